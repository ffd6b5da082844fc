"""What training makes smaller: the CTC loss, that of intermediate classifiers, the divergence of two views."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ds2.audio.spec_augment import apply_masks
from ds2.audio.vocal_tract import warp
from ds2.config.schema import Config, ConfigError
from ds2.training.ctc import ctc_losses, divergence
from ds2.training.inputs import Inputs
from ds2.training.trainer import Trainer

MakeConfig = Callable[..., Config]
PLACES = [[0, 3, 5]]
MASKS = ("augment.time_masks=2", "augment.time_fraction=0.5", "model.dropout=0.2")


def prepared(config: Config) -> tuple[Trainer, Inputs]:
    trainer = Trainer(config, Path(config.run_dir))
    trainer.model.train()
    return trainer, trainer.inputs(next(iter(trainer.loader.epoch(PLACES, 1))), 1)


def test_two_views_of_an_utterance_differ_in_masks_and_dropout(tiny_config: MakeConfig) -> None:
    _, one = prepared(tiny_config(*MASKS))
    _, two = prepared(tiny_config(*MASKS, "train.consistency=0.2"))
    assert one.masks is not None and two.masks is not None
    first, second = two.masks.time.chunk(2)
    assert torch.equal(first, one.masks.time) and not torch.equal(second, one.masks.time)
    keys, others = two.keys.chunk(2)
    assert torch.equal(keys, one.keys) and not set(others.tolist()) & set(keys.tolist())


@pytest.mark.parametrize("cell", ["rnn", "lstm"])
def test_dropout_rises_by_epochs_beside_all_else_that_travels(tiny_config: MakeConfig, cell: str) -> None:
    extra = (*MASKS, "augment.vtlp=[0.8,1.2]", "train.consistency=0.2", f"model.cell={cell}")
    _, whole = prepared(tiny_config(*extra))
    trainer, first = prepared(tiny_config(*extra, "train.dropout_rise_epochs=4", "train.epochs=9"))
    assert whole.dropout_share is None
    batch = next(iter(trainer.loader.epoch(PLACES, 1)))
    shares = [trainer.inputs(batch, epoch).dropout_share for epoch in (1, 2, 4, 5, 9)]
    assert all(share is not None and share.shape == (6,) for share in shares)
    assert [float(share[0]) for share in shares if share is not None] == [0, 0.25, 0.75, 1, 1]
    assert first.masks is not None and whole.masks is not None and first.factors is not None
    assert torch.equal(first.masks.time, whole.masks.time) and torch.equal(first.factors, whole.factors)  # type: ignore[arg-type]
    without, _ = prepared(tiny_config(*extra, "model.dropout=0"))
    without.model.load_state_dict(trainer.model.state_dict())
    without.features.load_state_dict(trainer.features.state_dict())
    torch.testing.assert_close(trainer.passes.losses(first), without.passes.losses(whole))


def test_frequencies_are_warped_before_masks_are_laid(tiny_config: MakeConfig) -> None:
    _, plain = prepared(tiny_config(*MASKS))
    trainer, inputs = prepared(tiny_config(*MASKS, "augment.vtlp=[0.8,1.2]", "train.consistency=0.2"))
    assert plain.factors is None and inputs.factors is not None and len(set(inputs.factors.tolist())) == 6
    assert plain.masks is not None and inputs.masks is not None
    assert torch.equal(plain.masks.time, inputs.masks.time[:3]) and torch.equal(plain.keys, inputs.keys[:3])
    features = trainer.features.padded(inputs.waveforms, inputs.frames).repeat(2, 1, 1)
    warped = warp(features, trainer.features.centres_hz, inputs.factors, trainer.features.sample_rate_hz)
    assert not torch.equal(warped, features)
    logits, frames = trainer.model(apply_masks(warped, inputs.masks), inputs.frames.repeat(2), inputs.keys)
    given = [t.repeat(2, *[1] * (t.dim() - 1)) for t in (inputs.labels, inputs.label_lengths, inputs.feasible)]
    wanted = ctc_losses(logits, frames, *given).view(2, 3).mean(0)
    torch.testing.assert_close(trainer.passes.losses(inputs)[0], wanted, rtol=1e-5, atol=1e-4)


def test_two_views_that_are_the_same_train_as_one(tiny_config: MakeConfig) -> None:
    masks = ("augment.time_masks=1", "augment.time_width_s=0")
    found = []
    for extra in ((), ("train.consistency=0.2",)):
        trainer, inputs = prepared(tiny_config(*masks, *extra))
        losses, objective = trainer.passes.losses(inputs)
        assert losses.shape == (3,)
        found.append([losses, objective, *torch.autograd.grad(objective.sum(), list(trainer.model.parameters()))])
    for plain, viewed in zip(*found, strict=True):
        torch.testing.assert_close(viewed, plain, rtol=1e-4, atol=1e-4 * float(plain.detach().abs().max()))


def test_the_loss_of_two_views_is_their_mean_and_the_divergence_comes_on_top(tiny_config: MakeConfig) -> None:
    trainer, inputs = prepared(tiny_config(*MASKS, "train.consistency=0.7"))
    losses, objective = trainer.passes.losses(inputs)
    features = trainer.features.padded(inputs.waveforms, inputs.frames).repeat(2, 1, 1)
    logits, frames = trainer.model(apply_masks(features, inputs.masks), inputs.frames.repeat(2), inputs.keys)
    for view in (0, 1):
        rows = slice(3 * view, 3 * view + 3)
        losses = losses - 0.5 * ctc_losses(
            logits[:, rows], frames[rows], inputs.labels, inputs.label_lengths, inputs.feasible
        )
    torch.testing.assert_close(losses, torch.zeros(3), rtol=0, atol=1e-4)
    apart = objective - trainer.passes.losses(inputs)[0]
    assert float(apart.detach().min()) > 0
    torch.testing.assert_close(apart, 0.7 * divergence(logits), rtol=1e-3, atol=1e-4)


def test_the_divergence_is_the_mean_of_both_directions_and_each_teaches_one_view() -> None:
    logits = torch.randn(4, 2, 3, generator=torch.Generator().manual_seed(1)).double().requires_grad_()
    apart = divergence(logits)
    a, b = logits.detach().softmax(2).unbind(1)
    expected = ((a * (a / b).log()).sum() + (b * (b / a).log()).sum()) / 2
    torch.testing.assert_close(apart, expected.float()[None])
    apart.sum().backward()
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad[:, 0], (a - b) / 2, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(logits.grad[:, 1], (b - a) / 2, rtol=1e-5, atol=1e-7)


def test_an_intermediate_classifier_trains_what_lies_before_it_and_recognition_does_without(
    tiny_config: MakeConfig,
) -> None:
    trainer, inputs = prepared(tiny_config("model.intermediate=[1]", "train.intermediate_weight=1"))
    losses, objective = trainer.passes.losses(inputs)
    assert not torch.equal(losses, objective)
    objective.sum().backward()
    gradients = {name: p.grad for name, p in trainer.model.named_parameters()}
    reached = {name for name, gradient in gradients.items() if gradient is not None and bool(gradient.any())}
    assert {"heads.1.classifier.weight", "recurrent_modules.0.recurrent.0.weight_hh"} <= reached
    assert not any(name.startswith(("recurrent_modules.1.", "classifier.")) for name in reached)
    assert len(trainer.model.eval().every_logits(torch.zeros(1, 161, 20), torch.tensor([20]))) == 1


@pytest.mark.parametrize("modules", ["[2]", "[1,1]"])
def test_an_intermediate_classifier_behind_no_inner_module_is_refused(tiny_config: MakeConfig, modules: str) -> None:
    config = tiny_config(f"model.intermediate={modules}")
    with pytest.raises(ConfigError, match=r"model\.intermediate=.*, allowed are different numbers from 1 to 1"):
        Trainer(config, Path(config.run_dir))


def test_two_views_without_masks_are_refused(tiny_config: MakeConfig) -> None:
    with pytest.raises(ConfigError, match=r"train\.consistency=0\.2 .*set augment\.time_masks"):
        tiny_config("train.consistency=0.2")
