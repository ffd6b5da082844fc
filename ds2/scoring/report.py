"""WER reports as text, JSON and an HTML page."""

from __future__ import annotations

import base64
import html
import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ds2.scoring.statistics import Interval, PairedTest
from ds2.scoring.wer import AlignedUtterance, ErrorCounts, Report
from ds2.system.files import write_text

_CONFUSIONS_SHOWN = 20
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
        _interval_line(report.interval, "utterances"),
    ]
    if report.speaker_interval is not None:
        lines.append(_interval_line(report.speaker_interval, "speakers"))
    return "\n".join(lines)


def format_report(report: Report) -> str:
    """Return the summary and tables by speaker, by length and of the most frequent errors."""
    parts = [summary(report)]
    if report.has_speakers:
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
        "by_speaker": {name: _counts(counts) for name, counts in report.by_speaker.items()}
        if report.has_speakers
        else {},
        "by_length": {label: _counts(counts) for label, counts in report.by_length.items()},
        "confusions": [[*error, times] for error, times in report.confusions.most_common(_CONFUSIONS_SHOWN)],
    }


def write_report(
    report: Report, folder: Path, title: str, facts: Mapping[str, Any], recordings: Mapping[int, bytes] | None = None
) -> None:
    """Write report.txt, report.json, errors.txt and errors.html, each atomically.

    Args:
        report: of a corpus.
        folder: created if it does not exist.
        title: heading of the HTML page.
        facts: further entries of report.json, such as model and manifest.
        recordings: for the HTML page, see `html_page`.
    """
    head = "".join(f"{key}: {value}\n" for key, value in facts.items())
    write_text(folder / "report.txt", f"{head}\n{format_report(report)}" if head else format_report(report))
    write_text(
        folder / "report.json", json.dumps({**facts, **report_record(report)}, indent=1, ensure_ascii=False) + "\n"
    )
    write_text(folder / "errors.txt", format_alignments(report))
    write_text(folder / "errors.html", html_page(report, title, summary(report), recordings))


def _interval_line(interval: Interval, unit: str) -> str:
    return (
        f"{100 * interval.confidence:.0f} % interval of the WER: {100 * interval.low:.2f} .. {100 * interval.high:.2f} "
        f"(bootstrap over {interval.units} {unit})"
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
    rows: tuple[list[str], list[str], list[str]] = ([], [], [])
    for edit, reference, hypothesis in utterance.pairs():
        width = max(len(reference), len(hypothesis), 1)
        for row, cell in zip(
            rows, (reference or "*" * width, hypothesis or "*" * width, "" if edit == "C" else edit), strict=True
        ):
            row.append(cell.ljust(width))
    counts = utterance.words
    speaker = f" (speaker {utterance.speaker})" if utterance.speaker else ""
    head = (
        f"{utterance.name}{speaker}: {counts.substitutions} sub, {counts.deletions} del, {counts.insertions} ins "
        f"of {counts.reference_length} words"
    )
    lines = [f"{label} {' '.join(row)}".rstrip() for label, row in zip(("REF:", "HYP:", "    "), rows, strict=True)]
    return "\n".join([head, *lines])


def _counts(counts: ErrorCounts) -> dict[str, Any]:
    return {
        **asdict(counts),
        "errors": counts.errors,
        "reference_length": counts.reference_length,
        "rate": _finite(counts.rate),
    }


def _interval(interval: Interval) -> dict[str, Any]:
    return {key: _finite(value) for key, value in asdict(interval).items()}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


_ERRORS_LISTED = 200


def most_errors(report: Report, count: int) -> list[int]:
    """Return the indices of the `count` utterances with most errors, of equal numbers those with fewer words first."""
    wrong = [index for index, utterance in enumerate(report.utterances) if utterance.words.errors]
    words = [utterance.words for utterance in report.utterances]
    return sorted(wrong, key=lambda index: (-words[index].errors, words[index].reference_length))[:count]


def html_page(report: Report, title: str, summary: str, recordings: Mapping[int, bytes] | None = None) -> str:
    """Return a self-contained page of all utterances and the most frequent errors.

    The page inserts texts of its JSON data as text nodes only, so that a transcript cannot act as markup.

    Args:
        report: aligned utterances.
        title: heading.
        summary: lines shown below it.
        recordings: MP3 files by the index of their utterance, which the page then plays.
    """
    recordings = recordings or {}
    content = {
        "recordings": {index: base64.b64encode(recording).decode() for index, recording in recordings.items()},
        "utterances": [[u.name, u.speaker, u.edits, u.reference, u.hypothesis] for u in report.utterances],
        "errors": [[*error, times] for error, times in report.confusions.most_common(_ERRORS_LISTED)],
    }
    data = json.dumps(content, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{html.escape(title)}</h1>
<pre>{html.escape(summary)}</pre>
{_PLAYABLE.format(count=len(recordings)) if recordings else ""}
{_CONTROLS}
<script type="application/json" id="data">{data}</script>
<script>{_SCRIPT}</script>
</body>
</html>
"""


_STYLE = """
:root { color-scheme: light dark; --line: #8886; --sub: #b45f00; --del: #c0182b; --ins: #1a6fc4; }
@media (prefers-color-scheme: dark) { :root { --sub: #ffb055; --del: #ff7d88; --ins: #7cbcff; } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 1rem auto; padding: 0 1rem; }
h1 { font-size: 1.3rem; overflow-wrap: anywhere; }
form { display: flex; flex-wrap: wrap; gap: .5rem 1rem; position: sticky; top: 0; padding: .6rem 0; background: Canvas;
  border-bottom: 1px solid var(--line); }
#query { min-width: 18rem; }
article { padding: .6rem 0; border-bottom: 1px solid var(--line); }
article h2 { font-size: .85rem; font-weight: normal; margin: 0; opacity: .75; }
audio { display: block; height: 2rem; margin: .2rem 0; }
.words { display: flex; flex-wrap: wrap; gap: .1rem .5rem; }
.words span { display: inline-flex; flex-direction: column; }
.words b { font-weight: 600; }
.S b { color: var(--sub); } .D b { color: var(--del); text-decoration: line-through; }
.I b { color: var(--ins); text-decoration: underline; } .words i { font-style: normal; opacity: .55; }
#errors button { font: inherit; border: 1px solid var(--line); border-radius: .4rem; background: none; margin: .1rem; }
#errors button[aria-pressed=true] { background: Highlight; color: HighlightText; }
"""

_PLAYABLE = "<p>{count} of the utterances with most errors have a player: choose the order by most errors.</p>"

_CONTROLS = """
<form id="filter" onsubmit="return false">
<label>Find <input id="query" type="search" placeholder="words, name or speaker; all must occur"></label>
<label>Speaker <select id="speaker"><option value="">all</option></select></label>
<label>Show <select id="kind"><option value="">all utterances</option><option value="E">with errors</option>
<option value="S">with substitutions</option><option value="D">with deletions</option>
<option value="I">with insertions</option></select></label>
<label>Order <select id="order"><option value="">as given</option><option value="errors">most errors</option>
<option value="rate">highest rate</option></select></label>
<output id="count"></output>
</form>
<details><summary>Most frequent errors</summary><div id="errors"></div></details>
<p>Each word of the reference; where it differs, the hypothesis stands below it: <span class="words"><span class="S">
<b>substituted</b></span> <span class="D"><b>deleted</b></span> <span class="I"><b>inserted</b></span></span></p>
<main id="list"></main>
<button id="more" type="button">Show more</button>
"""

_SCRIPT = """
"use strict";
const PAGE = 200;
const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const make = (tag, text, kind) => {
  const node = document.createElement(tag);
  if (text) node.textContent = text;
  if (kind) node.className = kind;
  return node;
};
const rows = data.utterances.map(([name, speaker, edits, reference, hypothesis], index) => {
  let r = 0, h = 0;
  const pairs = [...edits].map((kind) =>
    [kind, kind === "I" ? "" : reference[r++], kind === "D" ? "" : hypothesis[h++]]);
  const errors = pairs.filter(([kind]) => kind !== "C");
  const rate = reference.length ? errors.length / reference.length : errors.length ? Infinity : 0;
  const text = [name, speaker, reference.join(" "), hypothesis.join(" ")].join("\\n").toLowerCase();
  const keys = new Set(errors.map((error) => error.join("\\t")));
  const recording = data.recordings[index];
  return {name, speaker, pairs, errors, words: reference.length, rate, text, keys, recording};
});
const controls = ["query", "speaker", "kind", "order"];
let chosen = "", limit = PAGE, shown = [];

function article(row) {
  const node = make("article");
  const speaker = row.speaker ? `, speaker ${row.speaker}` : "";
  node.append(make("h2", `${row.name}${speaker}: ${row.errors.length} of ${row.words}`));
  const words = make("div", "", "words");
  for (const [kind, reference, hypothesis] of row.pairs) {
    const cell = make("span", "", kind);
    if (kind === "C") cell.append(make("i", reference));
    else if (kind === "S") cell.append(make("i", reference), make("b", hypothesis));
    else cell.append(make("b", reference || hypothesis));
    if (kind !== "C") cell.title = {S: "substituted", D: "deleted", I: "inserted"}[kind];
    words.append(cell);
  }
  node.append(words);
  if (row.recording) {
    const player = make("audio");
    player.controls = true;
    player.preload = "none";
    player.src = "data:audio/mpeg;base64," + row.recording;
    node.append(player);
  }
  return node;
}

function draw() {
  byId("list").replaceChildren(...shown.slice(0, limit).map(article));
  byId("more").hidden = shown.length <= limit;
}

function update() {
  const terms = byId("query").value.toLowerCase().split(/\\s+/).filter(Boolean);
  const speaker = byId("speaker").value, kind = byId("kind").value, order = byId("order").value;
  shown = rows.filter((row) => terms.every((term) => row.text.includes(term))
    && (!speaker || row.speaker === speaker)
    && (!kind || (kind === "E" ? row.errors.length : row.errors.some((e) => e[0] === kind)))
    && (!chosen || row.keys.has(chosen)));
  if (order === "errors") shown.sort((a, b) => b.errors.length - a.errors.length || a.words - b.words);
  if (order === "rate") shown.sort((a, b) => (b.rate > a.rate) - (b.rate < a.rate));
  limit = PAGE;
  const errors = shown.reduce((sum, row) => sum + row.errors.length, 0);
  const words = shown.reduce((sum, row) => sum + row.words, 0);
  const rate = words ? `, WER ${(100 * errors / words).toFixed(2)} %` : "";
  byId("count").textContent = `${shown.length} of ${rows.length} utterances, ${errors} errors in ${words} words${rate}`;
  const state = new URLSearchParams();
  for (const id of controls) if (byId(id).value) state.set(id, byId(id).value);
  if (chosen) state.set("error", chosen);
  history.replaceState(null, "", "#" + state);
  for (const button of byId("errors").children) button.setAttribute("aria-pressed", String(button.value === chosen));
  draw();
}

for (const speaker of [...new Set(rows.map((row) => row.speaker))].sort()) {
  if (!speaker) continue;
  const option = make("option", speaker);
  option.value = speaker;
  byId("speaker").append(option);
}
byId("speaker").parentElement.hidden = byId("speaker").options.length < 2;
for (const [kind, reference, hypothesis, times] of data.errors) {
  const label = {S: `${reference} \\u2192 ${hypothesis}`, D: `${reference} deleted`, I: `${hypothesis} inserted`};
  const button = make("button", `${label[kind]} \\u00d7${times}`);
  button.type = "button";
  button.value = [kind, reference, hypothesis].join("\\t");
  button.addEventListener("click", () => { chosen = chosen === button.value ? "" : button.value; update(); });
  byId("errors").append(button);
}
const state = new URLSearchParams(location.hash.slice(1));
for (const id of controls) if (state.has(id)) byId(id).value = state.get(id);
chosen = state.get("error") || "";
for (const id of controls) byId(id).addEventListener(id === "query" ? "input" : "change", update);
byId("more").addEventListener("click", () => { limit += PAGE; draw(); });
update();
"""
