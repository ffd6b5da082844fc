"""Praat's TextGrid: words and characters of recordings with their times, one file for each recording."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

_SAME_S = 1e-6  # the last digit of a time


class Interval(NamedTuple):
    """A stretch of a tier."""

    start_s: float
    end_s: float
    text: str


def text_grid(tiers: Mapping[str, Sequence[Interval]], duration_s: float) -> str:
    """Write interval tiers in Praat's long text format; stretches between intervals get an empty text, as Praat needs.

    Args:
        tiers: by name; intervals in order, without overlaps, none of them empty, within 0 to `duration_s`.
        duration_s: of the recording.
    """
    lines = ['File type = "ooTextFile"', 'Object class = "TextGrid"', "", "xmin = 0", f"xmax = {duration_s:.6f}"]
    lines += ["tiers? <exists>", f"size = {len(tiers)}", "item []:"]
    for number, (name, intervals) in enumerate(tiers.items(), start=1):
        filled = _filled(intervals, duration_s)
        lines += [f"    item [{number}]:", '        class = "IntervalTier"', f"        name = {_quoted(name)}"]
        lines += ["        xmin = 0", f"        xmax = {duration_s:.6f}", f"        intervals: size = {len(filled)}"]
        for at, interval in enumerate(filled, start=1):
            lines += [f"        intervals [{at}]:", f"            xmin = {interval.start_s:.6f}"]
            lines += [f"            xmax = {interval.end_s:.6f}", f"            text = {_quoted(interval.text)}"]
    return "\n".join(lines) + "\n"


def _filled(intervals: Sequence[Interval], duration_s: float) -> list[Interval]:
    """Intervals without gaps from 0 to the end."""
    filled, end_s = list[Interval](), 0.0
    for interval in (*intervals, Interval(duration_s, duration_s, "")):
        start_s = max(interval.start_s, end_s)
        if start_s - end_s < _SAME_S:
            start_s = end_s
        else:
            filled.append(Interval(end_s, start_s, ""))
        if interval.end_s > start_s:
            filled.append(Interval(start_s, interval.end_s, interval.text))
            end_s = interval.end_s
    return filled


def _quoted(text: str) -> str:
    return '"' + text.replace('"', '""') + '"'
