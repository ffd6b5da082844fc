"""Files that are whole or not there."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ds2.data.manifest import Utterance, read_manifest, write_manifest
from ds2.system import UserError, files
from ds2.system.files import atomic_file, check_writable, read_lines, remove_stale, sole_writer, write_text
from ds2.system.tensor_file import save


def test_an_error_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "file.txt"
    write_text(path, "old\n")
    with pytest.raises(RuntimeError, match="on purpose"), atomic_file(path) as partial:
        partial.write_text("half")
        assert path.read_text() == "old\n"
        raise RuntimeError("on purpose")
    assert path.read_text() == "old\n"
    assert os.listdir(path.parent) == ["file.txt"]


def test_a_second_ctrl_c_leaves_no_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(folder: Path, **options: bool) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(files.shutil, "rmtree", interrupted)
    with pytest.raises(KeyboardInterrupt), files.temporary_folder(tmp_path, "a"):
        raise KeyboardInterrupt
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("name", ["a" * 251 + ".txt", "語" * 83 + ".txt"])
def test_names_are_as_long_as_the_file_system_allows(name: str, tmp_path: Path) -> None:
    write_text(tmp_path / name, "text\n")
    assert os.listdir(tmp_path) == [name]


@pytest.mark.parametrize("name", ["folder", "new/file"])
def test_a_second_writer_is_refused_until_the_first_ends(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    (tmp_path / "folder").mkdir()
    for error in (RuntimeError, KeyboardInterrupt):
        with pytest.raises(error), sole_writer(path):
            with pytest.raises(UserError, match=f"{name} is written by another process: end that"):
                sole_writer(path).__enter__()
            with sole_writer(path.with_name("other")):
                raise error
    assert not [file for file in tmp_path.rglob("*") if file.is_file()]


def test_a_lock_that_was_removed_meanwhile_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unlink_and_lock(descriptor: int, operation: int) -> None:
        (tmp_path / "file.lock").unlink()
        flock(descriptor, operation)

    flock = files.fcntl.flock
    monkeypatch.setattr(files.fcntl, "flock", unlink_and_lock)
    with pytest.raises(UserError, match="is written by another process"), sole_writer(tmp_path / "file"):
        pass


def test_two_writers_at_once_and_the_last_wins(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    with atomic_file(path) as outer:
        outer.write_text("first begun, last done")
        write_text(path, "last begun, first done")
        assert path.read_text() == "last begun, first done"
    assert path.read_text() == "first begun, last done"
    assert os.listdir(tmp_path) == ["file.txt"]


def test_permissions_are_those_of_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    with atomic_file(tmp_path / "whole") as partial:
        (tmp_path / "private").touch(mode=0o600)
        (tmp_path / "private").replace(partial)
    assert (tmp_path / "whole").stat().st_mode == (tmp_path / "plain").stat().st_mode


def left_by(folder: Path, name: str, host: str, process: int) -> Path:
    left = folder / f".{name}.{host}.{process}.{'0' * 16}.partial"
    left.mkdir()
    (left / name).write_text("half")
    return left


def test_folders_of_killed_processes_are_deleted_and_those_of_live_ones_stay(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "3600"]) as other:
        live = left_by(tmp_path, "a", files.host_id(), other.pid)
        other_name = left_by(tmp_path, "b", files.host_id(), other.pid)
        write_text(tmp_path / "a", "new")
        assert live.exists()
        other.kill()
    write_text(tmp_path / "a", "newer")
    assert not live.exists() and other_name.exists()
    (tmp_path / "mine.partially").touch()
    remove_stale(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["a", "mine.partially"]


def test_a_folder_of_another_host_is_deleted_without_lock_after_an_hour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom ds2.system import files\n"
        "files.host_id = lambda: 'elsewhere-1'\n"
        "with files.temporary_folder(Path(sys.argv[1]), 'a') as folder:\n"
        "    (folder / 'a').write_text('half')\n    print(folder, flush=True)\n    time.sleep(3600)"
    )
    unlocked = left_by(tmp_path, "a", "elsewhere-1", 1)  # of a writer whose file system has no locks
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        left = Path(other.stdout.readline().strip())
        assert left.parent == tmp_path
        monkeypatch.setattr(files.time, "time", lambda: 4e9)  # a clock that jumped
        remove_stale(tmp_path)
        assert (left / "a").read_text() == "half"
        monkeypatch.undo()
        other.kill()
    remove_stale(tmp_path)
    assert (left / "a").exists()
    monkeypatch.setattr(files.time, "time", lambda: 4e9)
    remove_stale(tmp_path)
    assert not left.exists() and unlocked.exists()


def test_the_folder_of_a_process_killed_at_any_moment_is_deleted(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\nfrom pathlib import Path\nimport torch\nfrom ds2.system import tensor_file\n"
        "def killed(tensors, partial, metadata):\n"
        "    (partial.parent / '.tmpXyz123').write_text('half')\n    os.kill(os.getpid(), signal.SIGKILL)\n"
        "tensor_file.write_tensors = killed\n"
        "tensor_file.save(Path(sys.argv[1]), {'w': torch.ones(3)}, {})"
    )
    path = tmp_path / "a.safetensors"
    assert subprocess.run([sys.executable, "-c", code, str(path)], check=False).returncode == -9
    assert len(os.listdir(tmp_path)) == 1
    save(path, {}, {})
    assert os.listdir(tmp_path) == ["a.safetensors"]


def test_an_error_without_file_name_gets_one(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"No space left on device: '.*file\.txt'"), atomic_file(tmp_path / "file.txt"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Disk:
    """What a power cut leaves: names of a folder as of its last fsync, or all; content of a file as of its last."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
        self.root, self.content, self.names, self.seen = root, {}, {}, set()  # type: ignore[var-annotated]
        self.names[root.stat().st_ino] = {}
        for name in ("fsync", "replace", "mkdir"):
            monkeypatch.setattr(os, name, self._traced(getattr(os, name)))

    def _traced(self, call: Callable[..., object]) -> Callable[..., object]:
        def traced(*arguments: object, **options: object) -> object:
            self.look()
            result = call(*arguments, **options)
            if call.__name__ == "fsync":
                self._keep(f"/proc/self/fd/{arguments[0]}")
            self.look()
            return result

        return traced

    def _keep(self, path: str) -> None:
        number = os.stat(path).st_ino
        if os.path.isdir(path):
            self.names[number] = {entry.name: entry.inode() for entry in os.scandir(path)}
        else:
            self.content[number] = Path(path).read_bytes()

    def after_power_cut(self, path: Path) -> bytes | None:
        """What is there if no name was written but by fsync; None: nothing."""
        number = self.root.stat().st_ino
        for name in path.relative_to(self.root).parts:
            number = self.names.get(number, {}).get(name, 0)
        return self.content.get(number, b"") if number else None

    def look(self) -> None:
        path = self.root / "new" / "folder" / "file"
        self.seen.add(self.after_power_cut(path))
        if path.exists():  # if every name was written as soon as it was made
            self.seen.add(self.content.get(path.stat().st_ino, b""))


def test_a_power_cut_at_any_moment_leaves_the_old_file_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch, tmp_path)
    path = tmp_path / "new" / "folder" / "file"
    write_text(path, "old")
    assert disk.seen == {None, b"old"}
    assert disk.after_power_cut(path) == b"old"
    disk.seen.clear()
    write_text(path, "new")
    assert disk.seen == {b"old", b"new"}
    assert disk.after_power_cut(path) == b"new"


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.xz"])
def test_a_text_is_read_as_it_was_written_whatever_its_name(name: str, tmp_path: Path) -> None:
    write_text(tmp_path / name, "ä\nb\n")
    assert [line for _, line in read_lines(tmp_path / name)] == ["ä", "b"]
    write_manifest(tmp_path / name, [Utterance(tmp_path / "a.wav", 1.0, "ä")])
    assert [u.text for u in read_manifest(tmp_path / name)] == ["ä"]


def test_no_result_takes_the_place_of_a_device(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/null"), Path("/dev/stdout")):
        with pytest.raises(UserError, match="is no file, and would be replaced by one: choose another path"):
            check_writable(path)
