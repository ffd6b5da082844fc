"""What a setting may be, said where it is declared: one of a few names, or numbers of a range."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

KEY = "allowed"  # of a field's metadata
UNLIMITED = math.inf
COUNT = 10**12  # more than anything is ever counted to
SEED = 2**63 - 1


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, both among them unless `above` or `below` says otherwise; never NaN.

    Infinity is allowed where it is an end of the range: there it means that there is no limit.
    """

    low: float
    high: float
    above: bool = False  # low itself is not allowed
    below: bool = False  # high itself is not allowed
    lengths: tuple[int, ...] = ()  # of a list of them; none: any
    way_out: str = ""  # what else does what a value outside would mean

    def __contains__(self, value: object) -> bool:
        if not isinstance(value, int | float):
            return False
        enough = self.low < value if self.above else self.low <= value
        return enough and (value < self.high if self.below else value <= self.high)

    def __str__(self) -> str:
        many = f"{' or '.join(map(str, self.lengths))} " if self.lengths else ""
        low = f"above {self.low:.15g}" if self.above else f"from {self.low:.15g}"
        way_out = f"; {self.way_out}" if self.way_out else ""
        return f"{many}numbers {low} to {'below ' if self.below else ''}{self.high:.15g}{way_out}"


def number(default: float, low: float, high: float, *, above: bool = False, below: bool = False) -> Any:
    """A setting that is one number of a range; arguments as of `Range`."""
    return field(default=default, metadata={KEY: Range(low, high, above, below)})


def numbers(
    default: Sequence[float], low: float, high: float, *, below: bool = False, lengths: tuple[int, ...] = ()
) -> Any:
    """A setting that is a list of numbers of one range; arguments as of `Range`."""
    return field(default_factory=lambda: list(default), metadata={KEY: Range(low, high, False, below, lengths)})


def numbers_by_name(low: float, high: float, *, above: bool = False, way_out: str = "") -> Any:
    """A setting that is a mapping of the user's names to numbers of one range, empty at first."""
    return field(default_factory=dict, metadata={KEY: Range(low, high, above, way_out=way_out)})


def choice(default: str, *others: str) -> Any:
    """A setting that is one of a few names."""
    return field(default=default, metadata={KEY: (default, *others)})
