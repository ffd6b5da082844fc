"""ds2 from Python: arrays, lists, hot words, log-probs, own decoders, own data, training."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ds2_ops
import numpy as np
import pytest
import soundfile
import torch

import ds2
from ds2.audio.read import AudioError, read_audio
from ds2.config.schema import ConfigError, DecodeConfig
from ds2.data.manifest import ManifestError, read_manifest
from ds2.decoding.hypothesis import DecodeError
from ds2.decoding.phrases import LexiconError, PhraseError
from ds2.inference import runner
from ds2.recognition.recogniser import Recogniser
from ds2.system import UserError

BIDIRECTIONAL = ("model.bidirectional=true", "model.max_lookahead_ms=0", "model.row_convs=0")


def test_importing_ds2_imports_no_torch_and_lists_its_names() -> None:
    code = "import sys, ds2; print('torch' in sys.modules, 'hydra' in sys.modules, 'numpy' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["False"] * 3
    assert {"load", "train", "save_dataset"} <= set(dir(ds2))
    assert {"LSTM", "GRU", "RNN", "recurrence"} <= set(dir(ds2_ops))


@pytest.mark.parametrize("overrides", [(), BIDIRECTIONAL])
def test_samples_of_any_kind_give_the_words_of_their_file(
    make_model: Callable[..., Path], recording: Path, overrides: tuple[str, ...]
) -> None:
    recogniser: Recogniser = ds2.load(make_model(*overrides), device="cpu")
    expected = recogniser.transcribe(recording)
    assert expected.text
    samples = read_audio(recording)
    pcm = (samples * 32768).round().astype(np.int16)
    for audio in (samples, samples.astype(np.float64), torch.from_numpy(samples), pcm, torch.from_numpy(pcm)):
        assert recogniser.transcribe(audio, 16000) == expected
    assert recogniser.transcribe([recording, str(recording)]) == [expected, expected]
    assert recogniser.transcribe([samples], 16000) == [expected]
    assert recogniser.transcribe([]) == []


def test_a_recogniser_that_is_pickled_says_how_other_processes_get_one(make_model: Callable[..., Path]) -> None:
    recogniser = ds2.load(make_model(), device="cpu")
    for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(UserError, match=r"threads can share it; another process .* ds2\.load\(\.\.\.\)"):
            attempt(recogniser)


def test_threads_share_a_recogniser(make_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    recogniser: Recogniser = ds2.load(make_model(), device="cpu")
    draw = np.random.default_rng(0)
    audios = [(0.1 * draw.standard_normal(9000 * (number + 1))).astype(np.float32) for number in range(6)]
    alone, launch = recogniser.transcribe(audios, 16000), runner._BlockBatch.launch

    def launch_later(batch: Any, edges: bool) -> torch.Tensor:
        time.sleep(0.002)  # another thread goes on, if it may
        return launch(batch, edges)

    monkeypatch.setattr(runner._BlockBatch, "launch", launch_later)
    with ThreadPoolExecutor(len(audios)) as pool:
        assert list(pool.map(lambda audio: recogniser.transcribe(audio, 16000), audios)) == alone


def test_samples_of_another_rate_are_resampled(make_model: Callable[..., Path], tmp_path: Path) -> None:
    recogniser = ds2.load(make_model(), device="cpu")
    samples = (0.1 * np.random.default_rng(0).standard_normal(8000)).astype(np.float32)
    soundfile.write(tmp_path / "slow.wav", samples, 8000, subtype="FLOAT")
    transcript = recogniser.transcribe(samples, 8000)
    assert transcript.duration_s == pytest.approx(1.0, abs=1e-3)
    assert transcript.hypothesis.labels == recogniser.transcribe(tmp_path / "slow.wav").hypothesis.labels


@pytest.mark.parametrize(
    ("audio", "rate_hz", "message"),
    [
        (np.zeros(9), None, "has no sample rate"),
        (3, 16000, "3 is no audio: give the path of a file"),
        (np.zeros((9, 2)), 16000, r"shape \(9, 2\): give \(N,\)"),
        (np.zeros(0), 16000, "N above 0"),
        (np.full(9, 20000.0), 16000, "divided by 32768"),
        (np.full(9, np.nan), 16000, "nan"),
        (np.zeros(9, np.uint8), 16000, "uint8"),
        ("talk.wav", 16000, "its own sample rate"),
        (np.zeros(9), 10, "allowed are whole numbers from 1000 to"),
        (np.zeros(9), 16000.5, "samples at 16000.5 Hz"),
        (np.zeros(9), "16000", "samples at '16000' Hz"),
    ],
)
def test_samples_that_cannot_be_used_are_named(
    make_model: Callable[..., Path], audio: object, rate_hz: int | None, message: str
) -> None:
    with pytest.raises(AudioError, match=message):
        ds2.load(make_model(), device="cpu").transcribe(audio, rate_hz)


def test_hot_words_of_a_call(make_model: Callable[..., Path], recording: Path) -> None:
    beam = DecodeConfig(method="beam", beam=16)
    recogniser = ds2.load(make_model(), device="cpu", decode=beam)
    plain = recogniser.transcribe(recording).hypothesis
    [word] = plain.text.split()
    hot = recogniser.transcribe(recording, hot_words={word: 5.0, "cab a": None}).hypothesis
    assert (hot.text, hot.bonus) == (plain.text, pytest.approx(plain.bonus + 5.0))
    listed = recogniser.transcribe(recording, hot_words=[word]).hypothesis
    assert listed.bonus == pytest.approx(plain.bonus + beam.hot_word_bonus)
    assert recogniser.transcribe(recording, hot_words=[]).hypothesis == plain
    with pytest.raises(LexiconError, match="characters that the network writes"):
        recogniser.transcribe(recording, hot_words=["xyz"])
    with pytest.raises(LexiconError, match="is one string"):
        recogniser.transcribe(recording, hot_words="abc")
    with pytest.raises(LexiconError, match=r"decode\.method=beam"):
        ds2.load(make_model(), device="cpu").transcribe(recording, hot_words=["abc"])


@pytest.mark.parametrize("overrides", [(), BIDIRECTIONAL])
def test_log_probs_and_own_decoders(
    make_model: Callable[..., Path], recording: Path, overrides: tuple[str, ...]
) -> None:
    recogniser = ds2.load(make_model(*overrides), device="cpu")
    log_probs = recogniser.log_probs(recording)
    frames = round(3.0 / recogniser.frame_s)
    assert log_probs.dtype == torch.float32 and log_probs.shape[1] == len(recogniser.alphabet.symbols)
    assert abs(len(log_probs) - frames) <= 3
    assert torch.allclose(log_probs.exp().sum(1), torch.ones(len(log_probs)), atol=1e-5)
    [[greedy]] = recogniser.decoder.decode(log_probs[:, None], torch.tensor([len(log_probs)]))
    assert greedy.text == recogniser.transcribe(recording).text
    shapes: list[torch.Size] = []

    def always_ab(log_probs: torch.Tensor) -> str:
        shapes.append(log_probs.shape)
        return "ab a"

    transcript = recogniser.with_decoder(always_ab).transcribe(recording)
    assert transcript.text == "ab a" and [w.text for w in transcript.words] == ["ab", "a"]
    assert shapes == [log_probs.shape]
    assert recogniser.with_decoder(recogniser.decoder).transcribe(recording) == recogniser.transcribe(recording)


def test_own_data_trains_from_python(tiny_overrides: list[str], tone_manifest: Path, tmp_path: Path) -> None:
    utterances = read_manifest(tone_manifest)
    arrays = [(read_audio(u.audio_filepath), u.text, u.speaker) for u in utterances[:6]]
    train = ds2.save_dataset(tmp_path / "train", arrays, sample_rate_hz=16000)
    dev = ds2.save_dataset(tmp_path / "dev", [(str(u.audio_filepath), u.text) for u in utterances[6:]])
    assert [u.text for u in read_manifest(train)] == [u.text for u in utterances[:6]]
    assert read_manifest(train)[1].speaker == "s1" and read_manifest(dev)[0].duration_s == utterances[6].duration_s
    with torch.inference_mode():
        run = ds2.train(*tiny_overrides, f"data.train=[{train}]", f"data.dev=[{dev}]", "train.epochs=1")
    assert isinstance(ds2.load(run, device="cpu").transcribe(utterances[0].audio_filepath).text, str)
    with pytest.raises(ConfigError, match="did you mean"):
        ds2.train(*tiny_overrides, "train.epoch=1")


def test_own_data_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="no utterances"):
        ds2.save_dataset(tmp_path / "empty", [])
    with pytest.raises(ManifestError, match=r"utterance 1: expected \(audio, text\)"):
        ds2.save_dataset(tmp_path / "texts", ["text"])  # type: ignore[list-item]
    with pytest.raises(AudioError, match="utterance 1: samples need a rate"):
        ds2.save_dataset(tmp_path / "rates", [(np.zeros(9), "a")])
    assert ds2.save_dataset(tmp_path / "one", [(np.zeros(900), "a")], sample_rate_hz=16000).is_file()
    with pytest.raises(ManifestError, match="exists already"):
        ds2.save_dataset(tmp_path / "one", [(np.zeros(900), "a")], sample_rate_hz=16000)


def test_saving_own_data_replaces_no_recording_and_lists_none_twice(tmp_path: Path) -> None:
    recording, samples, broken = tmp_path / "own" / "000002.flac", np.zeros(900), np.full(900, np.nan)
    recording.parent.mkdir()
    soundfile.write(recording, np.full(900, 0.5), 16000)
    before = recording.read_bytes()
    with pytest.raises(ManifestError, match=r"utterance 2: .*000002\.flac exists already"):
        ds2.save_dataset(recording.parent, [(samples, "a"), (samples, "b")], sample_rate_hz=16000)
    assert recording.read_bytes() == before and list(recording.parent.iterdir()) == [recording]
    with pytest.raises(ManifestError, match=r"utterance 2: .* is an utterance already"):
        ds2.save_dataset(tmp_path / "twice", [(recording, "a"), (recording, "b")])
    with pytest.raises(AudioError, match="utterance 2: samples reach nan"):
        ds2.save_dataset(tmp_path / "nan", [(samples, "a"), (broken, "b")], sample_rate_hz=16000)
    assert ds2.save_dataset(tmp_path / "nan", [(samples, "a")], sample_rate_hz=16000).is_file()


@pytest.mark.parametrize("overrides", [(), BIDIRECTIONAL])
def test_only_listed_phrases_are_written_in_files_and_streams(
    make_model: Callable[..., Path], recording: Path, overrides: tuple[str, ...]
) -> None:
    free: Recogniser = ds2.load(make_model(*overrides), device="cpu")
    words = sorted(set(free.transcribe(recording).text.split()))
    only = free.only_phrases(words)
    transcript = only.transcribe(recording)
    assert transcript.text
    assert set(transcript.text.split()) <= set(words)
    assert free.only_phrases([*words, "[unk]"]).transcribe(recording).text == transcript.text
    assert free.only_phrases(["a", "[unk]"]).transcribe(recording).text == "[unk]"
    with pytest.raises(PhraseError, match="does not write"):
        free.only_phrases(["zebra"])
    if not overrides:
        session = only.session()
        session.accept_waveform(read_audio(recording))
        assert session.finish().text == transcript.text


def test_arguments_of_other_kinds_are_refused(make_model: Callable[..., Path], tmp_path: Path) -> None:
    model, samples = make_model(), np.zeros(900)
    with pytest.raises(ConfigError, match="precision='fp16' is not one of auto, fp32, bf16"):
        ds2.load(model, device="cpu", precision="fp16")
    with pytest.raises(ConfigError, match=r"decode='beam': give a .*DecodeConfig\(method='beam'"):
        ds2.load(model, device="cpu", decode="beam")
    recogniser = ds2.load(model, device="cpu")
    with pytest.raises(DecodeError, match="'beam' is no decoder"):
        recogniser.with_decoder("beam")  # type: ignore[arg-type]
    with pytest.raises(DecodeError, match="returned 3: it must return a text"):
        recogniser.with_decoder(lambda log_probs: 3).transcribe(np.zeros(9000), 16000)  # type: ignore[arg-type, return-value]
    for rate_hz in (0, 16000.5, "16000", 768_000):  # FLAC has no rate as high as the last one
        with pytest.raises(AudioError, match="utterance 1: "):
            ds2.save_dataset(tmp_path / "rates", [(samples, "a")], sample_rate_hz=rate_hz)  # type: ignore[arg-type]
    with pytest.raises(ManifestError, match="half of a surrogate pair"):
        ds2.save_dataset(tmp_path / "half", [(samples, "\ud800")], sample_rate_hz=16000)
    assert not [*tmp_path.rglob("*.flac"), *tmp_path.rglob("*.jsonl")]
    with ThreadPoolExecutor(1) as pool, pytest.raises(ConfigError, match="in the main thread"):
        pool.submit(ds2.train, "data.train=[x.jsonl]", f"run_dir={tmp_path / 'run'}").result()
