"""Predict throughput on many ranks from the steps and the link of one machine, and compare with measured rows.

    python tools/bench.py scaling --ranks 1 2 4 --per-rank 4 8 16 32 64 --model rnn_48_skip_4
    mpirun -n 4 python tools/bench.py collectives --device cuda --out collectives.json
    python tools/bench.py predict scaling.json collectives.json --way "ours over NCCL" \\
        --global-batch 512 --ranks 1 8 16 32 64 128 --ranks-per-host 8 --network-gb-per-s 25 --network-latency-us 20

The model of one step on N ranks with b utterances each:
  forward(b), backward(b), optimizer: the measured times on one rank, linear between measured b;
  a sum of S bytes: latency x log2(N) + 2 (N - 1) / N x S / bandwidth, with the link's figures inside a host and the
    network's beyond it;
  gradients: equal buckets that are ready evenly over backward and travel one after the other; what ends after backward
    is exposed (without overlap, all of it);
  contention: sums take multiprocessors from the backward pass, which lengthens it by this part of their time where the
    recurrence fills the GPU (from --full-batch utterances a rank on), and by proportionally less below;
  meeting: once a step all ranks wait for the slowest;
  shared batch norm: one small sum a layer, forward and backward, each as long as its latency.
With --fit, contention and meeting are fitted to the rows of several ranks, whose errors are then in-sample.
"""

import argparse
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.common import Table
from dispatch import plain_parser, read_result

NORMS = 51  # batch norm layers: 48 recurrent, 2 convolutions, 1 last
BUCKET_BYTES = 25 * 2**20  # of gradients that are sent together


@dataclass(frozen=True)
class LinkSpeed:
    """How long a sum takes: latency of one hop (s) and bus bandwidth (byte/s)."""

    latency_s: float
    bandwidth: float


@dataclass(frozen=True)
class MeasuredHost:
    """Measurements on one rank, and the links."""

    batches: list[float]  # utterances a rank, ascending
    forward_s: list[float]
    backward_s: list[float]
    optimizer_s: list[float]
    gradient_bytes: float
    host: LinkSpeed
    network: LinkSpeed
    ranks_per_host: int
    contention: float = 0.0
    meeting_s: float = 0.0
    full_batch: float = 0.0  # utterances with which the recurrence fills the GPU; 0: any number does

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


def step_s(machine: MeasuredHost, ranks: int, batch: float, *, overlap: bool, shared: bool) -> tuple[float, float]:
    """Seconds of a step with `batch` utterances a rank, and those in which it only waits for gradients."""
    forward, backward, optimizer = machine.compute_s(batch)
    norm_s = NORMS * machine.sum_s(ranks, 0) if shared else 0.0
    forward, backward = forward + norm_s, backward + norm_s
    buckets = max(1, math.ceil(machine.gradient_bytes / BUCKET_BYTES))
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


def measured_host(rows: list[dict[str, Any]], collectives: dict[str, Any], options: argparse.Namespace) -> MeasuredHost:
    """Take the rows of one rank and the fitted link."""
    alone = sorted({r["batch"]: r for r in rows if r["ranks"] == 1}.values(), key=lambda r: r["batch"])
    if not alone:
        raise SystemExit("the scaling file has no row of one rank: run `bench.py scaling` with --ranks 1 ...")
    if options.way not in collectives["fits"]:
        raise SystemExit(f"--way {options.way!r} is not one of {', '.join(collectives['fits'])}")
    latency_s, bandwidth = collectives["fits"][options.way]
    host = LinkSpeed(latency_s / max(1.0, math.log2(collectives["ranks"])), bandwidth)
    network = host
    if options.network_gb_per_s:
        network = LinkSpeed(options.network_latency_us * 1e-6, options.network_gb_per_s * 1e9)
    rest = [r["step_ms"] - r["forward_ms"] - r["backward_ms"] for r in alone]
    return MeasuredHost(
        [r["batch"] for r in alone], [r["forward_ms"] / 1000 for r in alone], [r["backward_ms"] / 1000 for r in alone],
        [max(0.0, ms) / 1000 for ms in rest], alone[0]["gradient_mib"] * 2**20, host, network,
        options.ranks_per_host, options.contention, options.meeting_us * 1e-6, options.full_batch,
    )  # fmt: skip


def errors(machine: MeasuredHost, rows: list[dict[str, Any]]) -> list[float]:
    """How much longer the model's steps are than the measured ones, relative to these."""
    relative = []
    for row in rows:
        batch, shared = row["batch"] / row["ranks"], row["batch_norm"] == "shared" and row["ranks"] > 1
        seconds, _ = step_s(machine, row["ranks"], batch, overlap=row["overlap"], shared=shared)
        relative.append(1000 * seconds / row["step_ms"] - 1)
    return relative


def fitted(machine: MeasuredHost, rows: list[dict[str, Any]]) -> MeasuredHost:
    """The machine with the contention and the meeting for which the largest error is smallest."""
    tried = [replace(machine, contention=0.05 * c, meeting_s=50e-6 * m) for c in range(61) for m in range(61)]
    return min(tried, key=lambda candidate: max(map(abs, errors(candidate, rows))))


def compare(machine: MeasuredHost, rows: list[dict[str, Any]], backend: str, *, fit: bool) -> MeasuredHost:
    """Print the model's error on each row of a backend's layers; return the machine, fitted to them if asked to."""
    many = [row for row in rows if row["ranks"] > 1]
    if fit and many:
        machine = fitted(machine, many)
        print(f"{backend}, fitted: contention {machine.contention:.2f}, meeting {1e6 * machine.meeting_s:.0f} us")
    print(f"\n{backend}, measured\n")
    columns = {name: f"{{{name}}}" for name in ("ranks", "batch", "overlap", "batch_norm")}
    table = Table(columns | {"step ms": "{step_ms:.1f}", "model ms": "{model_ms:.1f}", "error": "{error:+.1%}"})
    for row, error in zip(rows, errors(machine, rows), strict=True):
        table.print_row({**row, "model_ms": row["step_ms"] * (1 + error), "error": error})
    return machine


def predict(machine: MeasuredHost, rows: list[dict[str, Any]], duration_s: float, options: argparse.Namespace) -> None:
    """Print audio seconds a second, TFLOP/s of all ranks together and efficiency at each number of ranks."""
    flop_per_audio_s = 1e12 * rows[0].get("tflop_per_s", 0.0) / rows[0]["audio_s_per_s"]
    print(f"\npredicted, global batch {options.global_batch}\n")
    ways = {"overlap": (True, True), "no overlap": (False, True), "local norm": (True, False)}
    columns = {
        "ranks": "{ranks}", "utterances a rank": "{batch:g}", "step ms": "{step_ms:.1f}", "exposed": "{exposed_ms:.2f}",
        "audio s/s": "{rate:.0f}", "TFLOP/s": "{tflops:.0f}",
    }  # fmt: skip
    table = Table(columns | {f"efficiency, {way}": f"{{efficiency[{way}]:.1%}}" for way in ways})
    base, _ = step_s(machine, 1, options.global_batch, overlap=True, shared=False)
    for ranks in options.ranks:
        batch = options.global_batch / ranks
        steps = {
            way: step_s(machine, ranks, batch, overlap=overlap, shared=shared)
            for way, (overlap, shared) in ways.items()
        }
        seconds, exposed_s = steps["overlap"]
        rate = options.global_batch * duration_s / seconds
        table.print_row({
            "ranks": ranks, "batch": batch, "step_ms": 1000 * seconds, "exposed_ms": 1000 * exposed_s, "rate": rate,
            "tflops": rate * flop_per_audio_s / 1e12,
            "efficiency": {way: base / step / ranks for way, (step, _) in steps.items()},
        })  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Compare the model with the measured rows, then predict."""
    parser = plain_parser(__doc__)
    parser.add_argument("scaling", type=Path, nargs="+", help="scaling.json of `bench.py scaling`, of one model")
    parser.add_argument("collectives", type=Path)
    parser.add_argument("--way", default="ours over MPI", help="whose sums: a name in the collectives file")
    parser.add_argument("--global-batch", type=int, default=512, help="utterances over all ranks (paper: 512)")
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32, 64, 128])
    parser.add_argument("--ranks-per-host", type=int, default=8)
    parser.add_argument("--network-gb-per-s", type=float, default=0.0, help="bus bandwidth between hosts; 0: as inside")
    parser.add_argument("--network-latency-us", type=float, default=20.0)
    parser.add_argument("--contention", type=float, default=0.0, help="see above")
    parser.add_argument("--full-batch", type=float, default=0.0, help="see above; 0: contention does not depend on it")
    parser.add_argument("--meeting-us", type=float, default=0.0, help="see above")
    parser.add_argument("--fit", action="store_true", help="fit contention and meeting to the measured rows")
    parser.add_argument("--backend", nargs="+", default=["auto"], help="whose rows, where the files have several")
    options = parser.parse_args(arguments)
    try:
        *files, collectives = (read_result(path) for path in (*options.scaling, options.collectives))
    except (OSError, ValueError) as error:
        parser.error(f"{error}; `bench.py scaling` and `bench.py collectives` write such files with --out")
    for backend in options.backend:
        rows = [row for file in files for row in file["rows"] if row.get("backend", "auto") == backend]
        machine = compare(measured_host(rows, collectives, options), rows, backend, fit=options.fit)
        predict(machine, rows, files[0]["duration_s"], options)
    return 0
