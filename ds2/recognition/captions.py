"""Words with times as paragraphs, as captions (SubRip, .srt, and WebVTT, .vtt) and as Praat's TextGrid."""

import html
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from ds2.decoding.hypothesis import Word

_LINE_CHARACTERS = 42  # of one of at most two lines: broadcasters' limit
_LONGEST_S = 7.0
_PAUSE_S = 1.0  # between words, at which a cue or paragraph ends
_LONG_PARAGRAPH_S = 30.0  # a longer paragraph ends at shorter pauses too
_SHORT_PAUSE_S = 0.4
_SAME_S = 1e-6  # the last digit of a time


@dataclass(frozen=True)
class Cue:
    """One or two lines on the screen from start to end."""

    start_s: float
    end_s: float
    lines: tuple[str, ...]

    @property
    def text(self) -> str:
        """The lines as one."""
        return " ".join(self.lines)


def cues(words: Iterable[Word]) -> list[Cue]:
    """Group words into cues that can be read: at most two lines of 42 characters and seven seconds, split at pauses.

    A longer word has a line of its own.
    """

    def fits(group: Sequence[Word], word: Word) -> bool:
        return (
            word.start_s - group[-1].end_s < _PAUSE_S
            and word.end_s - group[0].start_s <= _LONGEST_S
            and _two_lines([w.text for w in (*group, word)]) is not None
        )

    return [
        Cue(group[0].start_s, group[-1].end_s, _two_lines([w.text for w in group]) or (group[0].text,))
        for group in _grouped(words, fits)
    ]


def paragraphs(words: Iterable[Word]) -> list[list[Word]]:
    """Group words into paragraphs, which end at a pause of a second; once they have 30 s, at one of 0.4 s."""

    def fits(group: Sequence[Word], word: Word) -> bool:
        long = group[-1].end_s - group[0].start_s >= _LONG_PARAGRAPH_S
        return word.start_s - group[-1].end_s < (_SHORT_PAUSE_S if long else _PAUSE_S)

    return _grouped(words, fits)


def _grouped(words: Iterable[Word], fits: Callable[[Sequence[Word], Word], bool]) -> list[list[Word]]:
    groups: list[list[Word]] = []
    for word in words:
        if groups and fits(groups[-1], word):
            groups[-1].append(word)
        else:
            groups.append([word])
    return groups


def _two_lines(words: Sequence[str]) -> tuple[str, ...] | None:
    """Break words into one line that fits, or the two most equal ones; None if two do not fit."""
    whole = " ".join(words)
    if len(whole) <= _LINE_CHARACTERS:
        return (whole,)
    pairs = [(" ".join(words[:at]), " ".join(words[at:])) for at in range(1, len(words))]
    return min(
        (pair for pair in pairs if max(map(len, pair)) <= _LINE_CHARACTERS),
        key=lambda pair: abs(len(pair[0]) - len(pair[1])),
        default=None,
    )


def srt(shown: Sequence[Cue]) -> str:
    """The cues as a SubRip file."""
    blocks = (
        f"{number}\n{_clock(cue.start_s, ',')} --> {_clock(cue.end_s, ',')}\n{_lines(cue)}\n"
        for number, cue in enumerate(shown, 1)
    )
    return "\n".join(blocks)


def vtt(shown: Sequence[Cue]) -> str:
    """The cues as a WebVTT file."""
    blocks = (
        f"{_clock(cue.start_s, '.')} --> {_clock(cue.end_s, '.')}\n{html.escape(_lines(cue), quote=False)}\n"
        for cue in shown
    )
    return "\n".join(chain(["WEBVTT\n"], blocks))


def _lines(cue: Cue) -> str:
    return "\n".join(cue.lines)


def _clock(seconds: float, point: str) -> str:
    """hh:mm:ss and milliseconds."""
    minutes, rest = divmod(round(seconds * 1000), 60_000)  # milliseconds
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest // 1000:02}{point}{rest % 1000:03}"


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
