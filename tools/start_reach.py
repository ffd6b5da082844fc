"""How far back an untrained network looks: where the gradient of an output frame falls, by start and skip.

    python tools/start_reach.py --skip 1 4 8 0

Starts are damped and plain of model.start, and what comes of taking the recurrent weights of one and the residual
branches of the other (plain weights, damped branches: even). Noise goes in, batch norm in training mode; frames are the
network's (40 ms at 25 a second).
"""

from __future__ import annotations

import argparse
import itertools

import torch
from torch import Tensor

from ds2.config.schema import ConvConfig, ModelConfig
from ds2.model.acoustic import AcousticModel

BINS, LABELS, FRAMES, BATCH = 80, 29, 480, 8
STARTS = ("damped", "plain")
WITHIN = (2, 5, 10, 20)


def network(depth: int, hidden: int, skip: int, start: str) -> AcousticModel:
    """A network of the paper's tables at 25 frames a second, always with the same draws."""
    torch.manual_seed(1)
    convs = [ConvConfig([41, 11], [2, 2], 32), ConvConfig([21, 11], [2, 2], 32)]
    config = ModelConfig(
        depth=depth, hidden=hidden, skip=skip, start=start, convs=convs, row_convs=10, row_conv_context=1
    )
    return AcousticModel(config, BINS, LABELS)


def mixed(depth: int, hidden: int, skip: int, weights: str, branches: str) -> AcousticModel:
    """A network whose recurrent weights start in one way and whose residual branches in another."""
    model = network(depth, hidden, skip, branches)
    other = network(depth, hidden, skip, weights).state_dict()
    model.load_state_dict(model.state_dict() | {name: other[name] for name in other if "weight_hh" in name})
    return model


def gradient_energy(model: AcousticModel) -> tuple[Tensor, Tensor]:
    """Where the gradient of one output frame, projected at random, comes from.

    Returns:
        (FRAMES,) its energy by feature frame, of sum 1, and how many output frames each lies behind that frame.
    """
    torch.manual_seed(2)
    features = torch.randn(BATCH, BINS, FRAMES, requires_grad=True)
    logits, lengths = model(features, torch.full((BATCH,), FRAMES))
    frame = 2 * int(lengths[0]) // 3
    of_frame = logits[frame]
    (gradient,) = torch.autograd.grad((of_frame * torch.randn_like(of_frame)).sum(), features)
    energy = gradient.square().sum((0, 1))
    return energy / energy.sum(), frame - torch.arange(FRAMES) / model.time_stride


def main() -> None:
    """Print a row a start and skip."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, default=48)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--skip", type=int, nargs="+", default=[1, 4, 8, 0])
    given = parser.parse_args()
    columns = " | ".join(f"within {frames}" for frames in WITHIN)
    print(f"| skip | recurrent weights | branches | frames behind, mean | {columns} |\n|{'---|' * (4 + len(WITHIN))}")
    for skip, weights, branches in itertools.product(given.skip, STARTS, STARTS):
        if not skip and weights != branches:
            continue  # without residuals there are no branches
        energy, behind = gradient_energy(mixed(given.depth, given.hidden, skip, weights, branches))
        shares = [f"{100 * float(energy[behind.abs() <= frames + 0.5].sum()):.0f} %" for frames in WITHIN]
        print(f"| {skip} | {weights} | {branches} | {float((energy * behind).sum()):.1f} | {' | '.join(shares)} |")


if __name__ == "__main__":
    main()
