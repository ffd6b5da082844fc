"""The performance model: microseconds of a time step from what a tile does in it.

A step is a chain: products of the received state, partial sums, the cell, the message to the other blocks. Each kind of
tile (layout, groups in turns or rows in parts, phases, gates) has one constant for each link of its chain, the same for
all sizes. `fit` finds them by least squares: tools/plans.py all of them from one half of a recorded sweep, which it
tests on the other half; `calibrate` a few factors of them for a GPU that no sweep was recorded on.
`tiles` that do not fit on the chip together run one after the other.
"""

import functools
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, NamedTuple

import numpy as np

Constants = dict[str, dict[str, float]]
CLOCK_MHZ = 1980  # of the H200 on which constants were measured
WHOLE_CHIP = ("narrow", "wide", "streams")  # with gates, one set of constants for clusters of any size
HIDDEN_PRODUCTS, MAX_PRODUCTS = 8, 45  # of a warp: that cost nothing; that registers hold
_PRIOR = 0.1  # relative error of an estimate that weighs as much as a factor that is 1 off from the clock's
# The links of a step whose speeds differ between GPUs each in its own way; all other terms are products of a
# multiprocessor.
_TERMS = {
    "exchange": ("step", "turns", "blocks", "words", "odd words", "late words", "backward sent"),
    "reads": ("state read", "loads", "waves", "backward", "backward samples", "backward words", "backward split"),
}
_LINK_OF = {term: link for link, terms_of_link in _TERMS.items() for term in terms_of_link}
LINKS = (*_TERMS, "products")


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
    """The speed of a processor, relative to the H200 of the constants.

    Attributes:
        clock: arithmetic and messages take cycles.
        factors: design -> link -> its time, relative to that by the constants; of designs that were measured, for which
            the clock does not count.
    """

    clock: float = 1.0
    factors: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


def kind(work: Work) -> str:
    """Return the name of the constants for this work."""
    variant = " parts" if work.head_words < work.words else " turns" if work.groups > 1 else ""
    variant += " phases" if work.phases > 1 else ""
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
    if processor.factors:
        design, links = link_us(work, constants)
        if factors := processor.factors.get(design):
            return work.tiles * sum(factors[link] * us for link, us in links.items())
    return work.tiles * (sum(_term_us(work, constants).values()) / processor.clock)


def _term_us(work: Work, constants: Constants | None) -> dict[str, float]:
    values = (constants or fitted())[kind(work)]
    return {term: values.get(term, 0.0) * count for term, count in terms(work).items()}


def link_us(work: Work, constants: Constants | None = None) -> tuple[str, dict[str, float]]:
    """Return the design of a tile, and microseconds of the links of one of its steps."""
    links = dict.fromkeys(LINKS, 0.0)
    for term, us in _term_us(work, constants).items():
        links[_LINK_OF.get(term, "products")] += us
    name = work.layout.rstrip("0123456789")
    return "wide" if name in ("wider", "streams") else name, links


@functools.cache
def contents() -> dict[str, Any]:
    """Read the constants, the names of the GPUs, and of the records, to which they were fitted."""
    text = resources.files("ds2_ops.recurrent.plan").joinpath("constants.json").read_text()
    result: dict[str, Any] = json.loads(text)
    return result


def fitted() -> Constants:
    """Read the constants of an H200, and of portable tiles an H100, in microseconds."""
    constants: Constants = contents()["constants"]
    return constants


def recorded_gpus() -> list[str]:
    """Return the names of the GPUs to whose times the constants were fitted."""
    names: list[str] = contents()["gpus"]
    return names


class Timed(NamedTuple):
    """A tile that was timed: microseconds a step, and those of the fastest tile of its problem."""

    work: Work
    us: float
    best_us: float


def fit(timed: Iterable[Timed]) -> Constants:
    """Find the constants of every kind of tile by which estimates come closest to what was measured."""
    return _fit(timed, lambda work: (kind(work), terms(work)))


def fit_factors(timed: Iterable[Timed], clock: float) -> Constants:
    """Find the factors of the links of each design, for `Processor`, from a few tiles.

    Args:
        timed: on one GPU.
        clock: its clock, relative to that of the constants: what few timings say nothing about follows it.
    """
    factors = _fit(timed, link_us, 1 / clock)
    return {design: {link: values.get(link, 0.0) for link in LINKS} for design, values in factors.items()}


def _fit(
    timed: Iterable[Timed],
    describe: Callable[[Work], tuple[str, dict[str, float]]],
    expected: float | None = None,
) -> Constants:
    """Solve for what the counts of a tile are multiplied by, apart for each group, by least squares of relative errors.

    Args:
        timed: the tiles.
        describe: returns a tile's group and its counts.
        expected: of every solution, or None.
    """
    groups: dict[str, list[tuple[dict[str, float], Timed]]] = defaultdict(list)
    for one in timed:
        group, counts_of_one = describe(one.work)
        groups[group].append((counts_of_one, one))
    constants = {}
    for group, rows in sorted(groups.items()):
        names = sorted({name for row, _ in rows for name in row})
        counts = np.array([[row.get(name, 0.0) for name in names] for row, _ in rows])
        us = np.array([one.us / one.work.tiles for _, one in rows])
        # Errors of tiles that are far from the fastest matter less.
        weight = np.array([one.best_us / one.us for _, one in rows]) / us
        a, b = counts * weight[:, None], us * weight
        if expected is not None:
            prior = _PRIOR * np.eye(len(names))
            a, b = np.concatenate([a, prior]), np.concatenate([b, expected * prior.sum(axis=0)])
        constants[group] = _least_squares(a, b, names)
    return constants


def _least_squares(a: np.ndarray, b: np.ndarray, names: list[str]) -> dict[str, float]:
    """Solve without negative constants: the most negative one is left out until there is none."""
    columns = [place for place in range(len(names)) if np.ptp(a[:, place]) or a[:, place].any()]
    while True:
        solution = np.linalg.lstsq(a[:, columns], b, rcond=1e-9)[0]
        scale = solution * np.abs(a[:, columns]).mean(axis=0)
        if not columns or scale.min() >= 0:
            return {names[place]: float(f"{value:.4g}") for place, value in zip(columns, solution, strict=True)}
        del columns[int(scale.argmin())]


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
    products = work.m_tiles * work.k_tiles * work.rounds  # of a sub-core
    return {
        "step": 1.0,
        "products": products,
        "lone products": products * (work.samples == 1),  # of cells with gates: four lanes share a unit
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
