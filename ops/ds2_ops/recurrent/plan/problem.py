"""What the planner is asked, what it may use, and its answer.

Shape letters: B batch, H hidden.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from ds2_ops.jit.launch import Launch
from ds2_ops.recurrent.plan.model import step_us
from ds2_ops.recurrent.plan.work import Work

THREADS = 256  # that multiply: 8 warps, so that each thread may hold more than 200 registers, most of them weights
FINISHERS = 128  # and 4 warps for each group, or for each part of the only group, that finish a step
MMA_ROWS, MMA_WORDS, MMA_SAMPLES = 16, 8, 8  # one matrix instruction: rows, 32-bit words of K, columns
WARPS = THREADS // 32

ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
NUMBERS = {"bfloat16": ("Bf16", 2), "float16": ("Fp16", 2), "float32": ("Fp32", 1)}  # C++ type, elements a word


class DoesNotFit(ValueError):
    """No persistent kernel can run this problem on this device; the message says why and what to use instead."""


def check_rows(frames: int, batch: int) -> None:
    """Raise DoesNotFit where the kernels cannot count the rows."""
    if frames * batch >= 2**31:
        raise DoesNotFit(
            f"T x B = {frames} x {batch} is beyond 2^31 rows, which the kernels count in 32 bits: use backend='gemm'"
        )


@dataclass(frozen=True)
class DeviceFacts:
    """What a kernel may use on one GPU; the defaults are an H200's.

    Attributes:
        name: for messages.
        capability: (major, minor).
        sms: streaming multiprocessors.
        smem_bytes_per_block: largest dynamic shared memory of a block.
        active_clusters: cluster size in blocks -> how many such clusters (one block an SM) run at the same time.
        registers: of 32 bits, of each multiprocessor.
        clock_mhz: of the multiprocessors, as the driver says it; under matrix instructions it may fall below.
    """

    name: str = "NVIDIA H200"
    capability: tuple[int, int] = (9, 0)
    sms: int = 132
    smem_bytes_per_block: int = 232_448
    active_clusters: Mapping[int, int] = field(
        default_factory=lambda: {2: 66, 3: 39, 4: 30, 5: 22, 6: 17, 8: 15, 9: 9, 16: 7}
    )
    clock_mhz: int = 1980
    registers: int = 65_536


class Problem(NamedTuple):
    """One pass of one recurrence: ``batch`` utterances, ``hidden`` units, dtype "bfloat16" | "float16" | "float32".

    With two ``directions`` both run in one launch, each with its own matrix.
    """

    batch: int
    hidden: int
    dtype: str
    nonlinearity: str
    backward: bool
    directions: int = 1


@dataclass(frozen=True)
class Choice:
    """A kernel that can run a problem, and what the planner knows of it.

    Attributes:
        design: "cluster" (h exchanged through distributed shared memory) or "grid" (through L2).
        launch: the kernel and how to launch it.
        rows: rows of the recurrent matrix that a block keeps.
        samples: utterances of one tile, the columns of a matrix product.
        groups: tiles that a block runs in turn, so that one's exchange hides behind the other's arithmetic.
        parts: of a block's rows, finished and sent one after the other, to the same end.
        work: what a step of it is, from which its time is estimated.
        exchange_words: 32-bit words of workspace, whatever they hold, that the kernel takes last; 0 for none.
    """

    design: Literal["cluster", "grid", "units"]
    launch: Launch
    rows: int
    samples: int
    groups: int
    work: Work
    parts: int = 1
    exchange_words: int = 0

    @functools.cached_property
    def early(self) -> Launch:
        """Its launch, before the kernel ahead on the stream has ended."""
        return replace(self.launch, early=True)

    @property
    def step_us(self) -> float:
        """The model's estimate of one time step of the whole batch, on an H200."""
        return step_us(self.work)

    @property
    def name(self) -> str:
        """What tells this choice from the others for the same problem, for records of measurements."""
        work = self.work
        head = f"-{work.head_words}" if work.head_words < work.words else ""
        return f"{work.layout} w{work.words}{head} b{work.blocks} {work.groups}x{work.samples}"

    def explain(self) -> str:
        """One line for logs and error messages."""
        launch = self.launch
        return (
            f"{self.design} design: {launch.grid} blocks of {launch.threads} threads in clusters of {launch.cluster}, "
            f"{self.rows} rows a block in {self.parts} part{'s'[: self.parts - 1]}, "
            f"{self.groups} x {self.samples} utterances in flight a cluster, "
            f"{launch.smem_bytes} B shared memory a block, about {self.step_us:.2f} us a step"
        )
