"""Binary models as the ARPA files that C++ decoders read, kept from one start to the next."""

from __future__ import annotations

import hashlib
import json
import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ds2.lm.arpa import write_arpa
from ds2.lm.ngram import TENSORS, LanguageModelError, NGram
from ds2.system.files import cache_dir, own_folder, sweep

log = logging.getLogger(__name__)
_FORMAT = 1  # another one when `write_arpa` writes the same model otherwise
_KEPT_BYTES = 4 << 30  # of the files used last; the newest stays whatever its size


@contextmanager
def arpa_file(lm: NGram, given: str) -> Iterator[Path]:
    """The model as a file that KenLM reads, for as long as this lasts.

    Args:
        lm: the model.
        given: the file it was read from, which is taken if it is ARPA that KenLM reads. Else one is written under
            `cache_dir` where an equal model has none there yet, or, where that fails, which is logged, to a temporary
            file.

    Raises:
        LanguageModelError: a temporary file cannot be written either.
    """
    if ".arpa" in Path(given).suffixes and _kenlm_reads(Path(given)):
        yield Path(given)
        return
    try:
        kept = _kept(lm)
    except (LanguageModelError, OSError, RuntimeError) as error:  # RuntimeError: a user without a home
        log.warning("%s; every start writes it anew: set DS2_CACHE_DIR to a folder with room for it", error)
    else:
        yield kept
        return
    with own_folder(Path(tempfile.gettempdir()), "ds2-lm") as folder:
        write_arpa(lm, folder / "model.arpa")
        yield folder / "model.arpa"


def _kenlm_reads(path: Path) -> bool:
    """Whether a file starts as KenLM wants it: without a byte-order mark, and no words before the first section."""
    if path.suffix != ".arpa":  # compressed
        return True
    with suppress(OSError), open(path, "rb") as file:
        return file.read(4096).lstrip().startswith(b"\\data\\")
    return True


def _kept(lm: NGram) -> Path:
    path = cache_dir() / "arpa" / f"{_content_key(lm)}.arpa"
    if path.is_file():
        with suppress(OSError):  # a cache that others filled for all to read
            path.touch()
    else:
        write_arpa(lm, path)
        _drop_least_recent(path)
    return path


def _content_key(lm: NGram) -> str:
    digest = hashlib.sha256(json.dumps([_FORMAT, lm.vocabulary, lm.entry_starts, lm.state_starts]).encode())
    for name in TENSORS:
        digest.update(getattr(lm, name).cpu().contiguous().numpy())
    return digest.hexdigest()[:24]


def _drop_least_recent(newest: Path) -> None:
    """Remove what was not used for longest, and what killed processes left, until the folder is within its limit."""
    sweep(newest.parent)
    others = []
    for path in newest.parent.iterdir():
        with suppress(OSError):  # another process removed it meanwhile
            others += [(path.stat().st_mtime, path.stat().st_size, path)] if path != newest else []
    left_bytes = _KEPT_BYTES - newest.stat().st_size
    for _, size, path in sorted(others, reverse=True):
        left_bytes -= size
        if left_bytes < 0:
            with suppress(OSError):
                path.unlink()
