"""Shared by all importers: reading lists, finding audio under another extension, durations from headers."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from tqdm import tqdm

from ds2.audio.read import AUDIO_SUFFIXES, END_TOLERANCE_S, AudioError, audio_info
from ds2.audio.shard import member_of
from ds2.data.manifest import Utterance
from ds2.system import text_files
from ds2.system.errors import UserError
from ds2.system.machine import usable_cores

log = logging.getLogger(__name__)

_MAX_SHOWN = 20


class ImporterError(UserError):
    """A corpus cannot be imported; the message names files, lines and the way out."""


@dataclass(frozen=True)
class Entry:
    """An utterance that a corpus lists, before its audio is read."""

    audio: Path  # as listed; the file may have another extension
    text: str
    source: str  # "file:line" of the corpus
    speaker: str = ""
    lang: str = ""
    offset_s: float = 0.0
    end_s: float | None = None  # None: to the end of the file


def to_utterances(entries: Sequence[Entry], *, skip_bad: bool, problems: Sequence[str] = ()) -> list[Utterance]:
    """Find each entry's audio and read its duration from the header, in parallel.

    Args:
        entries: utterances that the corpus lists.
        skip_bad: leave out utterances without usable audio, with a warning, instead of raising.
        problems: of lines that are not entries; treated the same.
    Raises:
        ImporterError: some audio is missing or unreadable and `skip_bad` is false, or no utterance is left.
    """
    with ThreadPoolExecutor(usable_cores()) as pool:
        measured = list(
            tqdm(pool.map(_measure, entries), total=len(entries), desc="reading headers", unit="utt", disable=None)
        )
    utterances = [m for m in measured if isinstance(m, Utterance)]
    problems = [*problems, *(m for m in measured if isinstance(m, str))]
    # names that are not UTF-8 are written as escapes: a log may take nothing else
    problems = [problem.encode("utf-8", "backslashreplace").decode("utf-8") for problem in problems]
    if problems:
        more = [f"... and {len(problems) - _MAX_SHOWN} more"] if len(problems) > _MAX_SHOWN else []
        if not skip_bad:
            listed = "\n  ".join([*problems[:_MAX_SHOWN], *more])
            raise ImporterError(
                f"{len(problems)} of {len(utterances) + len(problems)} utterances cannot be imported:\n  {listed}\n"
                "Correct the corpus, or leave them out (--skip-bad)"
            )
        log.warning("%d utterances left out of the import:\n  %s", len(problems), "\n  ".join(problems))
    if not utterances:
        raise ImporterError("the corpus lists no utterances with audio")
    return utterances


def read_lines(path: Path) -> Iterator[tuple[str, str]]:
    """Yield ("file:line", stripped text) of the lines of a UTF-8 file that are not blank; raises TextError."""
    return ((f"{path}:{number}", line.strip()) for number, line in text_files.read_lines(path) if line.strip())


def find_audio(listed: Path) -> Path | None:
    """Return the listed file or member of a shard, else a file with another audio extension, else None."""
    if listed.is_file() or member_of(listed):
        return listed
    stem = listed.stem if listed.suffix.lower() in AUDIO_SUFFIXES else listed.name
    name = _audio_names(str(listed.parent)).get(stem)
    return listed.with_name(name) if name else None


def corpus_folder(folder: str | Path) -> Path:
    """Return the folder as an absolute path; raises ImporterError where it is not a folder."""
    path = Path(folder).expanduser().resolve()
    if not str(folder) or not path.is_dir():
        raise ImporterError(f"no corpus folder at {str(folder)!r}; give the folder as published (data.corpus=FOLDER)")
    return path


def _measure(entry: Entry) -> Utterance | str:
    audio = find_audio(entry.audio)
    if audio is None:
        return f"{entry.source}: no audio at {entry.audio}, nor with another extension"
    try:
        f"{audio}{entry.speaker}".encode()
    except UnicodeEncodeError:
        return f"{entry.source}: {str(audio)!a} is not UTF-8, as manifests are: rename the file or its folder"
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
    """Map the stems of a folder's audio files to their names."""
    try:
        names = [entry.name for entry in os.scandir(folder)]
    except (OSError, ValueError):  # ValueError: NUL or half a surrogate pair
        return {}
    order = {suffix: rank for rank, suffix in enumerate(AUDIO_SUFFIXES)}
    audio = [name for name in names if os.path.splitext(name)[1].lower() in order]
    audio.sort(key=lambda name: -order[os.path.splitext(name)[1].lower()])
    return {os.path.splitext(name)[0]: name for name in audio}
