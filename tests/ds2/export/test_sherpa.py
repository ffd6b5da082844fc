"""Exported models in sherpa-onnx: the words that `ds2 transcribe` writes; and what it cannot run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sherpa_onnx
import soundfile

from ds2.commands.compose import compose_config
from ds2.config.schema import ConvConfig, DecodeConfig
from ds2.data.manifest import read_manifest
from ds2.export.files import export_onnx, sherpa_tokens, why_not_sherpa
from ds2.model.checkpoint import LoadedModel, load_model
from ds2.recognition.recogniser import Recogniser
from ds2.system import UserError
from ds2.text.alphabet import Alphabet

Make = Callable[..., LoadedModel]
RATE_HZ = 16000


def recogniser(file: Path) -> Any:
    return sherpa_onnx.OnlineRecognizer.from_nemo_ctc(
        model=str(file), tokens=str(file.with_name("tokens.txt")), num_threads=1
    )


def pause(seconds: float) -> np.ndarray:
    """As it was between the tones of the training: a little noise."""
    noise = np.random.default_rng(0).standard_normal(round(seconds * RATE_HZ))
    return (0.001 * noise).astype(np.float32)


@pytest.mark.parametrize("chunk_s", [0.04, 0.16, 0.64])
def test_sherpa_writes_the_words_that_we_write(
    tone_run: Path, tone_manifest: Path, tmp_path: Path, chunk_s: float
) -> None:
    """Of streams that are heard together; the silence that the description asks for is enough and not too much."""
    described = export_onnx(load_model(tone_run), tmp_path / "model.onnx", chunk_s=chunk_s)
    ours = Recogniser.load(tone_run, device="cpu", decode=DecodeConfig())
    theirs = recogniser(tmp_path / "model.onnx")
    streams, wanted = [], []
    for utterance in read_manifest(tone_manifest):
        samples, _ = soundfile.read(utterance.audio_filepath, dtype="float32")
        stream = theirs.create_stream()
        for part in (samples[:5000], samples[5000:], pause(described["tail_s"])):
            stream.accept_waveform(RATE_HZ, part)
        stream.input_finished()
        streams.append(stream)
        soundfile.write(tmp_path / "padded.wav", np.concatenate([samples, pause(3.0)]), RATE_HZ, subtype="FLOAT")
        wanted.append(ours.transcribe(tmp_path / "padded.wav").text)
    while ready := [stream for stream in streams if theirs.is_ready(stream)]:
        theirs.decode_streams(ready)
    found = [" ".join(theirs.get_result(stream).split()) for stream in streams]
    assert found == wanted and len(set(wanted)) > 5


def test_times_are_the_lag_late(tone_run: Path, tmp_path: Path) -> None:
    described = export_onnx(load_model(tone_run), tmp_path / "model.onnx")
    theirs = recogniser(tmp_path / "model.onnx")
    sound = pause(2.5)
    sound[8000:10_400] += 0.3 * np.sin(2 * np.pi * 400.0 * np.arange(2400, dtype=np.float32) / RATE_HZ)
    stream = theirs.create_stream()
    stream.accept_waveform(RATE_HZ, sound)
    while theirs.is_ready(stream):
        theirs.decode_stream(stream)
    late_s = described["lag_frames"] * described["frame_s"]
    assert theirs.tokens(stream) == ["a"]
    assert 0.4 <= theirs.timestamps(stream)[0] - late_s <= 0.8


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("log_spectrogram", {}, "features.kind=log_spectrogram: train with features=nemo_fbank"),
        ("kaldi_fbank", {"bidirectional": True, "max_lookahead_ms": 0.0}, "model.bidirectional=true needs the end"),
        ("kaldi_fbank", {"convs": [ConvConfig([11, 5], [2, 2], 4)]}, "this model gives one for 2,"),
    ],
)
def test_what_sherpa_cannot_run_is_refused(
    random_model: Make, tmp_path: Path, kind: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=f"{message}.* --interface plain"):
        export_onnx(random_model(kind, **settings), tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())
    export_onnx(random_model(kind, **settings), tmp_path / "model.onnx", for_sherpa=False)


def test_all_obstacles_are_named_at_once() -> None:
    config = compose_config(["model.bidirectional=true", "model.max_lookahead_ms=0", "model.row_convs=0"])
    reason = why_not_sherpa(config) or ""
    assert all(part in reason for part in ("bidirectional", "features.kind", "whose product is 4", "--interface plain"))
    assert why_not_sherpa(compose_config(["recipe=librispeech_5h_sherpa"])) is None


def test_tokens_of_pieces_and_digits() -> None:
    assert sherpa_tokens(Alphabet(("", "\u2581a", "7", "\u00e9"))) == "<blk> 0\n\u2581a 1\n7 2\n\u00e9 3\n"
