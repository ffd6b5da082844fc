"""The design space of a processor (Persistent RNNs, 2016, sections 3.1 and 5.1.4): what it can hold, and how fast.

    python tools/design_space.py                                  an H200: largest H, us a step against H and B, cliffs
    python tools/design_space.py --sms 264 --registers 131072     a processor with twice as much of both
    python tools/design_space.py --figure --out ops/figures       Figure 6: throughput of every tile, for variations
    python tools/design_space.py --check plans_h200_64.json       estimates beside a sweep with fewer multiprocessors

The processor is described by its multiprocessors, registers and shared memory of each, clock, and how long an exchange
takes beside an H200's; the estimates are those of the planner's model, which was fitted to an H200. Shape letters: B
batch, H hidden.
"""

import argparse
import itertools
import statistics
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ds2_ops.recurrent.plan.choose import space
from ds2_ops.recurrent.plan.model import Processor, step_us
from ds2_ops.recurrent.plan.problem import DeviceFacts, DoesNotFit, Problem
from ds2_ops.recurrent.plan.record import read

BATCH = (1, 4, 16, 64)
STEP, CLIFF = 64, 1.1
H200 = DeviceFacts()


@dataclass(frozen=True)
class Point:
    """A tile for one problem."""

    hidden: int
    batch: int
    name: str
    us: float

    @property
    def tflops(self) -> float:
        """Useful products and sums a second."""
        return 2e-6 * self.hidden**2 * self.batch / self.us


def described(options: argparse.Namespace) -> tuple[DeviceFacts, Processor]:
    """Turn the command line into what the planner takes.

    Clusters live within a part of the chip, so that some multiprocessors are left over: as many of a hundred as on an
    H200.
    """
    facts = DeviceFacts(
        name="the processor described",
        sms=options.sms,
        smem_bytes_per_block=options.smem,
        registers=options.registers,
        clock_mhz=options.clock,
        active_clusters={size: count * options.sms // H200.sms for size, count in H200.active_clusters.items()},
    )
    return facts, Processor(clock=options.clock / H200.clock_mhz, exchange=options.exchange)


def tiles(hidden: int, batch: int, options: argparse.Namespace) -> list[Point]:
    """Estimate all tiles of a problem, the fastest first; none where it does not fit."""
    facts, processor = described(options)
    problem = Problem(batch, hidden, options.dtype, options.cell, options.backward)
    try:
        choices = space(problem, facts)
    except DoesNotFit:
        return []
    points = [Point(hidden, batch, choice.name, step_us(choice.work, processor=processor)) for choice in choices]
    return sorted(points, key=lambda point: point.us)


def largest(options: argparse.Namespace) -> int:
    """The largest hidden size that fits the processor's registers and shared memory."""
    hidden = STEP
    while tiles(hidden, 1, options):
        hidden += STEP
    while not tiles(hidden, 1, options):
        hidden -= 1
    return hidden


def sizes(options: argparse.Namespace) -> list[int]:
    """Hidden sizes of the tables: multiples of STEP, and the largest."""
    most = largest(options)
    return sorted({*range(STEP, most + 1, STEP), most})


def cliffs(points: Iterable[Point]) -> list[str]:
    """Where a little more costs much more: steps between neighbouring sizes above CLIFF."""
    points = list(points)
    return [
        f"H {a.hidden} -> {b.hidden}: {a.us:.2f} -> {b.us:.2f} us ({a.name} -> {b.name})"
        for a, b in itertools.pairwise(points)
        if b.us > CLIFF * a.us
    ]


def table(options: argparse.Namespace) -> None:
    """Print the largest H, us a step against H and B, and the cliffs."""
    hidden = sizes(options)
    print(f"{described(options)[0]}\nlargest H: {hidden[-1]} ({options.cell}, {options.dtype})")
    print("     H" + "".join(f"{f'B {batch}':>9}" for batch in options.batch) + "   us a step, the fastest tile")
    best = {(h, b): tiles(h, b, options)[0] for h in hidden for b in options.batch}
    for h in hidden:
        if h % (4 * STEP) == 0 or h == hidden[-1]:
            print(f"{h:6}" + "".join(f"{best[h, b].us:9.2f}" for b in options.batch))
    for batch in options.batch:
        for line in cliffs(best[h, batch] for h in hidden):
            print(f"cliff at B {batch}, {line}")


VARIATIONS: dict[str, dict[str, float]] = {
    "as it is": {},
    "twice the registers": {"registers": 2},
    "twice the shared memory": {"smem": 2},
    "twice the multiprocessors": {"sms": 2},
    "twice the clock": {"clock": 2},
    "half the exchange": {"exchange": 0.5},
}


def figure(options: argparse.Namespace, path: Path) -> None:
    """Draw us a step against H and, as in Figure 6, the throughput of every tile for variations of the processor."""
    from matplotlib.figure import Figure

    canvas = Figure(figsize=(15, 9), layout="constrained")
    axes = canvas.subplots(2, 4)
    hidden = sizes(options)
    for batch in options.batch:
        axes[0, 0].plot(hidden, [tiles(h, batch, options)[0].us for h in hidden], label=f"B {batch}")
    axes[0, 0].set(xlabel="H", ylabel="us a step", title="the fastest tile", ylim=(0, None))
    axes[0, 0].legend()
    axes[0, 1].plot(hidden, [2e-6 * h * h * 1.0 / tiles(h, 1, options)[0].us for h in hidden])
    axes[0, 1].set(xlabel="H", ylabel="useful TFLOP/s", title="B 1", ylim=(0, None))
    for place, (name, factors) in zip(axes.flat[2:], VARIATIONS.items(), strict=True):
        varied = argparse.Namespace(**vars(options))
        for key, factor in factors.items():
            value = getattr(options, key)
            setattr(varied, key, type(value)(value * factor))
        points = [point for h in sizes(varied) for point in tiles(h, max(options.batch), varied)]
        best: dict[int, float] = {}
        for point in points:
            best[point.hidden] = max(best.get(point.hidden, 0.0), point.tflops)
        place.scatter([p.hidden for p in points], [p.tflops for p in points], s=3, alpha=0.5)
        place.plot(list(best), list(best.values()), linewidth=1)
        place.set(xlabel="H", ylabel="useful TFLOP/s", title=f"{name}, B {max(options.batch)}", ylim=(0, None))
    canvas.savefig(path, dpi=110)


def check(path: Path) -> float:
    """Print estimates of the fastest tile beside a sweep's; return the worst ratio, above or below."""
    record = read(path)
    ratios = []
    for problem, times in record.problems:
        estimated, measured = min(step_us(choice.work) for choice, _ in times), min(us for _, us in times)
        ratios.append(estimated / measured)
        way = "backward" if problem.backward else "forward"
        print(f"{problem.hidden:5} {problem.batch:3} {way:8} {estimated:7.2f} {measured:7.2f} {ratios[-1]:6.2f}")
    worst = max(max(ratio, 1 / ratio) for ratio in ratios)
    within = sum(1 / 1.15 <= ratio <= 1.15 for ratio in ratios)
    print(
        f"{record.max_sms or record.facts.sms} multiprocessors: estimate / measured {statistics.mean(ratios):.3f} on "
        f"average, at worst {worst:.3f} x off; {within} of {len(ratios)} within 15 %"
    )
    return worst


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sms", type=int, default=H200.sms, help="multiprocessors")
    parser.add_argument("--registers", type=int, default=H200.registers, help="32-bit registers of each")
    parser.add_argument("--smem", type=int, default=H200.smem_bytes_per_block, help="bytes of shared memory of each")
    parser.add_argument("--clock", type=int, default=H200.clock_mhz, help="MHz")
    parser.add_argument("--exchange", type=float, default=1.0, help="latency of a message beside an H200's")
    parser.add_argument("--batch", type=int, nargs="+", default=list(BATCH))
    parser.add_argument("--cell", default="relu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--backward", action="store_true")
    parser.add_argument("--figure", action="store_true")
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--check", type=Path, nargs="+", default=[])
    return parser.parse_args()


def main() -> int:
    """Print or draw; with --check, 1 where an estimate is off by more than 15 %."""
    options = parse()
    if options.check:
        return int(max(map(check, options.check)) > 1.15)
    if options.figure:
        options.out.mkdir(parents=True, exist_ok=True)
        figure(options, options.out / "design_space.png")
        return 0
    table(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
