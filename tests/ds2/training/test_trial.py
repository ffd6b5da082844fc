"""What a trial says of memory is what training needs, and it leaves the run alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.run_log import losses

from ds2.config.schema import Config
from ds2.training.loop import train
from ds2.training.trainer import Trainer

MakeConfig = Callable[..., Config]
pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "overrides",
    [("model.backend=auto",), ("model.cell=lstm", "optim=adamw"), ("train.graphs=off", "train.precision=fp32")],
    ids=["graphs", "lstm", "fp32"],
)
def test_training_needs_what_the_trial_measured(
    tiny_config: MakeConfig, tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    config = tiny_config("device=cuda", "model.hidden=256", "batching.utterances=10", *overrides)
    trainer = Trainer(config, tmp_path / "run")
    weights = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    drawn = torch.get_rng_state(), torch.cuda.get_rng_state()
    measure, room, most_s = trainer._trial()
    plan = trainer.plan()
    told = max(measure(batch) or 0.0 for batch in plan)
    del measure
    assert most_s > 100 and told < room <= torch.cuda.get_device_properties(0).total_memory
    assert all(torch.equal(value, weights[name]) for name, value in trainer.model.state_dict().items())
    assert torch.equal(drawn[0], torch.get_rng_state()) and torch.equal(drawn[1], torch.cuda.get_rng_state())
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    batches = trainer.epoch(plan)
    trainer.model.train()
    for batch in plan:
        trainer.step(batches, [batch])
    peak = torch.cuda.max_memory_allocated()
    assert peak <= 1.1 * told + (64 << 20)  # a tiny model: workspaces of libraries are what differs
    assert told <= 1.5 * peak + (64 << 20)


def test_a_run_finds_its_budget_and_keeps_it(tiny_config: MakeConfig, tmp_path: Path) -> None:
    auto = ("device=cuda", "batching=auto", "train.epochs=2")
    assert train(tiny_config(*auto, "train.max_steps=1"), tmp_path / "broken") == 0
    assert train(tiny_config(*auto), tmp_path / "broken") == 0
    assert train(tiny_config(*auto), tmp_path / "whole") == 0
    assert losses(tmp_path / "broken") == losses(tmp_path / "whole")
