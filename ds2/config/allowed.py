"""Declarations of settings: the numbers or names that each allows, and settings without effect."""

import math
from copy import copy
from dataclasses import dataclass, field
from typing import Any

ALLOWED = "allowed"  # entry of a field's metadata: a Range or a tuple of names
REMOVED = "removed"  # entry of a field's metadata: its constant value, and what is done instead
UNLIMITED = math.inf
COUNT = 10**12  # a limit above all counts
SEED = 2**63 - 1


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, both included unless `above` or `below` is set; never NaN.

    If `high` is infinity, infinity is allowed and means no limit.
    """

    low: float
    high: float
    above: bool = False  # low itself is not allowed
    below: bool = False  # high itself is not allowed
    lengths: tuple[int, ...] = ()  # allowed lengths of a list; empty: any
    way_out: str = ""  # the setting to use instead of a value outside

    def __contains__(self, value: object) -> bool:
        if not isinstance(value, int | float):
            return False
        above_low = self.low < value if self.above else self.low <= value
        return above_low and (value < self.high if self.below else value <= self.high)

    def __str__(self) -> str:
        count = f"{' or '.join(map(str, self.lengths))} " if self.lengths else ""
        low = f"above {self.low:.15g}" if self.above else f"from {self.low:.15g}"
        way_out = f"; {self.way_out}" if self.way_out else ""
        return f"{count}numbers {low} to {'below ' if self.below else ''}{self.high:.15g}{way_out}"


def number(default: float, low: float, high: float, *, above: bool = False, below: bool = False) -> Any:
    """A setting that is one number of a range; arguments as of `Range`."""
    return field(default=default, metadata={ALLOWED: Range(low, high, above, below)})


def numbers(default: list[float] | dict[str, float], low: float, high: float, **others: Any) -> Any:
    """A setting that is a list of numbers of one range, or maps names to them; arguments as of `Range`."""
    return field(default_factory=lambda: copy(default), metadata={ALLOWED: Range(low, high, **others)})


def choice(default: str, *others: str) -> Any:
    """A setting that is one of a few names; the default may be among the others too."""
    return field(default=default, metadata={ALLOWED: tuple(dict.fromkeys((default, *others)))})


def removed(default: Any, instead: str) -> Any:
    """A setting of an earlier version: it is still read, and a value other than the default is warned of.

    The default is the constant that is used now; the warning says what is done `instead`.
    """
    return field(default_factory=lambda: copy(default), metadata={REMOVED: (default, instead)})
