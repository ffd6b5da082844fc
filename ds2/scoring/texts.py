"""Texts to score: manifests, plain text and Kaldi's text; hypotheses matched to references."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from pathlib import Path

from ds2.scoring.statistics import ScoringError
from ds2.system.plain import parse_json
from ds2.system.text_files import read_lines

_NAMED_AT_MOST = 10


@dataclass(frozen=True, slots=True)
class TextLine:
    """An utterance of a file."""

    name: str
    text: str
    speaker: str = ""


def read_texts(path: Path, *, ids: bool, hypotheses: bool) -> dict[str, TextLine]:
    """Read a manifest or text file.

    Args:
        path: the file, UTF-8; `-` is standard input.
        ids: the first word of each line of a text file is its id.
        hypotheses: whether to read `pred_text` of a manifest, if it has one.

    Returns:
        Utterances by the key that matches references and hypotheses, with texts in composed characters (NFC).

    Raises:
        TextError: the file is unreadable or not UTF-8.
        ScoringError: a bad manifest line, or a key listed twice.
    """
    lines = [line for _, line in read_lines(path)]
    manifest = next((line for line in lines if line.strip()), "").lstrip().startswith("{")
    texts: dict[str, TextLine] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip() and (manifest or ids):
            continue
        if manifest:
            key, entry = _manifest_line(line, path, number, len(texts) + 1, hypotheses=hypotheses)
        elif ids:
            key, *rest = line.split(maxsplit=1)
            entry = TextLine(key, _nfc(rest[0]) if rest else "")
        else:
            key, entry = str(number), TextLine(str(number), _nfc(line))
        if key in texts:
            raise ScoringError(f"{path}:{number}: {entry.name} is listed twice; each utterance may occur once")
        texts[key] = entry
    return texts


def _manifest_line(line: str, path: Path, number: int, position: int, *, hypotheses: bool) -> tuple[str, TextLine]:
    source = f"{path}:{number}"
    try:
        record = parse_json(line)
    except ValueError as error:
        raise ScoringError(f"{source}: is not JSON ({error}), but the lines before it are") from error
    name = "pred_text" if hypotheses and isinstance(record, dict) and "pred_text" in record else "text"
    if not isinstance(record, dict) or not isinstance(record.get(name), str):
        raise ScoringError(f"{source}: has no string {name!r}")
    audio, offset = record.get("audio_filepath"), record.get("offset") or 0
    if audio is None:
        return str(position), TextLine(str(position), _nfc(record[name]), str(record.get("speaker") or ""))
    if not isinstance(audio, str) or not isinstance(offset, int | float):
        raise ScoringError(f"{source}: audio_filepath must be a string and offset a number")
    try:
        key = f"{(path.parent / audio).resolve()}+{offset:g}"
    except (ValueError, OverflowError) as error:
        raise ScoringError(f"{source}: audio_filepath or offset is invalid: {error}") from error
    shown = Path(audio).stem + (f"+{offset:g}s" if offset else "")
    return key, TextLine(shown, _nfc(record[name]), str(record.get("speaker") or ""))


def _nfc(text: str) -> str:
    """Compose characters as `Alphabet` does, so that the encoding of an accent does not count as an error."""
    return unicodedata.normalize("NFC", text)


def match_texts(
    references: dict[str, TextLine], hypotheses: dict[str, TextLine], path: Path, *, missing: str
) -> tuple[list[str], list[str]]:
    """Return the hypothesis of each reference, empty if there is none, and the names of references without one.

    Raises:
        ScoringError: a hypothesis has no reference, or, with missing="stop", a reference has no hypothesis.
    """
    absent = [references[key].name for key in references if key not in hypotheses]
    extra = [hypotheses[key].name for key in hypotheses if key not in references]
    if extra:
        raise ScoringError(f"{path}: {len(extra)} hypotheses have no reference: {first_names(extra)}")
    if absent and missing == "stop":
        raise ScoringError(
            f"{path}: {len(absent)} of {len(references)} references have no hypothesis: {first_names(absent)}; "
            "use --missing empty to count their words as deleted"
        )
    return [hypotheses[key].text if key in hypotheses else "" for key in references], absent


def first_names(names: list[str]) -> str:
    """Return the first names of a list, for a message."""
    return ", ".join(names[:_NAMED_AT_MOST]) + (", ..." if len(names) > _NAMED_AT_MOST else "")
