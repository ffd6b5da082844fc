"""The trainer state on disk and its position in an epoch, also after data, batching or files have changed."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from ds2.audio.features import Features
from ds2.config.schema import Config, ConfigError, FeaturesConfig, OptimConfig
from ds2.data.manifest import Utterance, read_manifest, write_manifest
from ds2.model.acoustic import AcousticModel
from ds2.system import UserError
from ds2.system.tensor_file import CheckpointError, load, make_header, save
from ds2.text.alphabet import AlphabetError
from ds2.training.loop import train
from ds2.training.optim import make_optimizer
from ds2.training.state import (
    Progress,
    TrainState,
    initial_state,
    plan_fingerprint,
    prepare_state,
    read_state,
    resolve_position,
)
from ds2.training.trainer import Trainer

MakeConfig = Callable[..., Config]


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_an_optimizer_goes_on_as_if_it_had_not_stopped(tmp_path: Path, name: str) -> None:
    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
        for i in range(count):
            optimizer.zero_grad()
            model(torch.full((2, 3), 0.1 * (i + 1))).square().sum().backward()
            optimizer.step()

    config = OptimConfig(name=name, learning_rate=0.01, weight_decay=0.1)
    torch.manual_seed(1)
    model = nn.Linear(3, 2)
    optimizer = make_optimizer(model, config)
    steps(model, optimizer, 3)
    features = Features(FeaturesConfig(), 16000)
    state = TrainState(cast(AcousticModel, model), features, optimizer, Progress(step=3))
    prepare_state(tmp_path, state, Config(optim=config, run_dir="x"))()
    resumed = nn.Linear(3, 2)
    resumed_optimizer = make_optimizer(resumed, config)
    again = TrainState(cast(AcousticModel, resumed), features, resumed_optimizer)
    parts, progress = read_state(tmp_path, Config(optim=config, run_dir="y"), again)
    again.load(parts, progress, average_decay=0.0)
    steps(model, optimizer, 2)
    steps(resumed, resumed_optimizer, 2)
    assert again.progress == Progress(step=3)
    assert torch.equal(model.weight, resumed.weight) and torch.equal(model.bias, resumed.bias)


@pytest.mark.parametrize("settings", [("train.average_decay=0.9",), ("optim=sgd", "optim.learning_rate=1e-3")])
def test_each_save_has_the_state_of_its_moment(
    tiny_config: MakeConfig, tmp_path: Path, settings: tuple[str, ...]
) -> None:
    trainer = Trainer(tiny_config(*settings), tmp_path)
    state, batches, plan = trainer.state, trainer.epoch(trainer.plan()), trainer.plan()

    def saved() -> int:
        trainer.files.save_and_wait()
        expected = {
            f"{part}.{name}": value for part, values in state.tensors().items() for name, value in values.items()
        }
        tensors, _ = load(tmp_path / "trainer.safetensors")
        assert {*tensors} == {*expected}
        assert all(torch.equal(tensors[name], value) for name, value in expected.items())
        return len(tensors)

    first = saved()  # the optimizer has no state yet
    for number in range(2):
        trainer.step(batches, plan[number : number + 1])
        assert saved() > first
    assert state.named_tensors() is state.named_tensors()
    state.load(*read_state(tmp_path, trainer.config, state), average_decay=trainer.config.train.average_decay)
    trainer.step(batches, plan[2:3])
    saved()


def test_an_average_that_a_resumed_run_began_counts_its_own_steps(tiny_config: MakeConfig, tmp_path: Path) -> None:
    train(tiny_config("train.epochs=1"), tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    for name, epochs in (("whole", [3]), ("parts", [2, 3])):
        for last in epochs:
            settings = (f"train.epochs={last}", "train.average_decay=0.99", "optim.schedule=constant")
            train(tiny_config(*settings), tmp_path / name)
    whole, parts = (load(tmp_path / name / "trainer.safetensors")[0] for name in ("whole", "parts"))
    assert all(torch.equal(value, parts[name]) for name, value in whole.items())


def test_a_run_whose_momentum_was_set_to_0_goes_on_again(tiny_config: MakeConfig, tmp_path: Path) -> None:
    for epochs, momentum in enumerate((0.9, 0, 0, 0.9, 0.9), start=1):
        train(tiny_config("optim=sgd", f"optim.momentum={momentum}", f"train.epochs={epochs}"), tmp_path)
        names = load(tmp_path / "trainer.safetensors")[0].keys()
        assert any(name.endswith("momentum_buffer") for name in names) == (momentum > 0)


@pytest.mark.parametrize(
    "lost", ["optimizer.3.exp_avg", "optimizer.", "average.", "model.classifier.bias", "features."]
)
@pytest.mark.parametrize("form", [1, 2])
def test_a_state_without_some_of_its_tensors_does_not_resume(
    tiny_config: MakeConfig, tmp_path: Path, lost: str, form: int
) -> None:
    config = tiny_config("train.average_decay=0.9", "train.max_steps=1")
    trainer = Trainer(config, tmp_path)
    trainer.step(trainer.epoch(trainer.plan()), trainer.plan()[:1])
    trainer.files.save()
    trainer.files.wait()
    path = tmp_path / "trainer.safetensors"
    tensors, metadata = load(path)
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(lost)}
    metadata["format"] = form
    save_file(kept, path, make_header(metadata, kept) if form == 2 else {"ds2": json.dumps(metadata)})
    with pytest.raises(CheckpointError, match=rf"trainer\.safetensors: {lost}.*: is missing, expected"):
        Trainer(config, tmp_path)


def test_a_lexicon_with_other_phones_under_the_same_name_does_not_resume(
    tiny_config: MakeConfig, tmp_path: Path
) -> None:
    config = tiny_config(f"alphabet.lexicon={tmp_path / 'lexicon.txt'}", "alphabet.unknown=drop")
    texts = [utterance.text for utterance in read_manifest(Path(config.data.train[0]))]

    def write(phones: str) -> None:
        lines = (f"{text} {' '.join(phones[ord(letter) - ord('a')] for letter in text)}\n" for text in sorted({*texts}))
        (tmp_path / "lexicon.txt").write_text("".join(lines), encoding="utf-8")

    write("ABC")
    trainer = Trainer(config, tmp_path / "run")
    trainer.files.save()
    trainer.files.wait()
    write("BCA")  # corrected pronunciations
    assert Trainer(config, tmp_path / "run").progress.phones == "A B C"
    write("ABD")
    with pytest.raises(ConfigError, match=r"lexicon.txt has other phones now.* were A B C\. .*run_dir=NEW"):
        Trainer(config, tmp_path / "run")


def test_a_run_with_inner_classifiers_of_phones_resumes_with_the_bits_of_an_unbroken_one_and_its_phones(
    tiny_config: MakeConfig, tmp_path: Path, tone_lexicon: Path
) -> None:
    lexicon = f"train.intermediate_lexicon={tone_lexicon}"
    for run, steps in (("unbroken", (5,)), ("resumed", (2, 5))):
        for last in steps:
            config = tiny_config(
                "model.intermediate=[1]", lexicon, "train.average_decay=0.9", f"train.max_steps={last}"
            )
            assert train(config, tmp_path / run) == 0
    unbroken, resumed = (load(tmp_path / run / "trainer.safetensors")[0] for run in ("unbroken", "resumed"))
    assert unbroken.keys() == resumed.keys() and "model.heads.1.classifier.bias" in resumed
    assert all(torch.equal(resumed[name], value) for name, value in unbroken.items())
    phones = rf"\['A1', .*, not \[\] \(the phones that {lexicon} had\): resume with"
    with pytest.raises(ConfigError, match=rf"trained with model\.intermediate_phones={phones}"):
        Trainer(tiny_config("model.intermediate=[1]"), tmp_path / "resumed")


def test_a_lexicon_for_inner_classifiers_that_does_not_fit_is_refused_or_named(
    tiny_config: MakeConfig, tmp_path: Path, tone_lexicon: Path, caplog: pytest.LogCaptureFixture
) -> None:
    setting = f"train.intermediate_lexicon={tone_lexicon}"
    lines = tone_lexicon.read_text("utf-8").splitlines()
    word = lines.pop().split()[0]
    tone_lexicon.write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(
        AlphabetError, match=rf"{tone_lexicon} lacks words of training texts: {word}; add .*unknown=drop"
    ):
        Trainer(tiny_config("model.intermediate=[1]", setting), tmp_path / "run")
    trainer = Trainer(tiny_config("model.intermediate=[1]", setting, "alphabet.unknown=drop"), tmp_path / "run")
    assert f"lacks words of training texts: {word}. Intermediate classifiers do without them" in caplog.text
    assert [len(phones) for phones in trainer.phones] == [
        2 * len(u.text) * (u.text != word) for u in trainer.utterances
    ]
    with pytest.raises(AlphabetError, match=r"intermediate_lexicon=.*alphabet\.lexicon has \[.*case=upper"):
        Trainer(tiny_config("model.intermediate=[1]", setting, "alphabet.case=upper", "alphabet.symbols=ABC"), tmp_path)
    with pytest.raises(UserError, match=r"nothing\.txt cannot be read"):
        tiny_config("model.intermediate=[1]", "train.intermediate_lexicon=nothing.txt")
    with pytest.raises(ConfigError, match=r"model\.intermediate_phones follows from train\.intermediate_lexicon"):
        tiny_config("model.intermediate=[1]", "model.intermediate_phones=[A]")


def test_a_state_with_damaged_metadata_does_not_resume(tiny_config: MakeConfig, tmp_path: Path) -> None:
    config = tiny_config("train.max_steps=1")
    trainer = Trainer(config, tmp_path)
    trainer.files.save()
    trainer.files.wait()
    path = tmp_path / "trainer.safetensors"
    tensors, metadata = load(path)
    progress = metadata["progress"]
    for change, says in (
        ({"progress": None}, "metadata.progress: is None"),
        ({"progress": progress | {"step": "3"}}, "metadata.progress.step: is '3', expected a whole number"),
        ({"progress": progress | {"epoch": 0}}, "metadata.progress: counts from before the start"),
        ({"progress": progress | {"stpe": 0}}, "metadata.progress.stpe: no such field"),
        ({"config": []}, r"metadata.config: is \[\]"),
        ({"config": metadata["config"] | {"optim": 1}}, "metadata.config.optim: is 1"),
        ({"kind": "model"}, "is a model, not a trainer state"),
    ):
        save(path, tensors, metadata | change)
        with pytest.raises(CheckpointError, match=rf"trainer\.safetensors.*{says}.*run_dir=NEW checkpoint.init_from="):
            Trainer(config, tmp_path)
    save(path, tensors, metadata)
    with pytest.raises(ConfigError, match=r"trained with optim\.name=.adamw., not .sgd."):
        Trainer(tiny_config("optim=sgd"), tmp_path)


def test_dropout_may_change_as_a_run_goes_on_and_widths_may_not(tiny_config: MakeConfig, tmp_path: Path) -> None:
    trainer = Trainer(tiny_config("model.dropout=0.1"), tmp_path)
    prepare_state(tmp_path, trainer.state, trainer.config)()
    other = tiny_config("model.dropout=0.4", "model.stochastic_depth=0.1")
    goes_on = Trainer(other, tmp_path)
    parts, _ = read_state(tmp_path, other, goes_on.state)
    assert {*parts["model"]} == {*trainer.model.state_dict()}
    narrower = tiny_config("model.hidden=8")
    with pytest.raises(ConfigError, match=r"trained with model\.hidden=48, not 8: resume"):
        read_state(tmp_path, narrower, goes_on.state)


def test_what_has_changed_is_named_with_both_values_and_what_no_longer_exists_is_not_compared(
    tiny_config: MakeConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    removed = ("features.statistics_utterances=10", "batching.buckets=3")
    trainer = Trainer(tiny_config(*removed), tmp_path)
    prepare_state(tmp_path, trainer.state, trainer.config)()
    caplog.clear()
    read_state(tmp_path, tiny_config(f"run_dir={tmp_path / 'moved'}"), trainer.state)
    assert "settings have changed" not in caplog.text
    read_state(tmp_path, tiny_config("optim.learning_rate=0.02", "optim.weight_decay=0.1"), trainer.state)
    changed = "optim.learning_rate=0.02 (was 0.01), optim.weight_decay=0.1 (was 0.01)"
    assert f"settings have changed since it was saved: {changed}. A recipe may have changed" in caplog.text
    with pytest.raises(ConfigError, match=r"with optim\.layer_rates={}, not {'weight_hh': 0\.3}: resume with the same"):
        read_state(tmp_path, tiny_config("optim.layer_rates={weight_hh:0.3}"), trainer.state)  # {} can be given


def test_a_lexicon_and_a_text_that_changed_in_their_place_are_named(
    tiny_config: MakeConfig, tmp_path: Path, tone_lexicon: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "text.txt").write_text("ab ca\nabc\n" * 9)
    settings = (f"alphabet.lexicon={tone_lexicon}", "train.metric=cer")
    text = ("train.objective=ctc_crf", f"train.denominator_text=[{tone_lexicon.parent / 'text.txt'}]")
    for name, others in (("phones", settings), ("text", text)):
        for _ in range(2):  # the second goes on, and nothing has changed
            trainer = Trainer(tiny_config(*others), tmp_path / name)
            prepare_state(tmp_path / name, trainer.state, trainer.config)()
    assert "changed since" not in caplog.text
    lines = tone_lexicon.read_text().splitlines()
    tone_lexicon.write_text("\n".join([f"{lines[0].split()[0]} A1 A1", *lines[1:]]))
    Trainer(tiny_config(*settings), tmp_path / "phones")
    assert "changed since it was saved: pronunciations, which" in caplog.text
    (tmp_path / "text.txt").write_text("cab\n" * 9)
    Trainer(tiny_config(*text), tmp_path / "text")
    assert "changed since it was saved: denominator, which" in caplog.text


def test_a_run_goes_on_with_what_fits_any_weights(
    tiny_config: MakeConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """On a machine with other kernels, with another limit, with its pieces in another folder."""
    pieces = ("alphabet.symbols='abc '", "alphabet.pieces=[▁,a,b,c]", "alphabet.pieces_file=")
    trainer = Trainer(tiny_config(*pieces), tmp_path)
    prepare_state(tmp_path, trainer.state, trainer.config)()
    other = tiny_config(*pieces[:2], f"alphabet.pieces_file={tmp_path / 'x'}", "model.backend=reference",
                        "model.max_lookahead_ms=700")  # fmt: skip
    read_state(tmp_path, other, trainer.state)
    assert "model.backend='reference' (was 'auto')" in caplog.text


def test_a_run_does_not_go_on_with_audio_of_another_rate(tiny_config: MakeConfig, tmp_path: Path) -> None:
    mel = ("features=log_mel", "features.mels=20")  # as many bands at each rate, so that all tensors fit
    trainer = Trainer(tiny_config(*mel), tmp_path)
    prepare_state(tmp_path, trainer.state, trainer.config)()
    with pytest.raises(ConfigError, match=r"trained with data\.sample_rate_hz=16000, not 8000: resume"):
        Trainer(tiny_config(*mel, "data.sample_rate_hz=8000"), tmp_path)


def test_a_model_to_start_from_that_a_run_does_not_start_from_is_named(
    tiny_config: MakeConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = Trainer(tiny_config(), tmp_path)
    prepare_state(tmp_path, trainer.state, trainer.config)()
    read_state(tmp_path, trainer.config, trainer.state)
    assert "has no effect" not in caplog.text
    checkpoint = replace(trainer.config.checkpoint, init_from="other")
    read_state(tmp_path, replace(trainer.config, checkpoint=checkpoint), trainer.state)
    assert "checkpoint.init_from=other has no effect: the run goes on from its own weights" in caplog.text


def test_the_first_state_of_another_rank_is_not_another_run(tiny_config: MakeConfig, tmp_path: Path) -> None:
    config = tiny_config("train.epochs=1")
    train(config, tmp_path / "run")
    shared = tmp_path / "shared"
    shared.mkdir()

    class SharedFolder(type(Path())):  # type: ignore[misc]
        """Another rank writes its state as soon as this process has looked for one."""

        def is_file(self) -> bool:
            return bool(self.look(super().is_file()))

        def glob(self, pattern: str) -> Iterator[Path]:
            return iter(self.look(list(super().glob(pattern))))

        def look(self, answer: Any) -> Any:
            shutil.copy(tmp_path / "run" / "trainer.safetensors", shared)
            return answer

    trainer = Trainer(config, tmp_path / "new")
    _, progress = initial_state(trainer.state, trainer.loader, trainer.alphabet, config, SharedFolder(shared))
    assert progress.step > 0


def test_the_best_score_is_of_the_dev_set_of_now(
    tiny_config: MakeConfig, tone_manifest: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_dir, harder = tmp_path / "run", tmp_path / "harder.jsonl"
    utterances = [replace(u, text=u.text[::-1] + " abc abc") for u in read_manifest(tone_manifest)]
    write_manifest(harder, utterances)
    train(tiny_config("train.epochs=1"), run_dir)
    assert train(tiny_config("train.epochs=2"), run_dir) == 0
    assert "the dev set has changed" not in caplog.text
    tensors, metadata = load(run_dir / "trainer.safetensors")
    metadata["progress"] |= {"best_wer": 0.0, "best_cer": 0.0}  # no model is better on the harder set
    save(run_dir / "trainer.safetensors", tensors, metadata)
    assert train(tiny_config("train.epochs=3", f"data.dev=[{harder}]"), run_dir) == 0
    assert "the dev set has changed: the best score so far, WER 0.00 %" in caplog.text
    _, best = load(run_dir / "best.safetensors")
    assert best["metrics"]["epoch"] == 3 and best["metrics"]["dev"]["manifests"] == str(harder)


UTTERANCES = [Utterance(Path(f"/x/{i}.wav"), 1.0 + i, "a") for i in range(6)]
PLAN = [[0, 1], [2, 3], [4, 5]]


def at(batch: int, plan: str = "") -> Progress:
    return Progress(epoch=2, batch=batch, step=9, plan=plan, batches=3)


def test_the_same_plan_keeps_the_position_wherever_the_audio_lies(caplog: pytest.LogCaptureFixture) -> None:
    progress = at(2, plan_fingerprint(PLAN, UTTERANCES))
    moved = [Utterance(Path(f"/elsewhere/{i}.wav"), 1.0 + i, "corrected") for i in range(6)]
    resolve_position(progress, PLAN, moved)
    assert progress.batch == 2 and not caplog.text


@pytest.mark.parametrize("plan", [[[0, 1, 2], [3, 4, 5]], [[0, 1], [2, 3]], [[2, 3], [0, 1], [4, 5]]])
def test_another_plan_begins_the_epoch_again_and_says_so(
    plan: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    progress = at(2, plan_fingerprint(PLAN, UTTERANCES))
    resolve_position(progress, plan, UTTERANCES)
    assert (progress.epoch, progress.batch, progress.step, progress.batches) == (2, 0, 9, len(plan))
    assert "epoch 2 begins again: it was stopped after batch 2 of another plan" in caplog.text
    assert progress.plan == plan_fingerprint(plan, UTTERANCES)


def test_an_epoch_that_had_ended_stays_ended_under_another_plan(caplog: pytest.LogCaptureFixture) -> None:
    progress = at(3, plan_fingerprint(PLAN, UTTERANCES))
    resolve_position(progress, [[0, 1, 2, 3, 4, 5]], UTTERANCES)
    assert progress.batch == 1 and not caplog.text


def test_a_state_without_a_plan_keeps_a_position_that_exists() -> None:
    old = Progress(epoch=2, batch=3)
    resolve_position(old, PLAN, UTTERANCES)
    assert old.batch == 3
    beyond = Progress(epoch=2, batch=4)
    resolve_position(beyond, PLAN, UTTERANCES)
    assert beyond.batch == 0


@pytest.mark.parametrize("noted", [True, False], ids=["as-written", "of-before-plans-were-noted"])
def test_a_run_goes_on_with_larger_batches_and_ends(
    tiny_config: MakeConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture, noted: bool
) -> None:
    run_dir = tmp_path / "run"
    train(tiny_config("train.max_steps=2"), run_dir)  # 2 of 3 batches
    if not noted:
        tensors, metadata = load(run_dir / "trainer.safetensors")
        del metadata["progress"]["plan"], metadata["progress"]["batches"]
        save(run_dir / "trainer.safetensors", tensors, metadata)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert train(tiny_config("batching.utterances=10", "train.epochs=2"), run_dir) == 0
    assert caplog.text.count("begins again") == 1
    with safe_open(run_dir / "trainer.safetensors", "pt") as opened:
        progress = json.loads(opened.metadata()["ds2"])["progress"]
    assert (progress["epoch"], progress["step"]) == (3, 4)


def test_copies_of_an_utterance_are_in_different_batches_of_the_first_epoch(tiny_config: MakeConfig) -> None:
    config = tiny_config("data.repeats=[3]", "batching.sortagrad=true")
    trainer = Trainer(config, Path(config.run_dir))
    names = [[trainer.utterances[place].name for place in batch] for batch in trainer.plan()]
    assert len(trainer.utterances) == sum(map(len, names)) == 3 * len({name for batch in names for name in batch})
    assert all(len(set(batch)) == len(batch) for batch in names) and max(map(len, names)) > 1
