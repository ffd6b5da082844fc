"""Words with times as captions: SubRip (.srt) and WebVTT (.vtt)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from ds2.decoding.hypothesis import Word

_MOST_CHARACTERS = 84  # two lines of 42, as broadcasters have them
_LONGEST_S = 7.0
_PAUSE_S = 1.0  # between words, at which a new cue starts


@dataclass(frozen=True)
class Cue:
    """Text on the screen from start to end."""

    start_s: float
    end_s: float
    text: str


def cues(words: Iterable[Word]) -> list[Cue]:
    """Group words into cues that can be read: at most two lines and seven seconds, split at pauses."""
    gathered: list[list[Word]] = []
    for word in words:
        last = gathered[-1] if gathered else []
        fits = (
            bool(last)
            and word.start_s - last[-1].end_s < _PAUSE_S
            and word.end_s - last[0].start_s <= _LONGEST_S
            and sum(len(w.text) + 1 for w in last) + len(word.text) <= _MOST_CHARACTERS
        )
        if fits:
            last.append(word)
        else:
            gathered.append([word])
    return [Cue(group[0].start_s, group[-1].end_s, " ".join(w.text for w in group)) for group in gathered]


def srt(shown: Sequence[Cue]) -> str:
    """The cues as a SubRip file."""
    blocks = (
        f"{number}\n{_clock(cue.start_s, ',')} --> {_clock(cue.end_s, ',')}\n{cue.text}\n"
        for number, cue in enumerate(shown, 1)
    )
    return "\n".join(blocks)


def vtt(shown: Sequence[Cue]) -> str:
    """The cues as a WebVTT file."""
    blocks = (f"{_clock(cue.start_s, '.')} --> {_clock(cue.end_s, '.')}\n{_escaped(cue.text)}\n" for cue in shown)
    return "\n".join(chain(["WEBVTT\n"], blocks))


def _clock(seconds: float, point: str) -> str:
    """hh:mm:ss and milliseconds."""
    milliseconds = round(seconds * 1000)
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest // 1000:02}{point}{rest % 1000:03}"


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
