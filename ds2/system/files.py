"""Files: atomic writes, pictures, and lines of texts of users.

After a crash or a power cut a file is the old version or the complete new one: it is written in a temporary folder
beside its final path, flushed to the disk and renamed.

Texts are manifests, transcripts, references, corpora, tables; plain, .gz or .xz. A text is a regular file, or standard
input if its name is `-`. Pipes and devices, which may never end, lines above 16 MiB, and archives that unpack to far
more than any text does are refused.
"""

import errno
import fcntl
import functools
import gzip
import json
import logging
import lzma
import os
import platform
import re
import secrets
import shutil
import stat
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TextIO

from ds2.system import UserError
from ds2.system.plain import parse_json

log = logging.getLogger(__name__)
PACKED_BY: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open}  # texts, by their suffix
_STALE_S = 3600.0  # folders of other hosts stay this long: their locks may not be visible here
_TEMPORARY = re.compile(r"\.(?P<name>.+)\.(?P<host>[^.]*)\.(?P<process>\d+)\.[0-9a-f]{16}\.partial")
_NAME_BYTES = 100  # of a file's name in that of its temporary folder
_LOCK = ".writer"  # a file in each temporary folder, locked while its process lives


def check_writable(*paths: Path, inputs: Iterable[str | Path] = ()) -> None:
    """Check before a computation that its results can be written and replace none of its inputs. Creates no files.

    Raises:
        UserError: a path is a folder, a device, one of the inputs or another result's, or its parent folder
            cannot be created or written.
    """
    taken = {Path(path).resolve() for path in inputs}
    for path in paths:
        if path.resolve() in taken:
            raise UserError(f"{path} is read too, or is to be written twice: choose another path for the result")
        taken.add(path.resolve())
        try:
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            if path.absolute().parent == Path("/dev") or (path.exists() and not path.is_file()):
                raise UserError(f"{path} is no file, and would be replaced by one: choose another path")
            parent = next(folder for folder in path.absolute().parents if folder.exists())
            with tempfile.TemporaryFile(dir=parent) as probe:
                probe.write(b"ds2")
        except OSError as error:
            raise UserError(f"{path} could not be written: {error.strerror}; choose another path") from error


@contextmanager
def sole_writer(path: Path) -> Iterator[None]:
    """Let no second process write a folder, or a file, during the block; the system ends this when the process ends.

    A folder itself is locked. For a file it is NAME.lock beside it, which is removed after the block.

    Raises:
        UserError: another process has the lock.
        OSError: it cannot be made.
    """
    lock = path if path.is_dir() else path.with_name(f"{path.name}.lock")
    lock.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(lock, os.O_RDONLY if lock.is_dir() else os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Another process may have removed this file when it ended, and a third one may have locked a new file.
            taken = lock != path and not os.fstat(descriptor).st_nlink
        except BlockingIOError:
            taken = True
        except OSError as error:
            log.warning("%s has no locks (%s): let no second process write it", path, error)
            taken = False
        if taken:
            raise UserError(f"{path} is written by another process: end that, or choose another path")
        try:
            yield
        finally:
            if lock != path:
                lock.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


def cache_dir() -> Path:
    """Return the cache folder: $DS2_CACHE_DIR, else ds2 under $XDG_CACHE_HOME or ~/.cache."""
    if chosen := os.environ.get("DS2_CACHE_DIR"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ds2"


@contextmanager
def temporary_folder(parent: Path, name: str) -> Iterator[Path]:
    """Create a folder in `parent` for the block and delete it afterwards, with those that killed processes left.

    Its name says which process owns it: `.NAME.HOST.PROCESS.HEX.partial`. Raises OSError if `parent` does not exist or
    is not writable.
    """
    name = os.fsencode(name)[:_NAME_BYTES].decode(errors="ignore")  # a file system allows 255 with the rest
    remove_stale(parent, name)
    folder = parent / f".{name}.{host_id()}.{os.getpid()}.{secrets.token_hex(8)}.partial"
    try:
        folder.mkdir(mode=0o700)
        with (folder / f"{_LOCK}.new").open("w") as lock:
            with suppress(OSError):  # without file locks other hosts assume that the writer is alive
                fcntl.lockf(lock, fcntl.LOCK_EX)
                os.replace(lock.name, folder / _LOCK)
            yield folder
    finally:
        try:
            shutil.rmtree(folder, ignore_errors=True)
        except BaseException:  # a second Ctrl-C
            shutil.rmtree(folder, ignore_errors=True)
            raise


def remove_stale(parent: Path, name: str | None = None) -> None:
    """Delete the temporary folders in `parent` whose process was killed, those of `name` only unless it is None.

    A process of this host is dead if its process id is free. A process of another host is dead if its lock is free and
    its last write is an hour old: both, because clocks jump and some file systems do not share locks between hosts.
    """
    with suppress(OSError):
        for folder in list(parent.iterdir()):
            writer = _TEMPORARY.fullmatch(folder.name)
            if writer and name in (None, writer["name"]):
                with suppress(OSError):
                    if _is_dead(folder, writer):
                        shutil.rmtree(folder)


def _is_dead(folder: Path, writer: re.Match[str]) -> bool:
    if writer["host"] == host_id():
        try:
            os.kill(int(writer["process"]), 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            return False  # a live process of another user
        return False
    with (folder / _LOCK).open("r+") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    newest: float = max(path.lstat().st_mtime for path in (folder, *folder.iterdir()))
    return time.time() - newest > _STALE_S


def host_id() -> str:
    """Return the host name and the namespace of its process ids, which tells containers of one host name apart."""
    space = ""
    with suppress(OSError):
        space = "".join(filter(str.isdigit, os.readlink("/proc/self/ns/pid")))
    return platform.node().replace(".", "-").replace("/", "-") + f"-{space}"


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to; at the end of the block rename it to `path`, after an error delete it.

    Several processes, also on several hosts, may write the same file at once: the last one wins. The content and the
    name are flushed to the disk before this returns. Raises OSError if the folder is not writable or the disk is full.
    """
    _make_folder(path.parent)
    with name_errors(path), temporary_folder(path.parent, path.name) as folder:
        partial = folder / path.name
        partial.touch(exist_ok=False)
        mode = partial.stat().st_mode  # of the umask; safetensors replaces the file by one of another mode
        yield partial
        _sync_file(partial)
        partial.chmod(mode)
        partial.replace(path)
        _sync_folder(path.parent)


@contextmanager
def name_errors(path: Path) -> Iterator[None]:
    """Add the path to an OSError of the block that names no file, as that of a write to a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def describe_full_disk(error: Exception) -> str:
    """How much is free where an OSError says that the disk is full, and the way out; '' for other errors."""
    if not (isinstance(error, OSError) and error.filename and error.errno in (errno.ENOSPC, errno.EDQUOT)):
        return ""
    path = Path(os.fsdecode(error.filename)).absolute()
    free = shutil.disk_usage(next(folder for folder in path.parents if folder.is_dir())).free
    return f"; {free / 2**20:.1f} MiB are free there: free some space and start the same command again"


def sync(path: Path) -> None:
    """Flush a file that grows, and its name, to the disk; nothing where there is none."""
    with name_errors(path), suppress(FileNotFoundError):
        _sync_file(path)
        _sync_folder(path.parent)


def _sync_file(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())


@contextmanager
def new_text(path: Path) -> Iterator[TextIO]:
    """Open a UTF-8 file that is written atomically; compressed if its name ends in .gz or .xz, as it is read."""
    pack = PACKED_BY.get(path.suffix)
    with atomic_file(path) as written:
        open_text = functools.partial(pack, written) if pack else written.open
        with open_text("wt", encoding="utf-8", newline="\n") as file:
            yield file


def write_text(path: Path, content: str) -> None:
    """Write a file as `new_text` does."""
    with new_text(path) as file:
        file.write(content)


def write_json(path: Path, value: object) -> None:
    """Write a JSON file atomically, indented."""
    write_text(path, json.dumps(value, ensure_ascii=False, indent=1) + "\n")


def write_json_lines(path: Path, values: Iterable[object]) -> None:
    """Write a file with a JSON value a line atomically."""
    write_text(path, "".join(json.dumps(value, ensure_ascii=False) + "\n" for value in values))


def new_figure(width_in: float, height_in: float) -> Any:
    """Return an empty figure of matplotlib, for `save_picture`; raises UserError without matplotlib."""
    logging.getLogger("matplotlib").setLevel(logging.WARNING)  # it logs that it looks for fonts, the first time
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError("a picture needs matplotlib: pip install matplotlib") from error
    return Figure(figsize=(width_in, height_in), layout="constrained")


def save_picture(figure: Any, path: Path) -> None:
    """Write a figure atomically in the format of the path's suffix, PNG without one; raises UserError for others."""
    kind, kinds = path.suffix[1:].lower() or "png", figure.canvas.get_supported_filetypes()
    if kind not in kinds:
        raise UserError(f"{path}: {path.suffix} is no kind of picture: end its name in one of .{', .'.join(kinds)}")
    with atomic_file(path) as partial:
        figure.savefig(partial, dpi=150, format=kind)


def _make_folder(folder: Path) -> None:
    """Create a folder and its parents, and flush each name to the disk."""
    if folder.is_dir():
        return
    if folder.parent != folder:
        _make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk; some network file systems do so themselves and refuse this."""
    with suppress(OSError):
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


MAX_LINE_BYTES = 1 << 24
_MAX_UNPACKED = 100  # times the size of an archive; texts have 3 to 30
_MIN_UNPACKED_BYTES = 1 << 25  # that are allowed at any ratio
STANDARD_INPUT = Path("-")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")


def read_bytes(path: Path, *, max_bytes: int) -> bytes:
    """Return the content of a small file; raises UserError as `read_byte_lines`, and for more than `max_bytes`."""
    with _text_errors(path), _open_text(path) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise UserError(f"{path}: is longer than {max_bytes} bytes, the most that is read: is it the right file?")
    return content


def files_beneath(folder: Path) -> Iterator[Path]:
    """Yield the files beneath a folder, by folder and name, those of linked folders too; each folder once.

    Raises:
        UserError: a folder in it cannot be listed.
    """

    def refuse(error: OSError) -> NoReturn:
        raise UserError(f"{error.filename}: {error.strerror}: correct its permissions, or move it away") from error

    walked: set[tuple[int, int]] = set()
    for parent, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        status = os.stat(parent)
        if (status.st_dev, status.st_ino) in walked:  # a link to a folder above would be followed without end
            folders.clear()
            continue
        walked.add((status.st_dev, status.st_ino))
        folders.sort()
        yield from (Path(parent, name) for name in sorted(names))


def read_byte_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (line number, line without its end of line) of a text; .gz and .xz are decompressed.

    A byte-order mark of UTF-8 is removed.

    Raises:
        UserError: the file does not exist or is neither a regular file nor `-`, a damaged archive or one that unpacks
            to more than 100 times its size, UTF-16, or a line of more than MAX_LINE_BYTES.
    """
    number, unpacked = 0, 0
    with _text_errors(path), _open_text(path) as file:
        packed = path.stat().st_size if path.suffix in (".gz", ".xz") else 0
        max_bytes = max(_MIN_UNPACKED_BYTES, _MAX_UNPACKED * packed) if packed else sys.maxsize
        while line := file.readline(MAX_LINE_BYTES + 1):
            unpacked += len(line)
            if unpacked > max_bytes:
                raise UserError(
                    f"{path}:{number + 1}: unpacks to more than {_MAX_UNPACKED} times its {packed} bytes, as no text "
                    "does; unpack it first if it is one"
                )
            if number == 0:
                if line.startswith(_UTF16_MARKS):
                    raise UserError(f"{path}:1: is not UTF-8 but UTF-16; save the file as UTF-8")
                line = line.removeprefix(_BYTE_ORDER_MARK)
            number += 1
            if len(line) > MAX_LINE_BYTES:
                raise UserError(f"{path}:{number}: is longer than {MAX_LINE_BYTES >> 20} MiB; break the line")
            yield number, line.removesuffix(b"\n")


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line number, line without its end of line) of a UTF-8 text.

    Errors are those of `read_byte_lines`, and UserError for bytes that are not UTF-8 and for NUL characters.
    """
    for number, line in read_byte_lines(path):
        text = decode(line, f"{path}:{number}")
        if "\0" in text:
            raise UserError(f"{path}:{number}: contains NUL characters: is it UTF-16? Save the file as UTF-8")
        yield number, text


def read_log(path: Path) -> list[dict[str, Any]]:
    """Return the JSON objects of a log such as log.jsonl, in order; [] where there is no file.

    Other lines are left out: a kill may have cut one off.
    """
    objects = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else ():
        with suppress(ValueError):
            objects.append(parse_json(line))
    return [entry for entry in objects if isinstance(entry, dict)]


def decode(line: bytes, source: str) -> str:
    """Decode UTF-8; raises UserError with the source ("file:line") and the first byte that is not UTF-8."""
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{source}: byte {error.start + 1} is not UTF-8; save the file as UTF-8, e.g. by iconv -f latin1 -t utf-8"
        ) from error


@contextmanager
def _open_text(path: Path) -> Iterator[BinaryIO]:
    if path == STANDARD_INPUT:
        yield sys.stdin.buffer
        return
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        mode = os.fstat(file.fileno()).st_mode
        if not stat.S_ISREG(mode):
            kind = "a folder" if stat.S_ISDIR(mode) else "a pipe or device, which may never end"
            raise UserError(f"{path}: is {kind}; give a regular file, or - for standard input")
        if path.suffix == ".gz":
            with gzip.open(file) as unpacked:
                yield unpacked  # type: ignore[misc]  # it is a BinaryIO in all that is used
        elif path.suffix == ".xz":
            with lzma.open(file) as unpacked:
                yield unpacked  # type: ignore[misc]
        else:
            yield file


@contextmanager
def _text_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, ValueError, lzma.LZMAError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or f"cannot be read ({error}); copy it again"
        raise UserError(f"{path}: {reason}") from error
