"""Fine-tuning as a user meets it: a model's architecture and weights, other letters, frozen parts, slower layers."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
import torch
from support.run_log import events
from support.tiny import tiny_overrides_in

from ds2.cli import main
from ds2.commands.compose import compose_config
from ds2.config.schema import Config, ConfigError
from ds2.data.manifest import read_manifest
from ds2.model.checkpoint import load_model
from ds2.system.tensor_file import CheckpointError
from ds2.training.loop import train
from ds2.training.optim import set_learning_rate
from ds2.training.trainer import Trainer


@pytest.fixture(scope="module")
def trained(tone_manifest: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with a model of two steps."""
    folder = tmp_path_factory.mktemp("trained")
    train(compose_config([*tiny_overrides_in(folder, tone_manifest), "train.max_steps=2"]), folder / "base")
    return folder / "base"


@pytest.fixture
def base(trained: Path, tmp_path: Path) -> Path:
    """A copy of that folder."""
    return shutil.copytree(trained, tmp_path / "base")


def tuned(tiny_overrides: list[str], base: Path, *more: str) -> Config:
    """Compose what a user writes: data and a model to start from, no word of its architecture."""
    own = [o for o in tiny_overrides if not o.startswith(("model", "alphabet"))]
    return compose_config([*own, f"checkpoint.init_from={base}", *more])


def test_architecture_features_and_alphabet_come_from_the_model(tiny_overrides: list[str], base: Path) -> None:
    config, source = tuned(tiny_overrides, base), load_model(base)
    assert (config.model, config.features) == (source.config.model, source.config.features)
    assert config.alphabet.symbols == "abc "
    started = Trainer(config, Path(config.run_dir))
    theirs = source.model.state_dict()
    assert all(torch.equal(value, theirs[name]) for name, value in started.model.state_dict().items())
    assert torch.equal(started.features.mean, source.features.mean)


def test_what_the_command_line_sets_stays_and_the_log_says_what_differs(
    tiny_overrides: list[str], base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = [o for o in tiny_overrides if not o.startswith(("model", "alphabet", "run_dir"))]
    changes = ["model.depth=3", "model.dropout=0.1", "train.max_steps=1", f"run_dir={tmp_path / 'second'}"]
    with caplog.at_level(logging.INFO):
        assert main(["train", *own, f"checkpoint.init_from={base}", *changes]) == 0
    assert "unlike" in caplog.text and "model.depth=3 (the model has 2)" in caplog.text
    assert "model.hidden=48 (not 1152)" in caplog.text and "model.convs=[{kernel:[" in caplog.text
    assert "start from nothing: recurrent_modules.2" in caplog.text
    assert load_model(tmp_path / "second").config.model.depth == 3


def test_averages_of_layers_of_another_width_begin_anew(
    tiny_overrides: list[str], base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = tuned(tiny_overrides, base, "model.hidden=32")
    started = Trainer(config, Path(config.run_dir)).model
    assert (load_model(base).model.norm.batches, started.norm.batches, started.convs[0].norm.batches) == (2, 0, 2)
    config = tuned(tiny_overrides, base, "model.convs=[{kernel:[7,5],stride:[4,2],channels:4}]")
    started = Trainer(config, tmp_path / "convs").model
    assert (started.convs[0].norm.batches, started.recurrent_modules[1].recurrent[0].norm.batches) == (0, 2)
    config = tuned(tiny_overrides, base, "model.hidden=32", "model.norm=rms", "alphabet.symbols='cbxa '")
    caplog.clear()
    Trainer(config, tmp_path / "rms")
    (warning,) = [record.getMessage() for record in caplog.records if "start from nothing" in record.getMessage()]
    assert "classifier.weight" in warning  # other labels and another width: no row fits


def test_statistics_of_features_stay_with_their_normalisation(
    tiny_overrides: list[str], base: Path, tmp_path: Path
) -> None:
    config = tuned(tiny_overrides, base, "features.normalise=none", "train.max_steps=1")
    assert not Trainer(config, tmp_path / "none").features.mean.any()
    train(config, tmp_path / "plain")
    config = tuned(tiny_overrides, tmp_path / "plain", "features.normalise=corpus")
    assert Trainer(config, tmp_path / "corpus").features.mean.any()


def test_a_changed_alphabet_keeps_the_rows_of_shared_labels(
    tiny_overrides: list[str], base: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = tuned(tiny_overrides, base, "alphabet.symbols='cbxa '")
    with caplog.at_level(logging.INFO):
        started = Trainer(config, Path(config.run_dir))
    source = load_model(base)
    mine, theirs = started.model.classifier, source.model.classifier
    symbols = (started.alphabet.symbols, source.alphabet.symbols)
    assert symbols == (("", "c", "b", "x", "a", " "), ("", "a", "b", "c", " "))
    for row, symbol in enumerate(symbols[0]):
        if symbol != "x":
            old = symbols[1].index(symbol)
            assert torch.equal(mine.weight[row], theirs.weight[old]) and torch.equal(mine.bias[row], theirs.bias[old])
    assert mine.weight[3].abs().sum() > 0
    assert "labels: 5 as in the model to start from, 1 new: 'x'\n" in caplog.text


def test_inner_classifiers_keep_the_rows_of_shared_labels_too(tiny_overrides: list[str], tmp_path: Path) -> None:
    train(compose_config([*tiny_overrides, "model.intermediate=[1]", "train.max_steps=2"]), tmp_path / "base")
    theirs = load_model(tmp_path / "base").model.state_dict()
    config = tuned(tiny_overrides, tmp_path / "base", "alphabet.symbols='cbxa'", "alphabet.unknown=drop")  # as many
    mine = Trainer(config, Path(config.run_dir)).model.state_dict()
    for name in ("heads.1.classifier.weight", "heads.1.classifier.bias", "classifier.weight", "classifier.bias"):
        assert torch.equal(mine[name][[0, 1, 2, 4]], theirs[name][[0, 3, 2, 1]])
        assert not torch.equal(mine[name][3], theirs[name][3])


def test_a_model_whose_inner_classifier_learnt_phones_needs_no_lexicon_to_recognise_or_to_be_tuned(
    tiny_overrides: list[str], tone_manifest: Path, tone_lexicon: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    of_phones = ["model.intermediate=[1]", f"train.intermediate_lexicon={tone_lexicon}"]
    train(compose_config([*tiny_overrides, *of_phones, "train.max_steps=2"]), tmp_path / "base")
    fewer = tmp_path / "fewer.txt"
    fewer.write_text(tone_lexicon.read_text("utf-8").replace("A2", "B2"), encoding="utf-8")
    tone_lexicon.unlink()
    assert main(["evaluate", str(tmp_path / "base"), str(tone_manifest)]) == 0
    theirs = load_model(tmp_path / "base").model.state_dict()
    names = ("heads.1.classifier.weight", "heads.1.classifier.bias")
    with caplog.at_level(logging.INFO):
        tuned_by_letters = tuned(tiny_overrides, tmp_path / "base")
        mine = Trainer(tuned_by_letters, tmp_path / "letters").model.state_dict()
    assert "labels of intermediate classifiers: 1 as in the model to start from, 4 new: 'a' 'b' 'c' ' '" in caplog.text
    assert all(len(mine[name]) == 5 and torch.equal(mine[name][0], theirs[name][0]) for name in names)
    assert torch.equal(mine["classifier.weight"], theirs["classifier.weight"])
    tuned_by_phones = tuned(tiny_overrides, tmp_path / "base", f"train.intermediate_lexicon={fewer}")
    mine = Trainer(tuned_by_phones, tmp_path / "phones").model.state_dict()
    assert tuned_by_phones.model.intermediate_phones == ["A1", "B1", "B2", "C1", "C2"]
    assert all(torch.equal(mine[name], theirs[name][[0, 1, 3, 4, 5, 6]]) for name in names)


def test_labels_that_the_new_alphabet_lacks_are_named(
    tiny_overrides: list[str], base: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = tuned(
        tiny_overrides, base, "alphabet.symbols='cb '", "alphabet.unknown=drop", "data.on_bad_utterance=skip"
    )
    Trainer(config, Path(config.run_dir))
    assert "this run lacks labels of the model to start from and cannot write them: 'a'" in caplog.text


def test_frozen_weights_stay_and_the_rest_learns(tiny_overrides: list[str], base: Path, tmp_path: Path) -> None:
    config = tuned(tiny_overrides, base, "train.freeze=[convs,recurrent_modules.0]", "train.max_steps=2")
    train(config, tmp_path / "frozen")
    before, after = load_model(base).model, load_model(tmp_path / "frozen").model
    same = {name for name, p in after.named_parameters() if torch.equal(p, before.get_parameter(name))}
    assert same == {n for n, _ in after.named_parameters() if n.startswith(("convs.", "recurrent_modules.0."))}
    train(tuned(tiny_overrides, base, "train.freeze=[convs,recurrent_modules.0]"), tmp_path / "frozen")  # resumes
    with pytest.raises(ConfigError, match=r"train\.freeze=\[.convs., .recurrent_modules\.0.\], not \[.convs.\]"):
        train(tuned(tiny_overrides, base, "train.freeze=[convs]"), tmp_path / "frozen")


def test_frozen_weights_that_nothing_was_learned_for_are_named(
    tiny_overrides: list[str], base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def warning(*changes: str, own: bool = False) -> str:
        caplog.clear()
        changes = ("train.freeze=[convs,classifier]", *changes)
        config = compose_config([*tiny_overrides, *changes]) if own else tuned(tiny_overrides, base, *changes)
        Trainer(config, tmp_path / "run")
        return "".join(r.getMessage() for r in caplog.records if "keeps weights that start" in r.getMessage())

    assert not warning()
    assert warning("alphabet.symbols=' abcd'").endswith("leave them out: classifier.weight, classifier.bias")
    assert "leave them out: convs.0.weight, " in warning(own=True)


def test_layers_learn_at_their_own_rates(tiny_overrides: list[str], base: Path) -> None:
    rates = "optim.layer_rates={convs:0.5,recurrent_modules:0.25,recurrent_modules.1:2.0}"
    trainer = Trainer(tuned(tiny_overrides, base, rates), base.parent / "rates")
    set_learning_rate(trainer.optimizer, 0.1)
    rate = {id(p): group["lr"] for group in trainer.optimizer.param_groups for p in group["params"]}
    for name, parameter in trainer.model.named_parameters():
        factor = {"convs": 0.5, "recurrent_modules.0": 0.25, "recurrent_modules.1": 2.0}
        expected = next((f for prefix, f in factor.items() if name.startswith(prefix + ".")), 1.0)
        assert rate[id(parameter)] == pytest.approx(0.1 * expected), name


def test_wrong_names_of_weights_list_the_right_ones(tiny_overrides: list[str], base: Path) -> None:
    for change in ("train.freeze=[conv]", "optim.layer_rates={conv:0.1}"):
        with pytest.raises(ConfigError, match=r"'conv'.*convs.*recurrent_modules\.0 to recurrent_modules\.1"):
            Trainer(tuned(tiny_overrides, base, change), base.parent / "second")
    with pytest.raises(ConfigError, match="nothing to train"):
        Trainer(
            tuned(tiny_overrides, base, "train.freeze=[convs,recurrent_modules,norm,classifier]"), base.parent / "x"
        )
    with pytest.raises(ConfigError, match=r"layer_rates=\{.convs.: 0.*train\.freeze"):
        tuned(tiny_overrides, base, "optim.layer_rates={convs:0}")


def test_a_resumed_run_needs_no_model_to_start_from(tiny_overrides: list[str], base: Path) -> None:
    config = tuned(tiny_overrides, base, "train.max_steps=1")
    train(config, Path(config.run_dir))
    base.rename(base.with_name("moved"))
    assert tuned(tiny_overrides, base).model == config.model
    with pytest.raises(CheckpointError, match="base"):
        tuned(tiny_overrides, base, "run_dir=elsewhere")


def test_a_resumed_run_of_phones_needs_neither_the_model_nor_its_place(
    tiny_overrides: list[str], tone_manifest: Path, tmp_path: Path
) -> None:
    texts = sorted({utterance.text for utterance in read_manifest(tone_manifest)})
    lexicon = tmp_path / "lexicon.txt"
    lexicon.write_text("".join(f"{text} {' '.join(text.upper())}\n" for text in texts), encoding="utf-8")
    train(compose_config([*tiny_overrides, f"alphabet.lexicon={lexicon}", "train.max_steps=2"]), tmp_path / "base")
    config = tuned(tiny_overrides, tmp_path / "base", "train.max_steps=1")
    run = Path(config.run_dir)
    Trainer(config, run).files.save_and_wait()
    moved = (tmp_path / "base").rename(tmp_path / "moved")
    assert Path(tuned(tiny_overrides, moved).alphabet.lexicon).parent == moved  # stopped before it wrote a model
    train(tuned(tiny_overrides, moved, "train.max_steps=1"), run)
    shutil.rmtree(moved)
    again = tuned(tiny_overrides, tmp_path / "base", "train.max_steps=2")
    assert Trainer(again, run).progress.step == 1


def test_a_trainer_state_is_no_model_to_start_from(tiny_overrides: list[str], base: Path) -> None:
    with pytest.raises(CheckpointError, match=r"is a trainer, not a model: give a run folder"):
        tuned(tiny_overrides, base / "trainer.safetensors")


def test_the_best_model_is_the_one_of_the_chosen_metric(tiny_overrides: list[str], tmp_path: Path) -> None:
    config = compose_config([*tiny_overrides, "train.metric=cer", "train.epochs=3"])
    train(config, tmp_path / "run")
    lowest = min(event["cer"] for event in events(tmp_path / "run", "dev"))
    assert load_model(tmp_path / "run").metadata["metrics"]["cer"] == lowest


def test_info_says_what_is_inside_a_model(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", str(base)]) == 0
    shown = capsys.readouterr().out
    for fragment in ("best.safetensors", "WER", "step 2", "log_spectrogram", "5 with the blank: 'abc '", "parameters"):
        assert fragment in shown


def test_info_of_what_is_not_there_names_both_ways(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "nowhere.safetensors"]) == 2
    assert "give a model file or a run folder, or overrides" in capsys.readouterr().err
    assert main(["info", "x", "model=rnn_8"]) == 2


def test_without_a_dev_set_the_user_is_warned_and_gets_the_last_model(
    tiny_overrides: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(compose_config([*tiny_overrides, "data.dev=[]", "train.max_steps=2"]), tmp_path / "run")
    assert "no dev set (data.dev is empty)" in caplog.text and "ds2 data split" in caplog.text
    assert load_model(tmp_path / "run").metadata["metrics"]["step"] == 2
    assert not (tmp_path / "run" / "best.safetensors").exists()


def test_a_run_that_ends_with_an_epoch_by_its_steps_is_evaluated(tiny_overrides: list[str], tmp_path: Path) -> None:
    steps_an_epoch = 3  # ten utterances in batches of four
    config = compose_config([*tiny_overrides, f"train.max_steps={steps_an_epoch}", "train.evaluate_every_epochs=100"])
    train(config, tmp_path / "run")
    assert (tmp_path / "run" / "best.safetensors").is_file()
