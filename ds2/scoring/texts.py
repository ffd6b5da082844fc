"""Texts to score: manifests, plain text and Kaldi's text, and which hypothesis belongs to which reference."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from pathlib import Path

from ds2.scoring.statistics import ScoringError
from ds2.system.plain import parse_json
from ds2.system.text_files import read_lines

_NAMED_AT_MOST = 10


@dataclass(frozen=True, slots=True)
class Line:
    """One utterance of a file."""

    name: str
    text: str
    speaker: str = ""


def read_texts(path: Path, *, ids: bool, hypotheses: bool) -> dict[str, Line]:
    """Read a manifest or text file.

    Args:
        path: the file, UTF-8; `-` is standard input.
        ids: the first word of each line of a text file is its id.
        hypotheses: take `pred_text` of a manifest where there is one.

    Returns:
        Utterances by the key they are matched by, their texts in composed characters (NFC).

    Raises:
        TextError: the file is unreadable or not UTF-8.
        ScoringError: a bad manifest line, or a key listed twice.
    """
    lines = [line for _, line in read_lines(path)]
    manifest = next((line for line in lines if line.strip()), "").lstrip().startswith("{")
    texts: dict[str, Line] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip() and (manifest or ids):
            continue
        if manifest:
            key, entry = _manifest_line(line, path, number, len(texts) + 1, hypotheses=hypotheses)
        elif ids:
            key, *rest = line.split(maxsplit=1)
            entry = Line(key, _nfc(rest[0]) if rest else "")
        else:
            key, entry = str(number), Line(str(number), _nfc(line))
        if key in texts:
            raise ScoringError(f"{path}:{number}: {entry.name} was listed before; an utterance may appear once")
        texts[key] = entry
    return texts


def _manifest_line(line: str, path: Path, number: int, position: int, *, hypotheses: bool) -> tuple[str, Line]:
    source = f"{path}:{number}"
    try:
        record = parse_json(line)
    except ValueError as error:
        raise ScoringError(f"{source}: not JSON ({error}), as the lines before it are") from error
    name = "pred_text" if hypotheses and isinstance(record, dict) and "pred_text" in record else "text"
    if not isinstance(record, dict) or not isinstance(record.get(name), str):
        raise ScoringError(f"{source}: no string {name!r} in this line")
    audio, offset = record.get("audio_filepath"), record.get("offset") or 0
    if audio is None:
        return str(position), Line(str(position), _nfc(record[name]), str(record.get("speaker") or ""))
    if not isinstance(audio, str) or not isinstance(offset, int | float):
        raise ScoringError(f"{source}: audio_filepath must be a string and offset a number")
    try:
        key = f"{(path.parent / audio).resolve()}+{offset:g}"
    except (ValueError, OverflowError) as error:
        raise ScoringError(f"{source}: audio_filepath or offset cannot be: {error}") from error
    shown = Path(audio).stem + (f"+{offset:g}s" if offset else "")
    return key, Line(shown, _nfc(record[name]), str(record.get("speaker") or ""))


def _nfc(text: str) -> str:
    """Composed characters, as `Alphabet` writes them: how a letter with an accent was typed is no error."""
    return unicodedata.normalize("NFC", text)


def match(
    references: dict[str, Line], hypotheses: dict[str, Line], path: Path, *, missing: str
) -> tuple[list[str], list[str]]:
    """Return the hypothesis of each reference, and the names of those that have none, whose hypothesis is empty.

    Raises:
        ScoringError: a hypothesis without reference, or, unless missing='empty', a reference without hypothesis.
    """
    absent = [references[key].name for key in references if key not in hypotheses]
    extra = [hypotheses[key].name for key in hypotheses if key not in references]
    if extra:
        raise ScoringError(f"{path}: {len(extra)} hypotheses have no reference: {first_names(extra)}")
    if absent and missing == "stop":
        raise ScoringError(
            f"{path}: {len(absent)} of {len(references)} references have no hypothesis: {first_names(absent)}; "
            "--missing empty counts their words as deleted"
        )
    return [hypotheses[key].text if key in hypotheses else "" for key in references], absent


def first_names(names: list[str]) -> str:
    """Return the first names of a list, for a message."""
    return ", ".join(names[:_NAMED_AT_MOST]) + (", ..." if len(names) > _NAMED_AT_MOST else "")
