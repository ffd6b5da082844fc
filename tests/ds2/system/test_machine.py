"""The commit that runs and models name, threads that end, freed memory, and collections that pause nobody."""

from __future__ import annotations

import gc
import os
import pickle
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from ds2.system.machine import call_pickled, commit_of, quick_imports, short_collections, thread_pool


def test_the_commit_is_named_without_a_write_to_the_repository(tmp_path: Path) -> None:
    assert commit_of(tmp_path) == "unknown"
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / "file").write_text("a")
    for arguments in (["init", "-q"], ["add", "file"], ["commit", "-qm", "first"]):
        subprocess.run([*git, *arguments], check=True)
    index = tmp_path / ".git" / "index"
    os.utime(tmp_path / "file", (1e9, 1e9))  # git would note the new time
    before = index.read_bytes()
    commit = commit_of(tmp_path)
    assert len(commit) == 40 and index.read_bytes() == before
    (tmp_path / "file").write_text("b")
    assert commit_of(tmp_path) == f"{commit}-dirty" and index.read_bytes() == before


def test_threads_finish_what_they_began_and_begin_no_more() -> None:
    began, ended, others = threading.Event(), list[int](), set(threading.enumerate())

    def work(number: int) -> None:
        began.set()
        time.sleep(0.05)
        ended.append(number)

    with pytest.raises(KeyboardInterrupt), thread_pool(2, wait_s=60) as threads:
        threads.map_async(work, range(1000), 1)
        began.wait()
        raise KeyboardInterrupt
    assert set(threading.enumerate()) <= others and 1 <= len(ended) < 1000


def test_a_thread_that_hangs_is_left() -> None:
    released = threading.Event()
    with thread_pool(1, wait_s=0.01) as threads:
        threads.apply_async(released.wait, (60,))
    assert not released.is_set()
    released.set()


def test_a_pool_waits_for_its_own_threads_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    waited, end = list[object](), threading.Event()

    class Other(threading.Thread):
        def join(self, timeout: float | None = None) -> None:
            waited.append(timeout)

    def beside_another(*arguments: Any) -> ThreadPool:
        Other(target=end.wait, daemon=True).start()  # as a pool that another thread opens just then
        return ThreadPool(*arguments)

    monkeypatch.setattr("ds2.system.machine.ThreadPool", beside_another)
    with thread_pool(2) as threads:
        assert threads.map(abs, [-1, 2]) == [1, 2]
    end.set()
    assert not waited


def test_collections_leave_out_what_was_there_before() -> None:
    gc.unfreeze()
    try:
        with short_collections():
            assert gc.get_freeze_count() > len(gc.get_objects())
        assert gc.get_freeze_count() == 0
    finally:
        gc.freeze()  # as before this test, or all later ones would look through the modules again


def test_a_few_frozen_objects_of_python_itself_keep_no_others_from_being_frozen() -> None:
    gc.unfreeze()
    try:
        with (
            patch.object(gc, "get_freeze_count", return_value=375),
            patch.object(gc, "freeze") as freeze,
            short_collections(),
        ):
            freeze.assert_called_once_with()
    finally:
        gc.freeze()  # as before this test


def test_frozen_objects_are_not_counted_where_few_others_are_there() -> None:
    """To count a million of them takes a tenth of a second, also for each training in these tests."""
    gc.freeze()
    with patch.object(gc, "get_freeze_count") as count, short_collections():
        count.assert_not_called()


def test_what_was_frozen_before_stays_frozen() -> None:
    gc.freeze()
    before = gc.get_freeze_count()
    for _ in range(2):
        with short_collections():
            assert before // 2 < gc.get_freeze_count() <= before  # frozen objects may go, none are added
    assert before // 2 < gc.get_freeze_count() <= before


def test_what_is_imported_is_not_looked_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    collections = list[int]()
    gc.callbacks.append(note := lambda phase, facts: collections.append(facts["generation"]))
    try:
        with quick_imports():
            rows = [[number] for number in range(10_000)]
        assert gc.isenabled() and not collections
        assert any(one is rows for one in gc.get_objects(2))
    finally:
        gc.callbacks.remove(note)
        gc.freeze()  # as before this test


def test_imports_leave_collections_off_for_a_caller_who_wants_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    gc.disable()
    try:
        with quick_imports():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


class _Import:
    """A function that notes, where it is unpickled and where it is called, whether collections may come."""

    def __reduce__(self) -> tuple[Callable[[], Callable[[list[bool]], None]], tuple[()]]:
        return _imported, ()


def _imported() -> Callable[[list[bool]], None]:
    before = gc.isenabled()
    return lambda notes: notes.extend((before, gc.isenabled()))


def test_a_process_unpickles_its_function_without_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    notes = list[bool]()
    try:
        call_pickled(pickle.dumps(_Import()), notes)
    finally:
        gc.freeze()  # as before this test
    assert notes == [False, True]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
@pytest.mark.parametrize("keep", [False, True])
def test_freed_memory_is_used_again(keep: bool) -> None:
    code = f"""
from resource import RUSAGE_SELF, getrusage
from ds2.system.machine import keep_freed_memory
if {keep}:
    keep_freed_memory()
def use():
    data = bytearray()
    for _ in range(4):
        data += bytes(150_000)
    return bytes(data)
use()
before = getrusage(RUSAGE_SELF).ru_minflt
for _ in range(100):
    use()
print(getrusage(RUSAGE_SELF).ru_minflt - before)
"""
    new_pages = int(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)
    assert (new_pages < 100) == keep  # a round uses 1.2 MB or more
