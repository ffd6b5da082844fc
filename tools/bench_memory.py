"""How deep a stack trains in so much memory: peak of whole steps at two depths, and the line through them.

    python tools/bench_memory.py --batch 4 64 --duration 30 --gib 12 80    # our layers beside torch.nn.RNN

Utterances are noise of equal length; steps are the trainer's (bf16 on a GPU): front end, CTC, gradients and Nesterov's
velocity are part of the peak. Layers beyond the two depths cost what the last ones did: the same activations, weights,
gradients and velocities each. Prints a table and one JSON line. Runs on a GPU, the only device whose peak torch knows.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
from pathlib import Path
from unittest import mock

import torch
from bench_training import write_corpus
from torch import Tensor, nn

from ds2.commands.compose import compose_config
from ds2.config.schema import ModelConfig
from ds2.model import acoustic
from ds2.model.norm import SequenceBatchNorm
from ds2.model.ragged import Ragged
from ds2.system.machine import git_commit
from ds2.training.trainer import Trainer

GIB = 2**30


class TorchLayer(nn.Module):
    """`torch.nn.RNN` in place of our layer: batch norm in front of it, as of torch's other cells."""

    def __init__(self, width_in: int, config: ModelConfig) -> None:
        super().__init__()
        self.norm = SequenceBatchNorm(width_in, config.batch_norm_momentum)
        self.rnn = nn.RNN(width_in, config.hidden, nonlinearity="relu")

    def forward(self, x: Tensor, ragged: Ragged, state: object = None) -> tuple[Tensor, object]:
        """As our layers'."""
        y, last = self.rnn(self.norm(x, ragged.count))
        return torch.where(ragged.valid.t()[:, :, None], y, 0.0), last


def peak_bytes(kind: str, depth: int, batch: int, args: argparse.Namespace, folder: Path) -> int:
    """The most memory that steps of a stack take."""
    overrides = [
        f"model.depth={depth}", f"model.skip={args.skip}", "optim=sgd", "optim.learning_rate=1e-6",
        f"batching.utterances={batch}", f"data.train=[{folder / 'noise.jsonl'}]", f"data.work_dir={folder}",
        "data.workers=0", f"data.max_duration_s={args.duration + 1}",
        "train.max_skipped_steps=100", f"train.graphs={args.graphs}", "model.row_convs=0", f"run_dir={folder / 'run'}",
        *args.overrides,
    ]  # fmt: skip
    config = compose_config(overrides)
    make = TorchLayer if kind == "nn.RNN" else acoustic.make_recurrent_layer
    with (
        mock.patch.object(acoustic, "make_recurrent_layer", make),
        mock.patch.object(acoustic.AcousticModel, "_scale_branches", lambda model: None),
    ):
        trainer = Trainer(config, folder / "run")
    trainer.model.train()
    prepared = next(iter(trainer.loader.epoch([list(range(batch))], 1)))
    batches = trainer.prepared(itertools.repeat(prepared.pin_memory()))
    torch.cuda.reset_peak_memory_stats()
    for _ in range(args.steps):
        trainer.step(batches, [range(batch)])
    return torch.cuda.max_memory_allocated()


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", nargs="+", type=int, default=[4, 64])
    parser.add_argument("--duration", type=float, default=30.0, help="seconds of each utterance")
    parser.add_argument("--characters", type=float, default=14.0, help="characters of transcript a second")
    parser.add_argument("--gib", nargs="+", type=float, default=[12.0, 80.0], help="memory that the stack may take")
    parser.add_argument("--depth", nargs=2, type=int, default=[4, 8], help="two depths that are measured")
    parser.add_argument("--skip", type=int, default=4, help="layers that a residual skip spans")
    parser.add_argument("--kind", nargs="+", choices=("ours", "nn.RNN"), default=["ours", "nn.RNN"])
    parser.add_argument("--graphs", choices=("auto", "off"), default="off")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("overrides", nargs="*", help="further settings, e.g. model.hidden=2560")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no GPU here, and no other device says how much memory was taken at most")
    print(f"torch {torch.__version__} on {torch.cuda.get_device_name()}, commit {git_commit()}")
    few, many = args.depth
    print(f"{args.duration:g} s utterances; layers of 1152 unless overridden; graphs {args.graphs}")
    print(
        f"{'layers':<8}{'batch':>6}{'MiB a layer':>13}{'GiB without':>13}" + "".join(f"{g:>9g} GiB" for g in args.gib)
    )
    rows = []
    for batch, kind in itertools.product(args.batch, args.kind):
        with tempfile.TemporaryDirectory() as folder:
            write_corpus(Path(folder), batch, args.duration, args.characters)
            peaks = []
            for depth in (few, many):
                torch.cuda.empty_cache()
                peaks.append(peak_bytes(kind, depth, batch, args, Path(folder)))
        layer = (peaks[1] - peaks[0]) / (many - few)
        rest = peaks[0] - few * layer
        deepest = [max(0, int((gib * GIB - rest) // layer)) for gib in args.gib]
        rows.append({"kind": kind, "batch": batch, "layer_bytes": layer, "rest_bytes": rest, "deepest": deepest})
        print(
            f"{kind:<8}{batch:>6}{layer / 2**20:>13.1f}{rest / GIB:>13.2f}" + "".join(f"{d:>13}" for d in deepest),
            flush=True,
        )
    print(json.dumps({"gib": args.gib, "duration_s": args.duration, "rows": rows}))


if __name__ == "__main__":
    main()
