"""Which decoder settings a command ends up with, and evaluation and transcription with a beam."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ds2.commands.compose import resolve_options, split_overrides
from ds2.config.schema import Config, ConfigError, DecodeConfig
from ds2.recognition.settings import save_settings, tuned_file


def test_arguments_precede_tuned_settings_and_these_the_models_config(tmp_path: Path) -> None:
    model, config = tmp_path / "best.safetensors", Config(run_dir="run")
    assert resolve_options([], model, config).method == "greedy"
    save_settings(DecodeConfig(method="beam", lm="books.lm", alpha=0.9, hot_words=["ann"]), tuned_file(model))
    assert resolve_options([], model, config) == DecodeConfig(
        method="beam", lm="books.lm", alpha=0.9, hot_words=["ann"]
    )
    assert resolve_options(["decode.alpha=0.2"], model, config).alpha == 0.2
    assert resolve_options(["decode.alpha=0.2"], model, config).lm == "books.lm"
    assert resolve_options(["decode=native", "decode.beam=9"], model, config) == DecodeConfig(method="native", beam=9)
    assert resolve_options(["decode=greedy"], model, config).method == "greedy"


@pytest.mark.parametrize("override", ["decode.alhpa=1", "decode.beam=wide", "decode.method=viterbi", "decode=viterbi"])
def test_mistakes_are_named(override: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"alhpa|beam|viterbi"):
        resolve_options([override], tmp_path / "best.safetensors", Config(run_dir="run"))


@pytest.mark.parametrize("others", [[], ["decode=beam"]])
def test_a_wrong_value_gets_what_the_setting_takes(others: list[str], tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"decode\.beam: takes a whole number, not 'wide'; allowed are numbers from 1"
    ):
        resolve_options([*others, "decode.beam=wide"], tmp_path / "best.safetensors", Config(run_dir="run"))


@pytest.mark.parametrize("value", ["{", '"', "@", "\1", "a: b: c", "[" * 5000, "[" * 900 + "]" * 900])
def test_a_value_that_cannot_be_parsed_is_refused(value: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"decode\.alpha="):
        resolve_options([f"decode.alpha={value}"], tmp_path / "best.safetensors", Config(run_dir="run"))


@pytest.mark.parametrize("others", [[], ["decode=beam"], ["decode.beam=9"]])
@pytest.mark.parametrize("value", ["{zero:5}", "zero"])
def test_a_value_that_is_no_list_gets_the_form_of_lists(value: str, others: list[str], tmp_path: Path) -> None:
    arguments = [*others, f"decode.hot_words={value}"]
    with pytest.raises(ConfigError, match=r"takes a list, in brackets even of one: decode\.hot_words=\[A,B\]"):
        resolve_options(arguments, tmp_path / "best.safetensors", Config(run_dir="run"))


@pytest.mark.parametrize("others", [[], ["decode=beam"], ["decode.beam=9"]])
def test_hot_words_stay_as_they_are_written(others: list[str], tmp_path: Path) -> None:
    arguments = [*others, "decode.hot_words=[yes,no, true ,007]"]
    options = resolve_options(arguments, tmp_path / "best.safetensors", Config(run_dir="run"))
    assert options.hot_words == ["yes", "no", "true", "007"]


def test_the_nearest_key_is_named(tmp_path: Path) -> None:
    model, config = tmp_path / "best.safetensors", Config(run_dir="run")
    with pytest.raises(ConfigError, match=r"did you mean 'decode\.alpha'"):
        resolve_options(["decode.alhpa=1"], model, config)
    tuned_file(model).write_text("beem: 8\n")
    with pytest.raises(ConfigError, match=r"best-decode\.yaml.*did you mean 'decode\.beam'"):
        resolve_options([], model, config)


def test_words_of_a_tuned_file_stay_words(tmp_path: Path) -> None:
    model = tmp_path / "best.safetensors"
    tuned_file(model).write_text("hot_words: [no, 007]\n")
    assert resolve_options([], model, Config(run_dir="x")).hot_words == ["no", "007"]


@pytest.mark.parametrize("content", [b"beam: 1" + b"0" * 5000, b"beam: \xff", b"beam: [", b"- 1", b"[" * 300])
def test_a_damaged_tuned_file_is_named(content: bytes, tmp_path: Path) -> None:
    model = tmp_path / "best.safetensors"
    tuned_file(model).write_bytes(content)
    with pytest.raises(ConfigError, match=r"best-decode\.yaml: .*`ds2 lm tune` again"):
        resolve_options([], model, Config(run_dir="run"))


def test_arguments_part() -> None:
    arguments = ["run", "decode=beam", "decode", "decode.wav", "decode.lm=x"]
    assert split_overrides(arguments, "decode") == (["decode=beam", "decode.lm=x"], ["run", "decode", "decode.wav"])


def test_settings_of_training_are_refused_for_a_trained_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="the only settings that can be given here are those of decode"):
        split_overrides(["run", "model.hidden=3"], "decode")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.v=2.jsonl").touch()
    assert split_overrides(["run", "data.v=2.jsonl"], "decode") == ([], ["run", "data.v=2.jsonl"])


def test_evaluate_and_transcribe_take_a_beam(
    tiny_config: Callable[..., Config], tone_manifest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from ds2.cli import main
    from ds2.data.manifest import read_manifest
    from ds2.training.loop import train

    config = tiny_config("train.epochs=1")
    train(config, Path(config.run_dir))
    capsys.readouterr()
    out = tmp_path / "report"
    beam = ["decode=beam", "decode.beam=8"]
    arguments = ["evaluate", config.run_dir, str(tone_manifest), "--out", str(out), "--device", "cpu", "--workers", "0"]
    assert main([*arguments, *beam]) == 0
    assert "beam, beam 8, no language model" in (out / tone_manifest.stem / "report.json").read_text()
    audio = str(read_manifest(tone_manifest)[0].audio_filepath)
    assert main(["transcribe", config.run_dir, audio, "--device", "cpu", "--format", "json", *beam]) == 0
    assert '"words"' in capsys.readouterr().out
    assert main([*arguments, "decode.method=beam", "decode.beam=0"]) == 2
    assert "decode.beam=0" in capsys.readouterr().err


@pytest.mark.parametrize(
    "path", ["models[1]/x.lm", "[a]/x.lm", "a, b=c/{x}.lm", "it's.lm", "~/x y.lm", "12", "a\\b.lm"]
)
def test_any_path_of_a_language_model_is_taken_as_it_is(path: str, tmp_path: Path) -> None:
    config = Config(run_dir="x")
    for overrides in ([f"decode.lm={path}"], ["decode=beam", f"decode.lm={path}"]):
        assert resolve_options(overrides, tmp_path / "m.safetensors", config).lm == path
