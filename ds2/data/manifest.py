"""Utterances; manifests, JSON lines with NeMo's keys that list them; splits, filters and statistics of lists."""

import hashlib
import json
import logging
import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ds2.audio.read import AUDIO_SUFFIXES
from ds2.system import UserError
from ds2.system.files import new_figure, new_text, read_byte_lines, save_picture
from ds2.system.plain import counted, first_of, grouped, parse_object, short_repr, shortened
from ds2.system.signals import time_limit

log = logging.getLogger(__name__)

MIN_DURATION_S = 1e-6  # less is written as 0
MAX_DURATION_S = 7 * 24 * 3600.0  # a larger "duration" was written in samples or milliseconds
_MAX_ERRORS_SHOWN = 10
_REQUIRED = ("audio_filepath", "duration", "text")
_KEYS = (*_REQUIRED, "offset", "speaker", "lang")
_QUANTILES = (0.0, 0.05, 0.5, 0.95, 1.0)
_SPEAKERS_SHOWN = 10
_MAX_MATCH_S = 10.0  # of a regular expression in one transcript
_BINS = 50


class ManifestError(UserError):
    """A manifest cannot be used, or not so as was asked; the message says why and the way out."""


@dataclass(frozen=True, slots=True)
class Utterance:
    """One stretch of recorded speech and its transcript."""

    audio_filepath: Path  # absolute
    duration_s: float
    text: str
    offset_s: float = 0.0  # where the utterance starts in the file
    speaker: str = ""
    lang: str = ""
    source: str = ""  # "manifest:line", for messages

    @property
    def name(self) -> str:
        """Name for messages: the file's stem, with the offset where there is one."""
        return self.audio_filepath.stem + (f"+{self.offset_s:g}s" if self.offset_s else "")

    @property
    def place(self) -> str:
        """Where it is listed, for messages; the name of an utterance that no manifest lists."""
        return self.source or self.name


def hours(utterances: Iterable[Utterance]) -> float:
    """Return the hours of audio of utterances."""
    return sum(u.duration_s for u in utterances) / 3600


def amount(utterances: Sequence[Utterance]) -> str:
    """Return how many utterances and hours these are, for a message."""
    return f"{counted(len(utterances), 'utterance')}, {hours(utterances):.2f} h"


def runs(utterances: Sequence[Utterance], max_s: float) -> Iterator[tuple[int, Sequence[Utterance]]]:
    """Divide a list into runs of at most so many seconds, or one utterance: (position of the first, utterances)."""
    first, total_s = 0, 0.0
    for position, utterance in enumerate(utterances):
        if total_s and total_s + utterance.duration_s > max_s:
            yield first, utterances[first:position]
            first, total_s = position, 0.0
        total_s += utterance.duration_s
    yield first, utterances[first:]


def read_manifests(paths: Iterable[str | Path]) -> list[Utterance]:
    """Read manifests into one list of utterances, in order; see `read_manifest`."""
    seen: dict[tuple[Path, float], str] = {}
    return [utterance for path in paths for utterance in read_manifest(path, seen)]


def write_manifest(path: str | Path, utterances: Iterable[Utterance]) -> None:
    """Write a manifest atomically; raises ManifestError for a text that cannot be written as UTF-8.

    Audio in the manifest's folder has a relative path, so that the folder can be moved; other audio an absolute one.
    """
    path = Path(path)
    folder = path.parent.resolve()
    with new_text(path) as file:
        for utterance in utterances:
            line = json.dumps(_to_record(utterance, folder), ensure_ascii=False)
            try:
                file.write(line + "\n")
            except UnicodeEncodeError as error:
                raise ManifestError(f"{shortened(line)}: half of a surrogate pair is not a character") from error


def _to_record(utterance: Utterance, folder: Path) -> dict[str, Any]:
    audio = utterance.audio_filepath
    is_inside = audio.is_relative_to(folder)
    record: dict[str, Any] = {
        "audio_filepath": str(audio.relative_to(folder) if is_inside else audio.absolute()),
        "duration": round(utterance.duration_s, 6),
        "text": utterance.text,
    }
    optional = {"offset": round(utterance.offset_s, 6), "speaker": utterance.speaker, "lang": utterance.lang}
    return record | {key: value for key, value in optional.items() if value}


def read_manifest(path: str | Path, seen: dict[tuple[Path, float], str] | None = None) -> list[Utterance]:
    """Read a JSON-lines manifest; one bad line is an error. A manifest named `-` is standard input.

    A line is an object with `audio_filepath`, `duration` (seconds) and `text`, optionally `offset` (seconds), `speaker`
    and `lang`; other keys are ignored and logged. A relative path starts at the manifest's folder; absolute paths and
    paths that leave the folder by `..` are allowed, since a manifest only names files. A
    byte-order mark, CRLF and blank lines are accepted. Audio files are not opened here; `ds2 data check` reads them.

    Args:
        seen: file, offset and line of the utterances of manifests that were read before; those of this one are added.

    Raises:
        ManifestError: names file:line and the reason for the first errors: not UTF-8, not a JSON object, a key missing
            or of a wrong type, a number that is negative, not finite or over a week, or an utterance (same file and
            offset) that was listed before; or the manifest is without utterances.
        UserError: the manifest is unreadable.
    """
    path, seen = Path(path), {} if seen is None else seen
    if path.suffix.lower() in AUDIO_SUFFIXES:
        raise ManifestError(
            f"{path}: is audio, not a manifest, which has an utterance a line ({', '.join(_REQUIRED)}): "
            "`ds2 data import` makes one, `ds2 transcribe` needs none"
        )
    folder = path.parent.resolve()
    utterances: list[Utterance] = []
    errors: list[str] = []
    ignored: set[str] = set()
    objects = 0
    for number, line in read_byte_lines(path):
        if not line.strip():
            continue
        source = f"{path}:{number}"
        try:
            record = _parse(line)
            objects += 1
            ignored.update(record.keys() - set(_KEYS))
            utterance = _to_utterance(record, folder, source)
            key = (utterance.audio_filepath, utterance.offset_s)
            if key in seen:
                raise ManifestError(f"{utterance.name} was listed before, at {seen[key]}; remove one of the two")
            seen[key] = source
            utterances.append(utterance)
        except ManifestError as error:
            errors.append(f"{source}: {error}")
    if errors:
        if not objects and len(errors) > 1:  # a recording or a plain text
            raise ManifestError(
                f"{errors[0]}\nNo line of {path} is a JSON object: give a manifest, whose lines are objects with "
                "audio_filepath, duration and text; `ds2 data import` writes them"
            )
        raise ManifestError("\n".join(first_of(errors, _MAX_ERRORS_SHOWN)))
    if not utterances:
        raise ManifestError(f"{path}: holds no utterances; expected one JSON object a line")
    if ignored:
        log.info("%s: keys that ds2 does not use were ignored: %s", path, ", ".join(sorted(ignored)))
    return utterances


def _parse(line: bytes) -> dict[str, Any]:
    try:
        return parse_object(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ManifestError(f"byte {error.start + 1} is not UTF-8; save the manifest as UTF-8") from error
    except ValueError as error:
        raise ManifestError(f"{error}; expected one object a line with {', '.join(_REQUIRED)}") from error


def _to_utterance(record: dict[str, Any], folder: Path, source: str) -> Utterance:
    missing = [key for key in _REQUIRED if record.get(key) is None]
    if missing:
        raise ManifestError(f"without {', '.join(missing)}; every line needs {', '.join(_REQUIRED)}")
    audio = _audio_path(_string(record, "audio_filepath"), folder)
    duration_s, text, offset_s = _seconds(record, "duration"), _string(record, "text"), _seconds(record, "offset")
    return Utterance(audio, duration_s, text, offset_s, _string(record, "speaker"), _string(record, "lang"), source)


def _audio_path(listed: str, folder: Path) -> Path:
    if not listed.strip() or "\0" in listed:
        raise ManifestError(f"audio_filepath is {short_repr(listed)}; expected a path")
    path = folder / listed
    return path.resolve() if ".." in path.parts else path


def _string(record: dict[str, Any], key: str) -> str:
    value = record.get(key)
    if value is None:
        return ""
    if key == "speaker" and isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise ManifestError(f"{key} is {short_repr(value)}; expected a string")
    if not value.isprintable() and any(0xD800 <= ord(character) <= 0xDFFF for character in value):
        raise ManifestError(f"{key} is {short_repr(value)}; half of a surrogate pair is not a character")
    return value


def _seconds(record: dict[str, Any], key: str) -> float:
    value = record.get(key)
    if value is None:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ManifestError(f"{key} is {short_repr(value)}; expected a number of seconds")
    if not 0 <= value <= MAX_DURATION_S:  # false for NaN too
        raise ManifestError(f"{key} is {short_repr(value)}; expected seconds, from 0 to {MAX_DURATION_S:g}")
    if key == "duration" and 0 < value < MIN_DURATION_S:
        raise ManifestError(f"{key} is {short_repr(value)}; expected seconds, 0 or at least {MIN_DURATION_S:g}")
    return float(value)


_GROUPS: dict[str, Callable[[Utterance], str]] = {
    "speaker": lambda u: u.speaker,
    "recording": lambda u: str(u.audio_filepath),
    "utterance": lambda u: f"{u.audio_filepath}+{u.offset_s}",
}
UNITS = tuple(_GROUPS)
"""Units that `split` does not divide: `--by` of the command."""


def corpus(name: str, utterances: Iterable[Utterance]) -> dict[str, object]:
    """Return the number of utterances and a digest of file names (without folders), times and texts."""
    digest, count = hashlib.sha256(), 0
    for u in utterances:
        digest.update(f"{u.audio_filepath.name}\0{u.offset_s!r}\0{u.duration_s!r}\0{u.text}\n".encode())
        count += 1
    return {name: f"{count} utterances ({digest.hexdigest()[:12]})"}


def split(
    utterances: Sequence[Utterance], shares: Mapping[str, float], *, by: str = "speaker", seed: int = 1
) -> dict[str, list[Utterance]]:
    """Split utterances by duration, whole speakers (or recordings) at a time; their order stays.

    Groups are shuffled by the seed. Each goes to the part that has the least of its share so far, so every part gets at
    least one; a part may differ from its share by about the length of one group.

    Args:
        shares: of the audio, by part; positive numbers, of which only the proportions count.
        by: speaker, recording (file) or utterance: unit that is not divided.

    Raises:
        ManifestError: shares that are not positive, utterances without a speaker or a duration, or fewer groups than
            parts.
    """
    if len(shares) < 2 or not all(0 < share < float("inf") for share in shares.values()):
        raise ManifestError(f"shares {dict(shares)}: two parts or more, each with a share above 0: train=0.9 dev=0.1")
    groups = grouped(range(len(utterances)), lambda index: _GROUPS[by](utterances[index]))
    if by == "speaker" and "" in groups:
        raise ManifestError(
            f"{len(groups[''])} of {len(utterances)} utterances have no speaker: write one into the manifest, or "
            "split with --by recording or --by utterance (people who speak in two parts make the WER look better)"
        )
    empty = [u.place for u in utterances if not u.duration_s]
    if empty:
        raise ManifestError(
            f"{len(empty)} of {len(utterances)} utterances last 0 s, the first at {empty[0]}, but parts are shares "
            "of the audio: write their durations, or leave them out with `ds2 data filter --min-s 0.1`"
        )
    if len(groups) < len(shares):
        raise ManifestError(
            f"{counted(len(groups), by)} cannot make {len(shares)} parts: "
            + ("ask for fewer parts" if by == "utterance" else "split with --by utterance, or ask for fewer parts")
        )
    order = sorted(groups)
    random.Random(seed).shuffle(order)
    durations_s = dict.fromkeys(shares, 0.0)
    part_of: dict[int, str] = {}
    for key in order:
        part = min(shares, key=lambda name: durations_s[name] / shares[name])
        durations_s[part] += sum(utterances[index].duration_s for index in groups[key])
        part_of.update(dict.fromkeys(groups[key], part))
    return {name: [u for index, u in enumerate(utterances) if part_of[index] == name] for name in shares}


def statistics(utterances: Sequence[Utterance]) -> dict[str, Any]:
    """Return the statistics of at least one utterance, for JSON; audio is not read.

    Speakers have their hours, most first; '' is unknown. Of seconds and paces, minimum, 5 %, median, 95 %, maximum.
    """
    by_speaker: defaultdict[str, float] = defaultdict(float)
    for utterance in utterances:
        by_speaker[utterance.speaker] += utterance.duration_s / 3600
    return {
        "utterances": len(utterances),
        "hours": hours(utterances),
        "words": sum(len(u.text.split()) for u in utterances),
        "characters": sum(len(u.text) for u in utterances),
        "distinct_texts": len({u.text for u in utterances}),
        "speakers": dict(sorted(by_speaker.items(), key=lambda item: (-item[1], item[0]))),
        "duration_s": _quantiles([u.duration_s for u in utterances]),
        "characters_per_s": _quantiles([pace(u) for u in utterances]),
    }


def format_statistics(facts: dict[str, Any]) -> str:
    """Return `statistics` as text."""
    known = {name: hours for name, hours in facts["speakers"].items() if name}
    unknown = f", unknown for {facts['speakers']['']:.2f} h" if "" in facts["speakers"] else ""
    rows = {
        "utterances": f"{facts['utterances']:,}",
        "audio": f"{facts['hours']:.2f} h",
        "words": f"{facts['words']:,}, {facts['characters']:,} characters",
        "texts": f"{facts['distinct_texts']:,} different ones",
        "speakers": f"{len(known):,}{unknown}",
        "seconds": _quantile_line(facts["duration_s"]),
        "characters/s": _quantile_line(facts["characters_per_s"]),
    }
    lines = [f"{name:<14}{value}" for name, value in rows.items()]
    speakers = [f"{name}: {60 * hours:.1f} min" for name, hours in known.items()]
    return "\n".join([*lines, *(f"{'':<14}{text}" for text in first_of(speakers, _SPEAKERS_SHOWN))])


def pace(utterance: Utterance) -> float:
    """Return characters per second of an utterance."""
    return len(utterance.text) / max(utterance.duration_s, 1e-9)


@dataclass(frozen=True)
class Conditions:
    """Conditions of `select`; None and empty values select everything."""

    min_s: float | None = None
    max_s: float | None = None
    min_pace: float | None = None  # characters a second
    max_pace: float | None = None
    speakers: Collection[str] = ()
    without_speakers: Collection[str] = ()
    text: str = ""  # a regular expression that matches in the transcript
    without_text: str = ""

    def reason(self, utterance: Utterance) -> str:
        """Return the first condition that an utterance fails, or ''."""
        checks = {
            "shorter than --min-s": self.min_s is not None and utterance.duration_s < self.min_s,
            "longer than --max-s": self.max_s is not None and utterance.duration_s > self.max_s,
            "slower than --min-pace": self.min_pace is not None and pace(utterance) < self.min_pace,
            "faster than --max-pace": self.max_pace is not None and pace(utterance) > self.max_pace,
            "not of --speakers": bool(self.speakers) and utterance.speaker not in self.speakers,
            "of --without-speakers": utterance.speaker in self.without_speakers,
            "without --text": bool(self.text) and not re.search(self.text, utterance.text),
            "with --without-text": bool(self.without_text) and bool(re.search(self.without_text, utterance.text)),
        }
        return next((name for name, failed in checks.items() if failed), "")


def select(utterances: Sequence[Utterance], conditions: Conditions) -> tuple[list[Utterance], Counter[str]]:
    """Return the utterances that meet all conditions, in order, and the number of others by the first failed one.

    Raises:
        ManifestError: a text condition is not a regular expression or takes over 10 s for a transcript, or no
            utterance is left.
    """
    for pattern in (conditions.text, conditions.without_text):
        try:
            re.compile(pattern)
        except re.error as error:
            raise ManifestError(f"{pattern!r} is not a regular expression: {error}") from error
    reasons = [_reason(conditions, utterance) for utterance in utterances]
    selected = [utterance for utterance, reason in zip(utterances, reasons, strict=True) if not reason]
    dropped = Counter(filter(None, reasons))
    if not selected:
        counts = ", ".join(f"{count} {reason}" for reason, count in dropped.most_common())
        raise ManifestError(f"no utterance of {len(utterances)} meets the conditions: {counts}; relax them")
    return selected, dropped


def _reason(conditions: Conditions, utterance: Utterance) -> str:
    if not (conditions.text or conditions.without_text):
        return conditions.reason(utterance)
    patterns = " or ".join(repr(pattern) for pattern in (conditions.text, conditions.without_text) if pattern)
    too_slow = ManifestError(
        f"{utterance.place}: {patterns} was not matched within {_MAX_MATCH_S:g} s: a repeat within a repeat, as in "
        "(a*)*, tries the same letters again and again; write it with one repeat"
    )
    with time_limit(_MAX_MATCH_S, too_slow):
        return conditions.reason(utterance)


def draw(utterances: Sequence[Utterance], path: Path) -> None:
    """Draw histograms of durations and of pace; raises UserError as `new_figure` and `save_picture`."""
    figure = new_figure(10, 4)
    left, right = figure.subplots(1, 2)
    left.hist([u.duration_s for u in utterances], bins=_BINS)
    left.set(xlabel="seconds", ylabel="utterances", title=f"{len(utterances)} utterances")
    right.hist([pace(u) for u in utterances], bins=_BINS)
    right.set(xlabel="characters a second", title="the tails are mostly wrong transcripts")
    save_picture(figure, path)


def _quantiles(values: Sequence[float]) -> list[float]:
    return [round(float(value), 3) for value in np.quantile(values, _QUANTILES)]


def _quantile_line(values: Sequence[float]) -> str:
    lowest, low, middle, high, highest = (f"{value:.2f}" for value in values)
    return f"median {middle}, 90 % in {low} to {high}, all in {lowest} to {highest}"
