"""From machine facts and a recurrence to a launch, or to the reason why no kernel can run it. Needs no GPU.

Shape letters: B batch, H hidden.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

THREADS = 256  # a block: 8 warps, so that each thread may hold 255 registers, most of them weights
MAX_SAMPLES = 8  # columns of one mma.m16n8k16 tile


class DoesNotFit(ValueError):
    """No persistent kernel can run this problem on this device; the message says why and what to use instead."""


@dataclass(frozen=True)
class DeviceFacts:
    """What a kernel may use on one GPU; the defaults are an H200's.

    Attributes:
        name: for messages.
        capability: (major, minor).
        sms: streaming multiprocessors.
        smem_bytes_per_block: largest dynamic shared memory of a block.
        active_clusters: cluster size in blocks -> how many such clusters (one block an SM) run at the same time.
    """

    name: str = "NVIDIA H200"
    capability: tuple[int, int] = (9, 0)
    sms: int = 132
    smem_bytes_per_block: int = 232_448
    active_clusters: Mapping[int, int] = field(default_factory=lambda: {8: 16, 16: 7})


@dataclass(frozen=True)
class Problem:
    """One pass of one recurrence: ``batch`` utterances, ``hidden`` units, dtype "bfloat16" | "float16" | "float32"."""

    batch: int
    hidden: int
    dtype: str
    nonlinearity: str
    backward: bool


@dataclass(frozen=True)
class Launch:
    """A kernel and how to launch it.

    Attributes:
        design: "cluster" (h exchanged through distributed shared memory) or "grid" (through L2).
        source: the translation unit for ``jit.load``.
        grid: blocks.
        cluster: blocks a cluster.
        block: threads a block.
        smem_bytes: dynamic shared memory a block.
        rows: rows of the recurrent matrix that a block keeps.
        samples: utterances whose time loops a block interleaves as one tile (columns of a matrix product).
        groups: such tiles in flight in a block, in turn, so that one's exchange hides behind the other's arithmetic.
    """

    design: str
    source: str
    grid: int
    cluster: int
    block: int
    smem_bytes: int
    rows: int
    samples: int
    groups: int


def choose(problem: Problem, device: DeviceFacts, max_sms: int | None = None) -> Launch:
    """Pick the design and the tile.

    Args:
        problem: what to run.
        device: where.
        max_sms: use at most this many multiprocessors; None for all.

    Raises:
        DoesNotFit: no design can; the message gives each one's reason.
    """
    raise DoesNotFit("no design yet")
