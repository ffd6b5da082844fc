"""The planner's problem, the hardware that it may use, the tile that it chooses, and the arguments of its kernel.

Shape letters: B batch, H hidden.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, NamedTuple

from ds2_ops.jit.build import LAUNCH_REGISTERS
from ds2_ops.jit.launch import Launch, names, parameters, translation_unit
from ds2_ops.recurrent.cells import CELLS, Cell
from ds2_ops.recurrent.plan.model import CLOCK_MHZ, Processor, Work, step_us

THREADS = 256  # multiplying threads: 8 warps, so that each has more than 200 registers, most of them for weights
FINISHERS = 128  # finishing threads: 4 warps for each group, or for each part of the only group
MMA_ROWS, MMA_WORDS, MMA_SAMPLES = 16, 8, 8  # one matrix instruction: rows, 32-bit words of K, columns
WARPS = THREADS // 32

ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
NUMBERS = {"bfloat16": ("Bf16", 2), "float16": ("Fp16", 2), "float32": ("Fp32", 1)}  # C++ type, elements a word

# Of the whole-chip designs: slots of the exchange without and with gates, and turns by which inputs are prefetched.
SLOTS = 16
GATED_SLOTS = 64
INPUTS_AHEAD = 8


class Design(StrEnum):
    """How blocks exchange the state.

    UNITS: small layers; warps own hidden units with all of K, on one multiprocessor or in a cluster.
    CLUSTER: a cluster of 8 or 16 blocks keeps the matrix; the state goes through distributed shared memory.
    NARROW: the whole chip keeps the matrix; the state goes through L2, groups of up to 8 utterances.
    WIDE: as NARROW, groups of up to 32 utterances of 16-bit numbers.
    PORTABLE: as NARROW without clusters, so that each block reads the whole state: for GPUs other than Hopper's.
    """

    UNITS = "units"
    CLUSTER = "cluster"
    NARROW = "narrow"
    WIDE = "wide"
    PORTABLE = "portable"


class DoesNotFit(ValueError):
    """No persistent kernel can run this problem on this device; the message says why and what to use instead."""


def check_rows(frames: int, batch: int) -> None:
    """Raise DoesNotFit where T x B overflows the kernels' 32-bit count."""
    if frames * batch >= 2**31:
        raise DoesNotFit(
            f"T x B = {frames} x {batch} is 2^31 rows or more, which the kernels cannot count: use backend='gemm'"
        )


@dataclass(frozen=True)
class DeviceFacts:
    """What a kernel may use on one GPU.

    Attributes:
        name: for messages.
        capability: (major, minor).
        sms: streaming multiprocessors.
        smem_bytes_per_block: largest dynamic shared memory of a block.
        active_clusters: cluster size in blocks -> how many such clusters (one block an SM) run at the same time.
        clock_mhz: of the multiprocessors, from the driver; matrix instructions may lower it.
        l2_bytes: of the L2 cache.
        registers: of 32 bits, of each multiprocessor.
        factors: of the links of its steps, where they were measured: see `Processor`.
    """

    name: str
    capability: tuple[int, int]
    sms: int
    smem_bytes_per_block: int
    active_clusters: Mapping[int, int]
    clock_mhz: int
    l2_bytes: int
    registers: int = 65_536
    factors: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    @property
    def processor(self) -> Processor:
        """Its speed for the performance model."""
        return Processor(self.clock_mhz / CLOCK_MHZ, self.factors)


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

    @property
    def cell(self) -> Cell:
        """The cell of its name."""
        return CELLS[self.nonlinearity]

    @property
    def per_word(self) -> int:
        """Numbers of the dtype in a 32-bit word."""
        return NUMBERS[self.dtype][1]

    @property
    def split_words(self) -> bool:
        """Whether rows of arrays may start between words."""
        return self.hidden % self.per_word != 0

    @property
    def sums(self) -> int:
        """Numbers of a unit that are added up in a step."""
        return 1 if self.backward else self.cell.gates

    @property
    def sent(self) -> int:
        """Numbers of a unit that other blocks read in a step."""
        return self.cell.gates if self.backward else 1

    @property
    def of_work(self) -> dict[str, Any]:
        """What the `Work` of every tile for it has."""
        kind = {"backward": self.backward, "split_words": self.split_words, "phases": self.cell.phases}
        return {"sums": self.sums, "sent": self.sent, **kind}


@dataclass(frozen=True)
class Choice:
    """A kernel that can run a problem, its tile and its estimated work.

    Attributes:
        design: how its blocks exchange the state.
        launch: the kernel and how to launch it.
        rows: rows of the recurrent matrix that a block keeps.
        work: of a step, from which its time is estimated.
        exchange_words: 32-bit words of uninitialised workspace, the last argument of the kernel; 0 for none.
        processor: speed of the GPU, relative to an H200.
    """

    design: Design
    launch: Launch
    rows: int
    work: Work
    exchange_words: int = 0
    processor: Processor = field(default_factory=Processor)

    @property
    def samples(self) -> int:
        """Utterances of a group, the columns of a matrix product."""
        return self.work.samples

    @property
    def groups(self) -> int:
        """Groups that a block runs in turn, so the exchange of one overlaps the arithmetic of the other."""
        return self.work.groups

    @property
    def parts(self) -> int:
        """Parts of a block's rows, finished and sent one after the other, for the same overlap."""
        return 2 if self.work.head_words < self.work.words else 1

    @functools.cached_property
    def early(self) -> Launch:
        """Its launch, which starts before the previous kernel of the stream has ended."""
        return replace(self.launch, early=True)

    @property
    def step_us(self) -> float:
        """The model's estimate of one time step of the whole batch."""
        return step_us(self.work, processor=self.processor)

    @property
    def name(self) -> str:
        """Its name among the choices for the same problem, in records of measurements."""
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


def state_words(problem: Problem) -> int:
    """Return the words of one utterance's state, rounded up to 16 bytes."""
    return -(-problem.hidden // (4 * problem.per_word)) * 4


def turns(batch: int, most_samples: int, most_groups: int) -> tuple[int, int, int]:
    """Return utterances of a group, groups of a tile, and tiles: the fewest groups, all of one size but the last."""
    all_groups = -(-batch // most_samples)
    tiles = -(-all_groups // most_groups)
    return -(-batch // all_groups), -(-all_groups // tiles), tiles


_PASS = parameters(
    """const void* input, const void* output_y, const void* matrix, const void* state, const int* lengths,
    void* result, void* last_state, int frames, int batch, int hidden, int samples, int whole_words, int wide_rows,
    float clip"""
)
_ARRAYS = 7  # of these, first
_GATES = parameters("void* saved, const void* bias, const float* carry, float* last_carry, void* result_last")
_EXCHANGE = parameters("unsigned* exchange, int exchange_words")  # of the whole-chip designs


_KERNELS = {  # header of csrc/recurrent, function, and its template argument: a template itself
    Design.UNITS: ("units.cuh", "units_recurrence", "UnitsShape"),
    Design.CLUSTER: ("cluster.cuh", "cluster_recurrence", "ClusterShape"),
    Design.NARROW: ("grid_narrow.cuh", "grid_recurrence", "GridShape"),
    Design.WIDE: ("grid_wide.cuh", "wide_recurrence", "WideShape"),
    Design.PORTABLE: ("grid_narrow.cuh", "grid_recurrence", "GridShape"),
}


def make_choice(
    design: Design,
    problem: Problem,
    numbers: Sequence[int],
    work: Work,
    *,
    rows: int,
    threads: int,
    smem_bytes: int,
    grid: int | None = None,
    slots: int = 0,
    exchange_words: int = 0,
) -> Choice:
    """Make a tile and the launch of its kernel, whose source asserts what was planned.

    Where its warps exchange registers, the source states how many a thread starts with, and `build` checks that the
    compiler used this number: with fewer, some warps would wait for ever.

    Args:
        design: of the kernel.
        problem: the pass that it runs.
        numbers: arguments of the kernel's shape, behind the number type and the cell.
        work: of a step.
        rows, exchange_words: as of `Choice`.
        threads, smem_bytes: as of `Launch`.
        grid: blocks; None: those that run together.
        slots: of the exchange of a whole-chip design, whose blocks all start at once; 0 for other designs.
    """
    header, function, shape = _KERNELS[design]
    hands_registers = design not in (Design.UNITS, Design.PORTABLE)
    cell, flags = problem.cell, [str(number).lower() for number in numbers]
    instance = ", ".join([f"ds2::{NUMBERS[problem.dtype][0]}", f"ds2::{cell.cuda}", *flags])
    counted = (
        f"constexpr int {LAUNCH_REGISTERS} = {DeviceFacts.registers // threads // 8 * 8};\n" if hands_registers else ""
    )
    disagree = f'static_assert(Shape::SLOTS == {slots}, "the planner and {header} disagree on the exchange");\n'
    members = _PASS if cell.gates == 1 else (*_PASS, *_GATES)
    arguments = f"{{{names(members)}}}"
    source = translation_unit(
        f"recurrent/{header}",
        (*members, *_EXCHANGE) if slots else members,
        f"    ds2::{function}<Shape>({arguments}{', exchange, exchange_words' if slots else ''});\n",
        ahead=f"using Shape = ds2::{shape}<{instance}>;\n"
        f'static_assert(Shape::SMEM_BYTES == {smem_bytes}, "the planner and {header} disagree on shared memory");\n'
        f'static_assert(Shape::ALL_THREADS == {threads}, "the planner and {header} disagree on threads");\n'
        f"{counted}{disagree if slots else ''}"
        f'static_assert(Shape::Cell::GATES == {cell.gates}, "cells.py and cells.cuh disagree on {cell.name}");\n',
        launch_bounds="Shape::ALL_THREADS, 1",
    )
    grid, cluster = work.blocks if grid is None else grid, 1 if design is Design.PORTABLE else work.cluster
    launch = Launch(source, threads, grid, cluster, smem_bytes, cooperative=slots > 0)
    return Choice(design, launch, rows, work, exchange_words)


def pass_arguments(
    choice: Choice, problem: Problem, frames: int, addresses: Sequence[int], clip: float, exchange: int
) -> list[float]:
    """Write the arguments of a launch, by the names of struct Pass of csrc/recurrent/pass.cuh.

    Args:
        choice: the kernel.
        problem: its problem.
        frames: T.
        addresses: of the arrays from input to last_state, then of the arrays of cells with gates; multiples of 4, 0 for
            none.
        clip: of clipped_relu.
        exchange: address of ``choice.exchange_words`` uninitialised words; ignored where the kernel needs none.
    """
    row_bytes = problem.hidden * ELEMENT_BYTES[problem.dtype]
    wide_rows = (row_bytes | common(addresses)) % 16 == 0
    sizes = (frames, problem.batch, problem.hidden, choice.samples)
    arguments = [*addresses[:_ARRAYS], *sizes, row_bytes % 4 == 0, wide_rows, clip, *addresses[_ARRAYS:]]
    return [*arguments, exchange, choice.exchange_words] if choice.exchange_words else arguments


def common(addresses: Sequence[int]) -> int:
    """Combine the addresses of all arrays of rows (all but the lengths): the result has their common alignment."""
    inputs, output_y, matrix, state, _, result, last_state, *of_gates = addresses
    bits = inputs | output_y | matrix | state | result | last_state
    for address in of_gates:
        bits |= address
    return bits


def array_bytes(problem: Problem, frames: int) -> list[int]:
    """Return the sizes of the arrays of `pass_arguments`, 0 for those that a pass does not need."""
    cell, size = problem.cell, ELEMENT_BYTES[problem.dtype]
    state = problem.directions * problem.batch * problem.hidden * size
    rows, matrix = frames * state, problem.directions * problem.hidden**2 * size * cell.gates
    of_gates = rows * cell.gates
    output_y = rows if problem.backward and cell.gates == 1 else 0
    ends = (rows, of_gates) if problem.backward else (of_gates, rows)
    sizes = [ends[0], output_y, matrix, 0, 0, ends[1], state]
    if cell.gates == 1:
        return sizes
    carry = problem.directions * problem.batch * problem.hidden * 4 if cell.carries_c else 0
    result_last = rows if problem.backward and cell.last_apart else 0
    return [*sizes, rows * cell.saved, 0, carry, carry, result_last]
