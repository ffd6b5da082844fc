"""Shared by all importers: reading lists, finding audio under another extension, durations from headers."""

import codecs
import logging
import os
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from ds2.audio.read import AUDIO_SUFFIXES, END_TOLERANCE_S, AudioError, audio_info
from ds2.audio.shard import member_of
from ds2.data.manifest import Utterance
from ds2.system import UserError, files
from ds2.system.machine import usable_cores
from ds2.system.plain import counted, first_of
from ds2.system.terminal import ProgressBar

log = logging.getLogger(__name__)

_MAX_SHOWN = 20
_MARKS = {codecs.BOM_UTF8: "utf-8-sig", codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
_LATIN = "cp1252"  # Windows' superset of Latin-1
# What texts of a language have besides ASCII. A text in another encoding, read as Latin-1, rarely stays within one row.
_LATIN_LETTERS = (
    "äöüß",
    "àâæçèéêëîïôœùûü",
    "áéíñóúü",
    "àáâãçéêíóôõúü",
    "àèéìíîòóù",
    "åäöéü",
    "æøåéóòâô",
    "äëïöüéèêóáí",
)
_LATIN_MARKS = "“”„«»—…¡¿°ºª§€£·\u2018\u2019\u201a\u2039\u203a\u2013\u00a0"


class ImporterError(UserError):
    """A corpus cannot be imported; the message names files, lines and the way out."""


@dataclass(frozen=True)
class CorpusEntry:
    """An utterance that a corpus lists, before its audio is read."""

    audio: Path  # as listed; the file may have another extension
    text: str
    source: str  # "file:line" of the corpus
    speaker: str = ""
    lang: str = ""
    offset_s: float = 0.0
    end_s: float | None = None  # None: to the end of the file


def to_utterances(entries: Sequence[CorpusEntry], *, skip_bad: bool, problems: Sequence[str] = ()) -> list[Utterance]:
    """Find each entry's audio and read its duration from the header, in parallel.

    A file and offset that an earlier entry has is a problem: no manifest may list it twice.

    Args:
        skip_bad: leave out utterances without usable audio, with a warning, instead of raising.
        problems: of lines that are not entries; treated the same.
    Raises:
        ImporterError: some audio is missing or unreadable and `skip_bad` is false, or no utterance is left.
    """
    with (
        ProgressBar("reading headers", len(entries), "utterances") as progress,
        ThreadPoolExecutor(usable_cores()) as pool,
    ):
        measured = list(progress.over(pool.map(_measure, entries)))
    problems = [*problems, *(m for m in measured if isinstance(m, str))]
    utterances: list[Utterance] = []
    listed: dict[tuple[Path, float], str] = {}
    for utterance in (m for m in measured if isinstance(m, Utterance)):
        key = (utterance.audio_filepath, round(utterance.offset_s, 6))
        if key in listed:
            problems.append(f"{utterance.source}: {utterance.audio_filepath} was listed before, at {listed[key]}")
        else:
            listed[key] = utterance.source
            utterances.append(utterance)
    # names that are not UTF-8 are written as escapes: a log may take nothing else
    problems = [problem.encode("utf-8", "backslashreplace").decode("utf-8") for problem in problems]
    if problems:
        if not skip_bad:
            shown = "\n  ".join(first_of(problems, _MAX_SHOWN))
            raise ImporterError(
                f"{len(problems)} of {len(utterances) + len(problems)} utterances cannot be imported:\n  {shown}\n"
                "Correct the corpus, or leave them out (--skip-bad)"
            )
        log.warning("%s left out of the import:\n  %s", counted(len(problems), "utterance"), "\n  ".join(problems))
    if not utterances:
        raise ImporterError("the corpus lists no utterances with audio")
    return utterances


def read_lines(path: Path) -> Iterator[tuple[str, str]]:
    """Yield ("file:line", stripped text) of the lines of a UTF-8 file that are not blank; raises UserError."""
    return ((f"{path}:{number}", line.strip()) for number, line in files.read_lines(path) if line.strip())


def read_transcripts(paths: Iterable[Path], encoding: str) -> tuple[dict[Path, str], dict[Path, str]]:
    """Read transcripts that are files of their own, their lines joined by spaces.

    UTF-8 and UTF-16 are recognised. Other files have `encoding`; if that is empty, they are Latin-1 (Windows-1252) if
    all of them together have the letters of one western language. Each encoding but UTF-8 is logged.

    Returns:
        The text of each file, and the problem of each file that cannot be read.

    Raises:
        ImporterError: no such encoding.
    """
    try:
        b"    ".decode(encoding or _LATIN)
    except LookupError as error:
        raise ImporterError(f"--encoding {encoding!r} is unknown; one of Python's, such as cp1254, cp1251") from error
    contents: dict[Path, bytes] = {}
    problems: dict[Path, str] = {}
    encodings: defaultdict[str, list[Path]] = defaultdict(list)
    for path in paths:
        try:
            contents[path] = files.read_bytes(path, max_bytes=files.MAX_LINE_BYTES)
        except UserError as error:
            problems[path] = str(error)
        else:
            encodings[_unicode_encoding(contents[path])].append(path)
    if others := encodings.pop("", []):
        latin = encoding or (_LATIN if _seems_latin([contents[path] for path in others]) else "")
        encodings[latin] += others
    texts: dict[Path, str] = {}
    for name, members in encodings.items():
        for path in members:
            try:
                text = contents[path].decode(name or "utf-8")
            except UnicodeDecodeError as error:
                problems[path] = (
                    f"{path}: byte {error.start + 1} is not {name or 'UTF-8'}; name its encoding: --encoding cp1252 "
                    "(western Europe), cp1250 (central Europe), cp1251 (Cyrillic), cp1254 (Turkish), ..."
                )
                continue
            if "\0" in text:
                problems[path] = f"{path}: holds NUL characters, so it is no text"
                continue
            texts[path] = " ".join(line.strip() for line in text.splitlines() if line.strip())
        read = [path for path in members if path in texts]
        if read and name not in ("utf-8", "utf-8-sig"):
            guess = "; this is a guess, --encoding NAME sets another" if name == _LATIN and not encoding else ""
            what = counted(len(read), "transcript")
            log.warning("read %s as %s, such as %s: %r%s", what, name, read[0], texts[read[0]][:60], guess)
    return texts, problems


def _unicode_encoding(content: bytes) -> str:
    """Return the encoding of Unicode that a text has, "" for none."""
    if mark := next((mark for mark in _MARKS if content.startswith(mark)), b""):
        return _MARKS[mark]
    odd, even = content[1::2].count(0), content[::2].count(0)  # UTF-16 without a mark: its ASCII has a zero per letter
    if 4 * max(odd, even) > len(content) and not min(odd, even):
        return "utf-16-le" if odd else "utf-16-be"
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return ""
    return "utf-8"


def _seems_latin(contents: Sequence[bytes]) -> bool:
    try:
        text = b"".join(contents).decode(_LATIN)
    except UnicodeDecodeError:
        return False
    letters = {c for c in text.lower() if c > "\x7f"} - set(_LATIN_MARKS)
    return any(letters <= set(row) for row in _LATIN_LETTERS)


def find_audio(listed: Path) -> Path | None:
    """Return the listed file or member of a shard, else a file with another audio extension, else None.

    Names that Unicode counts as equal are: macOS writes an accent as a character of its own, most lists do not.
    """
    if listed.is_file() or member_of(listed):
        return listed
    stem = listed.stem if listed.suffix.lower() in AUDIO_SUFFIXES else listed.name
    names = _audio_names(str(listed.parent))
    name = names.get(stem) or names.get(unicodedata.normalize("NFC", stem))
    return listed.with_name(name) if name else None


def corpus_folder(folder: str | Path, source: str = "") -> Path:
    """Return the folder as an absolute path.

    Raises:
        ImporterError: it is no folder; the message says where the corpus can be had, which is `source`.
    """
    path = Path(folder).expanduser().resolve()
    if not str(folder) or not path.is_dir():
        what = "is a file" if path.is_file() else "does not exist"
        hint = f", as published. To get it: {source}" if source else ""
        raise ImporterError(
            f"the folder {str(folder)!r} {what}: give the folder of the corpus (of a recipe: data.corpus=FOLDER){hint}"
        )
    return path


def _measure(entry: CorpusEntry) -> Utterance | str:
    audio = find_audio(entry.audio)
    if audio is None:
        return f"{entry.source}: no audio at {entry.audio}, nor with another extension"
    try:
        f"{audio}{entry.speaker}".encode()
    except UnicodeEncodeError:
        return (
            f"{entry.source}: {str(audio)!a} is not UTF-8, as manifests are: rename the file or its folder, or set "
            "PYTHONUTF8=1 where only the locale is not UTF-8"
        )
    try:
        info = audio_info(audio)
    except AudioError as error:
        return f"{entry.source}: {error}"
    end_s = info.duration_s if entry.end_s is None else entry.end_s
    if not 0 <= entry.offset_s < end_s <= info.duration_s + END_TOLERANCE_S:
        return (
            f"{entry.source}: {entry.offset_s} s to {end_s} s is not a segment of {audio}, {info.duration_s:.3f} s long"
        )
    duration_s = min(end_s, info.duration_s) - entry.offset_s
    return Utterance(audio, duration_s, entry.text, entry.offset_s, entry.speaker, entry.lang, entry.source)


@lru_cache(maxsize=64)
def _audio_names(folder: str) -> dict[str, str]:
    """Map the stems of a folder's audio files, as they are and in composed characters (NFC), to their names."""
    try:
        names = [entry.name for entry in os.scandir(folder)]
    except (OSError, ValueError):  # ValueError: NUL or half a surrogate pair
        return {}
    order = {suffix: rank for rank, suffix in enumerate(AUDIO_SUFFIXES)}
    audio = [name for name in names if os.path.splitext(name)[1].lower() in order]
    audio.sort(key=lambda name: (-order[os.path.splitext(name)[1].lower()], name))
    by_stem = {os.path.splitext(name)[0]: name for name in audio}
    return {unicodedata.normalize("NFC", stem): name for stem, name in by_stem.items()} | by_stem
