"""Numbered lines of UTF-8 texts: plain, .gz or .xz."""

from __future__ import annotations

import gzip
import lzma
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from ds2.system.errors import UserError


class TextError(UserError):
    """A text that cannot be read; the message names the file, the line and the way out."""


def _open(path: Path) -> BinaryIO | gzip.GzipFile | lzma.LZMAFile:
    if path.suffix == ".gz":
        return gzip.open(path, "rb")
    return lzma.open(path, "rb") if path.suffix == ".xz" else open(path, "rb")


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line number, line) of a UTF-8 text, unpacked where its name ends in .gz or .xz.

    Raises:
        TextError: no such file, a cut-off archive, or bytes that are not UTF-8 (the line is named).
    """
    number = 0
    try:
        with _open(path) as opened:
            for raw in opened:
                number += 1
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
                if "\0" in line:
                    raise TextError(f"{path}:{number} holds NUL characters: is it UTF-16? Convert it to UTF-8")
                yield number, line
    except UnicodeDecodeError as error:
        raise TextError(
            f"{path}:{number} is not UTF-8 ({error.reason} at byte {error.start} of the line): convert the file, e.g. "
            "iconv -f latin1 -t utf-8"
        ) from error
    except FileNotFoundError as error:
        raise TextError(f"there is no text {path}") from error
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise TextError(f"{path} cannot be read after line {number}: {error}") from error
