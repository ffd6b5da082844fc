"""Forward and backward passes: what training minimises, and the same bits from CUDA graphs as from single launches."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support.tiny import compose_once

from ds2.audio.spec_augment import apply_masks, warp_frequency, warp_time
from ds2.config.schema import Config, ConfigError, ModelConfig
from ds2.data.loader import Batch
from ds2.data.manifest import read_manifest
from ds2.model.acoustic import AcousticModel
from ds2.model.wavefront import Wavefront
from ds2.system import UserError
from ds2.training import passes
from ds2.training.ctc import ctc_losses, divergence
from ds2.training.inputs import InputMaker, Inputs
from ds2.training.optim import OptimizerStep, set_learning_rate
from ds2.training.passes import GraphedPasses, Passes, RecordedPasses, use_graphs, why_sums_are_launched
from ds2.training.trainer import Trainer, choose_wavefront

MakeConfig = Callable[..., Config]
PLACES = [[0, 3, 5]]
OF_PHONES = ("model.intermediate=[1]", "train.intermediate_weight=0.3")
MASKS = ("augment.time_masks=2", "augment.time_fraction=0.5", "model.dropout=0.2")


def prepared(config: Config) -> tuple[Trainer, Inputs]:
    trainer = Trainer(config, Path(config.run_dir))
    trainer.model.train()
    return trainer, trainer.inputs(next(iter(trainer.loader.epoch(PLACES, 1))), 1)


def test_two_views_of_an_utterance_differ_in_masks_and_dropout(tiny_config: MakeConfig) -> None:
    _, one = prepared(tiny_config(*MASKS))
    _, two = prepared(tiny_config(*MASKS, "train.consistency=0.2"))
    first, second = two.masks.chunk(2)
    assert torch.equal(first, one.masks) and not torch.equal(second, one.masks)
    keys, others = two.dropout_keys.chunk(2)
    assert torch.equal(keys, one.dropout_keys) and not set(others.tolist()) & set(keys.tolist())


def test_both_views_have_one_warp_of_time_and_all_else_stays_as_it_was(tiny_config: MakeConfig) -> None:
    extra = (*MASKS, "augment.vtlp=[0.8,1.2]", "train.consistency=0.2")
    _, plain = prepared(tiny_config(*extra))
    trainer, inputs = prepared(tiny_config(*extra, "augment.time_warp_s=0.1"))
    assert plain.time_warps is None and inputs.time_warps is not None and inputs.time_warps.shape == (3, 2)
    assert inputs.frequency_factors is not None
    assert torch.equal(plain.masks, inputs.masks) and torch.equal(plain.labels, inputs.labels)
    assert torch.equal(plain.dropout_keys, inputs.dropout_keys) and torch.equal(
        plain.frequency_factors, inputs.frequency_factors
    )  # type: ignore[arg-type]
    features = trainer.features.padded(inputs.waveforms, inputs.frames)
    moved = warp_time(features, inputs.frames, inputs.time_warps)
    assert not torch.equal(moved, features)
    views = warp_frequency(
        moved.repeat(2, 1, 1), trainer.features.centres_hz, inputs.frequency_factors, trainer.features.sample_rate_hz
    )
    logits, frames = trainer.model(apply_masks(views, inputs.masks, 0), inputs.frames.repeat(2), inputs.dropout_keys)
    given = [t.repeat(2, *[1] * (t.dim() - 1)) for t in (inputs.labels, inputs.label_lengths, inputs.feasible)]
    wanted = ctc_losses(logits, frames, *given).view(2, 3).mean(0)
    torch.testing.assert_close(trainer.passes.losses(inputs)[0], wanted, rtol=1e-5, atol=1e-4)


def test_frequencies_are_warped_before_masks_are_laid(tiny_config: MakeConfig) -> None:
    _, plain = prepared(tiny_config(*MASKS))
    trainer, inputs = prepared(tiny_config(*MASKS, "augment.vtlp=[0.8,1.2]", "train.consistency=0.2"))
    assert (
        plain.frequency_factors is None
        and inputs.frequency_factors is not None
        and len(set(inputs.frequency_factors.tolist())) == 6
    )
    assert torch.equal(plain.masks, inputs.masks[:3]) and torch.equal(plain.dropout_keys, inputs.dropout_keys[:3])
    features = trainer.features.padded(inputs.waveforms, inputs.frames).repeat(2, 1, 1)
    warped = warp_frequency(
        features, trainer.features.centres_hz, inputs.frequency_factors, trainer.features.sample_rate_hz
    )
    assert not torch.equal(warped, features)
    logits, frames = trainer.model(apply_masks(warped, inputs.masks, 0), inputs.frames.repeat(2), inputs.dropout_keys)
    given = [t.repeat(2, *[1] * (t.dim() - 1)) for t in (inputs.labels, inputs.label_lengths, inputs.feasible)]
    wanted = ctc_losses(logits, frames, *given).view(2, 3).mean(0)
    torch.testing.assert_close(trainer.passes.losses(inputs)[0], wanted, rtol=1e-5, atol=1e-4)


def test_the_delay_penalty_weighs_the_loss_of_every_view(tiny_config: MakeConfig) -> None:
    extra = ("train.consistency=0.2", "augment.time_masks=1", "augment.time_width_s=0")
    results = []
    for penalty in (0.0, 0.3):
        trainer, inputs = prepared(tiny_config(*extra, f"train.delay_penalty={penalty}"))
        results.append(trainer.passes.losses(inputs)[0])
    features = trainer.features.padded(inputs.waveforms, inputs.frames)
    logits, frames = trainer.model(features, inputs.frames, inputs.dropout_keys.chunk(2)[0])
    targets = inputs.labels, inputs.label_lengths, inputs.feasible
    for penalty, losses in zip((0.0, 0.3), results, strict=True):
        expected = ctc_losses(logits, frames, *targets, delay_penalty=penalty)
        torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(*results)


def test_the_delay_penalty_begins_after_its_epochs_and_has_recordings_of_its_own(tiny_config: MakeConfig) -> None:
    trainer, _ = prepared(tiny_config("train.delay_penalty=0.3", "train.delay_penalty_after_epochs=2"))
    batch = next(iter(trainer.loader.epoch(PLACES, 1)))
    of_epoch = {epoch: trainer.inputs(batch, epoch) for epoch in (1, 2, 3)}
    assert [inputs.delay_penalty for inputs in of_epoch.values()] == [0.0, 0.0, 0.3]
    assert of_epoch[1].shape == of_epoch[2].shape != of_epoch[3].shape
    with torch.no_grad():
        logits, frames = trainer.model(
            trainer.features.padded(of_epoch[1].waveforms, of_epoch[1].frames),
            of_epoch[1].frames,
            of_epoch[1].dropout_keys,
        )
        for inputs in of_epoch.values():
            targets = inputs.labels, inputs.label_lengths, inputs.feasible
            expected = ctc_losses(logits, frames, *targets, delay_penalty=inputs.delay_penalty)
            torch.testing.assert_close(trainer.passes.losses(inputs)[0], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("other", ["train.objective=ctc_crf", "model.bidirectional=true"])
def test_a_delay_penalty_is_refused_where_it_has_no_meaning(tiny_config: MakeConfig, other: str) -> None:
    with pytest.raises(ConfigError, match=rf"train\.delay_penalty=0\.1 .*{other}.*: set "):
        tiny_config("train.delay_penalty=0.1", "model.max_lookahead_ms=0", other)


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
    logits, frames = trainer.model(apply_masks(features, inputs.masks, 0), inputs.frames.repeat(2), inputs.dropout_keys)
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
    assert len(trainer.model.eval().all_logits(torch.zeros(1, 161, 20), torch.tensor([20]))) == 1


def test_intermediate_classifiers_of_phones_learn_those_of_each_word_and_skip_what_has_too_many(
    tiny_config: MakeConfig, tone_lexicon: Path
) -> None:
    """The objective and its gradients by torch's CTC in float64, with padding as for CUDA graphs and without."""
    views = ("train.consistency=0.2", "augment.time_masks=1", "augment.time_width_s=0")
    config = tiny_config(*OF_PHONES, f"train.intermediate_lexicon={tone_lexicon}", *views)
    text = read_manifest(Path(config.data.train[0]))[3].text
    lines = [line for line in tone_lexicon.read_text("utf-8").splitlines() if line.split()[0] != text]
    tone_lexicon.write_text("\n".join([*lines, f"{text} {'A1 ' * 200}", f"{lines[0].split()[0]}(2) B1"]), "utf-8")
    trainer, of_trainer = prepared(config)
    trainer.model.double()
    trainer.features.double()
    batch = next(iter(trainer.loader.epoch(PLACES, 1)))
    parameters = list(trainer.model.parameters())
    for padded in (False, True):
        make = InputMaker(trainer.features, trainer.model, config, padded=padded, phones=trainer.phones)
        inputs = make(batch, 1)
        _, objective = trainer.passes.losses(inputs)
        features = trainer.features.padded(inputs.waveforms, inputs.frames)
        head, last = trainer.model.all_logits(features, inputs.frames, inputs.dropout_keys[:3])
        frames, expected = trainer.model.output_frames(inputs.frames), []
        for row, index in enumerate(PLACES[0]):
            letters = trainer.utterances[index].text
            phones = [1 + 2 * "abc".index(letter) + half for letter in letters for half in (0, 1)]
            of_letters = exact_ctc(last[: frames[row], row], ["abc".index(letter) + 1 for letter in letters])
            of_phones = 0.0 if letters == text else exact_ctc(head[: frames[row], row], phones)
            expected.append(0.7 * of_letters + 0.3 * of_phones)
        torch.testing.assert_close(objective.double(), torch.stack(expected), rtol=1e-5, atol=1e-5)
        for mine, exact in zip(
            *(torch.autograd.grad(o.sum(), parameters) for o in (objective, sum(expected))), strict=True
        ):
            torch.testing.assert_close(mine, exact, rtol=1e-4, atol=1e-4 * float(exact.abs().max()))
    assert head.shape[2] == 7 and last.shape[2] == 5
    for each in (inputs, of_trainer):
        assert each.infeasible == 0 and each.phone_targets[2].tolist() == [True, False, True]


def exact_ctc(logits: torch.Tensor, labels: list[int]) -> torch.Tensor:
    frames, count = torch.tensor([len(logits)]), torch.tensor([len(labels)])
    log_probs = logits.log_softmax(1)[:, None]
    return torch.nn.functional.ctc_loss(log_probs, torch.tensor([labels]), frames, count, reduction="sum")


@pytest.mark.parametrize(
    ("overrides", "allowed"),
    [
        (["model.intermediate=[2]"], "are different numbers from 1 to 1: this model has 2 modules"),
        (["model.intermediate=[1,1]"], "are different numbers from 1 to 1"),
        (["model.intermediate=[1]", "model.depth=1", "model.skip=1"], r"is \[\]: this model has one module"),
    ],
)
def test_an_intermediate_classifier_behind_no_inner_module_is_refused(
    tiny_config: MakeConfig, overrides: list[str], allowed: str
) -> None:
    config = tiny_config(*overrides)
    with pytest.raises(ConfigError, match=rf"model\.intermediate=.*, allowed {allowed}"):
        Trainer(config, Path(config.run_dir))


def test_two_views_without_masks_are_refused(tiny_config: MakeConfig) -> None:
    with pytest.raises(ConfigError, match=r"train\.consistency=0\.2 .*set augment\.time_masks"):
        tiny_config("train.consistency=0.2")


Spoil = Callable[[int, Batch], None]
STEPS = 30
ON_GPU = ("device=cuda", "train.graphs=on", "model.batch_norm_momentum=0.5", "data.workers=0")


def run(config: Config, run_dir: Path, until: int, *, spoil: Spoil | None = None) -> tuple[Trainer, list[Any]]:
    """Take steps until so many are behind the run; a step has another learning rate than the next."""
    trainer = Trainer(config, run_dir)
    trainer.model.train()
    progress, losses = trainer.progress, []

    def spoilt(batches: Iterator[Batch]) -> Iterator[Batch]:
        for batch in batches:
            if spoil is not None:
                spoil(progress.step + progress.skipped, batch)
            yield batch

    while progress.step + progress.skipped < until:
        plan = trainer.plan()
        batches = trainer.prepared(spoilt(trainer.loader.epoch(plan[progress.batch :], progress.epoch)))
        while progress.batch < len(plan) and progress.step + progress.skipped < until:
            set_learning_rate(trainer.optimizer, 1e-3 * (1 + progress.step % 3))
            group = plan[progress.batch : progress.batch + config.train.accumulate]
            losses.append((trainer.step(batches, group), trainer.grad_norm))
        if progress.batch == len(plan):
            progress.epoch, progress.batch = progress.epoch + 1, 0
    return trainer, losses


def launched(monkeypatch: pytest.MonkeyPatch, *arguments: Any, **options: Any) -> tuple[Trainer, list[Any]]:
    """As `run`, with nothing recorded: the same shapes launch by launch."""
    call = OptimizerStep.__call__

    def launches(update: OptimizerStep, norm: torch.Tensor) -> None:
        update._graphed = False
        call(update, norm)

    with monkeypatch.context() as patch:
        patch.setattr(GraphedPasses, "forward", Passes.forward)
        patch.setattr(GraphedPasses, "backward", Passes.backward)
        patch.setattr(OptimizerStep, "__call__", launches)
        return run(*arguments, **options)


def assert_equal(one: tuple[Trainer, list[Any]], other: tuple[Trainer, list[Any]]) -> None:
    assert one[1] == other[1]
    for name, part in one[0].state.tensors().items():
        for key, value in other[0].state.tensors()[name].items():
            assert torch.equal(part[key], value), (name, key)


def replays(trainer: Trainer) -> int:
    assert isinstance(trainer.passes, GraphedPasses)
    return trainer.passes.replays


@pytest.mark.gpu
@pytest.mark.parametrize(
    "extra",
    [
        (),
        ("optim=sgd", "train.precision=fp32", "optim.clip_norm=1"),
        ("train.accumulate=2", "batching.utterances=2", "augment.speed=[0.9,1.0]"),
        ("augment.time_masks=1", "augment.frequency_masks=2", "train.average_decay=0.9", "model.batch_norm=false"),
        (
            "model.dropout=0.3",
            "train.freeze=[convs]",
            "optim.layer_rates={recurrent_modules:0.5}",
        ),
        (
            "train.consistency=0.2",
            "augment.vtlp=[0.9,1.1]",
            "augment.time_warp_s=0.2",
            "augment.time_masks=2",
            "model.dropout=0.1",
        ),
        ("model.intermediate=[1]", "model.depth=4", "model.skip=2"),
        ("model.intermediate=[1]", "train.intermediate_lexicon=LEXICON", "train.delay_penalty=0.1"),
        ("model.bidirectional=true", "model.max_lookahead_ms=0", "model.row_convs=0", "features.kind=log_mel"),
        ("model.cell=lstm", "train.accumulate=2", "batching.utterances=2"),
        ("model.cell=gru",),
        ("model.cell=gru_before",),
        ("model.cell=lstm", "model.bidirectional=true", "model.max_lookahead_ms=0", "model.row_convs=0"),
        ("model.cell=gru", "model.bidirectional=true", "model.max_lookahead_ms=0", "model.row_convs=0"),
    ],
    ids=[
        *("adamw", "sgd", "accumulated", "masked", "dropout", "two_views", "intermediate", "phones", "bidirectional"),
        *("lstm", "gru", "gru_before", "bidirectional_lstm", "bidirectional_gru"),
    ],
)
def test_graphs_give_the_bits_of_single_launches(
    tiny_config: MakeConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tone_lexicon: Path,
    extra: tuple[str, ...],
) -> None:
    config = tiny_config(*ON_GPU, *(setting.replace("LEXICON", str(tone_lexicon)) for setting in extra))
    eager = launched(monkeypatch, config, tmp_path / "eager", STEPS)
    graphed = run(config, tmp_path / "graphed", STEPS)
    assert_equal(eager, graphed)
    assert len({inputs[:2] for inputs in graphed[0].passes.recordings}) > 1  # type: ignore[attr-defined]
    assert replays(graphed[0]) > STEPS // 2 and replays(eager[0]) == 0


@pytest.mark.gpu
@pytest.mark.hopper
@pytest.mark.parametrize("cell", ["rnn", "lstm"])
def test_layers_side_by_side_give_the_bits_of_one_after_the_other(
    tiny_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cell: str
) -> None:
    """Recorded on streams, launched on one stream, and recorded again on a single pair of streams."""
    config = tiny_config(
        *ON_GPU, "train.wavefront=on", "model.norm=rms", "model.batch_norm=false", f"model.cell={cell}",
        "model.hidden=512", "model.depth=6", "model.skip=2", "model.row_convs=3", "model.row_conv_context=2",
        "model.dropout=0.1",
    )  # fmt: skip
    monkeypatch.setattr(Wavefront, "pieces", lambda plan, frames, batch: 3 if frames > 3 * 8 else 1)
    side_by_side = run(config, tmp_path / "streams", STEPS)
    eager = launched(monkeypatch, config, tmp_path / "eager", STEPS)
    assert_equal(eager, side_by_side)
    assert replays(side_by_side[0]) > STEPS // 2
    of = Wavefront.of
    monkeypatch.setattr(Wavefront, "of", lambda *args: replace(of(*args), streams=of(*args).streams[:1]))
    assert_equal(side_by_side, run(config, tmp_path / "one", STEPS))


@pytest.mark.gpu
@pytest.mark.hopper
def test_layers_side_by_side_give_the_gradients_of_the_whole_batch() -> None:
    """Factors of products are rounded to TF32, to 2^-11 of themselves: where sums differ by rounding, so may these."""
    torch.manual_seed(1)
    config = ModelConfig(
        hidden=256, depth=4, skip=2, row_convs=2, norm="rms", backend="persistent", nonlinearity="tanh"
    )
    model = AcousticModel(config, 80, 30).cuda().train()
    features, lengths = torch.randn(3, 80, 400, device="cuda"), torch.tensor([400, 310, 90])
    keys = torch.arange(3, device="cuda")

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        [logits] = model.all_logits(features, lengths, keys)
        logits.square().sum().backward()  # type: ignore[no-untyped-call]
        return [parameter.grad.double() for parameter in model.parameters() if parameter.grad is not None]

    whole = gradients()
    model.wavefront = replace(Wavefront.of(config, torch.float32, torch.device("cuda")), fixed=4)
    for mine, theirs in zip(gradients(), whole, strict=True):
        assert float((mine - theirs).norm()) < 2**-9 * float(theirs.norm())


@pytest.mark.gpu
def test_a_resumed_run_meets_shapes_anew_and_gives_the_same_bits(tiny_config: MakeConfig, tmp_path: Path) -> None:
    config = tiny_config(*ON_GPU)
    whole = run(config, tmp_path / "whole", STEPS)
    first = run(config, tmp_path / "broken", 14)
    first[0].files.save()
    first[0].files.wait()
    second = run(config, tmp_path / "broken", STEPS)
    assert_equal(whole, (second[0], first[1] + second[1]))
    assert replays(whole[0]) > replays(second[0]) > 0


@pytest.mark.gpu
def test_a_step_that_is_not_finite_is_skipped(
    tiny_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoil(step: int, batch: Batch) -> None:
        if step == 13:
            batch.waveforms[0, 800:] = float("nan")

    config = tiny_config(*ON_GPU)
    eager = launched(monkeypatch, config, tmp_path / "eager", STEPS, spoil=spoil)
    graphed = run(config, tmp_path / "graphed", STEPS, spoil=spoil)
    assert [loss is None for loss, _ in graphed[1]].count(True) == graphed[0].progress.skipped == 1
    assert [loss for loss, _ in eager[1]] == [loss for loss, _ in graphed[1]]
    assert replays(graphed[0]) > 8


@pytest.mark.gpu
def test_few_graphs_are_kept(tiny_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(*ON_GPU)
    whole = run(config, tmp_path / "all", STEPS)
    monkeypatch.setattr(passes, "MAX_GRAPHS", 1)
    few = run(config, tmp_path / "few", STEPS)
    assert_equal(whole, few)
    assert len(few[0].passes.recordings) == 1 < len(whole[0].passes.recordings)  # type: ignore[attr-defined]


@pytest.mark.gpu
def test_nothing_is_recorded_where_it_would_not_fit_beside_single_launches(
    tiny_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(*ON_GPU)
    recorded = run(config, tmp_path / "recorded", 10)
    in_use = torch.cuda.get_device_properties(0).total_memory // 2 + 1
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: in_use)
    full = run(config, tmp_path / "full", 10)
    assert_equal(recorded, full)
    assert replays(recorded[0]) > 0 == replays(full[0])


@pytest.mark.gpu
def test_out_of_memory_while_recording_names_the_batch_and_the_settings(
    tiny_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = GraphedPasses.record

    def without_memory(*arguments: Any, **options: Any) -> Any:
        torch.cuda.set_per_process_memory_fraction(1e-6)
        try:
            return record(*arguments, **options)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)

    config = tiny_config(*ON_GPU, "model.batch_norm_momentum=0.2")
    with monkeypatch.context() as patch:
        patch.setattr(GraphedPasses, "record", without_memory)
        with pytest.raises(UserError, match=r"out of memory on cuda.*batch .* utterances.*train\.graphs=off"):
            run(config, tmp_path / "small", STEPS)
    assert_equal(run(config, tmp_path / "one", 10), run(config, tmp_path / "other", 10))


def test_padded_inputs_have_the_same_losses_and_gradients(tiny_config: MakeConfig) -> None:
    config = tiny_config("augment.time_masks=1", "augment.frequency_masks=1", "model.dropout=0.2")
    trainer = Trainer(config, Path(config.run_dir))
    trainer.model.double()
    trainer.features.double()
    batch = next(iter(trainer.loader.epoch([[0, 3, 5]], 1)))
    results, shapes = [], []
    for padded in (False, True):
        make = InputMaker(trainer.features, trainer.model, config, padded=padded)
        inputs = make(batch, 1)
        shapes.append(inputs.shape)
        losses, _ = trainer.passes.losses(inputs)
        gradients = torch.autograd.grad(losses.sum(), list(trainer.model.parameters()))
        results.append([losses.detach().double(), *gradients])
    assert shapes[0] != shapes[1]
    for plain, wide in zip(*results, strict=True):  # float32 in features and loss, float64 between
        torch.testing.assert_close(plain, wide, rtol=1e-4, atol=1e-4 * float(plain.abs().max()))


def test_utterances_of_like_length_share_a_shape(tiny_config: MakeConfig) -> None:
    config = tiny_config()
    trainer = Trainer(config, Path(config.run_dir))
    make = InputMaker(trainer.features, trainer.model, config, padded=True)
    shapes = [make(batch, 1).shape for batch in trainer.loader.epoch([[0, 1], [1, 2], [3, 7], [4, 5]], 1)]
    frames = {int(trainer.features.frames(shape[1])) for shape in shapes}
    assert len(set(shapes)) == len(frames) < len(shapes)
    assert all(count % 32 == 28 for count in frames)


def use(overrides: Sequence[str], comm: Any, *why_not: str | None) -> bool:
    """What `use_graphs` says of a run with these overrides."""
    config = compose_once("run_dir=x", *overrides)
    return use_graphs(config, comm, why_sums_are_launched(config, comm), *(why_not or (None,)))


def ranks(device: str, world: int, name: str, hosts: Sequence[str] = ("one",)) -> Any:
    """What `use_graphs` looks at."""
    there = SimpleNamespace(device=torch.device(device), world=world, name=name, host=hosts[0], rank=0, elastic=False)
    there.allgather = lambda host: [*hosts]
    return there


@pytest.mark.parametrize(
    ("device", "world", "extra", "why_not", "reason"),
    [
        ("cpu", 1, (), (None, None), "the device is cpu"),
        ("cuda", 2, (), (None, None), "the ranks' sums go over mpi"),
        ("cuda", 1, ("model.cell=gru",), (None, "too large"), "torch's kernels of model.cell=gru .*: too large"),
        ("cuda", 1, (), ("no kernels", None), "the CTC loss: no kernels"),
    ],
)
def test_where_they_cannot_be_had_auto_does_without_and_on_is_refused(
    device: str, world: int, extra: tuple[str, ...], why_not: tuple[str | None, str | None], reason: str
) -> None:
    comm = ranks(device, world, "mpi")
    for choice in ("off", "auto"):
        assert not use([f"train.graphs={choice}", *extra], comm, *why_not)
    with pytest.raises(ConfigError, match=rf"train\.graphs=on cannot run: .*{reason}"):
        use(["train.graphs=on", *extra], comm, *why_not)


def test_a_rank_to_which_others_may_come_has_them_while_it_is_alone() -> None:
    comm = ranks("cuda", 1, "tcp")
    comm.elastic = True
    assert use([], comm)
    with pytest.raises(ConfigError, match=r"train\.graphs=on cannot run: the ranks' sums go over tcp"):
        use(["train.graphs=on"], comm)
    comm.world = 2
    assert not use([], comm)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("elastic", [False, True])
def test_sums_on_the_host_between_passes_leave_these_recorded(world: int, *, elastic: bool) -> None:
    comm = ranks("cuda", world, "tcp")
    comm.elastic = elastic
    between = ["comm.batch_norm=local", "comm.overlap=false"]
    for choice in ("auto", "on"):
        assert use([*between, f"train.graphs={choice}"], comm)
    assert use([*between, "comm.batch_norm=shared"], comm) is (world == 1)
    assert use([*between, "comm.overlap=true"], comm)
    if world > 1 or elastic:
        with pytest.raises(ConfigError, match=r"with comm\.batch_norm=local comm\.overlap=false passes are recorded"):
            use([*between, "comm.overlap=true", "train.graphs=on"], comm)


@pytest.mark.parametrize("world", [1, 2])
def test_gpus_of_one_host_have_them_by_default(world: int) -> None:
    comm = ranks("cuda", world, "nccl")
    assert use([], comm)
    assert not use(["train.graphs=off"], comm)


def test_over_several_hosts_sums_within_passes_must_be_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    comm = ranks("cuda", 2, "nccl", hosts=["one", "other"])
    with caplog.at_level("INFO"):
        assert not use([], comm)
    assert "on 2 hosts" in caplog.text and "train.graphs=on records there too" in caplog.text
    assert "with comm.batch_norm=local passes are recorded around the sums" in caplog.text
    assert use(["train.graphs=on"], comm) and use(["comm.batch_norm=local"], comm)


@pytest.mark.parametrize("records_sums", [True, False])
def test_passes_that_overlap_with_sums_that_cannot_be_recorded_are_launched(
    records_sums: bool, tiny_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of two batches, whose gradients are summed during the last pass, then after it."""
    trainer, inputs = prepared(tiny_config("model.batch_norm=false"))
    recorded: list[bool] = []  # with sums?

    def record(of: GraphedPasses, key: tuple[int, ...], inputs: Inputs, *, sums: bool) -> RecordedPasses:
        recorded.append(sums)
        graph: Any = SimpleNamespace(replay=lambda: None)
        of.recordings[key] = RecordedPasses(inputs, torch.zeros(3), graph, graph)
        return of.recordings[key]

    monkeypatch.setattr(GraphedPasses, "record", record)
    monkeypatch.setattr(passes, "_fits_twice", lambda: True)
    monkeypatch.setattr(passes, "GraphRecorder", lambda: None)
    gradients = trainer.gradients
    gradients.comm.world, gradients.overlap = 2, True
    monkeypatch.setattr(gradients.comm, "start_sum", lambda tensor, overlapped: Mock(wait=lambda: (0.0, 0.0)))
    graphed = GraphedPasses(
        trainer.model, trainer.features, gradients, trainer.config.train, autocast=False, records_sums=records_sums
    )
    graphed._waveforms, graphed._numbers = inputs.waveforms.flatten(), inputs.numbers.flatten()

    def step() -> list[bool]:
        """Whether each pass was launched, and says that later ones take as long."""
        gradients.start_step()
        launches = []
        for last in (False, True):
            before = graphed.replays
            graphed.forward(inputs, 6, last=last, idle=False)
            graphed.backward()
            launches.append(graphed.replays == before and graphed.typical)
        gradients.finish_step()
        return launches

    assert step() == [False, False]  # each place in a step is a shape of its own, which comes for the first time
    assert step() == [False, not records_sums]
    assert recorded == [False, True] if records_sums else [False]
    recorded.clear()
    gradients.overlap = False
    assert step() == [False, False] and recorded == [False]


def test_recorded_passes_that_are_dropped_are_those_used_longest_ago_and_all_before_a_larger_batch(
    tiny_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, _ = prepared(tiny_config("model.batch_norm=false"))
    graph: Any = SimpleNamespace(replay=lambda: None)
    recorder = Mock(recording=lambda: nullcontext(graph))
    monkeypatch.setattr(passes, "GraphRecorder", lambda: recorder)
    monkeypatch.setattr(passes, "MAX_GRAPHS", 2)
    monkeypatch.setattr(Passes, "forward", lambda *args, **options: torch.zeros(3))
    monkeypatch.setattr(Passes, "backward", lambda passes: None)
    graphed = GraphedPasses(trainer.model, trainer.features, trainer.gradients, trainer.config.train, autocast=False)

    def recorded_after(shape: int, samples: int = 100, *, fits: bool = True) -> list[int]:
        """Shapes that are recorded after a step of this one."""
        inputs: Any = Mock(shape=(shape,), waveforms=torch.zeros(samples), numbers=torch.zeros(9, dtype=torch.int64))
        monkeypatch.setattr(passes, "_fits_twice", lambda: fits)
        trainer.gradients.start_step()
        graphed.forward(inputs, 3, last=True, idle=False)
        graphed.backward()
        trainer.gradients.finish_step()
        return sorted(key[0] for key in graphed.recordings)

    assert [recorded_after(shape) for shape in (1, 2, 3, 4)] == [[]] * 4  # each comes for the first time
    assert [recorded_after(shape) for shape in (1, 2, 1, 3)] == [[1], [1, 2], [1, 2], [1, 3]]
    replays = graphed.replays
    assert [recorded_after(shape, fits=False) for shape in (4, 1, 2)] == [[1, 3]] * 3  # memory for no new one
    assert graphed.replays == replays + 1 and recorder.new_pool.call_count == 1
    assert [recorded_after(4, samples=101), recorded_after(1, samples=50)] == [[4], [1, 4]]
    assert recorder.new_pool.call_count == 2


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ((), "model.norm=batch: its statistics need all frames of a layer; model.norm=rms needs none"),
        (
            ("model.norm=rms", "model.bidirectional=true", "model.max_lookahead_ms=0", "model.row_convs=0"),
            "model.bidirectional=true: its backward layers begin at the last frame",
        ),
    ],
)
def test_layers_side_by_side_where_they_cannot_be_are_refused_with_the_reason(
    overrides: tuple[str, ...], reason: str
) -> None:
    for choice in ("auto", "off"):
        config = compose_once("run_dir=x", f"train.wavefront={choice}", *overrides)
        assert choose_wavefront(config, "bf16", torch.device("cpu"), graphed=True) is None
    config = compose_once("run_dir=x", "train.wavefront=on", *overrides)
    expected = rf"train\.wavefront=on cannot run: {re.escape(reason)}.*set train\.wavefront=auto or off"
    with pytest.raises(ConfigError, match=expected):
        choose_wavefront(config, "bf16", torch.device("cpu"), graphed=True)


@pytest.mark.parametrize(("others_gib", "fits"), [(0, True), (19, True), (21, False)])
def test_recordings_leave_other_processes_their_memory(
    others_gib: int, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes of 30 GiB, of which this process holds 32, on a GPU of 80."""
    gib = 2**30
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 30 * gib)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 32 * gib)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: ((80 - 32 - others_gib) * gib, 80 * gib))
    assert passes._fits_twice() is fits
