"""Lines of text files of users: manifests, transcripts, references, corpora, tables; plain, .gz or .xz.

A text is a regular file, or standard input if its name is `-`. Pipes and devices, which may never end, lines above
16 MiB, and archives that unpack to far more than any text does are refused.
"""

from __future__ import annotations

import gzip
import lzma
import os
import stat
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from ds2.system.errors import UserError
from ds2.system.plain import parse_json

MAX_LINE_BYTES = 1 << 24
_MOST_UNPACKED = 100  # times the size of an archive; texts have 3 to 30
_LEAST_UNPACKED_BYTES = 1 << 25  # that are allowed at any ratio
STANDARD_INPUT = Path("-")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")


class TextError(UserError):
    """A text that cannot be read; the message names the file, the line and what to do."""


def read_bytes(path: Path, *, max_bytes: int) -> bytes:
    """Return the content of a small file.

    Raises:
        TextError: as in `read_byte_lines`, or the file has more than `max_bytes`.
    """
    with _errors(path), _open(path) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise TextError(f"{path}: is longer than {max_bytes} bytes")
    return content


def read_byte_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (line number, line without its end of line) of a text; .gz and .xz are decompressed.

    A byte-order mark of UTF-8 is removed.

    Raises:
        TextError: the file does not exist or is neither a regular file nor `-`, a damaged archive or one that unpacks
            to more than 100 times its size, UTF-16, or a line of more than MAX_LINE_BYTES.
    """
    number, unpacked = 0, 0
    with _errors(path), _open(path) as file:
        packed = path.stat().st_size if path.suffix in (".gz", ".xz") else 0
        most = max(_LEAST_UNPACKED_BYTES, _MOST_UNPACKED * packed) if packed else sys.maxsize
        while line := file.readline(MAX_LINE_BYTES + 1):
            unpacked += len(line)
            if unpacked > most:
                raise TextError(
                    f"{path}:{number + 1}: unpacks to more than {_MOST_UNPACKED} times its {packed} bytes, as no text "
                    "does; unpack it first if it is one"
                )
            if number == 0:
                if line.startswith(_UTF16_MARKS):
                    raise TextError(f"{path}:1: is not UTF-8 but UTF-16; save the file as UTF-8")
                line = line.removeprefix(_BYTE_ORDER_MARK)
            number += 1
            if len(line) > MAX_LINE_BYTES:
                raise TextError(f"{path}:{number}: is longer than {MAX_LINE_BYTES >> 20} MiB; break the line")
            yield number, line.removesuffix(b"\n")


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line number, line without its end of line) of a UTF-8 text; arguments and errors of `read_byte_lines`.

    Raises:
        TextError: also for bytes that are not UTF-8, and for NUL characters.
    """
    for number, line in read_byte_lines(path):
        text = decode(line, f"{path}:{number}")
        if "\0" in text:
            raise TextError(f"{path}:{number}: contains NUL characters: is it UTF-16? Save the file as UTF-8")
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
    """Decode UTF-8; raises TextError with the source ("file:line") and the first byte that is not UTF-8."""
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise TextError(
            f"{source}: byte {error.start + 1} is not UTF-8; save the file as UTF-8, e.g. by iconv -f latin1 -t utf-8"
        ) from error


@contextmanager
def _open(path: Path) -> Iterator[BinaryIO]:
    if path == STANDARD_INPUT:
        yield sys.stdin.buffer
        return
    with open(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)), "rb") as file:
        mode = os.fstat(file.fileno()).st_mode
        if not stat.S_ISREG(mode):
            kind = "a folder" if stat.S_ISDIR(mode) else "a pipe or device, which may never end"
            raise TextError(f"{path}: is {kind}; give a regular file, or - for standard input")
        if path.suffix == ".gz":
            with gzip.open(file) as unpacked:
                yield unpacked  # type: ignore[misc]  # it is a BinaryIO in all that is used
        elif path.suffix == ".xz":
            with lzma.open(file) as unpacked:
                yield unpacked  # type: ignore[misc]
        else:
            yield file


@contextmanager
def _errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, ValueError, lzma.LZMAError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or f"cannot be read ({error}); copy it again"
        raise TextError(f"{path}: {reason}") from error
