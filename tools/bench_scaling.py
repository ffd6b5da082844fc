"""Measure how training scales over ranks: audio seconds a second, efficiency, and how much of the all-reduce is hidden.

    python tools/bench_scaling.py --ranks 1 2 4 --per-rank 4 --model rnn_48_skip_4       # work grows with the ranks
    python tools/bench_scaling.py --ranks 1 2 4 --global-batch 64 --model rnn_48_skip_4  # as in the paper's Figure 5

Starts `mpirun -n RANKS`, or torchrun (--launcher), itself for each number of ranks, and there takes whole training
steps of the trainer for every combination of recurrent backend, batch, overlap and batch norm. Utterances are noise of
equal length. Sustained TFLOP/s: 2 for each weight, frame and pass that uses it (forward, data, weights). Writes
scaling.json and, where matplotlib is installed, scaling.png into --out. Options of mpirun (hosts, binding) go into
--mpirun.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from bench_training import write_corpus

from ds2.commands.compose import compose_config
from ds2.config.device import resolve_device
from ds2.config.schema import CommConfig
from ds2.data.batching import deal
from ds2.data.loader import Batch
from ds2.distributed.communicator import Communicator
from ds2.distributed.launch import connect
from ds2.system.machine import git_commit
from ds2.training.trainer import Trainer


def step_flop(trainer: Trainer, frames: int) -> float:
    """Operations of a step's matrix products, convolutions and recurrences over so many feature frames in all."""
    model = trainer.model
    bins, total = model.bins, 0.0
    for conv in model.convs:
        frames, bins = -(-frames // conv.stride[1]), conv.output_bins(bins)
        total += 2.0 * conv.weight.numel() * bins * frames
    total += sum(2.0 * p.numel() * frames for p in model.parameters() if p.dim() == 2)
    return 3 * total


def measure(
    comm: Communicator, args: argparse.Namespace, folder: Path, batch: int, overlap: bool, norm: str, backend: str
) -> dict[str, Any]:
    """Mean step of one combination on these ranks, with its split; equal on all ranks but for what they waited."""
    with comm.in_turn():
        corpus = folder / str(batch)
        if not (corpus / "noise.jsonl").is_file():
            corpus.mkdir(parents=True, exist_ok=True)
            write_corpus(corpus, batch, args.duration, args.characters)
    overrides = [
        f"model={args.model}", f"batching.utterances={batch}", f"data.train=[{corpus / 'noise.jsonl'}]", "optim=sgd",
        "optim.learning_rate=1e-6", f"data.work_dir={corpus}", "data.workers=0",
        "train.max_skipped_steps=100000", f"comm.overlap={overlap}", f"comm.batch_norm={norm}",
        f"model.backend={backend}", f"comm.bucket_mib={args.bucket_mib}", f"run_dir={folder / 'run'}", *args.overrides,
    ]  # fmt: skip
    config = compose_config(overrides)
    trainer = Trainer(config, folder / "run", comm)
    trainer.model.train()
    plan = [list(range(batch))]
    part: Batch = next(iter(trainer.loader.epoch([deal(plan[0], comm.rank, comm.world)], 1)))
    part = part.pin_memory() if trainer.device.type == "cuda" else part
    trainer.overlap.decided = True  # each way is measured by itself
    batches = trainer.prepared(itertools.repeat(part))
    for _ in range(args.warmup):
        trainer.step(batches, plan)
    trainer.timer.means(1)
    comm.allgather(None)
    began = time.perf_counter()
    for _ in range(args.steps):
        trainer.step(batches, plan)
    if trainer.device.type == "cuda":
        torch.cuda.synchronize()
    step_s = (time.perf_counter() - began) / args.steps
    split = trainer.timer.means(args.steps)
    step_s = max(comm.allgather(step_s))
    frames = trainer.features.frames(int(args.duration * trainer.config.data.sample_rate_hz)) * batch
    return {
        "backend": backend, "tflop_per_s": step_flop(trainer, frames) / step_s / 1e12,
        "ranks": comm.world, "comm": comm.name, "batch": batch, "overlap": overlap, "batch_norm": norm,
        "step_ms": 1000 * step_s, "audio_s_per_s": batch * args.duration / step_s,
        "gradient_mib": sum(p.numel() * p.element_size() for p in trainer.model.parameters()) / 2**20,
        **{f"{name}_ms": 1000 * seconds for name, seconds in split.items()},
    }  # fmt: skip


def as_rank(args: argparse.Namespace) -> None:
    """Run all combinations on the ranks of this job; rank 0 writes the rows."""
    folder = Path(args.as_rank)
    rows = []
    with connect(CommConfig(backend=args.comm, timeout_s=120), args.device) as comm:
        batches = [("per_rank", n * comm.world) for n in args.per_rank] + [("global", n) for n in args.global_batch]
        choices = list(itertools.product([True, False], args.batch_norm)) if comm.world > 1 else [(True, "shared")]
        for backend, (overlap, norm), (fixed, batch) in itertools.product(args.backend, choices, batches):
            rows.append({"fixed": fixed, **measure(comm, args, folder, batch, overlap, norm, backend)})
            if comm.rank == 0:
                print(f"{comm.world} ranks: {json.dumps(rows[-1])}", flush=True)
            if comm.device.type == "cuda":
                torch.cuda.empty_cache()
        if comm.rank == 0:
            device = torch.cuda.get_device_name(comm.device) if comm.device.type == "cuda" else "cpu"
            text = json.dumps([{**row, "device": device} for row in rows])
            (folder / f"rows-{comm.world}.json").write_text(text)


def launch(args: argparse.Namespace, ranks: int, folder: Path) -> list[dict[str, Any]]:
    """Start the ranks and read what rank 0 wrote."""
    beside = Path(sys.executable).with_name("mpirun")
    mpirun = str(beside) if beside.is_file() else shutil.which("mpirun") or "mpirun"
    launcher = [mpirun, "-n", str(ranks), *shlex.split(args.mpirun), sys.executable]
    if args.launcher == "torchrun":
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    command = [*launcher, *sys.argv, "--as-rank", str(folder)]
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"} if os.geteuid() == 0 else {}
    subprocess.run(command, check=True, env={**os.environ, **root}, timeout=args.limit)
    rows: list[dict[str, Any]] = json.loads((folder / f"rows-{ranks}.json").read_text())
    return rows


def with_efficiency(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add the throughput a rank as a fraction of what the fewest ranks reach with the same batch a rank, or in all."""
    for row in rows:
        per_rank = row["fixed"] == "per_rank"
        like = [
            r
            for r in rows
            if (r["fixed"], r["backend"]) == (row["fixed"], row["backend"])
            and (r["batch"] * row["ranks"] == row["batch"] * r["ranks"] if per_rank else r["batch"] == row["batch"])
        ]
        base = min(
            like,
            key=lambda r: (r["ranks"], not r["overlap"]),
        )
        row["efficiency"] = row["audio_s_per_s"] / row["ranks"] / (base["audio_s_per_s"] / base["ranks"])
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as text."""
    lines = [
        f"{'backend':<9}{'fixed':<9}{'ranks':>6}{'batch':>7}{'overlap':>9}{'norm':>8}{'step ms':>9}{'fwd':>8}{'bwd':>8}"
        f"{'exposed':>9}{'total':>8}{'hidden':>8}{'audio s/s':>11}{'TFLOP/s':>9}{'efficiency':>12}"
    ]
    for row in rows:
        total, exposed = row.get("allreduce_total_ms", 0.0), row["allreduce_exposed_ms"]
        hidden = f"{max(0.0, 1 - exposed / total):.0%}" if total else "-"
        lines.append(
            f"{row['backend']:<9}{row['fixed']:<9}{row['ranks']:>6}{row['batch']:>7}{row['overlap']!s:>9}{row['batch_norm']:>8}{row['step_ms']:>9.1f}"
            f"{row['forward_ms']:>8.1f}{row['backward_ms']:>8.1f}{exposed:>9.2f}{total:>8.2f}{hidden:>8}"
            f"{row['audio_s_per_s']:>11.0f}{row['tflop_per_s']:>9.1f}{row['efficiency']:>12.1%}"
        )
    return "\n".join(lines)


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Throughput over ranks, a line for each combination, beside the linear one."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4.5), layout="constrained")
    axes = figure.add_subplot()
    key = lambda r: (r["backend"], r["fixed"], r["overlap"], r["batch_norm"])  # noqa: E731
    for (backend, mode, overlap, norm), group in itertools.groupby(
        sorted(rows, key=lambda r: (*key(r), r["ranks"])), key
    ):
        points = list(group)
        label = f"{backend}, fixed {mode} batch, {'' if overlap else 'no '}overlap, {norm} batch norm"
        axes.plot([p["ranks"] for p in points], [p["audio_s_per_s"] for p in points], "o-", label=label)
    first = min(rows, key=lambda r: r["ranks"])
    ranks = sorted({r["ranks"] for r in rows})
    axes.plot(ranks, [first["audio_s_per_s"] * n / first["ranks"] for n in ranks], "k--", lw=0.8, label="linear")
    axes.set(xscale="log", yscale="log", xlabel="ranks", ylabel="audio seconds a second")
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=150)


def main() -> None:
    """Parse; be a rank, or start ranks and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--per-rank", nargs="*", type=int, default=[], help="utterances a rank: the global batch grows")
    parser.add_argument("--global-batch", nargs="*", type=int, default=[], help="utterances over all ranks: fixed")
    parser.add_argument("--batch-norm", nargs="+", default=["shared"], choices=["shared", "local"])
    parser.add_argument("--model", default="rnn_8")
    parser.add_argument("--duration", type=float, default=7.0, help="seconds of each utterance")
    parser.add_argument("--characters", type=float, default=14.0, help="characters of transcript a second")
    parser.add_argument("--backend", nargs="+", default=["auto"], help="recurrent backends of ds2_ops, e.g. auto gemm")
    parser.add_argument("--comm", default="auto", choices=["auto", "mpi", "gloo", "nccl"])
    parser.add_argument("--launcher", default="mpirun", choices=["mpirun", "torchrun"])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--bucket-mib", type=float, default=25.0)
    parser.add_argument("--warmup", type=int, default=14, help="recorded passes start at the eleventh step")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--mpirun", default="--oversubscribe --bind-to none", help="options of mpirun")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds that each number of ranks may take")
    parser.add_argument("--out", type=Path, default=Path("."), help="folder of scaling.json and scaling.png")
    parser.add_argument("--as-rank", help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", help="further settings, e.g. model.depth=2")
    args = parser.parse_args()
    if not args.per_rank and not args.global_batch:
        args.per_rank = [4]
    if args.as_rank:
        as_rank(args)
        return
    resolve_device(args.device)
    with tempfile.TemporaryDirectory() as folder:
        rows = [row for ranks in args.ranks for row in launch(args, ranks, Path(folder))]
    rows = with_efficiency(rows)
    where = f"torch {torch.__version__}, {rows[0]['device']}, commit {git_commit()}"
    print(f"{args.model}, {args.duration:g} s utterances, {where}")
    print(table(rows))
    args.out.mkdir(parents=True, exist_ok=True)
    facts = {"model": args.model, "duration_s": args.duration, "torch": torch.__version__, "commit": git_commit()}
    (args.out / "scaling.json").write_text(json.dumps({**facts, "rows": rows}, indent=1))
    try:
        plot(rows, args.out / "scaling.png")
    except ImportError:
        print("no plot: pip install matplotlib")


if __name__ == "__main__":
    main()
