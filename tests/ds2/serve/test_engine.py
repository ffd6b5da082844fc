"""Sources that share a recogniser: how many are in one batch, and results that nobody waited for."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from support.serving import RATE_HZ, samples_of, speech

from ds2.audio.read import AudioError
from ds2.config.schema import DecodeConfig
from ds2.model.checkpoint import load_model
from ds2.recognition.open_segments import NEVER, Endpoints
from ds2.recognition.recogniser import Recogniser
from ds2.serve.client import SessionSettings, StreamResult
from ds2.serve.engine import HANGS_S, Answers, Chunk, Engine, LocalRecogniser, allowed_s
from ds2.serve.limits import BrokenError, Limits

RULES = Endpoints(longest_s=0.5)


def recogniser_of(model: Path) -> Recogniser:
    return Recogniser.of(load_model(model), DecodeConfig(), torch.device("cpu"))


def test_no_thread_outlives_an_engine(make_model: Callable[..., Path]) -> None:
    engine = Engine(recogniser_of(make_model()), Limits())
    engine.run(lambda block: [None], print)
    assert "ds2-watch" not in {thread.name for thread in threading.enumerate()}


def test_a_turn_may_take_longer_for_a_long_file(make_model: Callable[..., Path]) -> None:
    recogniser = recogniser_of(make_model())
    short, long = recogniser.live(sample_rate_hz=RATE_HZ), recogniser.live(sample_rate_hz=RATE_HZ, endpoints=NEVER)
    short.accept_waveform(np.zeros(20 * RATE_HZ, np.float32))
    long.accept_waveform(np.zeros(60 * RATE_HZ, np.float32))
    turn = [Chunk(live, None, print, 0) for live in (short, short, long, long)]
    assert allowed_s(turn[:2]) == HANGS_S
    assert allowed_s(turn) == pytest.approx(HANGS_S + 3)
    long.flush()
    assert allowed_s(turn) == HANGS_S


def test_a_turn_answers_what_it_decodes_and_what_needs_no_decoding(make_model: Callable[..., Path]) -> None:
    engine = Engine(recogniser_of(make_model()), Limits())
    answered: list[str] = []
    lives = [engine.open(SessionSettings(RATE_HZ, NEVER)) for _ in range(3)]
    seconds = {"no block": 0.05, "one block": 0.25, "two blocks": 0.5}

    def deliver(answers: Answers) -> None:
        answered.extend(chunk.call for chunk, _ in answers)

    chunks = [
        Chunk(live, samples_of(speech(3, duration_s)), deliver, name)
        for live, (name, duration_s) in zip(lives, seconds.items(), strict=True)
    ]
    waiting = engine.turn([], chunks)
    assert answered == ["no block", "one block"] and waiting == chunks[2:]
    assert engine.turn(waiting, []) == [] and answered == [*seconds]


def test_what_is_answered_before_a_turn_fails_is_not_answered_again(make_model: Callable[..., Path]) -> None:
    engine = Engine(recogniser_of(make_model()), Limits())
    answers: list[tuple[str, type]] = []

    def deliver(own: Answers) -> None:
        answers.extend((chunk.call, type(answer)) for chunk, answer in own)

    def fail_once(own: Answers) -> None:
        if ("failed", MemoryError) not in answers:
            answers.append(("failed", MemoryError))
            raise MemoryError
        deliver(own)

    chunks = [
        Chunk(engine.open(SessionSettings(RATE_HZ, NEVER)), samples_of(speech(3, 0.05)), own, name)
        for name, own in (("first", deliver), ("second", fail_once), ("third", print))
    ]
    assert engine.turn([], chunks) == []
    assert answers == [("first", StreamResult), ("failed", MemoryError), ("second", BrokenError)]


def test_who_cannot_be_answered_gets_one_more_try_and_keeps_nobody_waiting(make_model: Callable[..., Path]) -> None:
    engine = Engine(recogniser_of(make_model()), Limits())
    answers: list[tuple[str, type]] = []

    def deliver(own: Answers) -> None:
        answers.extend((chunk.call, type(answer)) for chunk, answer in own)

    def fail(own: Answers) -> None:
        deliver(own[:1])
        raise MemoryError

    def chunk(call: str, own: Callable[[Answers], None], samples: object = None) -> Chunk:
        return Chunk(engine.open(SessionSettings(RATE_HZ, NEVER)), samples, own, call)  # type: ignore[arg-type]

    refused = np.full(10, np.nan, np.float32)
    assert engine.turn([], [chunk("sent", fail), chunk("lost", fail), chunk("refused", fail, refused)]) == []
    assert answers == [
        ("refused", AudioError), ("refused", BrokenError), ("sent", StreamResult), ("sent", BrokenError),
    ]  # fmt: skip
    assert engine.turn([], [chunk("next", deliver)]) == [] and answers[4:] == [("next", StreamResult)]


def test_no_batch_is_larger_than_allowed(make_model: Callable[..., Path]) -> None:
    def sizes(batch: int) -> dict[str, str]:
        engine = LocalRecogniser(recogniser_of(make_model()), Limits(batch=batch))

        async def talk() -> bytes:
            sources = [await engine.open(SessionSettings(RATE_HZ, RULES)) for _ in range(6)]
            for _ in range(3):
                await asyncio.gather(*(source.accept_waveform(samples_of(speech(3, 0.4))) for source in sources))
            return await engine.metrics()

        lines = asyncio.run(talk()).decode().splitlines()
        engine.close()
        return dict(line.rsplit(" ", 1) for line in lines if line.startswith("ds2_batch_size"))

    alone, all_of_them = sizes(1), sizes(6)
    assert alone['ds2_batch_size_bucket{le="1.0"}'] == alone["ds2_batch_size_count"]
    assert float(all_of_them["ds2_batch_size_count"]) < float(alone["ds2_batch_size_count"])


def test_the_delay_of_last_words_is_counted_where_a_pause_ended_them(
    make_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ds2.recognition.open_segments.OVERTIME_S", 0.0)
    engine = LocalRecogniser(recogniser_of(make_model()), Limits())

    async def talk() -> tuple[int, str]:
        source = await engine.open(SessionSettings(RATE_HZ, RULES))
        answers = [await source.accept_waveform(samples_of(speech(3, 1.5))) for _ in range(2)]
        await source.flush()
        lines = (await engine.metrics()).decode().splitlines()
        [count] = [line for line in lines if line.startswith("ds2_last_word_seconds_count")]
        return sum(bool(answer.final) for answer in answers), count

    answered, count = asyncio.run(talk())
    engine.close()
    assert answered and count == f"ds2_last_word_seconds_count {answered:.1f}"


def test_results_that_nobody_waited_for_come_at_the_end(
    make_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ds2.recognition.open_segments.OVERTIME_S", 0.0)
    engine, samples = LocalRecogniser(recogniser_of(make_model()), Limits()), samples_of(speech(3, 3.0))

    async def texts(*, leaves: bool) -> list[str]:
        source = await engine.open(SessionSettings(RATE_HZ, RULES))
        accepting = asyncio.create_task(source.accept_waveform(samples))
        final = []
        if leaves:
            await asyncio.sleep(0)
            accepting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await accepting
        else:
            final = (await accepting).final
        return [segment.hypothesis.text for segment in [*final, *(await source.flush()).final]]

    wanted = asyncio.run(texts(leaves=False))
    assert len(wanted) > 2 and asyncio.run(texts(leaves=True)) == wanted
    engine.close()
