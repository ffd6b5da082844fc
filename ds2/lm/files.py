"""N-gram model files: a memory-mapped binary, which runs no code when it is opened, and ARPA files of any tool."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ds2.lm.ngram import (
    END,
    RESERVED,
    SPACE,
    START,
    TENSORS,
    UNITS,
    UNKNOWN,
    LanguageModelError,
    Level,
    NGram,
    from_levels,
    slices,
    to_levels,
)
from ds2.system.files import atomic_file, cache_dir, read_lines, remove_stale, temporary_folder
from ds2.system.plain import from_plain
from ds2.system.tensor_file import WAY_OUT, check_digest, has_digest, make_header, read_header, write_tensors
from ds2.text.alphabet import Alphabet, AlphabetError

log = logging.getLogger(__name__)
FORMAT_VERSION = 2  # 1 had no digest of the header
_HEAD_BYTES = 4096  # an ARPA file has its first header line in these
_CACHE_VERSION = 1  # change it when `write_arpa` changes, which makes cached files invalid
CACHE_LIMIT_BYTES = 4 << 30  # of cached files; the newest one is never deleted
_LN10 = math.log(10.0)
_ABSENT_LOG10 = -100.0  # of -inf, and of <unk> in a file without it
_BLOCK_LINES = 1 << 12
_COUNT = re.compile(r"[0-9]{1,18}")
_UNKNOWN_SPELLINGS = {"<UNK>": UNKNOWN}


def save_ngram(model: NGram, path: Path) -> None:
    """Write the binary, a safetensors file, atomically.

    Raises:
        LanguageModelError: the folder is not writable or the disk is full.
    """
    tensors = {name: getattr(model, name).cpu().contiguous() for name in TENSORS}
    tensors["vocabulary"] = torch.frombuffer(bytearray("\n".join(model.vocabulary).encode()), dtype=torch.uint8)
    metadata = {
        "format": FORMAT_VERSION,
        "kind": "n-gram",
        "entry_starts": model.entry_starts,
        "state_starts": model.state_starts,
        "unit": model.unit,
        "alphabet": None if model.alphabet is None else dict(model.alphabet),
    }
    try:
        with atomic_file(path) as partial:
            write_tensors(tensors, partial, make_header(metadata, tensors, content=False))
    except (OSError, SafetensorError) as error:
        needed_mib = sum(tensor.nbytes for tensor in tensors.values()) / 2**20
        free = f", {shutil.disk_usage(path.parent).free / 2**20:.0f} MiB are free" if path.parent.is_dir() else ""
        raise LanguageModelError(f"{path} could not be written ({error}): {needed_mib:.0f} MiB needed{free}") from error


def load_ngram(path: Path) -> NGram:
    """Open a language model: a binary of `save_ngram`, which is memory-mapped, or an ARPA file.

    Raises:
        LanguageModelError: the file is missing, truncated, damaged, of another program or of a newer format. The
            contents of a binary's tensors are not checked: `NGram.check` does.
    """
    if not path.is_file():
        raise LanguageModelError(f"there is no language model {path}: `ds2 lm build TEXT... --output {path}` makes one")
    if ".arpa" in path.suffixes or _looks_like_arpa(path):
        return read_arpa(path)
    try:
        with safe_open(str(path), framework="pt") as opened:
            header = opened.metadata() or {}
            metadata = read_header(header, FORMAT_VERSION)
            if metadata.get("kind") != "n-gram":
                raise ValueError(
                    f"is a {metadata.get('kind')}, not an n-gram model: `ds2 lm build` writes "
                    "n-gram models; a recurrent model belongs in decode.rescore"
                )
            stored = from_plain(_NgramHeader, metadata, "metadata")
            tensors = {name: opened.get_tensor(name) for name in (*TENSORS, "vocabulary")}
        if has_digest(header):
            check_digest(header, tensors, content=False)
        return _model(stored, tensors)
    except (SafetensorError, OSError) as error:
        raise LanguageModelError(
            f"{path} is no language model or is truncated ({error}): `ds2 lm build` writes them"
        ) from error
    except (ValueError, LanguageModelError) as error:
        raise LanguageModelError(f"{path}: {error}") from error


@dataclass
class _NgramHeader:
    """The metadata of a binary n-gram model."""

    format: int
    kind: str
    entry_starts: tuple[int, ...]
    state_starts: tuple[int, ...]
    unit: str
    alphabet: dict[str, Any] | None


def _model(stored: _NgramHeader, tensors: dict[str, Tensor]) -> NGram:
    """Build the model; raises ValueError if header and tensors do not match. Reads no contents of tensors."""
    text = tensors.pop("vocabulary")
    types = {"keys": torch.int64, "log_prob": torch.float32, "next_state": torch.int32, "backoff": torch.float32,
             "suffix": torch.int32, "vocabulary": torch.uint8}  # fmt: skip
    for name, tensor in {**tensors, "vocabulary": text}.items():
        if tensor.dtype != types[name] or tensor.ndim != 1:
            raise ValueError(f"{name}: is {tensor.dtype} {tuple(tensor.shape)}, expected {types[name]} in 1-D")
    vocabulary = tuple(bytes(text.numpy()).decode().split("\n"))
    entries, states = stored.entry_starts, stored.state_starts
    for name, starts, held in (
        ("entry_starts", entries, [tensors[key].numel() for key in ("keys", "log_prob", "next_state")]),
        ("state_starts", states, [tensors[key].numel() for key in ("backoff", "suffix")]),
    ):
        if len(starts) < 2 or starts[0] != 0 or list(starts) != sorted(starts) or {starts[-1]} != set(held):
            raise ValueError(f"metadata.{name}: is {starts}, expected to rise from 0 to {held}; {WAY_OUT}")
    if len(entries) != len(states) or entries[1] != len(vocabulary) or states[1] != 1:
        raise ValueError(f"metadata: {entries} and {states} do not fit {len(vocabulary)} words; {WAY_OUT}")
    if stored.unit not in UNITS:
        raise ValueError(f"metadata.unit: is {stored.unit!r}, expected one of {', '.join(UNITS)}; {WAY_OUT}")
    if stored.alphabet is not None:
        try:
            Alphabet.from_dict(stored.alphabet)
        except AlphabetError as error:
            raise ValueError(f"metadata.{error}; {WAY_OUT}") from error
    return NGram(
        vocabulary, **tensors, entry_starts=entries, state_starts=states, unit=stored.unit, alphabet=stored.alphabet
    )


def _looks_like_arpa(path: Path) -> bool:
    with open(path, "rb") as opened:
        return b"\\data\\" in opened.read(_HEAD_BYTES)


def write_arpa(model: NGram, path: Path) -> None:
    """Write a model as an ARPA file, atomically.

    Raises:
        LanguageModelError: the folder is not writable or the disk is full.
    """
    try:
        with atomic_file(path) as partial, partial.open("w", encoding="utf-8") as out:
            _write(model, out)
    except OSError as error:
        raise LanguageModelError(f"{path} could not be written: {error}") from error


def _write(model: NGram, out: TextIO) -> None:
    words = np.array(model.vocabulary, dtype=object)
    levels = to_levels(model)
    out.write("\\data\\\n")
    out.writelines(f"ngram {n}={len(level)}\n" for n, level in enumerate(levels, start=1))
    history: list[NDArray[np.int32]] = []  # columns with the words of the n-grams one order below
    for n, level in enumerate(levels, start=1):
        out.write(f"\n\\{n}-grams:\n")
        for part in slices(len(level)):
            columns = [words[c[level.prefix[part]]] for c in history] + [words[level.word[part]]]
            log_probs = (level.log_prob[part] / _LN10).tolist()
            texts = map(" ".join, zip(*columns, strict=True))
            if n == len(levels):
                out.writelines(f"{p:.8g}\t{t}\n" for p, t in zip(log_probs, texts, strict=True))
            else:
                backoffs = (level.backoff[part] / _LN10).tolist()
                rows = zip(log_probs, texts, backoffs, strict=True)
                out.writelines(f"{p:.8g}\t{t}\t{b:.8g}\n" for p, t, b in rows)
        history = [column[level.prefix] for column in history] + [level.word]
    out.write("\n\\end\\\n")


def read_arpa(path: Path) -> NGram:
    """Read an ARPA file of any tool, also .gz and .xz. If <unk> is missing, it gets the probability 10^-100.

    Raises:
        LanguageModelError: the file is truncated or malformed (the message names the line), an n-gram is repeated or
            its prefix is not listed, or <s> or </s> is missing.
        TextError: the file does not exist, is no UTF-8 or a damaged archive.
    """
    return _Reader(path).read()


class _Reader:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines = ((number, line) for number, line in read_lines(path) if line.strip())
        self._number = 0
        self._ids: dict[str, int] = {}

    def _error(self, message: str) -> LanguageModelError:
        return LanguageModelError(f"{self._path}:{self._number}: {message}")

    def _next(self, expected: str) -> str:
        for number, line in self._lines:
            self._number = number
            return line.strip()
        raise self._error(f"the file ends where {expected} is expected: it is truncated, copy it again")

    def _check_size(self, n: int, count: int) -> None:
        """Refuse a count of n-grams that needs a larger file. The size of a compressed file has no such limit."""
        if self._path.suffix in (".gz", ".xz") or not self._path.is_file():
            return
        size = self._path.stat().st_size
        needed = count * (2 * n + 2)  # a digit, a space, n words of one letter with spaces between, the end of the line
        if needed > size:
            raise self._error(
                f"the header promises {count} {n}-grams, which need {needed} bytes or more, but the file has {size}: "
                "it is truncated or damaged, copy it again"
            )

    def read(self) -> NGram:
        while self._next("\\data\\") != "\\data\\":
            pass
        counts: list[int] = []
        while (line := self._next("\\1-grams:")).startswith("ngram "):
            name, _, promised = line[len("ngram ") :].partition("=")
            if name.strip() != str(len(counts) + 1) or not _COUNT.fullmatch(promised.strip()):
                raise self._error(f"{line[:80]!r} is not 'ngram {len(counts) + 1}=COUNT' with a COUNT below 10^18")
            counts.append(int(promised))
            self._check_size(len(counts), counts[-1])
        if not counts or 0 in counts:
            raise self._error(f"an order is empty: the header lists the counts {counts}")
        levels: list[Level] = []
        for n, count in enumerate(counts, start=1):
            if line != f"\\{n}-grams:":
                raise self._error(f"{line!r} instead of \\{n}-grams:")
            words, log_prob, backoff = self._section(n, count, top=n == len(counts))
            if n == 1:
                log_prob, backoff = self._specials(log_prob, backoff)
                words = np.arange(len(log_prob), dtype=np.int32)[:, None]
            levels.append(self._level(words, log_prob, backoff, levels))
            line = self._next("\\end\\" if n == len(counts) else f"\\{n + 1}-grams:")
        if line != "\\end\\":
            raise self._error(f"{line!r} instead of \\end\\: the header promises {counts} n-grams")
        letters = [token for token in self._ids if token not in (*RESERVED, SPACE)]
        unit = "character" if SPACE in self._ids and all(len(token) == 1 for token in letters) else "word"
        return from_levels(levels, list(self._ids), unit)

    def _section(
        self, n: int, count: int, top: bool
    ) -> tuple[NDArray[np.int32], NDArray[np.float64], NDArray[np.float64]]:
        word_blocks, value_blocks = [], []  # grow with the lines that are read: a wrong count allocates nothing
        for part in slices(count, _BLOCK_LINES):
            numbered = [(number, line.split()) for number, line in islice(self._lines, part.stop - part.start)]
            self._check(numbered, n, part.stop - part.start, top)
            rows = [fields for _, fields in numbered]
            columns = list(zip_longest(*rows, fillvalue="0"))  # a missing back-off is 0
            log_probs = [float(value) if value != "-inf" else _ABSENT_LOG10 for value in columns[0]]
            backoffs = list(map(float, columns[n + 1])) if len(columns) == n + 2 else [0.0] * len(rows)
            value_blocks.append(np.array([log_probs, backoffs]))
            ids = [
                [self._ids[_UNKNOWN_SPELLINGS.get(token, token)] for token in column] for column in columns[1 : n + 1]
            ]
            word_blocks.append(np.array(ids, np.int32).T)
        words, values = np.concatenate(word_blocks), np.concatenate(value_blocks, axis=1)
        if not (np.isfinite(values).all() and (values[0] <= 0).all()):
            raise self._error(f"the {n}-grams above hold a log-prob above 0 or a value that is not finite")
        return words, values[0] * _LN10, values[1] * _LN10

    def _check(self, rows: list[tuple[int, list[str]]], n: int, count: int, top: bool) -> None:
        """Raise an error for the first line that is not an n-gram; for n = 1, number the words."""
        ids, allowed = self._ids, (n + 1,) if top else (n + 1, n + 2)
        for number, fields in rows:
            try:
                if len(fields) not in allowed:
                    raise ValueError(f"{len(fields)} fields instead of {' or '.join(map(str, allowed))}")
                if n == 1:
                    word = _UNKNOWN_SPELLINGS.get(fields[1], fields[1])
                    if word in ids:
                        raise ValueError(f"{word} is listed twice")
                    ids[word] = len(ids)
                float(fields[0])
                float(fields[-1] if len(fields) == n + 2 else 0)
                for word in fields[1 : n + 1]:
                    if word not in ids and word not in _UNKNOWN_SPELLINGS:
                        raise ValueError(f"{word} is not among the unigrams")
            except ValueError as error:
                self._number = number
                raise self._error(f"{' '.join(fields)[:80]!r} is no {n}-gram: {error}") from error
        self._number = rows[-1][0] if rows else self._number
        if len(rows) < count:
            raise self._error(
                f"the file ends {count - len(rows)} or more {n}-grams early: it is truncated, copy it again"
            )

    def _specials(
        self, log_prob: NDArray[np.float64], backoff: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        missing = {START, END} - self._ids.keys()
        if missing:
            raise self._error(f"no unigram {' or '.join(sorted(missing))}: decoders need them")
        if UNKNOWN not in self._ids:
            self._ids[UNKNOWN] = len(self._ids)
            log_prob, backoff = np.append(log_prob, _ABSENT_LOG10 * _LN10), np.append(backoff, 0.0)
        return log_prob, backoff

    def _level(
        self, words: NDArray[np.int32], log_prob: NDArray[np.float64], backoff: NDArray[np.float64], below: list[Level]
    ) -> Level:
        size = len(self._ids)
        prefix = np.zeros(len(words), np.int64)
        for column, level in enumerate(below):
            keys = level.prefix * size + level.word
            queries = prefix * size + words[:, column]
            prefix = np.searchsorted(keys, queries).clip(max=len(keys) - 1)
            missing = np.flatnonzero(keys[prefix] != queries)
            if missing.size:
                text = " ".join(np.array(list(self._ids), dtype=object)[words[missing[0]]])
                raise self._error(
                    f"the prefix of {text!r} is not listed among the lower orders ({missing.size} such n-grams)"
                )
        keys = prefix * size + words[:, -1]
        order = np.argsort(keys, kind="stable")
        keys = keys[order]
        if (keys[1:] == keys[:-1]).any():
            raise self._error(f"{np.count_nonzero(keys[1:] == keys[:-1])} {words.shape[1]}-grams are listed twice")
        return Level(
            prefix[order], words[order, -1], log_prob[order].astype(np.float32), backoff[order].astype(np.float32)
        )


@contextmanager
def arpa_file(lm: NGram, source: str) -> Iterator[Path]:
    """Yield the path of an ARPA file of the model that KenLM can read.

    Args:
        source: the file that the model was read from. It is yielded if KenLM can read it. Otherwise a file is written
            to the cache folder, unless it has one of an equal model. If that fails, it is logged and a temporary file
            is written.

    Raises:
        LanguageModelError: the temporary file cannot be written.
    """
    if ".arpa" in Path(source).suffixes and _kenlm_reads(Path(source)):
        yield Path(source)
        return
    try:
        cached = _cached_file(lm)
    except (LanguageModelError, OSError, RuntimeError) as error:  # RuntimeError: the user has no home folder
        log.warning("%s; it is written at every start: set DS2_CACHE_DIR to a folder with enough space", error)
    else:
        yield cached
        return
    with temporary_folder(Path(tempfile.gettempdir()), "ds2-lm") as folder:
        write_arpa(lm, folder / "model.arpa")
        yield folder / "model.arpa"


def _kenlm_reads(path: Path) -> bool:
    """Whether KenLM accepts the start of a file: no byte-order mark and no text before the first section."""
    if path.suffix != ".arpa":  # compressed
        return True
    with suppress(OSError), open(path, "rb") as file:
        return file.read(4096).lstrip().startswith(b"\\data\\")
    return True


def _cached_file(lm: NGram) -> Path:
    path = cache_dir() / "arpa" / f"{_content_key(lm)}.arpa"
    if path.is_file():
        with suppress(OSError):  # the file belongs to another user
            path.touch()
    else:
        write_arpa(lm, path)
        _limit_cache(path)
    return path


def _content_key(lm: NGram) -> str:
    digest = hashlib.sha256(json.dumps([_CACHE_VERSION, lm.vocabulary, lm.entry_starts, lm.state_starts]).encode())
    for name in TENSORS:
        digest.update(getattr(lm, name).cpu().contiguous().numpy())
    return digest.hexdigest()[:24]


def _limit_cache(newest: Path) -> None:
    """Delete the least recently used files until the folder is within its limit; the newest one stays."""
    remove_stale(newest.parent)
    others = []
    for path in newest.parent.iterdir():
        with suppress(OSError):  # another process removed it meanwhile
            others += [(path.stat().st_mtime, path.stat().st_size, path)] if path != newest else []
    remaining_bytes = CACHE_LIMIT_BYTES - newest.stat().st_size
    for _, size, path in sorted(others, reverse=True):
        remaining_bytes -= size
        if remaining_bytes < 0:
            with suppress(OSError):
                path.unlink()
