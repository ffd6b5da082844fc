"""Utterances and the JSON-lines manifests that list them, with the keys that NeMo uses; lists split into parts."""

from __future__ import annotations

import hashlib
import json
import logging
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds2.system.errors import UserError
from ds2.system.files import atomic_file
from ds2.system.plain import parse_json, short_repr
from ds2.system.text_files import read_byte_lines

log = logging.getLogger(__name__)

MIN_DURATION_S = 1e-6  # less is written as 0
MAX_DURATION_S = 7 * 24 * 3600.0  # a larger "duration" was written in samples or milliseconds
_MAX_ERRORS_SHOWN = 10
_REQUIRED = ("audio_filepath", "duration", "text")
_KEYS = (*_REQUIRED, "offset", "speaker", "lang")


class ManifestError(UserError):
    """A manifest cannot be used; the message names file, line and reason."""


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


def read_manifest(path: str | Path) -> list[Utterance]:
    """Read one manifest; see `read_manifests`."""
    return read_manifests([path])


def read_manifests(paths: Sequence[str | Path]) -> list[Utterance]:
    """Read JSON-lines manifests into one list of utterances, in order; one bad line is an error.

    A manifest named `-` is standard input.
    A line is an object with `audio_filepath`, `duration` (seconds) and `text`, optionally `offset` (seconds), `speaker`
    and `lang`; other keys are ignored and logged. A relative path starts at the manifest's folder; absolute paths and
    paths that leave the folder by `..` are allowed, since a manifest only names files. A
    byte-order mark, CRLF and blank lines are accepted. Audio files are not opened here; `ds2 data check` reads them.

    Raises:
        ManifestError: names file:line and the reason for the first errors of a manifest: not UTF-8, not a JSON object,
            a key missing or of a wrong type, a number that is negative, not finite or over a week, or an utterance
            (same file and offset) that was listed before; or a manifest is without utterances.
        TextError: a manifest is unreadable.
    """
    utterances: list[Utterance] = []
    seen: dict[tuple[Path, float], str] = {}
    for path in paths:
        utterances += _read(Path(path), seen)
    return utterances


def write_manifest(path: str | Path, utterances: Iterable[Utterance]) -> None:
    """Write a manifest atomically.

    Audio in the manifest's folder has a relative path, so that the folder can be moved; other audio an absolute one.
    """
    path = Path(path)
    folder = path.parent.resolve()
    with atomic_file(path) as partial, partial.open("w", encoding="utf-8", newline="\n") as file:
        for utterance in utterances:
            file.write(json.dumps(_to_record(utterance, folder), ensure_ascii=False) + "\n")


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


def _read(path: Path, seen: dict[tuple[Path, float], str]) -> list[Utterance]:
    folder = path.parent.resolve()
    utterances: list[Utterance] = []
    errors: list[str] = []
    ignored: set[str] = set()
    for number, line in read_byte_lines(path):
        if not line.strip():
            continue
        source = f"{path}:{number}"
        try:
            record = _parse(line)
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
        more = [f"... and {len(errors) - _MAX_ERRORS_SHOWN} more lines"] if len(errors) > _MAX_ERRORS_SHOWN else []
        raise ManifestError("\n".join([*errors[:_MAX_ERRORS_SHOWN], *more]))
    if not utterances:
        raise ManifestError(f"{path}: holds no utterances; expected one JSON object a line")
    if ignored:
        log.info("%s: keys that ds2 does not use were ignored: %s", path, ", ".join(sorted(ignored)))
    return utterances


def _parse(line: bytes) -> dict[str, Any]:
    try:
        record = parse_json(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ManifestError(f"byte {error.start + 1} is not UTF-8; save the manifest as UTF-8") from error
    except ValueError as error:
        raise ManifestError(f"not JSON ({error}); expected one object a line") from error
    if not isinstance(record, dict):
        raise ManifestError(f"a JSON {type(record).__name__}; expected one object a line with {', '.join(_REQUIRED)}")
    return record


def _to_utterance(record: dict[str, Any], folder: Path, source: str) -> Utterance:
    missing = [key for key in _REQUIRED if record.get(key) is None]
    if missing:
        raise ManifestError(f"without {', '.join(missing)}; every line needs {', '.join(_REQUIRED)}")
    return Utterance(
        _audio_path(_string(record, "audio_filepath"), folder),
        _seconds(record, "duration"),
        _string(record, "text"),
        _seconds(record, "offset"),
        _string(record, "speaker"),
        _string(record, "lang"),
        source,
    )


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


class SplitError(UserError):
    """Parts that cannot be made; the message says why and the way out."""


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
        utterances: to split.
        shares: of the audio, by part; positive numbers, of which only the proportions count.
        by: speaker, recording (file) or utterance: unit that is not divided.
        seed: of the shuffle.

    Raises:
        SplitError: unknown `by`, shares that are not positive, utterances without a speaker, or fewer groups than
            parts.
    """
    if by not in _GROUPS:
        raise SplitError(f"--by {by!r} is not one of {', '.join(UNITS)}")
    if len(shares) < 2 or not all(0 < share < float("inf") for share in shares.values()):
        raise SplitError(f"shares {dict(shares)}: two parts or more, each with a share above 0: train=0.9 dev=0.1")
    groups: dict[str, list[int]] = defaultdict(list)
    for index, utterance in enumerate(utterances):
        groups[_GROUPS[by](utterance)].append(index)
    if by == "speaker" and "" in groups:
        raise SplitError(
            f"{len(groups[''])} of {len(utterances)} utterances have no speaker: write one into the manifest, or "
            "split with --by recording or --by utterance (people who speak in two parts make the WER look better)"
        )
    if len(groups) < len(shares):
        raise SplitError(
            f"{len(groups)} {by}s cannot make {len(shares)} parts: "
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
