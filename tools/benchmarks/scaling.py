"""Measure how training scales over ranks: audio seconds a second, efficiency, and the hidden part of the all-reduce.

    python tools/bench.py scaling --ranks 1 2 4 --per-rank 4 --model rnn_48_skip_4       # work grows with the ranks
    python tools/bench.py scaling --ranks 1 2 4 --global-batch 64 --model rnn_48_skip_4  # as in the paper's Figure 5

Starts `mpirun -n RANKS`, or torchrun (--launcher), for each number of ranks, and times training steps for every
combination of recurrent backend, batch, overlap and batch norm. Utterances are noise of equal length. TFLOP/s count 2
operations for each weight, frame and pass that uses it (forward, data, weights). Writes scaling.json into --out.
Options of mpirun (hosts, binding) go into --mpirun.
"""

import argparse
import itertools
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from benchmarks.common import Table, facts, wait
from benchmarks.training import add_noise_options, noise_overrides, open_trainer
from dispatch import MPI_AS_ROOT, mpirun, new_parser, parse

from ds2.config.device import resolve_device
from ds2.config.schema import CommConfig
from ds2.distributed.communicator import Communicator
from ds2.distributed.launch import connect
from ds2.model.structure import output_size
from ds2.system.files import write_json
from ds2.training.trainer import Trainer

COLUMNS = {
    "backend": "{backend}", "fixed": "{fixed}", "ranks": "{ranks}", "batch": "{batch}", "overlap": "{overlap}",
    "batch norm": "{batch_norm}", "step ms": "{step_ms:.1f}", "forward": "{forward_ms:.1f}",
    "backward": "{backward_ms:.1f}", "exposed": "{allreduce_exposed_ms:.2f}", "all-reduce": "{allreduce_total_ms:.2f}",
    "hidden": "{hidden:.0%}", "audio s/s": "{audio_s_per_s:.0f}", "TFLOP/s": "{tflop_per_s:.1f}",
    "efficiency": "{efficiency:.1%}",
}  # fmt: skip
LIMIT_S = 600  # that each number of ranks may take


def step_flop(trainer: Trainer, frames: int) -> float:
    """Operations of a step's matrix products, convolutions and recurrences over `frames` feature frames in all."""
    model = trainer.model
    bins, total = model.bins, 0.0
    for conv in model.convs:
        bins, frames = (output_size(size, stride) for size, stride in zip((bins, frames), conv.stride, strict=True))
        total += 2.0 * conv.weight.numel() * bins * frames
    total += sum(2.0 * p.numel() * frames for p in model.parameters() if p.dim() == 2)
    return 3 * total


def measure(
    comm: Communicator, options: argparse.Namespace, folder: Path, batch: int, overlap: bool, norm: str, backend: str
) -> dict[str, Any]:
    """Mean step of one combination on these ranks, with its split."""
    with comm.in_turn():
        noise = noise_overrides(folder / str(batch), batch, options)
    overrides = [
        f"model={options.model}", f"model.backend={backend}", f"comm.overlap={overlap}", f"comm.batch_norm={norm}",
        *noise,
    ]  # fmt: skip
    trainer, take_step = open_trainer(overrides, batch, comm)
    trainer.overlap.decided = True  # each of the two is measured
    for _ in range(options.warmup):
        take_step()
    trainer.timer.means(1)
    comm.allgather(None)
    began = time.perf_counter()
    for _ in range(options.steps):
        take_step()
    wait(trainer.device)
    step_s = (time.perf_counter() - began) / options.steps
    split = trainer.timer.means(options.steps)
    step_s = max(comm.allgather(step_s))
    frames = trainer.features.frames(int(options.duration * trainer.config.data.sample_rate_hz)) * batch
    return {
        "backend": backend, "tflop_per_s": step_flop(trainer, frames) / step_s / 1e12,
        "ranks": comm.world, "comm": comm.name, "batch": batch, "overlap": overlap, "batch_norm": norm,
        "step_ms": 1000 * step_s, "audio_s_per_s": batch * options.duration / step_s,
        "gradient_mib": sum(p.numel() * p.element_size() for p in trainer.model.parameters()) / 2**20,
        **{f"{name}_ms": 1000 * seconds for name, seconds in split.items()},
    }  # fmt: skip


def run_rank(options: argparse.Namespace) -> None:
    """Run all combinations on the ranks of this job; rank 0 writes the rows."""
    folder, rows = options.as_rank, []
    with connect(CommConfig(timeout_s=120), options.device) as comm:
        batches = [("per_rank", n * comm.world) for n in options.per_rank]
        batches += [("global", n) for n in options.global_batch]
        choices = list(itertools.product([True, False], options.batch_norm)) if comm.world > 1 else [(True, "shared")]
        for backend, (overlap, norm), (fixed, batch) in itertools.product(options.backend, choices, batches):
            rows.append({"fixed": fixed, **measure(comm, options, folder, batch, overlap, norm, backend)})
            if comm.rank == 0:
                print(f"{comm.world} ranks: {json.dumps(rows[-1])}", flush=True)
            if comm.device.type == "cuda":
                torch.cuda.empty_cache()
        if comm.rank == 0:
            (folder / f"rows-{comm.world}.json").write_text(json.dumps(rows))


def launch(arguments: list[str], options: argparse.Namespace, ranks: int, folder: Path) -> list[dict[str, Any]]:
    """Start the ranks and read what rank 0 wrote."""
    launcher = [mpirun(), "-n", str(ranks), *shlex.split(options.mpirun), sys.executable]
    if options.launcher == "torchrun":
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    tool = str(Path(__file__).parents[1] / "bench.py")
    command = [*launcher, tool, "scaling", *arguments, "--as-rank", str(folder), "--commit", options.commit]
    subprocess.run(command, check=True, env={**os.environ, **MPI_AS_ROOT}, timeout=LIMIT_S)
    return json.loads((folder / f"rows-{ranks}.json").read_text())


def add_efficiency(rows: list[dict[str, Any]]) -> None:
    """Add the throughput a rank over that of the fewest ranks with the same batch (a rank, or in all)."""

    def work(row: dict[str, Any]) -> tuple[str, str, float]:
        return row["fixed"], row["backend"], row["batch"] / (row["ranks"] if row["fixed"] == "per_rank" else 1)

    for row in rows:
        comparable = [other for other in rows if work(other) == work(row)]
        base = min(comparable, key=lambda r: (r["ranks"], not r["overlap"]))
        row["efficiency"] = row["audio_s_per_s"] / row["ranks"] / (base["audio_s_per_s"] / base["ranks"])


def main(arguments: list[str]) -> int:
    """Start ranks and report; or be one of them."""
    parser = new_parser(__doc__)
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--per-rank", nargs="*", type=int, default=[], help="utterances a rank: the global batch grows")
    parser.add_argument("--global-batch", nargs="*", type=int, default=[], help="utterances over all ranks: fixed")
    parser.add_argument("--batch-norm", nargs="+", default=["shared"], choices=["shared", "local"])
    parser.add_argument("--model", default="rnn_8")
    parser.add_argument("--backend", nargs="+", default=["auto"], help="recurrent backends of ds2_ops, e.g. auto gemm")
    parser.add_argument("--launcher", default="mpirun", choices=["mpirun", "torchrun"])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--warmup", type=int, default=14, help="recorded passes start at the eleventh step")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--mpirun", default="--oversubscribe --bind-to none", help="options of mpirun")
    parser.add_argument("--out", type=Path, default=Path("."), help="folder of scaling.json")
    parser.add_argument("--as-rank", type=Path, help=argparse.SUPPRESS)
    add_noise_options(parser)
    options = parse(parser, arguments)
    if not options.per_rank and not options.global_batch:
        options.per_rank = [4]
    if options.as_rank:
        run_rank(options)
        return 0
    head = facts(options, resolve_device(options.device), f"{options.model}, {options.duration:g} s utterances")
    with tempfile.TemporaryDirectory() as folder:
        rows = [row for ranks in options.ranks for row in launch(arguments, options, ranks, Path(folder))]
    add_efficiency(rows)
    table = Table(COLUMNS)
    for row in rows:
        total_ms = row.get("allreduce_total_ms", 0.0)
        hidden = max(0.0, 1 - row["allreduce_exposed_ms"] / total_ms) if total_ms else None
        table.print_row({**row, "hidden": hidden})
    head |= {"model": options.model, "duration_s": options.duration}
    write_json(options.out / "scaling.json", {**head, "rows": rows})
    return 0
