"""Predict throughput on many ranks from one machine's measured steps and link, and check the model on measured rows.

    python tools/bench_scaling.py --ranks 1 2 4 --per-rank 4 8 16 32 64 --model rnn_48_skip_4 --out measured
    mpirun -n 4 python tools/bench_collectives.py --device cuda --out measured/collectives.json
    python tools/predict_scaling.py measured/scaling.json measured/collectives.json --way "ours over NCCL" \\
        --global-batch 512 --ranks 1 8 16 32 64 128 --ranks-per-host 8 --network-gb-per-s 25 --network-latency-us 20

The model of one step on N ranks with b utterances each:
  forward(b), backward(b), optimizer: the measured times on one rank, linear between measured b;
  a sum of S bytes: latency x log2(N) + 2 (N - 1) / N x S / bandwidth, with the link's figures inside a host and the
    network's beyond it;
  gradients: equal buckets that are ready evenly over backward and travel one after the other; what ends after backward
    is exposed (without overlap, all of it);
  contention: beside the backward pass sums take multiprocessors from it, which lengthens it by this part of their time
    where the recurrence fills the GPU (from --full-batch utterances a rank on), and by less in proportion below;
  meeting: several ranks wait for the slowest of them once a step;
  shared batch norm: one small sum a layer, forward and backward, each as long as its latency.
With --fit, contention and meeting are those by which the rows of several ranks are missed least; else as given.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Link:
    """How long a sum takes: latency of one hop (s) and bus bandwidth (byte/s)."""

    latency_s: float
    bandwidth: float


@dataclass(frozen=True)
class Machine:
    """What was measured on one rank, and the links."""

    batches: list[float]  # utterances a rank, ascending
    forward_s: list[float]
    backward_s: list[float]
    optimizer_s: list[float]
    gradient_bytes: float
    norms: int
    host: Link
    network: Link
    ranks_per_host: int
    contention: float = 0.0
    meeting_s: float = 0.0
    full_batch: float = 0.0  # utterances of which the recurrence fills the GPU; 0: any number does

    def compute_s(self, batch: float) -> tuple[float, float, float]:
        """Forward, backward and optimizer at a batch a rank; beyond the largest measured one in proportion."""
        beyond = max(1.0, batch / self.batches[-1])
        parts = (self.forward_s, self.backward_s, self.optimizer_s)
        forward, backward, optimizer = (float(np.interp(batch, self.batches, part)) for part in parts)
        return forward * beyond, backward * beyond, optimizer

    def sum_s(self, ranks: int, size: float) -> float:
        """A sum of `size` bytes over ranks."""
        link = self.host if ranks <= self.ranks_per_host else self.network
        return link.latency_s * math.log2(ranks) + 2 * (ranks - 1) / ranks * size / link.bandwidth if ranks > 1 else 0.0


def step_s(
    machine: Machine, ranks: int, batch: float, *, bucket_bytes: float, overlap: bool, shared: bool
) -> tuple[float, float]:
    """Seconds of a step with `batch` utterances a rank, and those in which gradients alone are under way."""
    forward, backward, optimizer = machine.compute_s(batch)
    norm_s = machine.norms * machine.sum_s(ranks, 0) if shared else 0.0
    forward, backward = forward + norm_s, backward + norm_s
    buckets = max(1, math.ceil(machine.gradient_bytes / bucket_bytes))
    each_s = machine.sum_s(ranks, machine.gradient_bytes / buckets)
    if overlap and ranks > 1:
        filled = min(1.0, batch / machine.full_batch) if machine.full_batch else 1.0
        backward += machine.contention * filled * buckets * each_s
    end_s = 0.0
    for number in range(1, buckets + 1):
        ready_s = backward * number / buckets if overlap else backward
        end_s = max(end_s, ready_s) + each_s
    if ranks == 1:
        return forward + backward + optimizer, 0.0
    exposed_s = end_s - backward
    return forward + backward + exposed_s + optimizer + machine.meeting_s, exposed_s


def calibrate(scaling: dict[str, Any], collectives: dict[str, Any], args: argparse.Namespace) -> Machine:
    """Take the one-rank rows and the fitted link."""
    alone = sorted({r["batch"]: r for r in scaling["rows"] if r["ranks"] == 1}.values(), key=lambda r: r["batch"])
    if not alone:
        raise SystemExit("the scaling file has no row of one rank: run bench_scaling.py with --ranks 1 ...")
    if args.way not in collectives["fits"]:
        raise SystemExit(f"--way {args.way!r} is not one of {', '.join(collectives['fits'])}")
    latency_s, bandwidth = collectives["fits"][args.way]
    host = Link(latency_s / max(1.0, math.log2(collectives["ranks"])), bandwidth)
    network = host
    if args.network_gb_per_s:
        network = Link(args.network_latency_us * 1e-6, args.network_gb_per_s * 1e9)
    rest = [r["step_ms"] - r["forward_ms"] - r["backward_ms"] for r in alone]
    return Machine(
        [r["batch"] for r in alone], [r["forward_ms"] / 1000 for r in alone], [r["backward_ms"] / 1000 for r in alone],
        [max(0.0, ms) / 1000 for ms in rest], alone[0]["gradient_mib"] * 2**20, args.norms, host, network,
        args.ranks_per_host,
    )  # fmt: skip


def errors(machine: Machine, rows: list[dict[str, Any]], bucket_bytes: float) -> list[float]:
    """By how much the model's steps are longer than the measured ones, as a part of these."""
    found = []
    for row in rows:
        batch, shared = row["batch"] / row["ranks"], row["batch_norm"] == "shared" and row["ranks"] > 1
        how = {"bucket_bytes": bucket_bytes, "overlap": row["overlap"], "shared": shared}
        found.append(1000 * step_s(machine, row["ranks"], batch, **how)[0] / row["step_ms"] - 1)
    return found


def fitted(machine: Machine, rows: list[dict[str, Any]], bucket_bytes: float) -> Machine:
    """The machine with the contention and the meeting for which the largest error is smallest."""
    tried = [replace(machine, contention=0.05 * c, meeting_s=50e-6 * m) for c in range(61) for m in range(61)]
    return min(tried, key=lambda candidate: max(map(abs, errors(candidate, rows, bucket_bytes))))


def calibrated(scaling: dict[str, Any], backend: str, args: argparse.Namespace) -> tuple[Machine, list[dict[str, Any]]]:
    """The machine with one backend's layers, and the rows that tell of it; what misses them by how much is printed."""
    rows = [row for row in scaling["rows"] if row.get("backend", "auto") == backend]
    machine = calibrate({**scaling, "rows": rows}, json.loads(args.collectives.read_text()), args)
    machine = replace(machine, contention=args.contention, meeting_s=args.meeting_us * 1e-6, full_batch=args.full_batch)
    bucket = args.bucket_mib * 2**20
    many = [row for row in rows if row["ranks"] > 1]
    if args.fit and many:
        machine = fitted(machine, many, bucket)
        print(f"{backend}, fitted: contention {machine.contention:.2f}, meeting {1e6 * machine.meeting_s:.0f} us")
    print(
        f"{backend}\n{'ranks':>6}{'batch':>7}{'overlap':>9}{'norm':>8}{'measured ms':>13}{'model ms':>10}{'error':>8}"
    )
    for row, error in zip(rows, errors(machine, rows, bucket), strict=True):
        print(
            f"{row['ranks']:>6}{row['batch']:>7}{row['overlap']!s:>9}{row['batch_norm']:>8}"
            f"{row['step_ms']:>13.1f}{row['step_ms'] * (1 + error):>10.1f}{error:>+8.1%}"
        )
    return machine, rows


def predicted(
    machine: Machine, rows: list[dict[str, Any]], duration_s: float, args: argparse.Namespace
) -> dict[str, list[float]]:
    """Audio seconds a second at each number of ranks, by way; printed with the TFLOP/s that all of them sustain."""
    bucket = args.bucket_mib * 2**20
    flop_per_audio_s = 1e12 * rows[0].get("tflop_per_s", 0.0) / rows[0]["audio_s_per_s"]
    curves: dict[str, list[float]] = {}
    print(f"\npredicted, global batch {args.global_batch}\n{'ranks':>6}{'a rank':>8}{'step ms':>9}{'exposed':>9}"
          f"{'audio s/s':>11}{'TFLOP/s':>9}{'efficiency':>12}{'no overlap':>12}{'local norm':>12}")  # fmt: skip
    ways = {"overlap": (True, True), "no overlap": (False, True), "local norm": (True, False)}
    for ranks in args.ranks:
        batch = args.global_batch / ranks
        base, _ = step_s(machine, 1, args.global_batch, bucket_bytes=bucket, overlap=True, shared=False)
        found = {
            w: step_s(machine, ranks, batch, bucket_bytes=bucket, overlap=o, shared=s) for w, (o, s) in ways.items()
        }
        rates = {way: args.global_batch * duration_s / seconds for way, (seconds, _) in found.items()}
        for way, rate in rates.items():
            curves.setdefault(way, []).append(rate)
        seconds, exposed = found["overlap"]
        shares = [base / found[way][0] / ranks for way in ways]
        print(
            f"{ranks:>6}{batch:>8g}{1000 * seconds:>9.1f}{1000 * exposed:>9.2f}{rates['overlap']:>11.0f}"
            f"{rates['overlap'] * flop_per_audio_s / 1e12:>9.0f}{shares[0]:>12.1%}{shares[1]:>12.1%}{shares[2]:>12.1%}"
        )
    return curves


def main() -> None:
    """Parse, check against the measured rows, predict, plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scaling", type=Path, nargs="+", help="files of bench_scaling.py, of one model")
    parser.add_argument("collectives", type=Path)
    parser.add_argument("--way", default="ours over MPI", help="whose sums: a name in the collectives file")
    parser.add_argument("--global-batch", type=int, default=512, help="utterances over all ranks (paper: 512)")
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32, 64, 128])
    parser.add_argument("--ranks-per-host", type=int, default=8)
    parser.add_argument(
        "--network-gb-per-s", type=float, default=0.0, help="bus bandwidth between hosts; 0: the host's"
    )
    parser.add_argument("--network-latency-us", type=float, default=20.0)
    parser.add_argument(
        "--norms", type=int, default=51, help="batch norm layers (48 recurrent, 2 convolutions, 1 last)"
    )
    parser.add_argument("--bucket-mib", type=float, default=25.0)
    parser.add_argument("--contention", type=float, default=0.0, help="see above")
    parser.add_argument("--full-batch", type=float, default=0.0, help="see above; 0: contention does not depend on it")
    parser.add_argument("--meeting-us", type=float, default=0.0, help="see above")
    parser.add_argument("--fit", action="store_true", help="find contention and meeting by the measured rows")
    parser.add_argument("--backend", nargs="+", default=["auto"], help="whose rows, where the files have several")
    parser.add_argument("--plot", type=Path, help="write the curves as an image")
    args = parser.parse_args()
    files = [json.loads(path.read_text()) for path in args.scaling]
    scaling = {**files[0], "rows": [row for file in files for row in file["rows"]]}
    curves = {}
    for backend in args.backend:
        machine, rows = calibrated(scaling, backend, args)
        curves[backend] = predicted(machine, rows, scaling["duration_s"], args)
    if args.plot:
        plot(args, scaling, curves)


def plot(args: argparse.Namespace, scaling: dict[str, Any], curves: dict[str, dict[str, list[float]]]) -> None:
    """Predicted curves and the measured points of the same global batch."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4.5), layout="constrained")
    axes = figure.add_subplot()
    measured = [row for row in scaling["rows"] if row["batch"] == args.global_batch and row["overlap"]]
    backends = dict.fromkeys([*curves, *(row.get("backend", "auto") for row in measured)])
    for color, backend in zip(itertools.cycle(f"C{n}" for n in range(10)), backends, strict=False):
        for style, (way, rates) in zip(("-", ":", "--"), curves.get(backend, {}).items(), strict=False):
            axes.plot(args.ranks, rates, style, color=color, label=f"{backend}: model, {way}")
        points = [row for row in measured if row.get("backend", "auto") == backend]
        axes.plot(
            [row["ranks"] for row in points], [row["audio_s_per_s"] for row in points], "o", color=color,
            label=f"{backend}: measured",
        )  # fmt: skip
    linear = [curves[args.backend[0]]["overlap"][0] * ranks / args.ranks[0] for ranks in args.ranks]
    axes.plot(args.ranks, linear, "k--", lw=0.8, label="linear")
    axes.set(xscale="log", yscale="log", xlabel="ranks", ylabel="audio seconds a second")
    axes.legend(fontsize=7)
    figure.savefig(args.plot, dpi=150)


if __name__ == "__main__":
    main()
