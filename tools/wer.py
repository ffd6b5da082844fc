"""WER report of two files, references and hypotheses, and of a second system's hypotheses beside the first's.

usage: python tools/wer.py REFERENCES HYPOTHESES [HYPOTHESES_B] [options]

A file is a manifest (JSON lines with `text`, or `pred_text` in hypotheses; matched by `audio_filepath` and `offset`),
plain text (one utterance a line, matched by line), or with --ids Kaldi's `text` (an id before each line).
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds2.wer import corpus_report
from ds2.wer_report import format_alignments, format_paired_test, format_report, summary, write_report
from ds2.wer_statistics import paired_test

_NAMED_AT_MOST = 10


class InputError(ValueError):
    """A file that cannot be scored; the message names the file, the line or ids, and the way out."""


@dataclass(frozen=True)
class Line:
    """One utterance of a file."""

    name: str
    text: str
    speaker: str = ""


def read_texts(path: Path, *, ids: bool, hypotheses: bool) -> dict[str, Line]:
    """Read a manifest or text file.

    Args:
        path: the file, UTF-8.
        ids: the first word of each line of a text file is its id.
        hypotheses: take `pred_text` of a manifest where there is one.

    Returns:
        Utterances by the key they are matched by.

    Raises:
        InputError: unreadable, not UTF-8, a bad manifest line, or a key listed twice.
    """
    try:
        lines = path.read_bytes().decode("utf-8-sig").split("\n")
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: byte {error.start + 1} is not UTF-8; save the file as UTF-8") from error
    if lines[-1] == "":
        lines.pop()
    manifest = next((line for line in lines if line.strip()), "").lstrip().startswith("{")
    texts: dict[str, Line] = {}
    for number, line in enumerate(lines, start=1):
        source = f"{path}:{number}"
        if not line.strip() and (manifest or ids):
            continue
        if manifest:
            key, entry = _manifest_line(line, path, source, len(texts) + 1, hypotheses=hypotheses)
        elif ids:
            key, *rest = line.split(maxsplit=1)
            entry = Line(key, rest[0] if rest else "")
        else:
            key, entry = str(number), Line(str(number), line)
        if key in texts:
            raise InputError(f"{source}: {entry.name} was listed before; an utterance may appear once")
        texts[key] = entry
    return texts


def _manifest_line(line: str, path: Path, source: str, position: int, *, hypotheses: bool) -> tuple[str, Line]:
    try:
        record: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"{source}: not JSON ({error}), as the lines before it are") from error
    name = "pred_text" if hypotheses and isinstance(record, dict) and "pred_text" in record else "text"
    if not isinstance(record, dict) or not isinstance(record.get(name), str):
        raise InputError(f"{source}: no string {name!r} in this line")
    audio, offset = record.get("audio_filepath"), record.get("offset") or 0
    if audio is None:
        return str(position), Line(str(position), record[name], str(record.get("speaker") or ""))
    if not isinstance(audio, str) or not isinstance(offset, int | float):
        raise InputError(f"{source}: audio_filepath must be a string and offset a number")
    key = f"{(path.parent / audio).resolve()}+{offset:g}"
    shown = Path(audio).stem + (f"+{offset:g}s" if offset else "")
    return key, Line(shown, record[name], str(record.get("speaker") or ""))


def match(references: dict[str, Line], hypotheses: dict[str, Line], path: Path, *, missing: str) -> list[str]:
    """Return the hypothesis of each reference; with missing='empty' one that is not there counts as all deleted.

    Raises:
        InputError: a hypothesis without reference, or a reference without hypothesis.
    """
    absent = [references[key].name for key in references if key not in hypotheses]
    extra = [hypotheses[key].name for key in hypotheses if key not in references]
    if extra:
        raise InputError(f"{path}: {len(extra)} hypotheses have no reference: {_some(extra)}")
    if absent and missing == "stop":
        raise InputError(
            f"{path}: {len(absent)} of {len(references)} references have no hypothesis: {_some(absent)}; "
            "--missing empty counts their words as deleted"
        )
    if absent:
        print(f"{path}: {len(absent)} missing hypotheses count as empty: {_some(absent)}", file=sys.stderr)
    return [hypotheses[key].text if key in hypotheses else "" for key in references]


def _warn_of_ids(references: dict[str, Line], hypotheses: dict[str, Line]) -> None:
    first = {key: line.text.split(maxsplit=1)[:1] for key, line in references.items()}
    distinct = len({word for words in first.values() for word in words})
    if 1 < len(first) == distinct and all(
        key in first and line.text.split(maxsplit=1)[:1] == first[key] for key, line in hypotheses.items()
    ):
        print(
            "every line's first word is distinct and the same in both files: if these are ids, give --ids",
            file=sys.stderr,
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:_NAMED_AT_MOST]) + (", ..." if len(names) > _NAMED_AT_MOST else "")


def _speakers(path: Path, names: list[str]) -> list[str]:
    speakers = {key: line.text.strip() for key, line in read_texts(path, ids=True, hypotheses=False).items()}
    absent = [name for name in names if name not in speakers]
    if absent:
        raise InputError(f"{path}: no speaker for {len(absent)} utterances: {_some(absent)}")
    return [speakers[name] for name in names]


def score(given: argparse.Namespace) -> None:
    """Read, match, align, print and write what the command line asks for."""
    references = read_texts(given.references, ids=given.ids, hypotheses=False)
    names = [line.name for line in references.values()]
    speakers = _speakers(given.utt2spk, names) if given.utt2spk else [line.speaker for line in references.values()]
    reports = []
    for path in filter(None, (given.hypotheses, given.hypotheses_b)):
        hypotheses = read_texts(path, ids=given.ids, hypotheses=True)
        if not given.ids:
            _warn_of_ids(references, hypotheses)
        found = match(references, hypotheses, path, missing=given.missing)
        prepare = str.lower if given.lower else str
        reports.append(
            corpus_report(
                [prepare(line.text) for line in references.values()],
                [prepare(text) for text in found],
                names=names,
                speakers=speakers,
            )
        )
    report = reports[0]
    print(format_report(report), end="")
    if given.errors:
        print(f"\n{format_alignments(report)}", end="")
    if len(reports) == 2:
        other = reports[1]
        errors, lengths = report.errors_and_lengths()
        print(f"\nsystem B: {given.hypotheses_b}\n{summary(other)}\n")
        print(format_paired_test(paired_test(errors, other.errors_and_lengths()[0], lengths), "utterances"))
        if report.speaker_interval is not None:
            test = paired_test(errors, other.errors_and_lengths()[0], lengths, speakers)
            print(format_paired_test(test, "speakers"))
    if given.out:
        facts = {"references": str(given.references), "hypotheses": str(given.hypotheses)}
        write_report(report, given.out, f"{given.hypotheses} against {given.references}", facts)
        print(f"\nreport: {given.out}")


def main(arguments: list[str] | None = None) -> int:
    """Command line; 2 for input that cannot be scored."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("references", type=Path)
    parser.add_argument("hypotheses", type=Path)
    parser.add_argument("hypotheses_b", type=Path, nargs="?", help="a second system, compared by a paired test")
    parser.add_argument("--ids", action="store_true", help="text files in Kaldi's form: the first word is the id")
    parser.add_argument("--utt2spk", type=Path, help="Kaldi's utt2spk: speaker of each utterance name")
    parser.add_argument("--lower", action="store_true", help="compare in lower case")
    parser.add_argument("--missing", choices=["stop", "empty"], default="stop", help="references without hypothesis")
    parser.add_argument("--errors", action="store_true", help="print the aligned errors too")
    parser.add_argument("--out", type=Path, help="folder for report.txt, report.json, errors.txt and errors.html")
    try:
        score(parser.parse_args(arguments))
    except (InputError, OSError, ValueError) as error:
        print(f"wer.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
