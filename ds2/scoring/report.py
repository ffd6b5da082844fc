"""WER reports as text, JSON and an HTML page."""

import base64
import html
import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any

from ds2.scoring.statistics import ConfidenceInterval, PairedTest
from ds2.scoring.wer import AlignedUtterance, ErrorCounts, Report
from ds2.system.files import write_json, write_text
from ds2.system.plain import counted

_CONFUSIONS_SHOWN = 20
_ERRORS_LISTED = 200  # on the HTML page
_PLAYERS = "<p>{count} of the utterances with most errors have a player: choose the order by most errors.</p>"
_KINDS = {"S": "substituted", "D": "deleted", "I": "inserted"}


def kaldi_line(name: str, counts: ErrorCounts) -> str:
    """Return the line that Kaldi's compute-wer prints, e.g. `%WER 7.42 [ 57 / 773, 5 ins, 9 del, 43 sub ]`."""
    return (
        f"%{name} {100 * counts.rate:.2f} [ {counts.errors} / {counts.reference_length}, {counts.insertions} ins, "
        f"{counts.deletions} del, {counts.substitutions} sub ]"
    )


def summary(report: Report) -> str:
    """Return the head of a report: WER, CER, sentence error rate and intervals."""
    count = len(report.utterances)
    share = 100 * report.wrong_utterances / max(1, count)
    lines = [
        kaldi_line("WER", report.words),
        kaldi_line("CER", report.characters),
        f"%SER {share:.2f} [ {report.wrong_utterances} / {count} ]",
        _interval_line(report.interval, "utterance"),
    ]
    if report.speaker_interval is not None:
        lines.append(_interval_line(report.speaker_interval, "speaker"))
    return "\n".join(lines)


def format_report(report: Report) -> str:
    """Return the summary and tables by speaker, by length and of the most frequent errors."""
    parts = [summary(report)]
    if report.by_speaker:
        parts.append(_table("speaker", {name or "(unknown)": counts for name, counts in report.by_speaker.items()}))
    parts.append(_table("words in reference", report.by_length))
    if report.confusions:
        lines = [f"{'times':>7}  error"]
        for (kind, reference, hypothesis), times in report.confusions.most_common(_CONFUSIONS_SHOWN):
            arrow = " -> " if kind == "S" else ""
            lines.append(f"{times:7d}  {_KINDS[kind]} {reference}{arrow}{hypothesis}")
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def format_alignments(report: Report) -> str:
    """Return every utterance with errors, reference above hypothesis; stars mark missing words."""
    blocks = [_aligned(utterance) for utterance in report.utterances if utterance.words.errors]
    return "\n\n".join(blocks) + ("\n" if blocks else "no errors\n")


def format_paired_test(test: PairedTest, unit: str) -> str:
    """Return the comparison of two systems as two lines."""
    interval = test.interval
    return (
        f"B - A: {100 * test.difference:+.2f} % absolute, {100 * interval.confidence:.0f} % interval "
        f"{100 * interval.low:+.2f} .. {100 * interval.high:+.2f} (paired bootstrap over {interval.units} {unit})\n"
        f"p = {test.p_value:.4f} (two-sided matched-pairs randomisation test)"
    )


def report_record(report: Report) -> dict[str, Any]:
    """Return the report without alignments as plain containers; an infinite rate is None, as JSON requires."""
    return {
        "wer": _finite(report.wer),
        "cer": _finite(report.cer),
        "words": _counts(report.words),
        "characters": _counts(report.characters),
        "utterances": len(report.utterances),
        "wrong_utterances": report.wrong_utterances,
        "interval": _interval(report.interval),
        "speaker_interval": None if report.speaker_interval is None else _interval(report.speaker_interval),
        "by_speaker": {name: _counts(counts) for name, counts in report.by_speaker.items()},
        "by_length": {label: _counts(counts) for label, counts in report.by_length.items()},
        "confusions": [[*error, times] for error, times in report.confusions.most_common(_CONFUSIONS_SHOWN)],
    }


def write_report(
    report: Report, folder: Path, title: str, facts: Mapping[str, Any], recordings: Mapping[int, bytes] | None = None
) -> None:
    """Write report.txt, report.json, errors.txt and errors.html, each atomically.

    Args:
        folder: created if it does not exist.
        title: heading of the HTML page.
        facts: further entries of report.json, such as model and manifest.
        recordings: for the HTML page, see `html_page`.
    """
    head = "".join(f"{key}: {value}\n" for key, value in facts.items())
    write_text(folder / "report.txt", f"{head}\n{format_report(report)}" if head else format_report(report))
    write_json(folder / "report.json", {**facts, **report_record(report)})
    write_text(folder / "errors.txt", format_alignments(report))
    write_text(folder / "errors.html", html_page(report, title, recordings))


def _interval_line(interval: ConfidenceInterval, unit: str) -> str:
    if math.isnan(interval.low):
        return f"no interval of the WER over {unit}s: the references have no words"
    return (
        f"{100 * interval.confidence:.0f} % interval of the WER: {100 * interval.low:.2f} .. {100 * interval.high:.2f} "
        f"(bootstrap over {counted(interval.units, unit)})"
    )


def _table(heading: str, groups: Mapping[str, ErrorCounts]) -> str:
    width = max(map(len, [heading, *groups]))
    lines = [f"{heading:<{width}}  {'WER %':>7} {'words':>7} {'errors':>7} {'sub':>6} {'del':>6} {'ins':>6}"]
    for label, counts in groups.items():
        lines.append(
            f"{label:<{width}}  {100 * counts.rate:7.2f} {counts.reference_length:7d} {counts.errors:7d} "
            f"{counts.substitutions:6d} {counts.deletions:6d} {counts.insertions:6d}"
        )
    return "\n".join(lines)


def _aligned(utterance: AlignedUtterance) -> str:
    columns = []
    for edit, reference, hypothesis in utterance.pairs():
        width = max(len(reference), len(hypothesis))
        cells = (reference or "*" * width, hypothesis or "*" * width, "" if edit == "C" else edit)
        columns.append([cell.ljust(width) for cell in cells])
    counts = utterance.words
    speaker = f" (speaker {utterance.speaker})" if utterance.speaker else ""
    head = (
        f"{utterance.name}{speaker}: {counts.substitutions} sub, {counts.deletions} del, {counts.insertions} ins "
        f"of {counts.reference_length} words"
    )
    rows = zip(("REF:", "HYP:", "    "), *columns, strict=True)
    lines = [" ".join(row).rstrip() for row in rows]
    return "\n".join([head, *lines])


def _counts(counts: ErrorCounts) -> dict[str, Any]:
    return {
        **asdict(counts),
        "errors": counts.errors,
        "reference_length": counts.reference_length,
        "rate": _finite(counts.rate),
    }


def _interval(interval: ConfidenceInterval) -> dict[str, Any]:
    return {key: _finite(value) for key, value in asdict(interval).items()}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def most_errors(report: Report, count: int) -> list[int]:
    """Return the indices of the `count` utterances with most errors, of equal numbers those with fewer words first."""
    wrong = [index for index, utterance in enumerate(report.utterances) if utterance.words.errors]
    words = [utterance.words for utterance in report.utterances]
    return sorted(wrong, key=lambda index: (-words[index].errors, words[index].reference_length))[:count]


def html_page(report: Report, title: str, recordings: Mapping[int, bytes] | None = None) -> str:
    """Return a self-contained page of all utterances and the most frequent errors.

    The page inserts texts of its JSON data as text nodes only, so that a transcript cannot act as markup.

    Args:
        recordings: MP3 files by the index of their utterance, which the page then plays.
    """
    recordings = recordings or {}
    content = {
        "recordings": {index: base64.b64encode(recording).decode() for index, recording in recordings.items()},
        "utterances": [[u.name, u.speaker, u.edits, u.reference, u.hypothesis] for u in report.utterances],
        "errors": [[*error, times] for error, times in report.confusions.most_common(_ERRORS_LISTED)],
    }
    inserted = {
        "title": html.escape(title),
        "summary": html.escape(summary(report)),
        "players": _PLAYERS.format(count=len(recordings)) if recordings else "",
        "data": json.dumps(content, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c"),
    }
    page = files("ds2.scoring").joinpath("errors.html").read_text(encoding="utf-8")
    for name, text in inserted.items():  # no transcript can hold a mark: each of its `<` is escaped
        page = page.replace(f"<!-- {name} -->", text)
    return page
