"""What existing clients may do: settings late or twice, nothing to commit, sessions that run out."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable
from typing import Any

import openai
import pytest
from support.serving import RATE_HZ, WAIT_S, Running, connect, speech, text_alone, text_at, wav
from websockets.exceptions import ConnectionClosed

from ds2.config.schema import DecodeConfig
from ds2.recognition.open_segments import Endpoints
from ds2.serve.client import SessionSettings
from ds2.serve.http import url
from ds2.serve.protocols.openai_realtime import Realtime

REALTIME_HZ = 24000
CONFIG = {"sample_rate": RATE_HZ}


async def replies(url: str, messages: list[str | bytes]) -> list[dict[str, Any]]:
    """All messages that a client gets that sends these and then nothing, until the server closes or has cleared."""
    answers = []
    async with connect(url) as ws:
        try:
            for message in messages:
                await ws.send(message)
            while not (answers and answers[-1].get("type") == "input_audio_buffer.cleared"):
                answers.append(json.loads(await asyncio.wait_for(ws.recv(), WAIT_S)))
        except ConnectionClosed:
            pass
        return answers


def config(**fields: Any) -> str:
    return json.dumps({"config": fields})


def texts(answers: list[dict[str, Any]]) -> list[str]:
    return [answer["text"] for answer in answers if "text" in answer]


def append(data: bytes) -> str:
    return json.dumps({"type": "input_audio_buffer.append", "audio": base64.b64encode(data).decode()})


def update(**fields: Any) -> str:
    return json.dumps({"type": "session.update", "session": {"type": "transcription", "audio": {"input": fields}}})


COMMIT, CLEAR = (json.dumps({"type": f"input_audio_buffer.{kind}"}) for kind in ("commit", "clear"))
VAD = {"type": "server_vad", "silence_duration_ms": 3_600_000}


async def events(running: Running, messages: list[str | bytes]) -> list[dict[str, Any]]:
    return await replies(f"ws://127.0.0.1:{running.port}/v1/realtime?intent=transcription", messages)


def test_vosk_gets_words_with_times_unless_they_are_not_wanted(shared: Callable[..., Running]) -> None:
    """Its server does by default, which its test_srt.py and makers of captions count on."""
    running, data = shared(), speech(2, 1.0)
    wanted = text_alone(running.recogniser, data)
    start = config(**CONFIG)
    first = asyncio.run(replies(running.websocket, [start, data, '{"eof" : 1}']))[-1]
    assert " ".join(word["word"] for word in first["result"]) == first["text"] == wanted
    assert all(word.keys() == {"conf", "end", "start", "word"} for word in first["result"])
    without = asyncio.run(replies(running.websocket, [config(**CONFIG, words=0), data, '{"eof" : 1}']))[-1]
    assert without == {"text": wanted}
    late = asyncio.run(replies(running.websocket, [start, data, config(words=False), '{"eof" : 1}']))[-1]
    assert late == {"text": wanted}


def test_a_vosk_client_may_say_its_config_again(shared: Callable[..., Running]) -> None:
    running, data = shared(), speech(3, 1.0)
    messages = [config(**CONFIG), data, '{"reset" : 1}', config(**CONFIG), data, config(**CONFIG), '{"eof" : 1}']
    assert texts(asyncio.run(replies(running.websocket, messages))) == [text_alone(running.recogniser, data)] * 2
    for other in ({"sample_rate": 8000}, {"endpoints": {"silence_s": 1.0}}):
        last = asyncio.run(replies(running.websocket, [config(**CONFIG), data, config(**other)]))[-1]
        assert "after the first audio" in last["error"]


def test_vosks_word_for_anything_else_is_dropped(shared: Callable[..., Running]) -> None:
    running, data = shared("beam"), speech(4, 1.0)
    answers = asyncio.run(
        replies(running.websocket, [config(**CONFIG, phrase_list=["a", "[unk]"]), data, '{"eof" : 1}'])
    )
    assert texts(answers) and "error" not in answers[-1]


@pytest.mark.parametrize("ends", ["duration", "idle"])
def test_a_session_that_runs_out_gets_its_last_words(serve: Callable[..., Running], ends: str) -> None:
    limits = {"duration_s": 1.1} if ends == "duration" else {"idle_s": 1.0}
    running, data = serve(**limits), speech(2, 1.0)
    at_24_khz = speech(2, 1.0, REALTIME_HZ)
    more: list[str | bytes] = [speech(5, 0.5)] if ends == "duration" else []
    later = [append(speech(5, 0.5, REALTIME_HZ))] if ends == "duration" else []

    async def both() -> tuple[Any, Any]:
        return await asyncio.gather(
            replies(running.websocket, [config(**CONFIG), data, *more]),
            events(running, [update(turn_detection=None), append(at_24_khz), *later]),
        )

    (*_, words, refusal), (*_, completed, refused) = asyncio.run(both())
    assert words["text"] == text_alone(running.recogniser, data) != ""
    assert "error" in refusal
    assert completed["transcript"] == text_at(running.recogniser, at_24_khz, REALTIME_HZ) != ""
    assert refused["type"] == "error"


def test_what_a_realtime_session_expects_may_change_between_items(shared: Callable[..., Running]) -> None:
    """Between a commit and the next audio; and what changes nothing may be sent at any time."""
    running, data = shared(), speech(2, 1.0, REALTIME_HZ)
    same = update(turn_detection=None)
    messages = [same, append(data + b"\0"), same, COMMIT, update(turn_detection=VAD), append(data), same, COMMIT, CLEAR]
    received = asyncio.run(events(running, messages))
    completed = [event for event in received if event["type"].endswith(".completed")]
    assert [event["transcript"] for event in completed] == [text_at(running.recogniser, data, REALTIME_HZ)] * 2
    assert [event["usage"]["seconds"] for event in completed] == [1.0, 1.0]
    assert sum(event["type"] == "session.updated" for event in received) == 3
    refused = [event["error"]["message"] for event in received if event["type"] == "error"]
    assert len(refused) == 1 and "before audio" in refused[0]


def test_nothing_to_commit_and_no_json_are_errors_of_their_event(shared: Callable[..., Running]) -> None:
    running, data = shared(), speech(2, 1.0, REALTIME_HZ)
    messages = [update(turn_detection=None), append(b""), COMMIT, "no json", b"binary", append(data), COMMIT, COMMIT]
    messages.append(CLEAR)
    received = asyncio.run(events(running, messages))
    kinds = [event["type"].rpartition(".")[2] for event in received]
    answered = ["committed", "delta", "completed"]
    assert kinds == ["created", "updated", "error", "error", "error", *answered, "error", "cleared"]
    refused = [event["error"]["message"] for event in received if event["type"] == "error"]
    assert ["buffer is empty" in message for message in refused] == [True, False, False, True]


def test_a_server_without_word_times_answers_all_that_needs_none(
    serve: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ds2.recognition.open_segments.OVERTIME_S", 0.0)  # the untrained model finds no silence
    monkeypatch.setattr(Realtime, "settings", SessionSettings(REALTIME_HZ, Endpoints(longest_s=0.5)))
    running = serve(decode=DecodeConfig(method="beam", beam=8, times=False))
    data = speech(2, 1.0, REALTIME_HZ)
    upload = wav(data, REALTIME_HZ)
    received = asyncio.run(events(running, [append(data), COMMIT, CLEAR]))
    started = [event["audio_start_ms"] for event in received if "audio_start_ms" in event]
    assert started and sum(bool(event.get("transcript")) for event in received) > 1
    create = running.client().audio.transcriptions.create
    assert create(model="ds2", file=upload).text
    for form in ("srt", "vtt", "verbose_json"):
        with pytest.raises(openai.BadRequestError, match=r"decode\.times=false"):
            create(model="ds2", file=upload, response_format=form)


@pytest.mark.parametrize(("host", "wanted"), [("::1", "http://[::1]:27"), ("127.0.0.1", "http://127.0.0.1:27")])
def test_a_url_is_one_that_clients_can_use(host: str, wanted: str) -> None:
    assert url(host, 27) == wanted
