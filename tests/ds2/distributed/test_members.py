"""Processes of a run find each other, and one that is stopped keeps nobody waiting."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from support.paths import ROOT

from ds2.config.schema import CommConfig
from ds2.distributed import members as members_module
from ds2.distributed.members import JOINER, Members, View, _Request
from ds2.distributed.process_group import LostRankError
from ds2.system import UserError
from ds2.system.signals import Stopped

WAIT_S = 600  # a last resort
SILENT_S = 2.5  # long enough for a process that is not stopped, of which a busy machine may make a false alarm
FACTS = {"version": "1"}
OTHER = """
import sys
from pathlib import Path
from ds2.config.schema import CommConfig
from ds2.distributed import members as members_module
members_module.SILENT_S = 600
members = members_module.Members(Path(sys.argv[1]), CommConfig(max_ranks=3))
position = members_module.JOINER
while True:
    try:
        view = members.next_view(position, {"version": "1"}, {}, lambda: 0)
    except members_module.LeftBehindError:
        assert position == 0 and members.view is None and members.superseded()
        position = members_module.JOINER
        continue
    assert not members.superseded()
    print(view.number, flush=True)
    position = 0
    sys.stdin.readline()
"""
ON_GPUS = """
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
import torch
from ds2.config.schema import CommConfig
from ds2.distributed import members as members_module
torch.cuda.device_count = lambda: 2
torch.cuda.get_device_properties = lambda index: SimpleNamespace(uuid=f"GPU-{index}")
torch.cuda.set_device = lambda device: None
processes = []
for line in sys.stdin:  # the names of devices, for a process of the run; or the number of one to be killed
    if line.strip().isdigit():
        os.kill(processes[int(line)], signal.SIGKILL)
        os.waitpid(processes[int(line)], 0)
        print("killed", flush=True)
        continue
    processes.append(os.fork())  # to import torch in each would take seconds
    if not processes[-1]:
        members = members_module.Members(Path(sys.argv[1]), CommConfig(max_ranks=4))
        print(*(members.take_device(name) for name in line.split()), flush=True)
        signal.pause()
"""


class Other:
    """Another process of the run, which asks for the next view at its start and whenever it is told to."""

    def __init__(self, folder: Path, script: str = OTHER, *arguments: str) -> None:
        path = os.pathsep.join((str(ROOT), str(ROOT / "ops")))
        pipe = subprocess.PIPE
        command = [sys.executable, "-c", script, str(folder), *arguments]
        environment = {**os.environ, "PYTHONPATH": path}
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, text=True, env=environment, start_new_session=True
        )

    def ask(self, line: str = "") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def line(self) -> str:
        """Wait for the next line that it prints."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def view(self) -> int:
        """Wait for its next view; returns the number."""
        return int(self.line())


@pytest.fixture(name="start")
def _start(tmp_path: Path) -> Iterator[Callable[..., Other]]:
    others: list[Other] = []

    def start(*script: str) -> Other:
        others.append(Other(tmp_path, *script))
        return others[-1]

    yield start
    for other in others:
        with suppress(ProcessLookupError):
            os.killpg(other.process.pid, signal.SIGKILL)  # and those that it has forked
        other.process.communicate()


@pytest.fixture(name="members")
def _members(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Members]:
    monkeypatch.setattr(members_module, "SILENT_S", SILENT_S)
    members = Members(tmp_path, CommConfig(max_ranks=3))
    yield members
    members.close()


def next_view(members: Members, position: int = 0) -> View:
    return members.next_view(position, FACTS, {}, lambda: 0)


def wait_for(condition: Callable[[], bool]) -> None:
    until_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.05)


def test_a_process_is_silent_since_it_stopped_unless_this_one_was_stopped_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock_s = [0.0]
    monkeypatch.setattr(members_module, "time", SimpleNamespace(monotonic=lambda: clock_s[0], sleep=time.sleep))
    without_thread = SimpleNamespace(Event=threading.Event, Thread=Mock())  # this test looks at the processes itself
    monkeypatch.setattr(members_module, "threading", without_thread)
    members, other = Members(tmp_path, CommConfig(max_ranks=3)), tmp_path / f"{'a' * 32}.lock"
    other.touch()
    for clock_s[0] in (1.0, 2.0, 3.0):
        members._look_at_all()
    assert members.silent_s(other.stem) == 2.0  # nobody asked before
    os.utime(other, ns=(1, 1))
    for clock_s[0] in (4.0, 60.0):
        members._look_at_all()
    assert members.silent_s(other.stem) == 0.0
    clock_s[0] = 61.0
    members._look_at_all()
    assert members.silent_s(other.stem) == 1.0
    members.close()


def test_a_folder_that_was_removed_is_made_again_with_the_view_and_the_locked_file(
    members: Members, tmp_path: Path
) -> None:
    first = next_view(members, JOINER)
    shutil.rmtree(tmp_path)
    assert not members.superseded() and not members.others_wait()
    wait_for((tmp_path / f"view-{first.number:06d}.json").is_file)
    assert (tmp_path / f"{members.me.id}.lock").is_file()
    assert next_view(members).number == first.number + 1


def test_a_folder_that_another_process_removes_as_one_enters_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, make = tmp_path / "members", Path.mkdir
    removed: list[Path] = []

    def make_and_remove(path: Path, *arguments: bool, **options: bool) -> None:
        make(path, *arguments, **options)
        if not removed:
            removed.append(path)
            path.rmdir()

    monkeypatch.setattr(Path, "mkdir", make_and_remove)
    members = Members(folder, CommConfig(max_ranks=3))
    assert removed == [folder] and (folder / f"{members.me.id}.lock").is_file()
    members.close()
    assert not folder.exists()


def test_a_view_says_whether_who_is_gone_was_killed_or_left(members: Members, tmp_path: Path) -> None:
    gone = [replace(members.me, id=number * 32, process=int(number)) for number in "12"]
    (tmp_path / f"{gone[0].id}.lock").touch()  # the system has unlocked it
    members.view = View(0, [members.me, *gone])
    members._propose(members.view)
    (tmp_path / f"{gone[0].id}.lock").touch()  # which `_propose` removes
    assert [text.rpartition(" (")[2] for text in next_view(members).left] == [
        "process 1) was killed",
        "process 2) left",
    ]


@pytest.mark.slow
def test_a_stopped_rank_is_left_behind_while_the_others_regroup(
    members: Members, start: Callable[..., Other], tmp_path: Path
) -> None:
    assert len(next_view(members, JOINER).members) == 1
    stopped, other = start(), start()
    wait_for(lambda: len([path for path in tmp_path.glob("*.json") if not path.name.startswith("view-")]) == 2)
    view = next_view(members)
    assert view.joined == 2 and (stopped.view(), other.view()) == (1, 1)
    os.kill(stopped.process.pid, signal.SIGSTOP)
    other.ask()
    view = next_view(members)  # comm.timeout_s is 600
    assert {member.process for member in view.members} == {os.getpid(), other.process.pid}
    (left,) = view.left
    assert f"(process {stopped.process.pid}) has been silent for" in left
    assert other.view() == view.number
    other.ask()
    stopped.ask()
    os.kill(stopped.process.pid, signal.SIGCONT)  # it sees that the others went on, and wants to join
    wait_for(members.others_wait)
    view = next_view(members)
    assert view.joined == 1 and len(view.members) == 3 and stopped.view() == view.number


@pytest.mark.slow
def test_a_process_that_is_stopped_while_it_waits_to_join_is_not_taken_in_again_and_again(
    members: Members, start: Callable[..., Other]
) -> None:
    next_view(members, JOINER)
    other = start()
    wait_for(members.others_wait)
    os.kill(other.process.pid, signal.SIGSTOP)
    wait_for(lambda: not members.others_wait())
    assert len(next_view(members).members) == 1
    os.kill(other.process.pid, signal.SIGCONT)
    wait_for(members.others_wait)
    assert len(next_view(members).members) == 2 and other.view() == 2


@pytest.mark.parametrize(
    ("position", "received", "others_too", "leaves"),
    [(5, 15, False, True), (6, 15, False, False), (5, 15, True, False), (5, 0, False, None)],
)
def test_a_process_that_a_signal_ends_leaves_the_others_waiting_and_saves_first_what_nobody_has_who_stays(
    members: Members,
    monkeypatch: pytest.MonkeyPatch,
    position: int,
    received: int,
    others_too: bool,
    leaves: bool | None,
) -> None:
    members._config = CommConfig(max_ranks=4, min_ranks=3)
    other = _Request(replace(members.me, id="0" * 32), 0, 5, FACTS, stop_signal=15 * others_too)
    own = replace(other, member=members.me, position=position, stop_signal=received)
    view = View(0, [members.me, other.member])
    monkeypatch.setattr(members, "_requests", lambda: [other])
    with pytest.raises(Stopped, match="SIGTERM") if leaves else nullcontext():
        following = members._following(view, own, {}, 0.0)
        assert (following is None) is (leaves is None) and not (following and following.enough)
        assert following is None or (following.members, following.joined) == ([members.me], 0)


def test_a_process_without_a_state_leaves_at_a_signal(members: Members) -> None:
    with pytest.raises(Stopped, match="SIGTERM"):
        members.next_view(JOINER, FACTS, {}, lambda: 15)


@pytest.mark.parametrize(
    ("runs", "is_new", "passed_s", "ends"),
    [(True, True, 0, True), (False, True, 0, False), (True, False, 0, False), (True, False, 601, True)],
)
def test_a_process_that_cannot_reach_a_rank_which_runs_keeps_the_others_from_meeting_no_longer(
    members: Members, monkeypatch: pytest.MonkeyPatch, runs: bool, is_new: bool, passed_s: float, ends: bool
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    rank = replace(members.me, id="0" * len(members.me.id), port=port)
    view = View(1, [rank, members.me], joined=int(is_new))
    monkeypatch.setattr(members, "alive", lambda member: runs)
    with pytest.raises(LostRankError if not ends or passed_s else UserError, match="cannot be reached"):
        members.connect(view)
    if passed_s:
        now_s = time.monotonic()
        monkeypatch.setattr(members_module.time, "monotonic", lambda: now_s + passed_s)
        with pytest.raises(UserError, match=rf"port {port}, .* runs but cannot be reached from here \(.*refused"):
            members.connect(view)


def test_a_process_that_leaves_has_ended_before_it_cannot_be_reached(tmp_path: Path) -> None:
    members = Members(tmp_path, CommConfig(max_ranks=3))
    listener, files = members._listener, list[list[Path]]()
    members._listener = Mock(close=lambda: files.append([*tmp_path.glob("*.lock")]))
    members.close()
    listener.close()
    assert files == [[]]


def test_files_of_other_programs_end_no_rank(members: Members, tmp_path: Path) -> None:
    next_view(members)
    for name in ("._notes.json", f"._{members.me.id}.json", "view-000009.json.orig", "view-x.json"):
        (tmp_path / name).write_bytes(b"\0\5\26\7")
    assert not members.others_wait() and not members.superseded()
    assert next_view(members).number == 1


@pytest.mark.parametrize("call", [True, False])
def test_a_process_that_may_open_no_more_files_ends(
    members: Members, monkeypatch: pytest.MonkeyPatch, call: bool
) -> None:
    def refuse(*_: object) -> socket.socket:
        raise OSError(errno.EMFILE, "Too many open files")

    rank = replace(members.me, id="0" * len(members.me.id))
    with socket.create_connection(("127.0.0.1", members.me.port)):
        monkeypatch.setattr(socket, "create_connection", refuse)
        listens = SimpleNamespace(fileno=members._listener.fileno, accept=refuse, close=members._listener.close)
        monkeypatch.setattr(members, "_listener", listens)
        with pytest.raises(OSError, match="Too many open files"):
            members.connect(View(1, [rank, members.me] if call else [members.me, rank], joined=1))


def test_processes_of_a_host_share_its_gpus_and_a_new_one_takes_that_of_a_lost_one(
    start: Callable[..., Other],
) -> None:
    processes = start(ON_GPUS)

    def answer(line: str) -> str:
        processes.ask(line)
        return processes.line()

    assert answer("cuda:1") == "cuda:1"
    for expected in ("cuda:0", "cuda:0", "cuda:1"):  # two a GPU, from the first one that is free
        assert answer("auto") == expected
    assert answer("1") == "killed"
    assert answer("cuda cpu") == "cuda:0 cpu"


def test_a_process_is_superseded_by_a_view_without_it_and_not_by_one_that_it_has_yet_to_read(tmp_path: Path) -> None:
    members = Members(tmp_path, CommConfig(max_ranks=3))
    try:
        view = members.next_view(0, FACTS, {}, lambda: 0)
        other = replace(view.members[0], id="0" * len(view.members[0].id))
        (first,) = tmp_path.rglob(f"view-{view.number:06d}.json")
        for ranks, superseded in (([*view.members, other], False), ([other, *view.members], False), ([other], True)):
            view = replace(view, number=view.number + 1, members=ranks)
            first.with_name(f"view-{view.number:06d}.json").write_text(json.dumps(asdict(view)))
            assert members.superseded() is superseded
    finally:
        members.close()
