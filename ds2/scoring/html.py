"""Aligned errors as one HTML page that needs no network: filter by text, speaker and kind of error; sort."""

from __future__ import annotations

import html
import json

from ds2.scoring.wer import Report

_ERRORS_LISTED = 200


def html_page(report: Report, title: str, summary: str) -> str:
    """Return a self-contained page of all utterances and the most frequent errors.

    Texts travel as JSON and enter the page as text nodes only, so that no transcript can act as markup.

    Args:
        report: aligned utterances.
        title: heading.
        summary: lines shown below it.
    """
    content = {
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
.words { display: flex; flex-wrap: wrap; gap: .1rem .5rem; }
.words span { display: inline-flex; flex-direction: column; }
.words b { font-weight: 600; }
.S b { color: var(--sub); } .D b { color: var(--del); text-decoration: line-through; }
.I b { color: var(--ins); text-decoration: underline; } .words i { font-style: normal; opacity: .55; }
#errors button { font: inherit; border: 1px solid var(--line); border-radius: .4rem; background: none; margin: .1rem; }
#errors button[aria-pressed=true] { background: Highlight; color: HighlightText; }
"""

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
const rows = data.utterances.map(([name, speaker, edits, reference, hypothesis]) => {
  let r = 0, h = 0;
  const pairs = [...edits].map((kind) =>
    [kind, kind === "I" ? "" : reference[r++], kind === "D" ? "" : hypothesis[h++]]);
  const errors = pairs.filter(([kind]) => kind !== "C");
  const rate = reference.length ? errors.length / reference.length : errors.length ? Infinity : 0;
  const text = [name, speaker, reference.join(" "), hypothesis.join(" ")].join("\\n").toLowerCase();
  const keys = new Set(errors.map((error) => error.join("\\t")));
  return {name, speaker, pairs, errors, words: reference.length, rate, text, keys};
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
  if (order === "errors") shown.sort((a, b) => b.errors.length - a.errors.length);
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
