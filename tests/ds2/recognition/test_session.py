"""Sources chunk by chunk: however they are cut and whoever shares their batches, what is heard is the same."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from support.streams import recognise_in_chunks

from ds2.audio.read import AudioError, read_audio
from ds2.config.schema import ConfigError, DecodeConfig
from ds2.decoding.hypothesis import Hypothesis
from ds2.decoding.phrases import LexiconError
from ds2.lm.files import read_arpa, save_ngram
from ds2.model.checkpoint import load_model
from ds2.recognition.recogniser import Recogniser, transcribe_file
from ds2.recognition.session import BLOCK_S, LiveSession, Session, decode_sessions

RATE_HZ = 16000
ARPA = """\\data\\
ngram 1=6
ngram 2=2

\\1-grams:
-1.5\t<unk>\t0
-99\t<s>\t-0.3
-0.9\t</s>\t0
-0.6\ta\t-0.2
-0.7\tab\t-0.4
-1.1\tcba\t-0.1

\\2-grams:
-0.2\t<s> ab
-0.3\ta cba

\\end\\
"""


@pytest.fixture(params=["greedy", "beam"])
def recogniser(request: pytest.FixtureRequest, make_model: Callable[..., Path], tmp_path: Path) -> Recogniser:
    (tmp_path / "model.arpa").write_text(ARPA, encoding="utf-8")
    save_ngram(read_arpa(tmp_path / "model.arpa"), tmp_path / "model.lm")
    lm = str(tmp_path / "model.lm") if request.param == "beam" else ""
    options = DecodeConfig(method=request.param, lm=lm, beam=16, unknown_score=-2.0)
    return Recogniser.of(load_model(make_model()), options, torch.device("cpu"))


@pytest.mark.parametrize("seed", range(2))
def test_any_chunks_give_the_bits_of_the_file(recogniser: Recogniser, recording: Path, seed: int) -> None:
    wanted = transcribe_file(recogniser, recording, block_s=BLOCK_S, context_s=0.0).hypothesis
    assert len(wanted.labels) > 5
    assert recognise_in_chunks(recogniser.session(), read_audio(recording), random.Random(seed)) == wanted
    at_once = transcribe_file(recogniser, recording).hypothesis  # blocks of a minute: sums in another order
    assert (at_once.text, at_once.score) == (wanted.text, pytest.approx(wanted.score, rel=1e-4))


@pytest.mark.parametrize("seed", range(2))
def test_sessions_that_join_and_leave_at_random_get_their_own_words(
    recogniser: Recogniser, recording: Path, seed: int
) -> None:
    draw, samples = random.Random(seed), read_audio(recording)
    sources = [
        np.ascontiguousarray(samples[first::step_]) for first, step_ in ((0, 1), (3000, 1), (0, 2), (9, 3), (20_000, 1))
    ]
    alone = [recognise_in_chunks(recogniser.session(), source, draw) for source in sources]
    assert len({hypothesis.text for hypothesis in alone}) > 3
    waiting, running, at, results = (
        list(range(len(sources))),
        dict[int, Session](),
        [0] * len(sources),
        dict[int, Hypothesis](),
    )
    while waiting or running:
        if waiting and draw.random() < 0.7:
            running[waiting[0]] = recogniser.session()
            del waiting[0]
        for index in [index for index in running if draw.random() < 0.7]:
            end = at[index] + round(draw.uniform(0.01, 3.0) * RATE_HZ)
            running[index].accept_waveform(sources[index][at[index] : end])
            at[index] = end
        for _ in range(draw.randint(0, 3)):
            decode_sessions(list(running.values()))
        for index in [index for index in running if at[index] >= len(sources[index]) and draw.random() < 0.5]:
            results[index] = running.pop(index).finish()
    for index, wanted in enumerate(alone):
        assert results[index].text == wanted.text
        assert [(w.start_s, w.end_s) for w in results[index].words] == [(w.start_s, w.end_s) for w in wanted.words]
        assert results[index].score == pytest.approx(wanted.score, rel=1e-4)


@pytest.mark.parametrize("rate_hz", [8000, 22050, 48000])
def test_another_rate_is_resampled_as_a_stream(
    recogniser: Recogniser, recording: Path, rate_hz: int, tmp_path: Path
) -> None:
    time_s = np.arange(2 * rate_hz) / rate_hz
    samples = (0.4 * np.sin(2 * np.pi * np.cumsum(np.repeat([300, 900, 2000, 600], rate_hz // 2)) / rate_hz)).astype(
        np.float32
    )
    samples = samples[: len(time_s)]
    soundfile.write(tmp_path / "other.wav", samples, rate_hz, subtype="FLOAT")
    wanted = transcribe_file(recogniser, tmp_path / "other.wav", block_s=BLOCK_S, context_s=0.0)
    session = recogniser.session(sample_rate_hz=rate_hz)
    assert recognise_in_chunks(session, samples, random.Random(1)) == wanted.hypothesis
    assert session.duration_s == wanted.duration_s


def test_what_is_no_audio_is_refused_and_the_session_goes_on(recogniser: Recogniser, recording: Path) -> None:
    samples, session = read_audio(recording), recogniser.session()
    session.accept_waveform(samples[:9000])
    with pytest.raises(AudioError, match="nan"):
        session.accept_waveform(np.array([0.1, np.nan], np.float32))
    assert recognise_in_chunks(session, samples[9000:], random.Random(0)) == recognise_in_chunks(
        recogniser.session(), samples, random.Random(1)
    )
    with pytest.raises(AudioError, match="12 Hz"):
        recogniser.session(sample_rate_hz=12)


@pytest.mark.parametrize("live", [False, True])
def test_samples_of_other_types_are_the_same_audio(recogniser: Recogniser, recording: Path, live: bool) -> None:
    samples = read_audio(recording)
    integers = (samples * 32768).clip(-32768, 32767).astype(np.int16)
    samples = integers.astype(np.float32) / 32768

    def text(same: Any) -> str:
        session = recogniser.live() if live else recogniser.session()
        session.accept_waveform(same[:7000])
        session.accept_waveform(same[:0])
        session.accept_waveform(same[7000:])
        if not isinstance(session, LiveSession):
            return session.finish().text
        session.flush()
        return " ".join(segment.hypothesis.text for segment in session.segments)

    wanted = text(samples)
    assert wanted
    for same in (integers, integers.astype(">i2"), integers.astype(np.int32) << 16, torch.from_numpy(samples)):
        assert text(same) == wanted
    for other in (samples * 32768, integers.astype(np.int64), np.stack([samples, samples], 1)):
        with pytest.raises(AudioError, match="samples"):
            text(other)
    assert recogniser.transcribe(torch.from_numpy(samples).bfloat16(), 16000).text


def test_a_source_ends_once(recogniser: Recogniser, recording: Path) -> None:
    samples, session = read_audio(recording), recogniser.session()
    session.accept_waveform(samples)
    wanted = session.finish()
    assert session.finish() == wanted
    with pytest.raises(ValueError, match="reset"):
        session.accept_waveform(samples)
    session.reset()
    session.accept_waveform(samples)
    assert session.finish() == wanted


def test_a_rate_of_zero_and_a_channel_below_zero_are_refused(recogniser: Recogniser, recording: Path) -> None:
    with pytest.raises(AudioError, match="0 Hz"):
        recogniser.session(sample_rate_hz=0)
    with pytest.raises(AudioError, match="channel -1"):
        recogniser.transcribe(recording, channel=-1)


@pytest.mark.parametrize("block_s", [0.0, float("nan"), float("inf"), 1e6])
def test_a_block_has_a_length_that_fits(recogniser: Recogniser, block_s: float) -> None:
    with pytest.raises(ValueError, match=r"give seconds from 0\.02, an output frame, to 600"):
        recogniser.session(block_s)


def test_sessions_take_hot_words_as_files_do(make_model: Callable[..., Path], recording: Path) -> None:
    searching = Recogniser.load(make_model(), device="cpu", decode=DecodeConfig(method="beam", beam=8))
    wanted = searching.transcribe(recording, hot_words=["ab"]).text
    session = searching.session(hot_words=["ab"])
    session.accept_waveform(read_audio(recording))
    assert session.finish().text == wanted
    for other, message in (("ab", "one string"), ([["ab"]], "no list of texts"), (3, "no list"), ([None], "are texts")):
        with pytest.raises(LexiconError, match=message):
            searching.live(hot_words=other)  # type: ignore[arg-type]


def test_a_bidirectional_model_is_refused(make_model: Callable[..., Path]) -> None:
    model = make_model("model.bidirectional=true", "model.max_lookahead_ms=0", "model.row_convs=0")
    with pytest.raises(ConfigError, match="cannot stream"):
        Recogniser.of(load_model(model), DecodeConfig(), torch.device("cpu")).session()
