"""The model that comes with ds2: what its card says, and commands that get no model or its name."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.serving import printed_port

import ds2
from ds2.audio.read import read_audio
from ds2.cli import main
from ds2.commands import transcribe
from ds2.config.schema import DecodeConfig
from ds2.data.manifest import read_manifest, write_manifest
from ds2.model import shipped
from ds2.model.checkpoint import find_model, load_model
from ds2.recognition.settings import decode_settings
from ds2.system.tensor_file import CheckpointError
from tests.ds2.commands.test_listen import fake

MAX_BYTES = 15_000_000
Capture = pytest.CaptureFixture[str]
pytestmark = pytest.mark.usefixtures("cache_of_english")


def test_a_folder_that_hides_a_shipped_model_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("english").mkdir()  # `recipe=english` reads a corpus of this name
    with pytest.raises(CheckpointError, match=r"a run folder, or .*models/english, which comes with ds2"):
        find_model(Path("english"))


@pytest.mark.parametrize("name", shipped.names())
def test_a_shipped_model_is_small_and_says_what_it_is(name: str, capsys: Capture) -> None:
    folder, card = shipped.FOLDER / name, shipped.read_card(name)
    assert max(file.stat().st_size for file in folder.iterdir()) <= MAX_BYTES
    assert not any(str(word).startswith("/") for word in json.dumps(load_model(folder).metadata).split('"'))
    assert main(["models", name]) == 0
    printed = capsys.readouterr().out
    assert name in printed and str(folder) in printed and card.language in printed
    for score in card.scores:
        assert score.speech in printed and f"{score.words:.1f}" in printed
        assert 0 < score.words < 100 and 0 < score.phones < 100
    for source in card.sources:
        assert source.licence in printed
    assert len(card.commit) == 7 and card.commit in printed


def test_without_a_model_english_is_used_and_named(recording: Path, capsys: Capture, tmp_path: Path) -> None:
    copy = shutil.copytree(shipped.FOLDER / "english", tmp_path / "copy")  # its language model moves with it
    assert find_model(Path("english")) == find_model(shipped.FOLDER / "english")
    outputs, errors = [], []
    for model in ([], [str(copy / "best.safetensors")]):
        assert main(["transcribe", *model, str(recording), "--device", "cpu", "--format", "json"]) == 0
        printed = capsys.readouterr()
        outputs.append(printed.out)
        errors.append(printed.err)
    assert len(set(outputs)) == 1 and json.loads(outputs[0])["duration"] > 0
    quality = shipped.read_card("english").quality()
    assert [f"model: english, which comes with ds2; words wrong: {quality}" in e for e in errors] == [True, False]


def test_python_loads_it_with_its_language_model(recording: Path, capsys: Capture) -> None:
    unnamed, named = ds2.load(device="cpu"), ds2.load("english", device="cpu", decode=DecodeConfig())
    assert capsys.readouterr().err.count("model: english") == 1
    assert torch.equal(unnamed.log_probs(recording), named.log_probs(recording))
    assert unnamed.transcribe(recording).hypothesis.lm < named.transcribe(recording).hypothesis.lm == 0
    settings = decode_settings(find_model(Path("english")), load_model("english").config)
    assert settings.lm == str(shipped.FOLDER / "english" / "english.lm.xz") and settings.method == "beam"


def test_listen_and_serve_do_without_a_model(recording: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setitem(sys.modules, "sounddevice", fake(read_audio(recording), ()))
    greedy = ["decode=greedy", "--device", "cpu"]  # the language model takes seconds to load
    assert main(["listen", *greedy]) == 2
    printed = capsys.readouterr().err
    assert "model: english" in printed and "no microphone" in printed
    command = [sys.executable, "-m", "ds2.cli", "serve", "--port", "0", *greedy]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        assert printed_port(server) > 0
        server.terminate()
        assert server.stderr is not None and "model: english" in server.stderr.read()


def test_a_folder_of_the_users_goes_before_the_name(
    make_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_model(Path("english")).parent == shipped.FOLDER / "english"
    Path("english").mkdir()
    shutil.copyfile(make_model(), "english/best.safetensors")
    assert find_model(Path("english")) == Path("english/best.safetensors")


def test_words_are_models_or_audio_by_what_they_are(
    make_model: Callable[..., Path], recording: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plain = shutil.copyfile(make_model(), tmp_path / "model of a friend")
    run = tmp_path / "run"
    run.mkdir()
    shutil.copyfile(plain, run / "last.safetensors")
    unnamed = shutil.copyfile(recording, tmp_path / "talk")
    audio = str(recording)
    for model in (str(plain), str(run), "english", "gone", "gone.pt", "gone.safetensors"):
        parsed = transcribe._parse([model, audio])
        assert (parsed.model, parsed.files) == (Path(model), [audio]), model
    for words in ([audio], [audio, str(unnamed)], [str(unnamed), audio], ["-", audio], ["gone.mp3", audio], ["gone"]):
        parsed = transcribe._parse(words)
        assert (parsed.model, parsed.files) == (None, words), words


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["english"], "english is a model, not audio: ds2 transcribe english talk.mp3"),
        (["gone.safetensors"], "gone.safetensors is a model, not audio"),
        (["talk.mp3", "english"], "english is a model, not audio: the model comes first"),
        (
            ["gone", "talk.mp3"],
            "there is no checkpoint gone: give a run folder, its best.safetensors, or one of english",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(
    words: list[str], message: str, capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["transcribe", *words]) == 2
    assert message in capsys.readouterr().err


def test_its_settings_are_not_tuned_in_place(capsys: Capture) -> None:
    before = (shipped.FOLDER / "english" / "best-decode.yaml").read_bytes()
    assert main(["lm", "tune", "english", "books.lm", "dev.jsonl"]) == 2
    assert f"copy {shipped.FOLDER / 'english'} and tune the copy" in capsys.readouterr().err
    assert (shipped.FOLDER / "english" / "best-decode.yaml").read_bytes() == before


def test_fine_tuning_starts_from_its_name(tone_manifest: Path, tmp_path: Path) -> None:
    run, words = tmp_path / "run", tmp_path / "words.jsonl"
    utterances = read_manifest(tone_manifest)
    write_manifest(words, [replace(utterance, text="a word") for utterance in utterances])
    overrides = [f"data.train=[{words}]", f"run_dir={run}", "checkpoint.init_from=english", "device=cpu"]
    steps = ["train.max_steps=1", "optim.learning_rate=1e-9", "batching.utterances=2", "data.workers=0"]
    assert main(["train", *overrides, *steps]) == 0
    base, tuned = load_model("english"), load_model(run / "last.safetensors")
    assert tuned.config.model == base.config.model and tuned.alphabet.pronunciations == base.alphabet.pronunciations
    assert base.alphabet.pronunciations is not None and "word" in base.alphabet.pronunciations.words
    for name, weight in base.model.named_parameters():
        torch.testing.assert_close(tuned.model.get_parameter(name), weight, rtol=0, atol=1e-6)
