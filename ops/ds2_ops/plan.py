"""From machine facts and a recurrence to a launch, or to the reason why no kernel can run it. Needs no GPU.

Shape letters: B batch, H hidden.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

THREADS = 256  # that multiply: 8 warps, so that each thread may hold more than 200 registers, most of them weights
FINISHERS = 128  # and 4 warps for each group, or for each part of the only group, that finish a step
WEIGHT_REGISTERS = 180  # of those 200, the rest is the loop's
MMA_ROWS, MMA_WORDS, MMA_SAMPLES = 16, 8, 8  # one matrix instruction: rows, 32-bit words of K, columns
WARPS = THREADS // 32
STEPS_AHEAD = 4  # inputs are fetched this early

NUMBERS = {"bfloat16": ("Bf16", 2), "float16": ("Fp16", 2), "float32": ("Fp32", 1)}  # C++ type, elements a word
CELLS = {"relu": "Relu", "clipped_relu": "ClippedRelu", "tanh": "Tanh"}

# The one signature of every design's kernel: struct Pass of recurrence.cuh, spread out.
_ENTRY = """
extern "C" __global__ void __launch_bounds__(Shape::ALL_THREADS, 1) ds2_kernel(
    const void* input, const void* output_y, const void* matrix, const void* state, const int* lengths, void* result,
    void* last_state, int frames, int batch, int hidden, int samples, int whole_words, int wide_rows, float clip) {
    ds2::cluster_recurrence<Shape>({input, output_y, matrix, state, lengths, result, last_state, frames, batch, hidden,
                                    samples, whole_words, wide_rows, clip});
}
"""


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
    active_clusters: Mapping[int, int] = field(default_factory=lambda: {2: 66, 4: 30, 5: 22, 6: 17, 8: 15, 16: 7})


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
        threads: a block.
        smem_bytes: dynamic shared memory a block.
        rows: rows of the recurrent matrix that a block keeps.
        samples: utterances of one tile, the columns of a matrix product.
        groups: tiles that a block runs in turn, so that one's exchange hides behind the other's arithmetic.
        parts: of a block's rows, finished and sent one after the other, to the same end.
        step_cycles: the cost model's estimate of one time step of the whole batch.
        exchange_words: 32-bit words of workspace, all bits set, that the kernel takes as its last argument; 0 for none.
    """

    design: Literal["cluster", "grid"]
    source: str
    grid: int
    cluster: int
    threads: int
    smem_bytes: int
    rows: int
    samples: int
    groups: int
    step_cycles: float
    parts: int = 1
    exchange_words: int = 0

    def explain(self) -> str:
        """One line for logs and error messages."""
        return (
            f"{self.design} design: {self.grid} blocks of {self.threads} threads in clusters of {self.cluster}, "
            f"{self.rows} rows a block in {self.parts} part{'s'[: self.parts - 1]}, "
            f"{self.groups} x {self.samples} utterances in flight a cluster, "
            f"{self.smem_bytes} B shared memory a block, about {self.step_cycles:.0f} cycles a step"
        )


def choose(problem: Problem, device: DeviceFacts, max_sms: int | None = None) -> Launch:
    """Pick the design and the tile with the lowest estimated time.

    Args:
        problem: what to run.
        device: where.
        max_sms: use at most this many multiprocessors; None for all.

    Returns:
        The cluster design where it fits: it is faster and its blocks need not all run at once. Else the whole chip.

    Raises:
        DoesNotFit: no design can; the message gives the reason and the way out.
    """
    if problem.dtype not in NUMBERS:
        raise DoesNotFit(f"dtype {problem.dtype} is not one of {', '.join(NUMBERS)}: use backend='gemm' or 'reference'")
    if problem.nonlinearity not in CELLS:
        raise DoesNotFit(f"nonlinearity {problem.nonlinearity!r} is not one of {', '.join(CELLS)}")
    if device.capability != (9, 0):
        major, minor = device.capability
        raise DoesNotFit(
            f"{device.name} has compute capability {major}.{minor}; the persistent kernels are built for 9.0 "
            "(H100, H200) and its clusters of 16 multiprocessors: use backend='gemm'"
        )
    sms = device.sms if max_sms is None else min(max_sms, device.sms)
    from ds2_ops.plan_grid import grid_launches, largest_grid_hidden  # they build on the types above

    launches = cluster_launches(problem, device, sms) or grid_launches(problem, device, sms)
    if not launches:
        raise DoesNotFit(_reason(problem, device, sms, largest_grid_hidden(problem.dtype, device, sms)))
    return min(launches, key=lambda launch: launch.step_cycles)


def cluster_launches(problem: Problem, device: DeviceFacts, sms: int) -> list[Launch]:
    """Every tile of the cluster design that can run this problem on ``sms`` multiprocessors."""
    found = []
    for cluster in (8, 16):
        clusters = min(device.active_clusters.get(cluster, 0), sms // cluster)
        rows = cluster_rows(problem.hidden, problem.dtype, cluster)
        if clusters == 0 or rows is None:
            continue
        for groups, parts in ((1, 1), (2, 1), (1, 2)):
            if parts == 2 and rows <= MMA_ROWS:
                continue  # one row tile cannot be shared out
            launch = _cluster_launch(problem, cluster, clusters, rows, groups, parts)
            if launch.smem_bytes <= device.smem_bytes_per_block:
                found.append(launch)
    return found


def cluster_rows(hidden: int, dtype: str, cluster: int) -> int | None:
    """Rows of the matrix that each block of a cluster keeps, or None if they do not fit its registers."""
    per_word = NUMBERS[dtype][1]
    # Blocks exchange 16 bytes at a time, and each of 8 warps takes a whole number of matrix instructions.
    step = per_word * max(4, MMA_WORDS * WARPS // cluster)
    rows = -(-hidden // (cluster * step)) * step
    k_tiles = cluster * rows // per_word // (MMA_WORDS * WARPS)
    m_tiles = -(-rows // MMA_ROWS)
    return rows if 4 * k_tiles * m_tiles <= WEIGHT_REGISTERS else None


def largest_cluster_hidden(dtype: str) -> int:
    """The largest hidden size that the cluster design can keep in registers."""
    hidden = 0
    while cluster_rows(hidden + 1, dtype, 16) is not None:
        hidden += 1
    return hidden


def _cluster_launch(problem: Problem, cluster: int, clusters: int, rows: int, groups: int, parts: int) -> Launch:
    number, per_word = NUMBERS[problem.dtype]
    words = rows // per_word
    m_tiles = -(-rows // MMA_ROWS)
    samples = min(MMA_SAMPLES, -(-problem.batch // (clusters * groups)))
    tiles = -(-problem.batch // (samples * groups))
    grid = cluster * min(tiles, clusters)
    # Two stages of state and of partial sums, padded against bank conflicts, inputs and mbarriers: as in cluster.cuh.
    sample_pitch = (4 * words + 31) // 64 * 64 + 32 if cluster == 16 else (4 * words + 63) // 128 * 128 + 64
    state_bytes = cluster * (MMA_SAMPLES * sample_pitch + 64)
    partial_bytes = WARPS * MMA_SAMPLES * (MMA_ROWS * m_tiles + 4) * 4
    head_tiles = -(-m_tiles // parts)  # row tiles of the first part
    head_words = words if parts == 1 else head_tiles * MMA_ROWS // per_word
    rounds = -(-MMA_SAMPLES // (FINISHERS // head_words))
    units = groups * parts
    input_bytes = (1 + STEPS_AHEAD * (2 if problem.backward else 1)) * rounds * FINISHERS * 4  # 1: lengths
    smem_bytes = 2 * groups * (state_bytes + partial_bytes) + units * (input_bytes + 2 * WARPS * 8)
    flags = (problem.backward, problem.hidden % per_word == 0)
    numbers = (cluster, rows, groups, head_tiles, *(str(flag).lower() for flag in flags))
    shape = f"ds2::ClusterShape<ds2::{number}, ds2::{CELLS[problem.nonlinearity]}, {', '.join(map(str, numbers))}>"
    source = (
        '#include "cluster.cuh"\n'
        f"using Shape = {shape};\n"
        f'static_assert(Shape::SMEM_BYTES == {smem_bytes}, "plan.py and cluster.cuh disagree on shared memory");'
        f"{_ENTRY}"
    )
    return Launch(
        design="cluster",
        source=source,
        grid=grid,
        cluster=cluster,
        threads=THREADS + units * FINISHERS,
        smem_bytes=smem_bytes,
        rows=rows,
        samples=samples,
        groups=groups,
        parts=parts,
        step_cycles=-(-tiles // clusters) * _cluster_step_cycles(m_tiles, words, cluster, samples, groups, head_words),
    )


def _cluster_step_cycles(m_tiles: int, words: int, cluster: int, samples: int, groups: int, head_words: int) -> float:
    """Cycles of one time step of one tile, fitted to measurements of version 8 (ops/NOTES.md) on an H200.

    One group: its products, then a fixed path through partial sums, cell and network, then a share for each word sent
    to each block, and for each further round in which the finishing threads take more utterances. Two parts: a longer
    fixed path, but only the first part's sends count, and mostly by the piece. Two groups: two turns of the multiplying
    warps, each with a fixed loss and a share of its sends. Within 13 % of all 86 tiles measured.
    """
    multiply = 7.3 * m_tiles * (cluster * words // MMA_WORDS) / 4  # 4 sub-cores
    pieces = samples * cluster  # the network carries each utterance's share of the state to each block
    rounds = -(-samples // (FINISHERS // head_words))
    if head_words < words:
        per_piece = 5.0 + 0.066 * head_words if cluster == 16 else 0.85 + 0.38 * head_words
        return multiply + 880.0 + per_piece * pieces + 720.0 * (rounds - 1)
    fixed, per_word = (770.0, 0.30) if cluster == 16 else (740.0, 0.244)
    one_group = multiply + fixed + per_word * words * pieces + 380.0 * (rounds - 1)
    if groups == 1:
        return one_group
    per_word = 0.195 if cluster == 16 else 0.25
    return max(one_group, 2 * (multiply + 380.0 + per_word * words * pieces))


def _reason(problem: Problem, device: DeviceFacts, sms: int, largest_grid: int) -> str:
    largest_cluster = largest_cluster_hidden(problem.dtype)
    if problem.hidden > largest_cluster:
        return (
            f"hidden size {problem.hidden} in {problem.dtype} does not fit: a cluster of 16 multiprocessors keeps at "
            f"most {largest_cluster} x {largest_cluster} weights, and the {sms} multiprocessors that may be used on "
            f"{device.name} ({device.sms} in all) at most {largest_grid} x {largest_grid}; use a smaller size, "
            "or backend='gemm'"
        )
    return (
        f"hidden size {problem.hidden} in {problem.dtype} needs a cluster of 8 or 16 multiprocessors, "
        f"and {sms} of {device.sms} may be used on {device.name}: raise max_sms, or use backend='gemm'"
    )
