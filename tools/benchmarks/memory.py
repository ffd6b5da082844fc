"""How many layers train in an amount of memory: the peak of whole steps at two depths, and the line through them.

    python tools/bench.py memory --batch 4 64 --duration 30 --gib 12 80    # our layers and torch.nn.RNN

Utterances are noise of equal length. The peak of a training step (bf16) holds the front end, CTC, gradients and
Nesterov's velocity. Each layer beyond the two depths is taken to need what the last measured ones did. Prints a table
and one JSON line. Needs a GPU: torch knows the peak of no other device.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from pathlib import Path
from unittest import mock

import torch
from benchmarks.common import Table, facts, new_parser, parse, write_json, write_noise
from benchmarks.training import add_noise_options, noise_overrides
from torch import Tensor, nn

from ds2.commands.compose import compose_config
from ds2.config.schema import ModelConfig
from ds2.model import acoustic
from ds2.model.norm import SequenceBatchNorm
from ds2.model.ragged import Ragged
from ds2.training.trainer import Trainer

GIB = 2**30


class TorchLayer(nn.Module):
    """`torch.nn.RNN` in place of our layer, with batch norm before it."""

    def __init__(self, width_in: int, config: ModelConfig) -> None:
        super().__init__()
        self.norm = SequenceBatchNorm(width_in, config.batch_norm_momentum)
        self.rnn = nn.RNN(width_in, config.hidden, nonlinearity="relu")

    def forward(self, x: Tensor, ragged: Ragged, state: object = None) -> tuple[Tensor, object]:
        """Return what our layers return."""
        y, last = self.rnn(self.norm(x, ragged.count))
        return torch.where(ragged.valid.t()[:, :, None], y, 0.0), last


def peak_bytes(kind: str, depth: int, batch: int, options: argparse.Namespace, folder: Path) -> int:
    """The peak of memory of training steps."""
    config = compose_config([
        f"model.depth={depth}", f"model.skip={options.skip}", f"data.max_duration_s={options.duration + 1}",
        f"train.graphs={options.graphs}", "model.row_convs=0", *noise_overrides(folder, batch), *options.overrides,
    ])  # fmt: skip
    layer = TorchLayer if kind == "nn.RNN" else acoustic.make_recurrent_layer
    with mock.patch.object(acoustic, "make_recurrent_layer", layer):
        trainer = Trainer(config, folder / "run")
    trainer.model.train()
    prepared = next(iter(trainer.loader.epoch([list(range(batch))], 1)))
    batches = trainer.prepared(itertools.repeat(prepared.pin_memory()))
    torch.cuda.reset_peak_memory_stats()
    for _ in range(options.steps):
        trainer.step(batches, [range(batch)])
    return torch.cuda.max_memory_allocated()


def main(arguments: list[str] | None = None) -> int:
    """Measure both depths of every kind of layer and batch size."""
    parser = new_parser(__doc__)
    parser.add_argument("--batch", nargs="+", type=int, default=[4, 64])
    parser.add_argument("--gib", nargs="+", type=float, default=[12.0, 80.0], help="memory for the model")
    parser.add_argument("--depth", nargs=2, type=int, default=[4, 8], help="the two depths that are measured")
    parser.add_argument("--skip", type=int, default=4, help="layers that a residual skip spans")
    parser.add_argument("--kind", nargs="+", choices=("ours", "nn.RNN"), default=["ours", "nn.RNN"])
    parser.add_argument("--graphs", choices=("auto", "off"), default="off")
    parser.add_argument("--steps", type=int, default=3)
    add_noise_options(parser, duration_s=30.0)
    options = parse(parser, arguments)
    if not torch.cuda.is_available():
        parser.error("this needs a GPU: torch does not record the peak of memory on a CPU")
    title = f"memory of layers, {options.duration:g} s utterances, graphs {options.graphs}"
    head = facts(options, torch.device("cuda"), title)
    few, many = options.depth
    columns = {
        "layers": "{kind}",
        "batch": "{batch}",
        "MiB a layer": "{layer_mib:.1f}",
        "GiB for the rest": "{rest_gib:.2f}",
    }
    table = Table(columns | {f"layers in {gib:g} GiB": f"{{deepest[{n}]}}" for n, gib in enumerate(options.gib)})
    rows = []
    for batch, kind in itertools.product(options.batch, options.kind):
        with tempfile.TemporaryDirectory() as folder:
            write_noise(Path(folder), batch, options.duration, options.characters)
            peaks = []
            for depth in (few, many):
                torch.cuda.empty_cache()
                peaks.append(peak_bytes(kind, depth, batch, options, Path(folder)))
        layer = (peaks[1] - peaks[0]) / (many - few)
        rest = peaks[0] - few * layer
        deepest = [max(0, int((gib * GIB - rest) // layer)) for gib in options.gib]
        rows.append({"kind": kind, "batch": batch, "layer_bytes": layer, "rest_bytes": rest, "deepest": deepest})
        table.print_row({**rows[-1], "layer_mib": layer / 2**20, "rest_gib": rest / GIB})
    write_json(None, {**head, "gib": options.gib, "duration_s": options.duration, "rows": rows})
    return 0
