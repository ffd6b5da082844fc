"""The performance model: microseconds of a time step from what a tile does in it.

A step is a chain: products of the received state, partial sums, the cell, the message to the other blocks. Each kind of
tile (layout, groups in turns or rows in parts, gates) has one constant for each link of its chain, the same for all
sizes. tools/plans.py fits them by least squares to one half of a recorded sweep and tests them on the other half.
`tiles` that do not fit on the chip together run one after the other.
"""

import functools
import json
from dataclasses import dataclass
from importlib import resources

Constants = dict[str, dict[str, float]]
# Time of a message of one word, measured alone.
EXCHANGE_US = {f"{design}{size}": us for size, us in ((8, 0.228), (16, 0.277)) for design in ("cluster", "units")}
EXCHANGE_US |= {"units1": 0.0, "units2": 0.228, "units4": 0.228}  # not measured for 2 and 4: as for 8
WHOLE_CHIP = ("narrow", "wide", "streams")  # with gates, one set of constants for clusters of any size
HIDDEN_PRODUCTS, MAX_PRODUCTS = 8, 45  # of a warp: that cost nothing; that registers hold
GRID_EXCHANGE_US = 0.657  # through L2 and distributed shared memory


@dataclass(frozen=True)
class Work:
    """The work of one multiprocessor in one time step of a tile, from which the cost is estimated.

    Attributes:
        layout: the design and its variant, which have constants of their own.
        backward: whether this is the backward pass.
        tiles: number of tiles that run one after the other.
        m_tiles, k_tiles: matrix instructions of a multiplying warp: along the rows, and along K.
        words: 32-bit words of one utterance's state that a block computes.
        head_words: of these, in the first of two parts; all where there is one part.
        samples, groups: utterances of a group, and groups that take turns.
        cluster: blocks of a cluster.
        blocks: blocks that run together on the chip.
        rounds: passes of the finishing threads over a group's utterances.
        state_words: of one utterance's state that a block reads.
        smem_k_tiles: of `k_tiles`, with weights in shared memory.
        split_words: whether rows of arrays start between words, which costs loads that nothing hides.
        phases: exchanges between blocks in a step.
        sums, sent: numbers of a unit that are added up, and that are sent, in a step: 1 but for cells with gates.
    """

    layout: str
    backward: bool
    tiles: int
    m_tiles: int
    k_tiles: int
    words: int
    head_words: int
    samples: int
    groups: int
    cluster: int
    blocks: int
    rounds: int
    state_words: int
    smem_k_tiles: int = 0
    split_words: bool = False
    sums: int = 1
    sent: int = 1
    phases: int = 1


@dataclass(frozen=True)
class Processor:
    """Factors of a processor's clock and of its time for a message, relative to the H200 of the constants."""

    clock: float = 1.0
    exchange: float = 1.0


def kind(work: Work) -> str:
    """Return the name of the constants for this work."""
    variant = " parts" if work.head_words < work.words else " turns" if work.groups > 1 else ""
    variant += " phases" if work.phases > 1 and work.layout.startswith("units") else ""
    gates = work.sums * work.sent > 1
    layout = work.layout.rstrip("0123456789") if gates and work.layout.startswith(WHOLE_CHIP) else work.layout
    return f"{layout}{variant}{' gates' if gates else ''}"


def terms(work: Work) -> dict[str, float]:
    """Count the operations of a step of a tile, by kind."""
    if work.layout.startswith("units"):
        counts = _units_terms(work)
    elif work.layout.startswith("cluster"):
        counts = _cluster_terms(work)
    else:
        narrow = work.layout.startswith(("narrow", "portable"))
        counts = _narrow_terms(work) if narrow else _wide_terms(work)
    if work.backward:  # reads another array, and sends all gates' gradients
        counts |= {
            "backward": work.groups,
            "backward samples": work.groups * work.samples,
            "backward words": work.samples * work.words,
            "backward sent": work.sent - 1,
            "backward split": work.groups * work.split_words,
        }
    return counts


def step_us(work: Work, constants: Constants | None = None, processor: Processor = Processor()) -> float:
    """Estimate a time step of the whole batch."""
    values = (constants or fitted())[kind(work)]
    chain = sum(values.get(term, 0.0) * count for term, count in terms(work).items())
    exchange = EXCHANGE_US.get(work.layout, GRID_EXCHANGE_US)
    # The units design has constants of its own for two phases; elsewhere a phase costs what a step of other cells does.
    phases = 1 if work.layout.startswith("units") else work.phases
    return phases * work.tiles * (chain / processor.clock + (processor.exchange - 1 / processor.clock) * exchange)


@functools.cache
def fitted() -> Constants:
    """Read the constants of an H200, in microseconds."""
    text = resources.files("ds2_ops.recurrent.plan").joinpath("constants.json").read_text()
    constants: Constants = json.loads(text)["constants"]
    return constants


def _cluster_terms(work: Work) -> dict[str, float]:
    products = work.m_tiles * work.k_tiles
    messages = work.samples * work.cluster * work.sent  # the network carries each utterance's share to each block
    words = messages * work.head_words
    return {
        "step": 1.0,
        "products": max(0, products - HIDDEN_PRODUCTS),
        "row tiles": work.m_tiles,
        "words": words,
        "odd words": words * (work.head_words // 4 % 2),  # a warp's 128 bytes do not end with an utterance
        "late words": messages * (work.words - work.head_words),
        "rounds": work.rounds - 1,
        "samples": work.samples,
        "split words": work.split_words,
        "split idle": work.split_words * max(0.0, 1 - products / MAX_PRODUCTS),  # loads that no products hide
    }


def _units_terms(work: Work) -> dict[str, float]:
    return {
        "step": 1.0,
        "products": work.m_tiles * work.k_tiles * work.rounds,  # of a sub-core
        "warps": work.rounds,
        "words": (work.cluster - 1) * work.samples * work.sent * work.words,
        "columns": work.samples > 4,  # a lane finishes two utterances
        "idle": work.samples < 4,  # some have none
        "split idle": work.split_words * (work.samples < 4),
        "samples": work.samples,
        "split words": work.split_words,
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
        "split words": work.split_words,
    }
    return {"step": 1.0, "turns": work.groups - 1, **{name: count * work.groups for name, count in turn.items()}}


def _wide_terms(work: Work) -> dict[str, float]:
    return {
        "step": 1.0,
        "loads": work.k_tiles,
        "blocks": work.blocks,
        "samples": work.samples,
        "split words": work.split_words,
        "split samples": work.split_words * work.samples,
    }
