"""Layers of whole utterances on a GPU: each over all frames after the other, and pieces of them side by side.

    python tools/bench_waves.py model=rnn_48_skip_4 --frames 350 1500 --batch 1 16

All recurrent modules of a model, row convolutions and skips included, as one CUDA graph. "Whole": a layer after the
other, each at once. Lanes: pieces of `--piece` frames on so many streams, whose bits are compared. Weights are random:
no time depends on them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

import torch
from timing import graphed, machine, measure
from torch import Tensor

from ds2.commands.compose import compose_config
from ds2.inference.network import PARALLEL_LAYERS, BlockNetwork
from ds2.model.acoustic import AcousticModel

BINS, LABELS = 161, 29


def model_of(overrides: Sequence[str], device: torch.device) -> AcousticModel:
    """An untrained model."""
    config = compose_config([*overrides, "run_dir=none", "data.train=[none]", "data.dev=[none]"])
    torch.manual_seed(0)
    return AcousticModel(config.model, BINS, LABELS, config.features.step_s).to(device).eval()


def stack(
    model: AcousticModel, frames: int, batch: int, piece: int, lanes: int, device: torch.device
) -> Callable[[], Tensor]:
    """A call of all recurrent modules on `frames` output frames, in pieces."""
    stride = model.time_stride
    network = BlockNetwork(model, frames * stride, torch.bfloat16, piece * stride)
    network.parallel_layers = lanes
    draw = torch.Generator(device).manual_seed(1)
    width = network.modules[0].layers[0].weight.shape[1]
    x = torch.randn(frames, batch, width, generator=draw, device=device, dtype=torch.bfloat16)
    state, slots = network.new_state(batch), torch.arange(batch, device=device)
    number = torch.full((batch,), 100, device=device)

    def call() -> Tensor:
        for table in state.tables():
            table.zero_()
        return network.run_layers(x, state, slots, number, number, edges=False)

    return call


@torch.inference_mode()
def main() -> int:
    """Print a table in Markdown; 1 if bits differ that must not."""
    parser = argparse.ArgumentParser(description="layers of whole utterances")
    parser.add_argument("overrides", nargs="*", default=["model=rnn_8", "model.depth=4"])
    parser.add_argument("--frames", type=int, nargs="+", default=[350], help="output frames")
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--piece", type=int, nargs="+", default=[44], help="output frames of a piece")
    parser.add_argument("--lanes", type=int, nargs="+", default=[1, PARALLEL_LAYERS])
    parser.add_argument("--rounds", type=int, default=20)
    given = parser.parse_args()
    device = torch.device("cuda")
    model, wrong = model_of(given.overrides, device), 0
    print(f"{' '.join(given.overrides)}, bf16, {machine(device)}")
    print("| T | B | piece | lanes | ms (10 to 90 %) | times whole |\n|---|---|---|---|---|---|")
    for frames, batch in ((frames, batch) for frames in given.frames for batch in given.batch):
        whole = graphed(stack(model, frames, batch, frames, 1, device))
        before = measure(whole, device, given.rounds)
        print(f"| {frames} | {batch} | whole | | {1e3 * before.median_s:.2f} | 1 |", flush=True)
        for piece in given.piece:
            said = None
            for lanes in given.lanes:
                call = graphed(stack(model, frames, batch, piece, lanes, device))
                found = measure(call, device, given.rounds)
                call()
                logits = call()
                assert isinstance(logits, Tensor)
                said = logits.clone() if said is None else said
                same = torch.equal(said, logits)
                wrong += not same
                spread = f"{1e3 * found.median_s:.2f} ({1e3 * found.low_s:.2f} to {1e3 * found.high_s:.2f})"
                ratio = f"{before.median_s / found.median_s:.2f}{'' if same else ', OTHER BITS'}"
                print(f"| {frames} | {batch} | {piece} | {lanes} | {spread} | {ratio} |", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
