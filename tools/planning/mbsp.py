"""Predict steps of a persistent recurrent layer by the MBSP model (Persistent RNNs, 2016, sections 3.1 and 5.1.4).

    python tools/plans.py mbsp                         the paper's variations of a TitanX, other GPUs, recorded steps
    python tools/plans.py mbsp --figure FILE.png       the paper's Figure 6 with panels for other GPUs

A machine is a hierarchy: each level has processors, bandwidth, latency and memory. No constant is fitted to steps. How
latency grows with the number of processors (as its root) and some bandwidths of L2 are assumed. A
tile gives each of n multiprocessors a block of rows and takes the batch in g groups, one after the other. Its step is
the longest of: the chain of one group (exchange, products, transfers), and the work of all groups on each resource.
Shape letters: B batch, H hidden, n multiprocessors of a tile, g groups.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from benchmarks.common import Table
from ds2_ops.recurrent.plan.model import EXCHANGE_US, GRID_EXCHANGE_US

from .fit import read

ROOT = Path(__file__).parents[2]
GROUPS = (1, 2, 4)  # the paper's pipeline has four stages


@dataclass(frozen=True)
class Level:
    """One level of the hierarchy.

    Attributes:
        processors: of the level below that it consists of; of the lowest, numbers multiplied and added in a cycle.
        bandwidth: bytes a second into all of them together.
        latency_s: of an exchange between all of them, which grows as the root of their number, as distances on a chip
            do; of DRAM, of a kernel launch.
        memory: bytes; for weights in the lowest level.
    """

    processors: int
    bandwidth: float
    latency_s: float
    memory: float


@dataclass(frozen=True)
class Machine:
    """A processor: a multiprocessor, clusters of them where it has any, the chip, its DRAM.

    Attributes:
        peak: operations a second of the chip, where a product and its sum are two.
        number_bytes: of a weight or a state.
        rows, samples: to which products are padded.
    """

    peak: float
    number_bytes: int
    rows: int
    samples: int
    multiprocessor: Level
    cluster: Level | None
    chip: Level
    dram: Level


def titan_x() -> Machine:
    """Return the paper's TitanX: 24 x 128 lanes at 1 GHz, 896 of 1024 bytes of each of 256 threads for weights.

    Section 4.1: a step's loads take four times as long as its products; section 4.3: a barrier takes no longer than
    these. Both for one utterance at H 1152. 32 bytes a cycle and multiprocessor from L2, 336.5 GB/s from DRAM.
    """
    products_s = 2 * 1152**2 / 6.144e12
    return Machine(
        6.144e12, 4, 8, 1, Level(128, 128e9, 0.0, 256 * 896), None,
        Level(24, 24 * 32e9, 5 * products_s, 3e6), Level(1, 336.5e9, 10 * products_s, 12e9),
    )  # fmt: skip


def _tensor_core_machine(
    peak: float, sms: int, clock_hz: float, cluster: int, memory: float, l2: tuple[float, float], dram: Level
) -> Machine:
    """Return a machine with tensor cores; l2 has bytes a second and bytes.

    The latencies of exchanges are those that were measured alone on an H200. Published latencies of L2 are alike: 200
    cycles on an H100 (PMC10448217, Table 3), 150 ns on a B200 (chipsandcheese.com/p/nvidias-b200-keeping-the-cuda-
    juggernaut), 279 cycles on an L40 (arXiv 2606.22588), whose successor the RTX 5090 is.
    """
    per_cluster_s = EXCHANGE_US[f"cluster{cluster}"] * 1e-6
    return Machine(
        peak, 2, 16, 8, Level(int(peak / 2 / sms / clock_hz), 128 * clock_hz, 0.0, memory),
        Level(cluster, cluster * 32 * clock_hz, per_cluster_s, 0.0), Level(sms, l2[0], GRID_EXCHANGE_US * 1e-6, l2[1]),
        dram,
    )  # fmt: skip


_REGISTERS = 7 / 8 * 256 * 1024  # bytes of weights in a multiprocessor's registers, the paper's share
MACHINES: Mapping[str, Machine] = {
    "TitanX": titan_x(),
    # NVIDIA's data sheets: dense bf16 with sums in fp32, multiprocessors, boost clock, shared memory, DRAM. Bandwidth
    # of L2: an H100's, PMC10448217, Table 3; of B200 and RTX 5090 not published, so the same bytes a cycle.
    "H200": _tensor_core_machine(
        989.5e12, 132, 1.83e9, 16, _REGISTERS + 227 * 1024, (8.986e12, 50e6), Level(1, 4.8e12, 5e-6, 141e9)
    ),
    "B200": _tensor_core_machine(
        2250e12, 148, 1.85e9, 16, _REGISTERS + 227 * 1024, (10.1e12, 126e6), Level(1, 8e12, 5e-6, 180e9)
    ),
    "RTX 5090": _tensor_core_machine(
        209.5e12, 170, 2.407e9, 8, _REGISTERS + 99 * 1024, (15.2e12, 96e6), Level(1, 1.792e12, 5e-6, 32e9)
    ),
}


def variations(base: Machine) -> dict[str, Machine]:
    """Return the variations of a 32-bit processor that the paper's Figure 6 has."""
    sm, chip = base.multiprocessor, base.chip
    twice = replace(
        chip, processors=2 * chip.processors, bandwidth=2 * chip.bandwidth, latency_s=math.sqrt(2) * chip.latency_s
    )
    return {
        "as it is": base,
        "16-bit numbers": replace(base, peak=2 * base.peak, number_bytes=base.number_bytes // 2),
        "twice the registers": replace(base, multiprocessor=replace(sm, memory=2 * sm.memory)),
        "twice the multiprocessors": replace(base, peak=2 * base.peak, chip=twice),
        "half the latency": replace(base, chip=replace(chip, latency_s=chip.latency_s / 2)),
        "twice the DRAM bandwidth": replace(base, dram=replace(base.dram, bandwidth=2 * base.dram.bandwidth)),
    }


class Point(NamedTuple):
    """A tile for one problem: multiprocessors, groups, seconds of a step, and useful operations a second."""

    blocks: int
    groups: int
    step_s: float
    flops: float


def step_s(machine: Machine, hidden: int, batch: int, blocks: int, groups: int) -> float:
    """Predict a step of a tile that fits; `inf` for one that does not."""
    rows = -(-hidden // blocks // machine.rows) * machine.rows
    if rows * hidden * machine.number_bytes > machine.multiprocessor.memory:
        return math.inf
    samples = -(-batch // groups)
    state = hidden * samples * machine.number_bytes  # bytes of a group's state
    in_cluster = machine.cluster is not None and blocks <= machine.cluster.processors
    level = machine.cluster if machine.cluster is not None and in_cluster else machine.chip
    padded = -(-samples // machine.samples) * machine.samples
    readers = -(-blocks // machine.cluster.processors) if machine.cluster and not in_cluster else blocks
    work = (
        2 * rows * hidden * padded / (machine.peak / machine.chip.processors),
        state / machine.multiprocessor.bandwidth,
        readers * state / level.bandwidth,
        2 * state / machine.dram.bandwidth,  # one array is read, one written
    )
    chain = level.latency_s * math.sqrt(min(blocks, level.processors) / level.processors) + sum(work[:3])
    return max(chain, groups * max(work))


def tiles(machine: Machine, hidden: int, batch: int) -> Iterator[Point]:
    """Predict all tiles of a problem that fit."""
    for blocks in range(1, machine.chip.processors + 1):
        for groups in GROUPS:
            if groups <= batch and (seconds := step_s(machine, hidden, batch, blocks, groups)) < math.inf:
                yield Point(blocks, groups, seconds, 2 * hidden**2 * batch / seconds)


def best(machine: Machine, hidden: int, batch: int) -> Point:
    """Return the fastest tile.

    Raises:
        ValueError: the weights do not fit on the chip.
    """
    return min(tiles(machine, hidden, batch), key=lambda point: point.step_s)


def relaunched_s(machine: Machine, hidden: int) -> float:
    """Predict a step that is a kernel launch and reads all weights anew."""
    return machine.dram.latency_s + hidden**2 * machine.number_bytes / machine.dram.bandwidth


def largest(machine: Machine, multiple: int = 32) -> int:
    """Return the largest hidden size that fits, a multiple of `multiple`."""
    hidden = multiple
    while any(tiles(machine, hidden + multiple, 1)):
        hidden += multiple
    return hidden


def compare(record: Path) -> list[tuple[int, int, float, float]]:
    """Return hidden size, batch, measured and predicted us of the relu forward passes of a recorded sweep.

    Sizes below 256 are left out: the sweep lacks the tiles of few multiprocessors that suit them.
    """
    return [
        (p.hidden, p.batch, min(us for _, us in times), 1e6 * best(MACHINES["H200"], p.hidden, p.batch).step_s)
        for p, times in read(record).problems
        if p.nonlinearity == "relu" and not p.backward and p.hidden >= 256
    ]


def draw(path: Path, batch: int) -> None:
    """Draw every tile's throughput against H, the peak, and what reading the weights from DRAM in each step allows."""
    from matplotlib.figure import Figure

    canvas = Figure(figsize=(15, 9), layout="constrained")
    panels = variations(MACHINES["TitanX"]) | {name: m for name, m in MACHINES.items() if name != "TitanX"}
    for place, (name, machine) in zip(canvas.subplots(3, 3).flat, panels.items(), strict=True):
        sizes = range(64, largest(machine) + 1, 64)
        points = [(h, point.flops / 1e12) for h in sizes for point in tiles(machine, h, batch)]
        place.scatter(*zip(*points, strict=True), s=2, alpha=0.3)
        place.axhline(machine.peak / 1e12, color="black", label="peak")
        from_dram = 2 * batch * machine.dram.bandwidth / machine.number_bytes / 1e12
        place.axhline(from_dram, color="black", linestyle="--", label="weights from DRAM")
        place.set(title=name, xlabel="H", ylabel=f"TFLOP/s, B {batch}", yscale="log")
    canvas.axes[0].legend()
    canvas.savefig(path, dpi=70)


def main(arguments: list[str]) -> int:
    """Print predictions, and measured steps beside them; draw with --figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--figure", type=Path)
    options = parser.parse_args(arguments)
    titan = {f"TitanX, {name}": machine for name, machine in variations(MACHINES["TitanX"]).items()}
    table = Table({
        "": "{name}", "largest H": "{most}", f"TFLOP/s there, B {options.batch}": "{flops:.1f}",
        "of the peak": "{share:.0f} %", "at H 512": "{small:.2f}", "at H 1152": "{paper:.2f}",
        "a launch a step": "{relaunched:.1f} x",
    })  # fmt: skip
    for name, machine in {**titan, **{name: m for name, m in MACHINES.items() if name != "TitanX"}}.items():
        most = largest(machine)
        flops, small, paper = (best(machine, hidden, options.batch).flops / 1e12 for hidden in (most, 512, 1152))
        relaunched = relaunched_s(machine, 1152) / best(machine, 1152, options.batch).step_s
        share = 1e14 * flops / machine.peak
        table.print_row({"name": name, "most": most, "flops": flops, "share": share, "small": small, "paper": paper,
                         "relaunched": relaunched})  # fmt: skip
    rows = compare(ROOT / "ops" / "figures" / "plans_h200.json")
    ratios = [measured / predicted for _, _, measured, predicted in rows]
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}, median {statistics.median(ratios):.2f}"
    print(f"\nH200, {len(rows)} recorded forward passes, measured over predicted: {spread}\n")
    print("| H | B | measured, us | predicted, us | ratio |\n|---|---|---|---|---|")
    for (hidden, batch, measured, predicted), ratio in zip(rows, ratios, strict=True):
        if hidden in (512, 1152, 1760, 2560) and batch in (1, 4, 16, 64):
            print(f"| {hidden} | {batch} | {measured:.2f} | {predicted:.2f} | {ratio:.2f} |")
    if options.figure:
        draw(options.figure, options.batch)
    return 0
