"""The performance model: microseconds of a time step from what a tile does in it.

A step is a chain: products of what has come, partial sums, the cell, the message to the others, which grows with what
is sent. Each kind of tile (layout, groups in turns or rows in parts, pass) has a constant for every link of its chain,
the same for all sizes; tools/fit_plans.py fits them by least squares to one half of a recorded sweep and judges them on
the other. `tiles` that do not fit on the chip together run one after the other.
"""

import functools
import json
from dataclasses import dataclass
from importlib import resources

from ds2_ops.recurrent.plan.work import Work

Constants = dict[str, dict[str, float]]
EXCHANGE_US = {"cluster8": 0.228, "cluster16": 0.277}  # of a step's chain, a message's way: measured alone, one word
GRID_EXCHANGE_US = 0.657  # ... through L2, and through distributed shared memory


@dataclass(frozen=True)
class Processor:
    """How a processor differs from the one that the constants are of: factors of its clock and of a message's way."""

    clock: float = 1.0
    exchange: float = 1.0


def kind(work: Work) -> str:
    """Name what has constants of its own."""
    how = " parts" if work.head_words < work.words else " turns" if work.groups > 1 else ""
    return f"{work.layout}{how}{' backward' if work.backward else ''}"


def terms(work: Work) -> dict[str, float]:
    """Count what a step of a tile consists of, each in its unit."""
    if work.layout.startswith("cluster"):
        return _cluster_terms(work)
    return _narrow_terms(work) if work.layout.startswith("narrow") else _wide_terms(work)


def step_us(work: Work, constants: Constants | None = None, processor: Processor = Processor()) -> float:
    """Estimate a time step of the whole batch."""
    mine = (constants or fitted())[kind(work)]
    chain = sum(mine.get(name, 0.0) * count for name, count in terms(work).items())
    exchange = EXCHANGE_US.get(work.layout, GRID_EXCHANGE_US)
    return work.tiles * (chain / processor.clock + (processor.exchange - 1 / processor.clock) * exchange)


@functools.cache
def fitted() -> Constants:
    """Read the constants of an H200, in microseconds."""
    text = resources.files("ds2_ops.recurrent.plan").joinpath("constants.json").read_text()
    found: Constants = json.loads(text)["constants"]
    return found


def _cluster_terms(work: Work) -> dict[str, float]:
    pieces = work.samples * work.cluster * work.sent  # the network carries each utterance's share to each block
    return {
        "step": 1.0,
        "products": work.m_tiles * work.k_tiles,
        "row tiles": work.m_tiles,
        "pieces": pieces,
        "words": pieces * work.head_words,
        "late words": pieces * (work.words - work.head_words),
        "rounds": work.rounds - 1,
        "samples": work.samples,
        "words made": work.words,
    }


def _narrow_terms(work: Work) -> dict[str, float]:
    turn = {
        "products": work.m_tiles * work.k_tiles,
        "row tiles": work.m_tiles,
        "weights read": work.m_tiles * work.smem_k_tiles,
        "state read": work.state_words * work.samples,
        "waves": -(-work.k_tiles // 12) - 1,
        "loads": work.k_tiles,
        "sums": work.rounds,
        "samples": work.samples,
        "blocks": work.blocks,
    }
    return {"step": 1.0, "turns": work.groups - 1, **{name: count * work.groups for name, count in turn.items()}}


def _wide_terms(work: Work) -> dict[str, float]:
    return {
        "step": 1.0,
        "loads": work.k_tiles,
        "blocks": work.blocks,
        "samples": work.samples,
    }
