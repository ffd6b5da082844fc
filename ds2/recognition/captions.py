"""Words with times as paragraphs and as captions: SubRip (.srt) and WebVTT (.vtt)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from ds2.decoding.hypothesis import Word

_LINE_CHARACTERS = 42  # of one of at most two lines: broadcasters' limit
_LONGEST_S = 7.0
_PAUSE_S = 1.0  # between words, at which a cue or paragraph ends
_LONG_PARAGRAPH_S = 30.0  # a longer paragraph ends at shorter pauses too
_SHORT_PAUSE_S = 0.4


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
    blocks = (f"{_clock(cue.start_s, '.')} --> {_clock(cue.end_s, '.')}\n{_escaped(_lines(cue))}\n" for cue in shown)
    return "\n".join(chain(["WEBVTT\n"], blocks))


def _lines(cue: Cue) -> str:
    return "\n".join(cue.lines)


def _clock(seconds: float, point: str) -> str:
    """hh:mm:ss and milliseconds."""
    milliseconds = round(seconds * 1000)
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest // 1000:02}{point}{rest % 1000:03}"


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
