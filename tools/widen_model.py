"""A trained model in the size of a larger one, whose new weights are zeros: it says the same and costs as much.

    python tools/widen_model.py MODEL OUT.safetensors --hidden 1152 --channels 32

How fast a large model is served depends on what it says, as a search follows what is likely; this shows it without
training the large one. Layers that are added in a module, behind its others, hand on what they are given.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch

from ds2.audio.features import Features
from ds2.model.acoustic import AcousticModel
from ds2.model.checkpoint import find_model, load_model, save_model


def main() -> None:
    """Write the larger model, and say how far its logits are from the smaller one's."""
    parser = argparse.ArgumentParser(description="a trained model in the size of a larger one")
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--hidden", type=int, default=1152)
    parser.add_argument("--channels", type=int, default=32)
    parser.add_argument("--times", type=int, default=1, help="as many relu layers in each module")
    given = parser.parse_args()
    found = load_model(find_model(given.model))
    convs = [replace(conv, channels=given.channels) for conv in found.config.model.convs]
    before = found.config.model
    if given.times > 1 and (before.cell != "rnn" or not before.skip):
        parser.error(f"layers of cell={before.cell}, skip={before.skip} cannot hand on what they are given")
    size = replace(before, depth=given.times * before.depth, skip=given.times * before.skip)
    config = replace(found.config, model=replace(size, hidden=given.hidden, convs=convs))
    features: Features = found.features
    model = AcousticModel(config.model, features.bins, len(found.alphabet), config.features.step_s).eval()
    small, large = found.model.state_dict(), model.state_dict()
    for name, tensor in large.items():
        tensor.fill_(1 if name.endswith("running_var") else 0)
        if name in small:
            tensor[tuple(slice(size) for size in small[name].shape)] = small[name]
        elif name.endswith("weight_ih"):
            tensor.fill_diagonal_(1)
        elif name.endswith("norm.weight"):
            tensor.fill_(1)
    model.load_state_dict(large)
    save_model(given.out, model, features, found.alphabet, config, found.metadata["metrics"])
    heard = torch.randn(1, features.bins, 300)
    with torch.inference_mode():
        ours, theirs = (m(heard, torch.tensor([300]))[0] for m in (model, found.model))
    print(
        f"{sum(map(torch.numel, model.parameters())):,} parameters, logits differ by {(ours - theirs).abs().max():.1e}"
    )


if __name__ == "__main__":
    main()
