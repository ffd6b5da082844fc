"""N-gram model files: a memory-mapped binary, the same compressed, and ARPA files of any tool. None runs code."""

import hashlib
import json
import logging
import lzma
import math
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ds2.lm import ngram
from ds2.lm.ngram import END, RESERVED, SPACE, START, TENSORS, UNITS, UNKNOWN, LanguageModelError, Level, NGram
from ds2.system import files
from ds2.system.plain import from_plain, parse_json
from ds2.system.tensor_file import WAY_OUT, check_digest, has_digest, make_header, read_header, write_tensors
from ds2.text.alphabet import Alphabet, AlphabetError

log = logging.getLogger(__name__)
FORMAT_VERSION = 2  # 1 had no digest of the header
_KIND, _COMPRESSED, _COMPRESSED_FORMAT = "n-gram", "compressed n-gram", 1
_COLUMNS: tuple[type[np.int32 | np.int16], ...] = (  # words after each history, words, log-probs, back-offs
    np.int32, np.int32, np.int16, np.int16,
)  # fmt: skip
_STEPS = 16  # of log-probs and back-offs in a compressed file, for each unit of the natural logarithm
_HEAD_BYTES = 4096  # an ARPA file has its first header line in these
_XZ = b"\xfd7zXZ\0"  # how compressed files start
_CACHE_VERSION = 1  # change it when `write_arpa` changes, which makes cached files invalid
CACHE_LIMIT_BYTES = 4 << 30  # of cached files; the newest one is never deleted
_LN10 = math.log(10.0)
_MAX_LOG10 = 1e30  # of log-probs and back-offs, which are stored as float32
_ABSENT_LOG10 = -100.0  # of -inf, and of <unk> in a file without it
_BLOCK_LINES = 1 << 12
_COUNT = re.compile(r"[0-9]{1,18}")
_UNKNOWN_SPELLINGS = {"<UNK>": UNKNOWN}
_Words = NDArray[np.int32]
_Floats = NDArray[np.float64]


def save_ngram(model: NGram, path: Path) -> None:
    """Write the binary, a safetensors file, atomically; compressed if the name ends in .xz.

    A compressed file has about an eighth of the size. Its log-probs and back-offs are rounded to 1 / 16.

    Raises:
        LanguageModelError: the folder is not writable, the disk is full, or a number is too large to be compressed.
    """
    if path.suffix == ".xz":
        with _write_errors(path), files.atomic_file(path) as partial:
            _compress(model, partial)
        return
    tensors = {name: getattr(model, name).cpu().contiguous() for name in TENSORS}
    tensors["vocabulary"] = torch.frombuffer(bytearray("\n".join(model.vocabulary).encode()), dtype=torch.uint8)
    alphabet = None if model.alphabet is None else dict(model.alphabet)
    metadata = _NgramHeader(FORMAT_VERSION, _KIND, model.entry_starts, model.state_starts, model.unit, alphabet)
    with _write_errors(path), files.atomic_file(path) as partial:
        write_tensors(tensors, partial, make_header(asdict(metadata), tensors, content=False))


def load_ngram(path: Path) -> NGram:
    """Open a language model: a binary of `save_ngram`, which is memory-mapped, or an ARPA file.

    A compressed binary is expanded at its first use, into the cache folder, and memory-mapped from there.

    Raises:
        LanguageModelError: the file is missing, truncated, damaged, of another program or of a newer format. The
            contents of a binary's tensors are not checked: `NGram.check` does.
    """
    if not path.is_file():
        raise LanguageModelError(f"there is no language model {path}: `ds2 lm build TEXT... --output {path}` makes one")
    if named_arpa(path) or b"\\data\\" in _head(path):
        return read_arpa(path)
    if path.suffix == ".xz" or _head(path, unpacked=False).startswith(_XZ):
        return _load_compressed(path)
    try:
        with safe_open(str(path), framework="pt") as opened:
            header = opened.metadata() or {}
            metadata = read_header(header, FORMAT_VERSION)
            if metadata.get("kind") != _KIND:
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
    _check_unit(stored.unit, stored.alphabet)
    return NGram(
        vocabulary, **tensors, entry_starts=entries, state_starts=states, unit=stored.unit, alphabet=stored.alphabet
    )


def _check_unit(unit: str, alphabet: dict[str, Any] | None) -> None:
    """Raise ValueError if the unit or the alphabet of a header is none."""
    if unit not in UNITS:
        raise ValueError(f"metadata.unit: is {unit!r}, expected one of {', '.join(UNITS)}; {WAY_OUT}")
    if alphabet is not None:
        try:
            Alphabet.from_dict(alphabet)
        except AlphabetError as error:
            raise ValueError(f"metadata.{error}; {WAY_OUT}") from error


@dataclass
class _CompressedHeader:
    """The first line of a compressed model, as JSON."""

    format: int
    kind: str
    sizes: tuple[int, ...]  # n-grams by order
    unit: str
    alphabet: dict[str, Any] | None
    vocabulary: tuple[str, ...]


def _compress(model: NGram, path: Path) -> None:
    """Write a header and, for each order, four columns of `_COLUMNS`: their first bytes, then their second ones, ..."""
    levels = ngram.to_levels(model)
    sizes = tuple(map(len, levels))
    alphabet = None if model.alphabet is None else dict(model.alphabet)
    header = _CompressedHeader(_COMPRESSED_FORMAT, _COMPRESSED, sizes, model.unit, alphabet, model.vocabulary)
    with lzma.open(path, "wb") as file:
        file.write(json.dumps(asdict(header)).encode() + b"\n")
        for histories, level in zip((1, *sizes), levels, strict=False):
            first = np.diff(level.prefix, prepend=-1) != 0  # the first word after each history
            columns = (
                np.bincount(level.prefix, minlength=histories),
                np.where(first, level.word, np.diff(level.word, prepend=0)),
                np.rint(level.log_prob * _STEPS),
                np.rint(level.backoff * _STEPS),
            )
            for column, kind in zip(columns, _COLUMNS, strict=True):
                if not (np.iinfo(kind).min <= column.min() and column.max() <= np.iinfo(kind).max):
                    raise ValueError(
                        "a log-prob or back-off is outside -2048 .. 2047, which a compressed file cannot hold: choose "
                        "a name without .xz"
                    )
                file.write(column.astype(kind).view(np.uint8).reshape(len(column), -1).T.tobytes())


def _expand(path: Path) -> NGram:
    """Read a compressed model; raises ValueError, EOFError or LZMAError for a damaged file."""
    with lzma.open(path) as file:
        header = from_plain(_CompressedHeader, parse_json(file.readline().decode()), "header")
        if header.kind != _COMPRESSED or header.format != _COMPRESSED_FORMAT:
            raise ValueError(
                f"is a {header.kind} of format {header.format}, expected {_COMPRESSED} of format {_COMPRESSED_FORMAT}"
            )
        if header.sizes[:1] != (len(header.vocabulary),):
            raise ValueError(f"header: n-grams {header.sizes} do not fit {len(header.vocabulary)} words; {WAY_OUT}")
        _check_unit(header.unit, header.alphabet)
        levels = []
        for histories, size in zip((1, *header.sizes), header.sizes, strict=False):
            lengths = (histories, size, size, size)
            words_after, steps, log_prob, backoff = (
                _column(file, length, kind) for length, kind in zip(lengths, _COLUMNS, strict=True)
            )
            if words_after.min() < 0 or words_after.sum() != size:
                raise ValueError(f"an order has {words_after.sum()} n-grams instead of {size}; {WAY_OUT}")
            sums = np.concatenate(([0], np.cumsum(steps, dtype=np.int64)))
            before = sums[np.cumsum(words_after) - words_after]  # what was summed before each history's first word
            levels.append(
                Level(
                    np.repeat(np.arange(histories), words_after),
                    (sums[1:] - np.repeat(before, words_after)).astype(np.int32),
                    (log_prob / np.float32(_STEPS)).astype(np.float32),
                    (backoff / np.float32(_STEPS)).astype(np.float32),
                )
            )
        if file.read(1):
            raise ValueError(f"it goes on after its last column; {WAY_OUT}")
    return ngram.from_levels(levels, header.vocabulary, header.unit, header.alphabet)


def _column(file: IO[bytes], length: int, kind: type[np.int32 | np.int16]) -> NDArray[Any]:
    """Read a column that was written byte by byte of its numbers."""
    width = np.dtype(kind).itemsize
    data = file.read(length * width)
    if length < 1 or len(data) < length * width:
        raise ValueError(f"it has {len(data)} of {length * width} bytes of a column; {WAY_OUT}")
    column: NDArray[Any] = np.frombuffer(data, np.uint8).reshape(width, length).T.copy().view(kind)[:, 0]
    return column


def _load_compressed(path: Path) -> NGram:
    """Return the model of a compressed file, memory-mapped from the cache folder if that can be written."""
    cached: Path | None = None
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()[:24]
        with suppress(RuntimeError):  # the user has no home folder
            cached = files.cache_dir() / "lm" / f"{digest}.lm"
            if _use(cached):
                return load_ngram(cached)
    except OSError as error:
        raise LanguageModelError(f"{path} cannot be read: {error.strerror}") from error
    except LanguageModelError as error:
        log.warning("%s; it is made anew", error)
    log.info("expanding %s, which is done once", path)
    try:
        model = _expand(path)
    except (OSError, EOFError, ValueError, MemoryError, LanguageModelError, lzma.LZMAError) as error:
        reason = str(error) or "its header states a size beyond the memory"
        raise LanguageModelError(f"{path} is no compressed language model or is damaged: {reason}") from error
    try:
        if cached is None:
            raise LanguageModelError("there is no cache folder")
        save_ngram(model, cached)
        _limit_cache(cached)
        return load_ngram(cached)
    except (LanguageModelError, OSError) as error:
        log.warning("%s; the model is expanded at every start: set DS2_CACHE_DIR to a folder with enough space", error)
        return model


def named_arpa(path: Path) -> bool:
    """Whether a file is called .arpa, .arpa.gz or .arpa.xz."""
    return ".arpa" in (path.suffixes[-2:] if path.suffix in files.PACKED_BY else [path.suffix])


def _head(path: Path, *, unpacked: bool = True) -> bytes:
    """Return the first bytes of a file, by default of what a file that ends in .gz or .xz holds; b"" of a damaged one.

    The name alone tells little: some tools write ARPA files under any name, and files are renamed.
    """
    with (
        suppress(OSError, EOFError, lzma.LZMAError),
        (files.PACKED_BY.get(path.suffix, open) if unpacked else open)(path, "rb") as file,
    ):
        head: bytes = file.read(_HEAD_BYTES)
        return head
    return b""


def write_arpa(model: NGram, path: Path) -> None:
    """Write an ARPA file atomically, compressed if it ends in .gz or .xz; raises LanguageModelError if it cannot."""
    words = np.array(model.vocabulary, dtype=object)
    levels = ngram.to_levels(model)
    with _write_errors(path), files.new_text(path) as out:
        out.write("\\data\\\n")
        out.writelines(f"ngram {n}={len(level)}\n" for n, level in enumerate(levels, start=1))
        history: list[_Words] = []  # columns with the words of the n-grams one order below
        for n, level in enumerate(levels, start=1):
            out.write(f"\n\\{n}-grams:\n")
            for part in ngram.slices(len(level)):
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


@contextmanager
def _write_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        raise LanguageModelError(f"{path} could not be written: {error}{files.describe_full_disk(error)}") from error


def read_arpa(path: Path) -> NGram:
    """Read an ARPA file of any tool, also .gz and .xz. If <unk> is missing, it gets the probability 10^-100.

    Raises:
        LanguageModelError: the file is truncated or malformed (the message names the line), an n-gram is repeated or
            its prefix is not listed, or <s> or </s> is missing.
        UserError: the file does not exist, is no UTF-8 or a damaged archive.
    """
    return _Reader(path).read()


class _Reader:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines = ((number, line) for number, line in files.read_lines(path) if line.strip())
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
        return ngram.from_levels(levels, list(self._ids), unit)

    def _section(self, n: int, count: int, top: bool) -> tuple[_Words, _Floats, _Floats]:
        word_blocks, value_blocks = [], []  # grow with the lines that are read: a wrong count allocates nothing
        for part in ngram.slices(count, _BLOCK_LINES):
            size = part.stop - part.start
            rows = [self._entry(number, line.split(), n, top) for number, line in islice(self._lines, size)]
            if len(rows) < size:
                raise self._error(
                    f"the file ends {size - len(rows)} or more {n}-grams early: it is truncated, copy it again"
                )
            word_blocks.append(np.array([words for words, _ in rows], np.int32))
            value_blocks.append(np.array([values for _, values in rows]))
        words, values = np.concatenate(word_blocks), np.concatenate(value_blocks).T
        if not ((abs(values) <= _MAX_LOG10).all() and (values[0] <= 0).all()):  # false for NaN too
            raise self._error(
                f"the {n}-grams above hold a log-prob above 0, or a number that is not finite or beyond {_MAX_LOG10:g}"
            )
        return words, values[0] * _LN10, values[1] * _LN10

    def _entry(self, number: int, fields: list[str], n: int, top: bool) -> tuple[list[int], tuple[float, float]]:
        """Return the words of a line, its log-prob and its back-off; for n = 1, number the word."""
        self._number, ids, allowed = number, self._ids, (n + 1,) if top else (n + 1, n + 2)
        try:
            if len(fields) not in allowed:
                raise ValueError(f"{len(fields)} fields instead of {' or '.join(map(str, allowed))}")
            words = [_UNKNOWN_SPELLINGS.get(word, word) for word in fields[1 : n + 1]]
            if n == 1 and words[0] in ids:
                raise ValueError(f"{words[0]} is listed twice")
            if n == 1:
                ids[words[0]] = len(ids)
            log_prob = float(fields[0]) if fields[0] != "-inf" else _ABSENT_LOG10
            backoff = float(fields[-1]) if len(fields) == n + 2 else 0.0
            if absent := [word for word in words if word not in ids]:
                raise ValueError(f"{absent[0]} is not among the unigrams")
        except ValueError as error:
            raise self._error(f"{' '.join(fields)[:80]!r} is no {n}-gram: {error}") from error
        return [ids[word] for word in words], (log_prob, backoff)

    def _specials(self, log_prob: _Floats, backoff: _Floats) -> tuple[_Floats, _Floats]:
        missing = {START, END} - self._ids.keys()
        if missing:
            raise self._error(f"no unigram {' or '.join(sorted(missing))}: decoders need them")
        if UNKNOWN not in self._ids:
            self._ids[UNKNOWN] = len(self._ids)
            log_prob, backoff = np.append(log_prob, _ABSENT_LOG10 * _LN10), np.append(backoff, 0.0)
        return log_prob, backoff

    def _level(self, words: _Words, log_prob: _Floats, backoff: _Floats, below: list[Level]) -> Level:
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
    path = Path(source)
    # KenLM takes a byte-order mark for text, and allows none before the first section.
    if path.suffix != ".xz" and named_arpa(path) and _head(path).lstrip().startswith(b"\\data\\"):
        yield path
        return
    try:
        cached = _cached_file(lm)
    except (LanguageModelError, OSError, RuntimeError) as error:  # RuntimeError: the user has no home folder
        log.warning("%s; it is written at every start: set DS2_CACHE_DIR to a folder with enough space", error)
    else:
        yield cached
        return
    with files.temporary_folder(Path(tempfile.gettempdir()), "ds2-lm") as folder:
        write_arpa(lm, folder / "model.arpa")
        yield folder / "model.arpa"


def _cached_file(lm: NGram) -> Path:
    digest = hashlib.sha256(json.dumps([_CACHE_VERSION, lm.vocabulary, lm.entry_starts, lm.state_starts]).encode())
    for name in TENSORS:
        digest.update(getattr(lm, name).cpu().contiguous().numpy())
    path = files.cache_dir() / "arpa" / f"{digest.hexdigest()[:24]}.arpa"
    if not _use(path):
        write_arpa(lm, path)
        _limit_cache(path)
    return path


def _use(cached: Path) -> bool:
    """Return whether a file is in the cache folder, and mark it as used, so that it is not the next one deleted."""
    if not cached.is_file():
        return False
    with suppress(OSError):  # the file belongs to another user
        cached.touch()
    return True


def _limit_cache(newest: Path) -> None:
    """Delete the least recently used files until the folder is within its limit; the newest one stays."""
    files.remove_stale(newest.parent)
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
