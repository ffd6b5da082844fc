"""`ds2 info MODEL`: on what the scores of a model were measured."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ds2 import __version__
from ds2.cli import main
from ds2.data.manifest import read_manifest, write_manifest
from ds2.model.checkpoint import load_model, prepare_model
from ds2.system.tensor_file import CheckpointError


def test_scores_are_named_with_their_data_and_what_of_it_was_trained_on(
    tone_manifest: Path,
    tiny_overrides: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    utterances = read_manifest(tone_manifest)
    train, dev = tmp_path / "train.jsonl", tmp_path / "dev.jsonl"
    write_manifest(train, utterances[:6])
    write_manifest(dev, utterances[4:])
    data = [f"data.train=[{train}]", f"data.dev=[{dev}]", f"data.test=[{dev}]"]
    assert main(["train", *tiny_overrides, *data, "train.epochs=1"]) == 0
    expected = f"{dev}: 2 of its 6 utterances and 2 of its 2 speakers are in the training data"
    assert expected in caplog.text
    capsys.readouterr()
    assert main(["info", str(tmp_path / "run")]) == 0
    shown = capsys.readouterr().out
    assert f"on {dev}, 6 utterances, 0.00 h" in shown and expected in shown
    caplog.clear()
    assert main(["evaluate", str(tmp_path / "run"), "--device", "cpu"]) == 0
    assert expected in caplog.text
    caplog.clear()
    train.unlink()  # the corpus need not be where the model is used
    assert main(["evaluate", str(tmp_path / "run"), "--device", "cpu"]) == 0
    assert "training data" not in caplog.text


def test_files_of_versions_that_did_not_say_load(
    make_model: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_model()
    assert load_model(model).dev is None
    model = model.rename(model.with_name("learning_rate=0.1.safetensors"))  # as of a sweep, not an override
    assert main(["info", str(model)]) == 0
    assert "scores      none" in capsys.readouterr().out
    loaded = load_model(model)
    prepare_model(model, loaded.model, loaded.features, loaded.alphabet, loaded.config, {"wer": 0.5})()
    assert main(["info", str(model)]) == 0
    assert "scores      WER 50.00 %\n" in capsys.readouterr().out


def test_damaged_facts_are_named(make_model: Callable[..., Path]) -> None:
    model = make_model()
    loaded = load_model(model)
    parts = (loaded.model, loaded.features, loaded.alphabet, loaded.config)
    prepare_model(model, *parts, {"dev": {"utterances": "many"}})()
    with pytest.raises(CheckpointError, match=r"metadata\.metrics\.dev"):
        load_model(model)


def test_version_says_version_and_commit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    assert capsys.readouterr().out.startswith(f"ds2 {__version__} (commit ")


def test_align_prints_as_many_as_were_asked_for(
    make_model: Callable[..., Path], tone_manifest: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["align", str(make_model()), str(tone_manifest), "--worst", "3", "--device", "cpu"]) == 0
    head, *worst = capsys.readouterr().out.splitlines()
    surprises = [float(line.split()[0]) for line in worst]
    assert " of 10 transcripts (surprise in nats a label):" in head
    assert len(surprises) == 3 and surprises == sorted(surprises, reverse=True)


def test_the_delay_of_final_text_is_named(make_model: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    model = make_model()
    assert main(["info", str(model)]) == 0
    ahead_s = load_model(model).model.lookahead_ms / 1000 + 0.01  # the last window's overlap
    parts = f"pause 0.8 s, lookahead {ahead_s:.2f} s, blocks 0.2 s"
    assert f"final text up to 1.00 s after the last word ({0.8 + ahead_s + 0.2:.2f} s in noise): {parts}" in (
        capsys.readouterr().out
    )
    assert main(["info", "model=rnn_small", "model.bidirectional=true", "model.max_lookahead_ms=0"]) == 0
    assert "live        needs a unidirectional model" in capsys.readouterr().out


def test_phones_are_named_one_by_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "english"]) == 0
    assert "40 with the blank: 'AA' 'AE' 'AH'" in capsys.readouterr().out
