"""WER report of references and hypotheses in two files, and a comparison with the hypotheses of a second system.

A file is a manifest (JSON lines with `text`, or `pred_text` in hypotheses; matched by `audio_filepath` and `offset`),
plain text (one utterance per line, matched by line), or with --ids Kaldi's `text` (an id before each line).
"""

import argparse
import gc
import sys
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ds2.commands.common import Parser
from ds2.scoring.report import format_alignments, format_paired_test, format_report, summary, write_report
from ds2.scoring.statistics import paired_test
from ds2.scoring.wer import corpus_report
from ds2.system import UserError
from ds2.system.files import STANDARD_INPUT, check_writable, read_lines
from ds2.system.plain import counted, first_of, parse_object, short_repr
from ds2.text.alphabet import fold

_MAX_NAMED = 10  # utterances in a message


def make_parser() -> Parser:
    parser = Parser(prog="ds2 wer", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("references", type=Path)
    parser.add_argument("hypotheses", type=Path)
    parser.add_argument("hypotheses_b", type=Path, nargs="?", help="a second system, compared by a paired test")
    parser.add_argument("--ids", action="store_true", help="text files in Kaldi's form: the first word is the id")
    parser.add_argument("--utt2spk", type=Path, help="Kaldi's utt2spk: speaker of each utterance name")
    parser.add_argument("--lower", action="store_true", help="compare in lower case")
    parser.add_argument("--fold", action="store_true", help="score again without case and punctuation")
    parser.add_argument("--missing", choices=["stop", "empty"], default="stop", help="references without hypothesis")
    parser.add_argument("--errors", action="store_true", help="print the aligned errors too")
    parser.add_argument("--out", type=Path, help="folder for report.txt, report.json, errors.txt and errors.html")
    return parser


def run(arguments: Sequence[str]) -> None:
    """`ds2 wer REFERENCES HYPOTHESES [HYPOTHESES_B]`."""
    args = make_parser().parse_args(arguments)
    gc.disable()  # garbage collection of millions of texts would take a fifth of the time, and there are no cycles
    try:
        _score(args)
    finally:
        gc.enable()


def _score(args: argparse.Namespace) -> None:
    """Read, match and align the files; print and write the reports."""
    if [args.references, args.hypotheses, args.hypotheses_b, args.utt2spk].count(STANDARD_INPUT) > 1:
        raise UserError("standard input, -, can be one of the files only: give the others by name")
    if args.out:
        check_writable(args.out / "report.txt")
    references = read_texts(args.references, ids=args.ids, hypotheses=False)
    if not references:
        raise UserError(f"{args.references}: holds no utterances, so there is no error rate; give the references")
    names = [line.name for line in references.values()]
    speakers = _speakers(args.utt2spk, names) if args.utt2spk else [line.speaker for line in references.values()]
    reports = []
    for path in filter(None, (args.hypotheses, args.hypotheses_b)):
        hypotheses = read_texts(path, ids=args.ids, hypotheses=True)
        if not args.ids and "1" in references:  # lines are numbered: a manifest has its audio for ids
            _warn_of_ids(references, hypotheses)
        texts, absent = match_texts(references, hypotheses, path, missing=args.missing)
        if absent:
            print(f"{path}: {len(absent)} missing hypotheses count as empty: {_first_names(absent)}", file=sys.stderr)
        if not args.lower:
            _warn_of_case(references, texts, path)
        prepare = str.lower if args.lower else str
        spoken, recognised = [prepare(line.text) for line in references.values()], list(map(prepare, texts))
        reports.append(corpus_report(spoken, recognised, names=names, speakers=speakers))
    report = reports[0]
    print(format_report(report), end="")
    if args.fold:
        spoken = [fold(" ".join(u.reference)) for u in report.utterances]
        recognised = [fold(" ".join(u.hypothesis)) for u in report.utterances]
        folded = corpus_report(spoken, recognised, names=names, speakers=speakers)
        print(f"\nwithout case and punctuation:\n{summary(folded)}")
    if args.errors:
        print(f"\n{format_alignments(report)}", end="")
    if len(reports) == 2:
        other = reports[1]
        (errors, lengths), (other_errors, _) = report.errors_and_lengths(), other.errors_and_lengths()
        print(f"\nsystem B: {args.hypotheses_b}\n{summary(other)}\n")
        print(format_paired_test(paired_test(errors, other_errors, lengths), "utterances"))
        if report.speaker_interval is not None:
            print(format_paired_test(paired_test(errors, other_errors, lengths, speakers), "speakers"))
    if args.out:
        facts = {"references": str(args.references), "hypotheses": str(args.hypotheses)}
        write_report(report, args.out, f"{args.hypotheses} against {args.references}", facts)
        print(f"\nreport: {args.out}")


@dataclass(frozen=True, slots=True)
class TextLine:
    """An utterance of a file."""

    name: str
    text: str
    speaker: str = ""


def _speakers(path: Path, names: list[str]) -> list[str]:
    speakers = {key: line.text.strip() for key, line in read_texts(path, ids=True, hypotheses=False).items()}
    absent = [name for name in names if name not in speakers]
    if absent:
        raise UserError(f"{path}: no speaker for {counted(len(absent), 'utterance')}: {_first_names(absent)}")
    return [speakers[name] for name in names]


def _warn_of_ids(references: dict[str, TextLine], hypotheses: dict[str, TextLine]) -> None:
    def words(texts: dict[str, TextLine], position: int) -> list[str]:
        return ["".join(line.text.split()[position:][:1]) for line in texts.values()]

    for position, place, way_out in (
        (0, "first", "use --ids"),
        (-1, "last", "as in sclite's trn, put them first, without brackets, and use --ids"),
    ):
        own, others = words(references, position), set(words(hypotheses, position))
        ids = {word for word in own if position == 0 or (word[:1] + word[-1:] == "()" and len(word) > 2)} - {""}
        if 1 < len(own) == len(ids) and others and others <= ids:
            print(
                f"the {place} words of all lines are distinct and the same in both files: if these are ids, {way_out}",
                file=sys.stderr,
            )


def _warn_of_case(references: dict[str, TextLine], hypotheses: Sequence[str], path: Path) -> None:
    spoken, recognised = " ".join(line.text for line in references.values()), " ".join(hypotheses)
    if recognised and spoken != spoken.lower() and recognised == recognised.lower():
        print(
            f"the references have capitals, {path} has none: words that differ in case count as errors; compare in "
            "lower case with --lower, or with the references of `ds2 evaluate`, the `text` of its hypotheses.jsonl",
            file=sys.stderr,
        )


def read_texts(path: Path, *, ids: bool, hypotheses: bool) -> dict[str, TextLine]:
    """Read a manifest or text file.

    Args:
        path: the file, UTF-8; `-` is standard input.
        ids: the first word of each line of a text file is its id.
        hypotheses: whether to read `pred_text` of a manifest, if it has one.

    Returns:
        Utterances by the key that matches references and hypotheses, with texts in composed characters (NFC).

    Raises:
        UserError: the file is unreadable or not UTF-8, a manifest line is bad, or a key is listed twice.
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
            raise UserError(f"{path}:{number}: {entry.name} is listed twice; each utterance may occur once")
        texts[key] = entry
    return texts


def _manifest_line(line: str, path: Path, number: int, position: int, *, hypotheses: bool) -> tuple[str, TextLine]:
    source = f"{path}:{number}"
    try:
        record = parse_object(line)
    except ValueError as error:
        raise UserError(f"{source}: {error}, but the file begins as a manifest: one object a line") from error
    name = "pred_text" if hypotheses and "pred_text" in record else "text"
    if not isinstance(record.get(name), str):
        raise UserError(f"{source}: has no string {name!r}: {short_repr(record)}")
    audio, offset = record.get("audio_filepath"), record.get("offset") or 0
    if audio is None:
        return str(position), TextLine(str(position), _nfc(record[name]), str(record.get("speaker") or ""))
    if not isinstance(audio, str) or not isinstance(offset, int | float):
        pair = f"{short_repr(audio)} and {short_repr(offset)}"
        raise UserError(f"{source}: audio_filepath must be a string and offset a number, not {pair}")
    try:
        key = f"{(path.parent / audio).resolve()}+{offset:.6f}"
    except (ValueError, OverflowError) as error:
        raise UserError(f"{source}: audio_filepath or offset is invalid: {error}") from error
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
        UserError: a hypothesis has no reference, or, with missing="stop", a reference has no hypothesis.
    """
    absent = [references[key].name for key in references if key not in hypotheses]
    extra = [hypotheses[key].name for key in hypotheses if key not in references]
    if extra:
        moved = not {line.name for line in references.values()}.isdisjoint(extra)
        way_out = "; references have such names, but other paths: make the audio_filepath of both the same" * moved
        number = counted(len(extra), "hypothesis", "hypotheses")
        raise UserError(f"{path}: {number} without a reference: {_first_names(extra)}{way_out}")
    if absent and missing == "stop":
        raise UserError(
            f"{path}: {len(absent)} of {len(references)} references have no hypothesis: {_first_names(absent)}; "
            "use --missing empty to count their words as deleted"
        )
    return [hypotheses[key].text if key in hypotheses else "" for key in references], absent


def _first_names(names: list[str]) -> str:
    return ", ".join(first_of(names, _MAX_NAMED))
