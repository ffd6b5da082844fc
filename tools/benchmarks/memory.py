"""How many layers train in an amount of memory: the peak of whole steps at two depths, and the line through them.

    python tools/bench.py memory --batch 4 64 --duration 30 --gib 12 80    # our layers and torch.nn.RNN
    python tools/bench.py memory --batch 4 --depth 4 8 101 --kind ours     # a network of 101 layers, trained

Utterances are noise of equal length. The peak of a training step (bf16) holds the front end, CTC, gradients and
Nesterov's velocity. The line gives each further layer as much as those between the first two depths. Further depths are
trained too, and their peaks printed beside those of the line. Prints a table and one JSON line.
Needs a GPU: torch knows the peak of no other device.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from benchmarks.common import Table, facts, gpu_of, write_json
from benchmarks.training import add_noise_options, layers_of, noise_overrides, open_trainer
from dispatch import new_parser, parse

GIB = 2**30


def peak_bytes(kind: str, depth: int, batch: int, options: argparse.Namespace, folder: Path) -> int:
    """The peak of memory of training steps."""
    overrides = [
        f"model.depth={depth}", "model.skip=4", f"data.max_duration_s={options.duration + 1}", "train.graphs=off",
        "model.row_convs=0", *noise_overrides(folder, batch, options),
    ]  # fmt: skip
    with layers_of("torch" if kind == "nn.RNN" else "ours"):
        _, take_step = open_trainer(overrides, batch)
    torch.cuda.reset_peak_memory_stats()
    for _ in range(options.steps):
        take_step()
    return torch.cuda.max_memory_allocated()


def line(depths: Sequence[int], peaks: Sequence[int], gib: Sequence[float]) -> dict[str, Any]:
    """Bytes of a layer and of the rest, from the peaks of the first two depths, and the deepest network that fits.

    Args:
        depths: layers of the networks that were trained, two at least.
        peaks: bytes of each.
        gib: amounts of memory.

    Returns:
        layer_bytes, rest_bytes; deepest, layers for each of `gib`; peaks, for each depth [layers, measured GiB, GiB
        that the line has].
    """
    layer = (peaks[1] - peaks[0]) / (depths[1] - depths[0])
    rest = peaks[0] - depths[0] * layer
    deepest = [max(0, int((most * GIB - rest) // layer)) for most in gib]
    measured = [[depth, peak / GIB, (rest + depth * layer) / GIB] for depth, peak in zip(depths, peaks, strict=True)]
    return {"layer_bytes": layer, "rest_bytes": rest, "deepest": deepest, "peaks": measured}


def main(arguments: list[str] | None = None) -> int:
    """Measure all depths of every kind of layer and batch size."""
    parser = new_parser(__doc__)
    parser.add_argument("--batch", nargs="+", type=int, default=[4, 64])
    parser.add_argument("--gib", nargs="+", type=float, default=[12.0, 80.0], help="memory for the model")
    parser.add_argument("--depth", nargs="+", type=int, default=[4, 8], help="depths to train; two make the line")
    parser.add_argument("--kind", nargs="+", choices=("ours", "nn.RNN"), default=["ours", "nn.RNN"])
    parser.add_argument("--steps", type=int, default=3)
    add_noise_options(parser, duration_s=30.0)
    options = parse(parser, arguments)
    if len(options.depth) < 2 or options.depth[0] == options.depth[1]:
        parser.error(f"--depth {' '.join(map(str, options.depth))}: two different depths come first")
    device = gpu_of(parser, "torch does not record the peak of memory on a CPU")
    head = facts(options, device, f"memory of layers, {options.duration:g} s utterances, no CUDA graphs")
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
            peaks = []
            for depth in options.depth:
                gc.collect()  # else the network before, whose objects refer to each other, is part of the peak
                torch.cuda.empty_cache()
                peaks.append(peak_bytes(kind, depth, batch, options, Path(folder)))
        rows.append({"kind": kind, "batch": batch, **line(options.depth, peaks, options.gib)})
        row = rows[-1]
        table.print_row({**row, "layer_mib": row["layer_bytes"] / 2**20, "rest_gib": row["rest_bytes"] / GIB})
        for depth, measured, expected in row["peaks"][2:]:
            print(f"{kind}, batch {batch}, {depth} layers trained: {measured:.2f} GiB, the line has {expected:.2f}")
    write_json(None, {**head, "gib": options.gib, "duration_s": options.duration, "rows": rows})
    return 0
