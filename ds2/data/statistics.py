"""Statistics of a list of utterances: hours, speakers, durations, pace; and a filter by conditions."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ds2.data.manifest import Utterance
from ds2.system.errors import UserError

_QUANTILES = (0.0, 0.05, 0.5, 0.95, 1.0)
_SPEAKERS_SHOWN = 10
_BINS = 50


class StatisticsError(UserError):
    """Wrong conditions, or a picture that cannot be drawn; the message says why and the way out."""


@dataclass(frozen=True)
class Statistics:
    """Statistics of a corpus; quantiles are minimum, 5 %, median, 95 %, maximum."""

    utterances: int
    hours: float
    words: int
    characters: int
    distinct_texts: int
    speakers: dict[str, float]  # hours by speaker, most first; '' is unknown
    duration_s: list[float]  # quantiles
    characters_per_s: list[float]  # quantiles

    def format(self) -> str:
        """Return the statistics as a table."""
        known = {name: hours for name, hours in self.speakers.items() if name}
        rows = [
            ("utterances", f"{self.utterances:,}"),
            ("audio", f"{self.hours:.2f} h"),
            ("words", f"{self.words:,}, {self.characters:,} characters"),
            ("texts", f"{self.distinct_texts:,} different ones"),
            (
                "speakers",
                f"{len(known):,}" + (f", unknown for {self.speakers['']:.2f} h" if "" in self.speakers else ""),
            ),
            ("seconds", _quantile_line(self.duration_s)),
            ("characters/s", _quantile_line(self.characters_per_s)),
        ]
        lines = [f"{name:<14}{value}" for name, value in rows]
        shown = list(known.items())[:_SPEAKERS_SHOWN]
        lines += [f"{'':<14}{name}: {60 * hours:.1f} min" for name, hours in shown]
        if len(known) > len(shown):
            lines.append(f"{'':<14}... and {len(known) - len(shown)} speakers more")
        return "\n".join(lines)


def statistics(utterances: Sequence[Utterance]) -> Statistics:
    """Return the statistics of at least one utterance; audio is not read."""
    hours: Counter[str] = Counter()
    for utterance in utterances:
        hours[utterance.speaker] += utterance.duration_s / 3600  # type: ignore[assignment]  # Counter types count ints
    return Statistics(
        len(utterances),
        sum(u.duration_s for u in utterances) / 3600,
        sum(len(u.text.split()) for u in utterances),
        sum(len(u.text) for u in utterances),
        len({u.text for u in utterances}),
        dict(sorted(hours.items(), key=lambda item: (-item[1], item[0]))),
        _quantiles([u.duration_s for u in utterances]),
        _quantiles([pace(u) for u in utterances]),
    )


def pace(utterance: Utterance) -> float:
    """Return characters per second of an utterance."""
    return len(utterance.text) / max(utterance.duration_s, 1e-9)


@dataclass(frozen=True)
class Conditions:
    """Conditions of `select`; None and empty values select everything."""

    min_s: float | None = None
    max_s: float | None = None
    min_pace: float | None = None  # characters a second
    max_pace: float | None = None
    speakers: Collection[str] = ()
    without_speakers: Collection[str] = ()
    text: str = ""  # a regular expression that matches in the transcript
    without_text: str = ""

    def reason(self, utterance: Utterance) -> str:
        """Return the first condition that an utterance fails, or ''."""
        checks = {
            "shorter than --min-s": self.min_s is not None and utterance.duration_s < self.min_s,
            "longer than --max-s": self.max_s is not None and utterance.duration_s > self.max_s,
            "slower than --min-pace": self.min_pace is not None and pace(utterance) < self.min_pace,
            "faster than --max-pace": self.max_pace is not None and pace(utterance) > self.max_pace,
            "not of --speakers": bool(self.speakers) and utterance.speaker not in self.speakers,
            "of --without-speakers": utterance.speaker in self.without_speakers,
            "without --text": bool(self.text) and not re.search(self.text, utterance.text),
            "with --without-text": bool(self.without_text) and bool(re.search(self.without_text, utterance.text)),
        }
        return next((name for name, failed in checks.items() if failed), "")


def select(utterances: Sequence[Utterance], conditions: Conditions) -> tuple[list[Utterance], Counter[str]]:
    """Return the utterances that meet all conditions, in order, and the number of others by the first failed one.

    Raises:
        StatisticsError: a text condition is not a regular expression, or no utterance is left.
    """
    for pattern in (conditions.text, conditions.without_text):
        try:
            re.compile(pattern)
        except re.error as error:
            raise StatisticsError(f"{pattern!r} is not a regular expression: {error}") from error
    reasons = [conditions.reason(utterance) for utterance in utterances]
    selected = [utterance for utterance, reason in zip(utterances, reasons, strict=True) if not reason]
    dropped = Counter(filter(None, reasons))
    if not selected:
        counts = ", ".join(f"{count} {reason}" for reason, count in dropped.most_common())
        raise StatisticsError(f"no utterance of {len(utterances)} meets the conditions: {counts}; relax them")
    return selected, dropped


def draw(utterances: Sequence[Utterance], path: Path) -> None:
    """Draw histograms of durations and of pace.

    Raises:
        StatisticsError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise StatisticsError("a picture needs matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.hist([u.duration_s for u in utterances], bins=_BINS)
    left.set(xlabel="seconds", ylabel="utterances", title=f"{len(utterances)} utterances")
    right.hist([pace(u) for u in utterances], bins=_BINS)
    right.set(xlabel="characters a second", title="the tails are mostly wrong transcripts")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _quantiles(values: Sequence[float]) -> list[float]:
    return [round(float(value), 3) for value in np.quantile(values, _QUANTILES)]


def _quantile_line(values: Sequence[float]) -> str:
    least, low, middle, high, most = (f"{value:.2f}" for value in values)
    return f"median {middle}, 90 % in {low} to {high}, all in {least} to {most}"
