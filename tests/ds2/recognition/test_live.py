"""Segments of a source without end: the rules that end them, flush, times from the start, memory."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support import kernel_on_cpu
from torch import Tensor

from ds2.audio.read import read_audio
from ds2.config.schema import ConfigError, DecodeConfig
from ds2.decoding.beam.decoder import BeamDecoder, BeamStream
from ds2.decoding.beam.kernel_search import KernelSearch, KernelStreams
from ds2.decoding.hypothesis import Hypothesis
from ds2.inference.runner import BlockOutput, Slot
from ds2.model.checkpoint import load_model
from ds2.recognition.open_segments import NEVER, Endpoints, Segment
from ds2.recognition.recogniser import Recogniser
from ds2.recognition.session import (
    LiveSession,
    Session,
    add_levels,
    decode_logits,
    decode_sessions,
    finish_segments,
    quiet_at_ends,
    results,
)

FRAME_S = 0.02  # of the tiny model
BLOCK_FRAMES = 20  # of features, in the default block


@pytest.fixture(params=["greedy", "beam"])
def recogniser(request: pytest.FixtureRequest, make_model: Callable[..., Path]) -> Recogniser:
    result = Recogniser.of(load_model(make_model()), DecodeConfig(method=request.param, beam=8), torch.device("cpu"))
    assert result.frame_s == pytest.approx(FRAME_S)
    return result


def logits_of(text: str, alphabet: tuple[str, ...]) -> Tensor:
    """(T', 1, V): a character of the text each frame, - for the blank."""
    path = [0 if character == "-" else alphabet.index(character) for character in text]
    return 20.0 * torch.nn.functional.one_hot(torch.tensor(path), len(alphabet)).float()[:, None]


def say(live: LiveSession, text: str, cut: int = 10) -> list[Segment]:
    logits = logits_of(text, live.pipeline.alphabet.symbols)
    for start in range(0, len(logits), cut):
        piece = logits[start : start + cut]
        decode_logits([live], piece, [len(piece)])
    result = list(live.segments)
    live.segments.clear()
    return result


def test_a_pause_after_words_ends_a_segment_and_silence_alone_none(recogniser: Recogniser) -> None:
    live = recogniser.live()
    assert say(live, "-" * 300) == []  # 6 s
    assert say(live, "ab-c" + "-" * 36) == []  # .7 s of silence
    assert live.result().text == "abc"
    [segment] = say(live, "-" * 20)
    assert segment.hypothesis.text == "abc"
    assert live.result().text == ""
    [word] = segment.hypothesis.words
    assert (word.start_s, word.end_s) == (pytest.approx(6.0), pytest.approx(6.08))
    assert segment.start_s <= 6.0 and segment.end_s >= 6.08 + 0.8


def talk(live: LiveSession, text: str, sound: str, ahead: int) -> float | None:
    """Seconds of audio when the first segment ends; the sound is w where words are, n noise, and the logits wait."""
    logits, draw = logits_of(text, live.pipeline.alphabet.symbols), np.random.default_rng(0)
    loudness = {"w": 0.1, "n": 0.03, "-": 0.003}
    for start in range(0, len(sound), 10):
        rows = [draw.normal(0, loudness[frame], round(FRAME_S * 16000)) for frame in sound[start : start + 10]]
        add_levels([(live, np.concatenate(rows).astype(np.float32))])
        piece = logits[max(0, start - ahead) : max(0, start + 10 - ahead)]
        decode_logits([live], piece, [len(piece)])
        if live.segments:
            return (start + 10) * FRAME_S
    return None


CLICKS = "w" * 20 + "-" * 25 + "w" * 3 + "-" * 27 + "w" * 3 + "-" * 42


@pytest.mark.parametrize(
    ("text", "sound", "ahead", "end_s"),
    [
        ("ab" * 10 + "-" * 100, "w" * 20 + "-" * 100, 30, 0.4 + 0.8),  # silence that the logits have not reached counts
        ("ab" * 10 + "-" * 100, "w" * 20 + "n" * 100, 30, 0.4 + 0.8 + 0.6),  # noise does not
        ("ab" * 10 + "-" * 30 + "ab" * 30, "w" * 20 + "-" * 30 + "w" * 60, 30, None),  # a pause of .6 s
        # A pause of .9 s: when the logits have .8 s of it, the next words are there.
        ("ab" * 10 + "-" * 45 + "ab" * 30, "w" * 20 + "-" * 45 + "w" * 60, 40, None),
        # Sound that is no word, until the logits say so.
        ("ab" * 10 + "-" * 100, "w" * 20 + "-" * 30 + "w" * 70, 30, 0.4 + 0.8 + 0.6 + 0.6),
        ("ab" * 10 + "-" * 100, CLICKS, 30, 0.4 + 0.8 + 0.6),
        ("a-" * 10 + "-" * 12 + "a-" * 69, "w" * 200, 30, None),  # logits that are quiet within a long word
    ],
)
def test_audio_whose_logits_wait_for_their_lookahead_says_whether_a_pause_goes_on(
    recogniser: Recogniser, text: str, sound: str, ahead: int, end_s: float | None
) -> None:
    live = recogniser.live()
    ended_s = talk(live, text, sound, ahead)
    assert ended_s == (None if end_s is None else pytest.approx(end_s))
    assert live.pipeline.open_segments.rows["levels"][live.row] <= ahead + 10


def test_each_session_has_its_own_rules(recogniser: Recogniser) -> None:
    quick, never = recogniser.live(endpoints=Endpoints(after_speech_s=0.2)), recogniser.live(endpoints=NEVER)
    text = "ab" + "-" * 300 + "ca" + "-" * 20
    assert [s.hypothesis.text for s in say(quick, text)] == ["ab", "ca"]
    assert say(never, text) == []
    assert never.result().text == "abca"
    with pytest.raises(ConfigError, match="after_speech_s=0"):
        Endpoints(after_speech_s=0.0)


def test_a_segment_that_is_too_long_ends_at_the_next_pause_or_at_last_without(recogniser: Recogniser) -> None:
    live = recogniser.live(endpoints=Endpoints(longest_s=2.0))
    assert say(live, "ab " * 33) == []
    [segment] = say(live, "ab" + "-" * 25 + "ab ")
    assert segment.end_s == pytest.approx((101 + 10) * FRAME_S, abs=10 * FRAME_S)
    [segment] = say(live, "ab " * 130)
    assert segment.end_s - segment.start_s == pytest.approx(7.0, abs=10 * FRAME_S)


def test_flush_loses_nothing_and_times_go_on(recogniser: Recogniser, recording: Path) -> None:
    samples = read_audio(recording)
    wanted = recogniser.session()
    wanted.accept_waveform(samples[:20_000])
    first = wanted.finish()
    live = recogniser.live(endpoints=NEVER)
    for part in (samples[:20_000], samples[:20_000]):
        live.accept_waveform(part)
        while live.is_ready():
            live.decode()
        live.flush()
    one, two = live.segments
    assert one.hypothesis == first
    assert two.hypothesis.text == first.text
    shifts = {round(b.start_s - a.start_s, 6) for a, b in zip(first.words, two.hypothesis.words, strict=True)}
    assert shifts == {1.25} and live.duration_s == 2.5
    live.flush()
    assert len(live.segments) == 2


def test_sources_that_end_share_batches_with_those_that_go_on(
    recogniser: Recogniser, recording: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples, sizes = read_audio(recording), list[int]()
    runner = recogniser.block_runner(BLOCK_FRAMES)
    alone = [recogniser.live(endpoints=NEVER) for _ in range(5)]
    together = [recogniser.live(endpoints=NEVER) for _ in range(5)]
    for lives in (alone, together):
        for number, live in enumerate(lives):
            live.accept_waveform(samples[: 20_000 + 700 * number])
    for live in alone[:4]:
        live.flush()
    step = runner.step

    def counted(slots: Sequence[Slot], blocks: Sequence[NDArray[np.float32]]) -> BlockOutput:
        sizes.append(len(slots))
        return step(slots, blocks)

    monkeypatch.setattr(runner, "step", counted)
    for live in together[:4]:
        live.input_finished()
    longest = max(len(live.blocks) for live in together)
    while any(live.is_ready() for live in together):
        decode_sessions(together)
    finish_segments(together[:4])
    assert [[s.hypothesis.text for s in live.segments] for live in together] == [
        [s.hypothesis.text for s in live.segments] for live in alone
    ]
    assert sizes[0] == 5 and len(sizes) == longest
    assert not together[4].segments and all(live.segments for live in together[:4])


def test_a_batch_whose_logits_cannot_be_decoded_fails_and_is_not_run_again(
    recogniser: Recogniser, recording: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lives, batches, failures = [recogniser.live() for _ in range(2)], list[int](), dict[Session, Exception]()
    for live in lives:
        live.accept_waveform(read_audio(recording))
    more_labels = torch.eye(len(recogniser.alphabet) + 1)[[-1]].expand(3, 2, -1)

    def step(slots: Sequence[Slot], blocks: Sequence[NDArray[np.float32]]) -> BlockOutput:
        batches.append(len(slots))
        return BlockOutput([0, 1], more_labels, [3, 3])

    monkeypatch.setattr(recogniser.block_runner(BLOCK_FRAMES), "step", step)
    decode_sessions(lives, failures.setdefault)
    assert batches == [2] and [type(failures[live]) for live in lives] == [IndexError] * 2


@pytest.mark.parametrize("seed", range(1))
def test_segments_do_not_depend_on_chunks(recogniser: Recogniser, recording: Path, seed: int) -> None:
    samples, rules, draw = np.tile(read_audio(recording), 3), Endpoints(longest_s=0.5), random.Random(seed)
    wanted, live = recogniser.live(endpoints=rules), recogniser.live(endpoints=rules)
    wanted.accept_waveform(samples)
    start = 0
    while start < len(samples):
        end = start + draw.randint(160, 20_000)
        live.accept_waveform(samples[start:end])
        start = end
        while live.is_ready():
            live.decode()
    for session in (wanted, live):
        while session.is_ready():
            session.decode()
        session.flush()
    assert len(live.segments) > 1
    assert live.segments == wanted.segments


def test_reset_drops_what_was_not_final(recogniser: Recogniser, recording: Path) -> None:
    samples = read_audio(recording)
    live, session = recogniser.live(endpoints=NEVER), recogniser.session()
    for source in (live, session):
        source.accept_waveform(samples[5000:20_000])
        source.decode()
        source.reset()
        assert not source.is_ready() and not source.is_endpoint() and not source.result().text
    expected = recogniser.session()
    for source in (live, session, expected):
        source.accept_waveform(samples[:20_000])
    assert session.finish() == expected.finish()
    live.flush()
    assert live.is_endpoint()
    [segment] = live.segments
    assert segment.hypothesis.text == expected.result().text and segment.start_s == 15_000 / 16_000


def test_no_word_ends_after_its_audio(make_model: Callable[..., Path]) -> None:
    """17 windows make 5 output frames of 40 ms, the last of which ends 20 ms after the audio."""
    convs = "[{kernel:[11,5],stride:[4,2],channels:4},{kernel:[3,3],stride:[1,2],channels:4}]"
    loaded = load_model(make_model(f"model.convs={convs}"))
    plain = Recogniser.of(loaded, DecodeConfig(), torch.device("cpu"))
    full = plain.with_decoder(lambda log_probs: "".join("ab"[frame % 2] for frame in range(len(log_probs))))
    samples = np.zeros(2880, np.float32)
    live = full.live(endpoints=NEVER)
    for number in range(1, 3):
        assert [word.end_s for word in full.transcribe(samples, 16_000).words] == [0.18]
        live.accept_waveform(samples)
        live.flush()
        segment = live.segments.pop()
        assert [word.end_s for word in segment.hypothesis.words] == [segment.end_s] == [pytest.approx(0.18 * number)]


def test_audio_that_the_resampler_still_holds_at_a_reset_counts(recogniser: Recogniser) -> None:
    live = recogniser.live(sample_rate_hz=8000)
    for _ in range(3):
        live.accept_waveform(np.zeros(4000, np.float32))
        live.reset()
    assert live.duration_s == 1.5


def test_silence_is_counted_at_both_ends_of_each_row() -> None:
    draw = np.random.default_rng(2)
    quiet, lengths = draw.random((7, 200)) < 0.8, draw.integers(1, 8, 200)
    before, after = [], []
    for row, length in enumerate(lengths):
        own = quiet[:length, row].tolist()
        before.append(next((at for at, silent in enumerate(own) if not silent), length))
        after.append(next((at for at, silent in enumerate(reversed(own)) if not silent), length))
    assert [counts.tolist() for counts in quiet_at_ends(quiet, lengths)] == [before, after]


def test_nothing_grows_in_a_source_without_end(recogniser: Recogniser) -> None:
    live = recogniser.live(endpoints=Endpoints(math.inf, 0.4, 5.0))
    for _ in range(30):
        say(live, "ab-c" + "-" * 30)
        stream = live.decoding
        assert len(recogniser.decoder.best([stream])[0].labels) <= 3
        if isinstance(stream, BeamStream):
            assert 0 < stream.aligner.pending_frames + len(stream.shared) <= 34


def test_results_come_with_the_step_of_the_search_where_that_saves_a_wait(
    make_model: Callable[..., Path], recording: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel_on_cpu.patch(monkeypatch)
    decode = DecodeConfig(method="beam", beam=8)
    recogniser = Recogniser.of(load_model(make_model("alphabet.symbols='a bc'")), decode, torch.device("cpu"))
    decoder = recogniser.decoder
    assert isinstance(decoder, BeamDecoder)
    decoder.search.kernel = KernelSearch(decoder.search.fusion, decode)
    decoder.search.streams = KernelStreams(decoder.search.kernel, decode)
    best, waits = decoder.best, list[int]()

    def counted_best(streams: Sequence[BeamStream], *, words: bool = False) -> list[Hypothesis]:
        waits.append(len(streams))
        return best(streams, words=words)

    monkeypatch.setattr(decoder, "best", counted_best)
    samples, lives = read_audio(recording), [recogniser.live(), recogniser.live(endpoints=NEVER)]
    for start in range(0, len(samples), 4000):
        for live, count in zip(lives, (4000, 2500), strict=True):
            live.accept_waveform(samples[start : start + count])
        while ready := [live for live in lives if live.is_ready()]:
            decode_sessions(ready)
            for live in lives:
                live.segments.clear()
        waits.clear()
        shown = results(lives)
        assert not waits or start == 0
        for live, hypothesis in zip(lives, shown, strict=True):
            [wanted] = best([live.decoding])
            assert (hypothesis.text, hypothesis.labels, hypothesis.fixed_words) == (
                wanted.text, wanted.labels, wanted.fixed_words,
            )  # fmt: skip
    lives[1].wants_words = True
    assert results(lives)[1] == best([lives[1].decoding], words=True)[0] and results(lives)[1].words
    lives[0].flush()
    assert results(lives[:1]) == best([lives[0].decoding])
    lives[1].reset()
    assert not results(lives)[1].text


@pytest.mark.parametrize("method", ["greedy", "beam"])
def test_fixed_words_are_those_of_the_final_text(make_model: Callable[..., Path], recording: Path, method: str) -> None:
    decode = DecodeConfig(method=method, beam=8)
    recogniser = Recogniser.of(load_model(make_model("alphabet.symbols='a bc'")), decode, torch.device("cpu"))
    live, samples, fixed = recogniser.live(endpoints=NEVER), read_audio(recording), list[list[str]]()
    for start in range(0, len(samples), 3200):
        live.accept_waveform(samples[start : start + 3200])
        while live.is_ready():
            live.decode()
        partial = live.result()
        fixed.append(partial.text.split()[: partial.fixed_words])
        assert (live.speech_start_s is None) == (not partial.labels) or method == "beam"
    live.flush()
    [segment] = live.segments
    words = segment.hypothesis.text.split()
    assert all(words[: len(first)] == first for first in fixed)
    assert len(words) > 2 and len(fixed[-1]) >= len(words) // 2
