"""OpenAI's realtime client on a server of ours."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable
from typing import Any

import numpy as np
import openai
import pytest
from support.serving import Running, alone, companded, speech, text_at

RATE_HZ = 24000


def client(running: Running) -> Any:
    return openai.AsyncOpenAI(base_url=f"{running.web}/v1", api_key="none").realtime.connect(
        model="ds2", extra_query={"intent": "transcription"}
    )


def session(detection: Any) -> dict[str, Any]:
    return {"type": "transcription", "audio": {"input": {"turn_detection": detection}}}


def update(**settings: Any) -> dict[str, Any]:
    return {"type": "session.update", "session": {"type": "transcription", "audio": {"input": settings}}}


def _silence(milliseconds: float) -> dict[str, Any]:
    return {"type": "server_vad", "silence_duration_ms": milliseconds}


async def send(connection: Any, data: bytes) -> None:
    for start in range(0, len(data), 9001):  # samples cut in halves too
        audio = base64.b64encode(data[start : start + 9001]).decode()
        await connection.input_audio_buffer.append(audio=audio)


@pytest.mark.parametrize(("kind", "law"), [("audio/pcmu", "mulaw"), ("audio/pcma", "alaw")])
def test_the_audio_of_telephones_is_taken(shared: Callable[..., Running], kind: str, law: str) -> None:
    running = shared()
    encoded, data = companded(speech(1, 1.5, 8000), law)

    async def talk() -> tuple[Any, Any]:
        async with client(running) as connection:
            await connection.recv()
            audio = {"format": {"type": kind}, "turn_detection": None}
            await connection.session.update(session={"type": "transcription", "audio": {"input": audio}})
            updated = await connection.recv()
            await send(connection, encoded)
            await connection.input_audio_buffer.commit()
            return updated, [await connection.recv() for _ in range(3)][-1]

    updated, completed = asyncio.run(talk())
    assert updated.session.audio.input.format.type == kind
    assert completed.transcript == text_at(running.recogniser, data, 8000) != ""


@pytest.mark.parametrize("method", ["greedy", "beam"])
def test_a_commit_makes_an_item_of_all_that_was_sent(shared: Callable[..., Running], method: str) -> None:
    running, data = shared(method), speech(1, 1.5, RATE_HZ)
    wanted = text_at(running.recogniser, data, RATE_HZ)
    assert wanted

    async def talk() -> list[Any]:
        events = []
        async with client(running) as connection:
            events.append(await connection.recv())
            await connection.session.update(session=session(None))
            events.append(await connection.recv())
            for _ in range(2):
                await send(connection, data)
                await connection.input_audio_buffer.commit()
                events += [await connection.recv() for _ in range(3)]
        return events

    created, updated, *rest = asyncio.run(talk())
    assert (created.type, updated.type) == ("session.created", "session.updated")
    kind = "conversation.item.input_audio_transcription"
    assert [e.type for e in rest] == ["input_audio_buffer.committed", f"{kind}.delta", f"{kind}.completed"] * 2
    assert [rest[at].transcript for at in (2, 5)] == [wanted, wanted]
    assert [rest[at].delta for at in (1, 4)] == [wanted, wanted]
    assert rest[3].previous_item_id == rest[0].item_id == rest[2].item_id != rest[5].item_id
    assert [rest[at].usage.seconds for at in (2, 5)] == pytest.approx([1.5, 1.5])


def test_what_is_wrong_is_an_error_event_and_the_session_goes_on(shared: Callable[..., Running]) -> None:
    running, data = shared(), speech(2, 1.0, RATE_HZ)
    bad = [
        ({"type": "response.create", "event_id": "mine"}, "session.update, and input_audio_buffer.append"),
        ({"type": "input_audio_buffer.append"}, "audio is None: give base64"),
        (update(transcription={"promt": "ab"}), "session.audio.input.transcription.promt is no setting; did you mean"),
        (update(transcription={"phrases": ["(a"]}), "is not closed by"),
        (update(turn_detecton=None), "session.audio.input.turn_detection?"),
        (update(turn_detection={"type": "server_vad", "silence_duration": 1}), "did you mean"),
        ({"type": "input_audio_buffer.commit"}, "append audio"),
        ({"type": "input_audio_buffer.append", "audio": "%"}, "base64"),
        ({"type": "session.update", "session": {"type": "realtime"}}, "transcription"),
        ({"type": "session.update", "session": session({"type": "semantic_vad"})}, "server_vad"),
        ({"type": "session.update", "session": session(3)}, "turn_detection is 3"),
        (update(turn_detection="x" * 1000), "it must be an object"),
        (update(format={"type": "x" * 1000}), "is none of audio/pcm"),
        (update(format={"type": "audio/pcm", "rate": 16000}), "is none of audio/pcm at 24000"),
        ({"type": "session.update", "session": session(_silence(True))}, "=True is not allowed"),
        ({"type": "session.update", "session": session(_silence(10**400))}, "above 0 to 3600000"),
        ({"type": "session.update", "session": {"type": "transcription", "audio": {"input": []}}}, "input is"),
        ({"type": "session.update", "session": {"type": "transcription", "audio": "loud"}}, "audio is 'loud'"),
        ({"type": "\ud800", "event_id": "\ud800"}, "ud800"),
    ]

    async def talk() -> str:
        async with client(running) as connection:
            await connection.recv()
            for event, message in bad:
                await connection.send(event)
                answer = await connection.recv()
                assert answer.type == "error" and message in answer.error.message and len(answer.error.message) < 500
                assert answer.error.event_id == event.get("event_id")
            await send(connection, data)
            await connection.input_audio_buffer.clear()
            kinds = [(await connection.recv()).type for _ in range(2)]
            assert kinds == ["input_audio_buffer.speech_started", "input_audio_buffer.cleared"]
            await connection.session.update(session=session(None))
            await connection.recv()
            await send(connection, data)
            await connection.input_audio_buffer.commit()
            return str([await connection.recv() for _ in range(3)][-1].transcript)

    assert asyncio.run(talk()) == text_at(running.recogniser, data, RATE_HZ)


def test_server_vad_ends_items_at_pauses(shared: Callable[..., Running], monkeypatch: pytest.MonkeyPatch) -> None:
    running, data = shared(), speech(3, 1.0, RATE_HZ)
    monkeypatch.setattr("ds2.recognition.open_segments.OVERTIME_S", 0.0)
    monkeypatch.setattr("ds2.serve.protocols.openai_realtime.Endpoints", _rules)

    async def talk() -> Any:
        async with client(running) as connection:
            await connection.recv()
            detection = {"type": "server_vad", "silence_duration_ms": 300}
            await connection.session.update(session=session(detection))
            updated = await connection.recv()
            assert updated.session.audio.input.turn_detection.silence_duration_ms == 300
            await send(connection, np.tile(np.frombuffer(data, "<i2"), 3).tobytes())
            return [await connection.recv() for _ in range(5)]

    started, stopped, committed, delta, completed = asyncio.run(talk())
    assert started.type == "input_audio_buffer.speech_started"
    assert stopped.type == "input_audio_buffer.speech_stopped"
    assert 0 <= started.audio_start_ms < stopped.audio_end_ms <= 3000
    assert started.item_id == stopped.item_id == committed.item_id == completed.item_id
    assert committed.type == "input_audio_buffer.committed"
    assert delta.delta == completed.transcript != ""


@pytest.mark.parametrize("method", ["greedy", "beam"])
def test_words_are_sent_before_the_turn_ends(serve: Callable[..., Running], method: str) -> None:
    running, data = serve(method, model=["alphabet.symbols='a bc'"]), speech(7, 6.0, RATE_HZ)
    wanted = alone(running.recogniser, data, RATE_HZ)
    assert len(wanted.text.split()) > 5

    async def talk() -> list[Any]:
        events: list[Any] = []
        async with client(running) as connection:
            await connection.recv()
            await connection.session.update(session=session({"type": "server_vad", "silence_duration_ms": 30_000}))
            await connection.recv()
            await send(connection, data)
            while not events or not events[-1].type.endswith("delta"):
                events.append(await connection.recv())
            await connection.input_audio_buffer.commit()
            while not events[-1].type.endswith("completed"):
                events.append(await connection.recv())
        return events

    events = asyncio.run(talk())
    deltas = [event for event in events if event.type.endswith("delta")]
    assert events[0].type == "input_audio_buffer.speech_started"
    assert abs(events[0].audio_start_ms - 1000 * wanted.words[0].start_s) <= 20  # a frame
    assert "".join(event.delta for event in deltas) == events[-1].transcript == wanted.text
    assert len({event.item_id for event in events}) == 1


def test_a_binary_message_is_refused_with_the_event_for_audio(shared: Callable[..., Running]) -> None:
    async def answer() -> Any:
        async with client(shared()) as connection:
            await connection.recv()
            await connection.send_raw(b"\0\0")
            return await connection.recv()

    assert "input_audio_buffer.append" in asyncio.run(answer()).error.message


def _rules(after_speech_s: float) -> Any:
    from ds2.recognition.open_segments import Endpoints

    assert after_speech_s == 0.3
    return Endpoints(after_speech_s=after_speech_s, longest_s=1.0)  # the untrained model finds no silence
