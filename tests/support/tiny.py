"""A model of a few thousand parameters that learns the tone corpus in seconds."""

from __future__ import annotations

from pathlib import Path


def tiny_overrides_in(folder: Path, manifest: Path) -> list[str]:
    """Overrides of a run below `folder` that trains and evaluates on a manifest; later ones win."""
    return [
        f"data.train=[{manifest}]",
        f"data.dev=[{manifest}]",
        f"data.work_dir={folder / 'work'}",
        "data.workers=0",
        "alphabet.symbols='abc '",
        "model=rnn_small",
        "model.convs=[{kernel:[11,5],stride:[4,2],channels:4}]",
        "model.hidden=48",
        "model.depth=2",
        "model.skip=1",
        "model.row_convs=1",
        "model.row_conv_context=2",
        "optim=adamw",
        "optim.learning_rate=0.01",
        "optim.warmup_steps=0",
        "batching.utterances=4",
        "train.epochs=4",
        "train.log_every_steps=1",
        "device=cpu",
        f"run_dir={folder / 'run'}",
    ]
