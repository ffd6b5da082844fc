"""Clients of Deepgram, sherpa-onnx, Vosk and Wyoming: words with times, interim results, errors in their protocols."""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import itertools
import json
import logging
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from support.serving import (
    RATE_HZ,
    WAIT_S,
    Running,
    alone,
    companded,
    connect,
    samples_of,
    speech,
    text_alone,
    vosk,
    wav,
)
from websockets.exceptions import ConnectionClosed

from ds2.recognition.open_segments import Endpoints
from ds2.serve.limits import BadRequestError, refuse_misspelt
from ds2.serve.protocols.sherpa_onnx import SherpaOnnx

PIECE = 6400  # bytes
START_AGAIN = Endpoints(longest_s=0.5)  # several segments
REFUSALS = [({"duration_s": 0.5}, "0.5 s of audio at most"), ({"api_key": "secret"}, "API key")]


def pieces(data: bytes) -> list[bytes]:
    return [data[start : start + PIECE] for start in range(0, len(data), PIECE)]


def listen(running: Running, data: list[bytes], key: str = "none", finalize: bool = False, **settings: Any) -> Any:
    """All messages that Deepgram's own client gets."""
    deepgram = pytest.importorskip("deepgram")
    environment = pytest.importorskip("deepgram.environment").DeepgramClientEnvironment
    urls = {"production": f"ws://127.0.0.1:{running.port}", "base": running.web}
    client = deepgram.DeepgramClient(api_key=key, environment=environment(**urls, agent="", agent_rest=""))
    messages = []
    settings = {"model": "nova-3", "encoding": "linear16", "sample_rate": RATE_HZ} | settings
    with client.listen.v1.connect(**settings) as connection:
        with contextlib.suppress(ConnectionClosed):  # by a server that refuses it meanwhile
            for piece in data:
                connection.send_media(piece)
            if finalize:
                connection.send_keep_alive()
                connection.send_finalize()
            connection.send_close_stream()
        try:
            while True:
                messages.append(connection.recv())
        except ConnectionClosed:
            return messages


def best(message: Any) -> Any:
    return message.channel.alternatives[0]


def test_deepgrams_client_gets_words_with_times(shared: Callable[..., Running]) -> None:
    running, data = shared(), speech(2, 1.0)
    wanted = alone(running.recogniser, data)
    *results, metadata = listen(running, pieces(data))
    assert [message.type for message in results] == ["Results"] and results[0].speech_final
    assert best(results[0]).transcript == wanted.text != ""
    words = [(word.word, word.start, word.end) for word in best(results[0]).words]
    assert words == [(word.text, round(word.start_s, 3), round(word.end_s, 3)) for word in wanted.words]
    assert (metadata.type, metadata.duration) == ("Metadata", 1.0)


def test_deepgram_answers_finalize_without_words_too(shared: Callable[..., Running]) -> None:
    finalized, last, _ = listen(shared(), [], finalize=True)
    assert (best(finalized).transcript, finalized.is_final, finalized.from_finalize) == ("", True, True)
    assert not last.from_finalize


@pytest.mark.parametrize("law", ["mulaw", "alaw"])
def test_deepgram_takes_the_audio_of_telephones(shared: Callable[..., Running], law: str) -> None:
    running = shared()
    encoded, data = companded(speech(2, 1.0), law)
    result, _ = listen(running, pieces(encoded), encoding=law)
    assert best(result).transcript == alone(running.recogniser, data).text != ""


@pytest.mark.parametrize("method", ["greedy", "beam"])
def test_deepgrams_client_gets_interim_results_and_events(
    shared: Callable[..., Running], monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr("ds2.recognition.open_segments.OVERTIME_S", 0.0)  # the untrained model finds no silence
    monkeypatch.setattr("ds2.serve.protocols.deepgram.Endpoints", lambda: START_AGAIN)
    running, data = shared(method), speech(2, 2.0)
    asked = {"interim_results": True, "vad_events": True, "utterance_end_ms": 400}
    messages = listen(running, pieces(data), finalize=True, **asked)
    results = [message for message in messages if message.type == "Results"]
    finals = [message for message in results if message.is_final]
    assert len(finals) > 2 and any(best(message).transcript for message in results if not message.is_final)
    for message in results:
        words = best(message).words
        assert " ".join(word.word for word in words) == best(message).transcript
        assert all(message.start <= word.start < word.end for word in words)
    texts = [best(message).transcript for message in finals if best(message).transcript]
    kinds = [message.type for message in messages]
    assert kinds.count("SpeechStarted") == len(texts) and kinds.count("UtteranceEnd") >= 1
    assert any(message.from_finalize for message in finals)
    for before, message in itertools.pairwise(messages):
        if message.type == "UtteranceEnd":  # not while words are spoken
            assert before.is_final and message.last_word_end == best(before).words[-1].end
    starts_s = [best(message).words[0].start for message in finals if best(message).words]
    assert [message.timestamp for message in messages if message.type == "SpeechStarted"] == starts_s
    ends = [message.start + message.duration for message in finals]
    assert ends == sorted(ends)
    assert sum(message.type == "Results" for message in listen(running, pieces(data), endpointing=False)) == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sample_rate": 1}, "sample_rate"),
        ({"encoding": "opus"}, "encoding=mulaw"),
        ({"diarize": True}, "diarize=false"),
        ({"endpointing": "soon"}, "endpointing"),
        ({"keyterm": ["ab"]}, "decode.method=beam"),
        (
            {"request_options": {"additional_query_parameters": {"interim_result": "true"}}},
            "no setting; did you mean interim_results?",
        ),
        (
            {"request_options": {"additional_query_parameters": {"vad_events": "maybe"}}},
            "vad_events='maybe' is not allowed: give true or false",
        ),
    ],
)
def test_deepgrams_errors_say_what_is_allowed(
    shared: Callable[..., Running], settings: dict[str, Any], message: str
) -> None:
    running = shared()
    [error] = listen(running, [], **settings)
    assert error.type == "Error" and message in error.description
    assert running.metric("ds2_sessions") == 0


def test_an_error_repeats_no_long_message(shared: Callable[..., Running]) -> None:
    async def refused() -> Any:
        async with connect(f"{shared().websocket}v1/listen?encoding=linear16&sample_rate={RATE_HZ}") as ws:
            await ws.send(json.dumps({"type": "x" * 1000}))
            return json.loads(await ws.recv())

    error = asyncio.run(refused())
    assert "is no message of this interface" in error["description"] and len(error["description"]) < 300


def test_names_of_any_number_and_length_take_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compare = Mock(wraps=difflib.get_close_matches)
    monkeypatch.setattr(difflib, "get_close_matches", compare)
    names = [f"{number}" + "x" * 10 * number for number in range(101)]
    with pytest.raises(BadRequestError, match=r"a message has 101 settings: allowed are 100"):
        refuse_misspelt(names, ["known"])
    compare.assert_not_called()
    refuse_misspelt(names[:100], ["known"])
    assert compare.call_count == 100 and max(len(call.args[0]) for call in compare.call_args_list) == 40


def test_deepgrams_client_sends_its_key_and_hot_words(serve: Callable[..., Running]) -> None:
    running, data = serve("beam", api_key="secret"), [speech(2, 0.5)]
    assert listen(running, data, "secret", keyterm=["ab"], keywords=["b:2", "a"])[-1].type == "Metadata"
    [error] = listen(running, data, "secret", keywords=["1"])
    assert "hot phrases ['1']" in error.description
    [error] = listen(running, data, "wrong")
    assert "API key" in error.description


async def sherpa(url: str, data: bytes) -> list[dict[str, Any]]:
    """All results that a client gets that sends and receives as sherpa-onnx's own does."""
    samples, results = samples_of(data), []
    async with connect(url) as ws:
        for start in range(0, len(samples), PIECE // 4):
            await ws.send(samples[start : start + PIECE // 4].tobytes())
        await ws.send("Done")
        async for message in ws:
            if message == "Done!":
                break
            results.append(json.loads(message))
    return results


@pytest.mark.parametrize(("root", "method"), [("vosk", "greedy"), ("sherpa-onnx", "beam")])
def test_sherpa_onnx_clients_get_results_and_done(serve: Callable[..., Running], root: str, method: str) -> None:
    running, data = serve(method, root=root), speech(2, 1.0)
    path = "" if root == "sherpa-onnx" else "sherpa-onnx"
    *interim, last = asyncio.run(sherpa(running.websocket + path, data))
    wanted = alone(running.recogniser, data)
    assert last["text"] == wanted.text != "" and last["is_eof"] and last["is_final"]
    assert "".join(last["tokens"]).strip() == wanted.text
    assert last["timestamps"] == [round(word.start_s, 3) for word in wanted.words]
    assert interim and not any(result["is_final"] for result in interim)
    assert all(len(result["timestamps"]) == len(result["tokens"]) for result in interim)
    assert any(result["timestamps"] for result in interim)
    texts = [result["text"] for result in asyncio.run(vosk(f"{running.websocket}vosk", data)) if "text" in result]
    assert texts == [wanted.text]


def printed_by_sherpa_onnx(running: Running, data: bytes, folder: Path) -> list[dict[str, Any]]:
    """All messages that the program of sherpa-onnx gets, which connects to `/`."""
    program = shutil.which("sherpa-onnx-online-websocket-client", path=sysconfig.get_path("scripts"))
    if program is None:
        pytest.skip("needs sherpa-onnx-bin, which the extra dev installs")
    (folder / "talk.wav").write_bytes(wav(data)[1])
    options = [f"--server-port={running.port}", "--samples-per-message=1600", "--seconds-per-message=0.01"]
    ended = subprocess.run(
        [program, *options, str(folder / "talk.wav")], check=False, capture_output=True, text=True, timeout=WAIT_S
    )
    return [json.loads(message) for message in re.findall(r'\{".*\}', ended.stderr)]


@pytest.mark.parametrize("method", ["greedy", "beam"])
def test_sherpa_onnxs_own_program_gets_words_with_times(
    serve: Callable[..., Running], tmp_path: Path, method: str
) -> None:
    running, data = serve(method, root="sherpa-onnx"), speech(2, 1.0)
    wanted = alone(running.recogniser, data)
    *interim, last = printed_by_sherpa_onnx(running, data, tmp_path)
    assert last["text"] == wanted.text != "" and last["is_eof"] and last["is_final"]
    assert last["timestamps"] == [round(word.start_s, 3) for word in wanted.words]
    assert any(result["text"] and result["timestamps"] for result in interim)
    assert not any(result["is_final"] for result in interim)
    assert running.metric("ds2_sessions") == 0


@pytest.mark.parametrize(("limits", "error"), REFUSALS)
def test_sherpa_onnxs_own_program_prints_errors(
    serve: Callable[..., Running], tmp_path: Path, limits: dict[str, Any], error: str
) -> None:
    *results, last = printed_by_sherpa_onnx(serve(root="sherpa-onnx", **limits), speech(2, 1.0), tmp_path)
    assert error in last["error"] and (not results or results[-1]["is_eof"])


def test_sherpa_onnx_segments_are_numbered_and_timed(
    shared: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ds2.recognition.open_segments.OVERTIME_S", 0.0)
    monkeypatch.setattr(SherpaOnnx, "settings", replace(SherpaOnnx.settings, endpoints=START_AGAIN))
    running = shared()
    results = asyncio.run(sherpa(f"{running.websocket}sherpa-onnx", speech(2, 2.0)))
    finals = [result for result in results if result["is_final"]]
    assert [result["segment"] for result in finals] == list(range(len(finals))) and len(finals) > 2
    starts = [result["start_time"] for result in finals]
    assert starts == sorted(set(starts)) and [result["is_eof"] for result in finals][-1]
    assert all(time >= 0 for result in finals for time in result["timestamps"])


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (np.full(800, 20000.0, np.float32).tobytes(), "samples reach"),
        (np.full(800, np.nan, np.float32).tobytes(), "samples reach nan"),
        ("Finish", "the text Done"),
    ],
)
def test_what_sherpa_onnx_has_not_is_an_error(shared: Callable[..., Running], message: str | bytes, error: str) -> None:
    running = shared()

    async def answers() -> list[dict[str, Any]]:
        async with connect(f"{running.websocket}sherpa-onnx") as ws:
            await ws.send(message)
            try:
                return [json.loads(await ws.recv()), json.loads(await ws.recv())]
            except ConnectionClosed as closed:
                assert closed.rcvd is not None and error in closed.rcvd.reason
                return []

    asyncio.run(answers())
    assert running.metric("ds2_sessions") == 0


def from_vosk(running: Running, data: bytes, folder: Path) -> tuple[Any, list[dict[str, Any]]]:
    """Vosk's own client, and the final results that it gets for 16-bit samples; it logs all messages."""
    kind = pytest.importorskip("vosk.transcriber.transcriber").Transcriber
    client = kind.__new__(kind)  # its __init__ fetches a model, which a server's client does not use
    client.args = SimpleNamespace(server=running.websocket, output_type="srt")
    (folder / "samples").write_bytes(data)

    async def recognise() -> list[dict[str, Any]]:
        printing = await asyncio.create_subprocess_exec("cat", str(folder / "samples"), stdout=subprocess.PIPE)
        try:
            return list((await client.recognize_stream_server(printing))[0])
        finally:
            await printing.communicate()

    return client, asyncio.run(recognise())


@pytest.mark.parametrize("method", ["greedy", "beam"])
def test_vosks_own_client_gets_words_with_times(
    shared: Callable[..., Running], tmp_path: Path, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    running, data = shared(method), speech(2, 1.0)
    wanted = alone(running.recogniser, data)
    caplog.set_level(logging.INFO)
    client, results = from_vosk(running, data, tmp_path)
    assert [result["text"] for result in results] == [wanted.text] != [""]
    assert any(record.msg.get("partial") for record in caplog.records if isinstance(record.msg, dict))
    [line] = pytest.importorskip("srt").parse(client.format_result(results))
    assert line.content == wanted.text
    assert line.start.total_seconds() == pytest.approx(wanted.words[0].start_s, abs=0.001)
    assert line.end.total_seconds() == pytest.approx(wanted.words[-1].end_s, abs=0.001)
    assert running.metric("ds2_sessions") == 0


@pytest.mark.parametrize(("limits", "error"), REFUSALS)
def test_vosks_own_client_raises_errors(
    serve: Callable[..., Running], tmp_path: Path, limits: dict[str, Any], error: str
) -> None:
    """A client that sends meanwhile need not read the message; the reason of the close is the same."""
    with pytest.raises(ConnectionClosed, match=error):
        from_vosk(serve(**limits), speech(2, 1.0), tmp_path)


async def wyoming(running: Running, events: list[Any], answers: str = "transcript-stop") -> list[Any]:
    """Send with Wyoming's own client; return all events up to the last one."""
    client, received = pytest.importorskip("wyoming.client"), []
    async with client.AsyncTcpClient("127.0.0.1", running.port) as connection:
        for event in events:
            await connection.write_event(event.event())
        while (event := await connection.read_event()) is not None:
            received.append(event)
            if event.type == answers:
                break
    return received


def utterance(data: bytes, **transcribe: Any) -> list[Any]:
    asr, audio = pytest.importorskip("wyoming.asr"), pytest.importorskip("wyoming.audio")
    form = {"rate": RATE_HZ, "width": 2, "channels": 1}
    chunks = [audio.AudioChunk(**form, audio=piece) for piece in pieces(data)]
    return [asr.Transcribe(**transcribe), audio.AudioStart(**form), *chunks, audio.AudioStop()]


def test_wyomings_client_gets_a_transcript_in_pieces(shared: Callable[..., Running]) -> None:
    running, data = shared(), speech(2, 2.0)
    wanted = text_alone(running.recogniser, data)
    first, *chunks, transcript, _ = asyncio.run(wyoming(running, utterance(data, language="en")))
    assert (first.type, first.data["language"], transcript.type) == ("transcript-start", "en", "transcript")
    assert transcript.data["text"] == "".join(chunk.data["text"] for chunk in chunks) == wanted != ""
    assert running.metric("ds2_sessions") == 0


def test_a_wyoming_connection_has_any_number_of_utterances(shared: Callable[..., Running]) -> None:
    running, data = shared("beam"), speech(2, 1.0)
    info, ping = pytest.importorskip("wyoming.info"), pytest.importorskip("wyoming.ping")
    hint = utterance(data, transcript_names=["ab"])
    events = [info.Describe(), *utterance(data), *hint, *utterance(b""), ping.Ping("x")]
    received = asyncio.run(wyoming(running, events, "pong"))
    described = info.Info.from_event(received[0])
    assert described.asr[0].models[0].languages == ["en"] and described.asr[0].supports_transcript_streaming
    texts = [event.data["text"] for event in received if event.type == "transcript"]
    assert texts[0] == text_alone(running.recogniser, data) and texts[2] == "" and len(texts) == 3


@pytest.mark.parametrize("event", ["transcribe", "audio-start"])
def test_no_words_are_lost_to_an_utterance_within_another(shared: Callable[..., Running], event: str) -> None:
    utterances = utterance(speech(2, 1.0))
    first = utterances[event == "audio-start"]
    *_, error = asyncio.run(wyoming(shared(), [*utterances[:-1], first], "error"))
    assert error.data["text"] == f"{event} within an utterance: audio-stop ends it, and brings its transcript"


def sent(running: Running, data: bytes) -> list[dict[str, Any]]:
    """All lines that follow these bytes, and the end of the connection."""

    async def answers() -> list[dict[str, Any]]:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(data)
        lines = (await reader.read()).splitlines()
        writer.close()
        return [json.loads(line) for line in lines]

    return asyncio.run(answers())


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"{]\n", "JSON"),
        (b"{}\n", "type"),
        (b'{"type": "\xff"}\n', "UTF-8"),
        (b'{"type": "audio-chunk", "payload_length": 99999999}\n', "payload_length=99999999 is not allowed"),
        (b'{"type": "audio-chunk", "payload_length": 1.5}\n', "whole number"),
        (b'{"type": "audio-chunk", "data_length": -1}\n', "data_length=-1 is not allowed"),
        (b'{"type": "audio-start", "data": {"rate": 16000, "width": 4, "channels": 1}}\n', "width 2"),
        (b'{"type": "audio-start", "data": {"rate": 1e9, "width": 2, "channels": 1}}\n', "rate="),
        (b'{"type": "audio-start", "data": {"rate": 16000.5, "width": 2, "channels": 1}}\n', "rate=16000.5"),
        (
            b'{"type": "audio-start", "data": {"rate": 16000, "width": 2, "channels": 1}}\n'
            b'{"type": "audio-chunk", "data": {"rate": 8000, "width": 2, "channels": 1}}\n',
            "rate=8000 after 16000: an utterance has one rate",
        ),
        (b'{"type": "transcribe", "data": {"transcript_names": "ab"}}\n', "lists of texts"),
        (b'{"type": "describe", "x": "' + b"x" * 200_000 + b'"}\n', "line of an event is too long"),
        (b'{"type": "transcribe", "data": {"transcript_name": ["ab"]}}\n', "did you mean transcript_names?"),
        (b'{"type": "unknown"}\n', "nothing came for 1 s"),
    ],
)
def test_what_is_no_event_of_wyoming_is_an_error_event(
    shared: Callable[..., Running], serve: Callable[..., Running], data: bytes, message: str
) -> None:
    running = serve(idle_s=1.0) if "nothing came" in message else shared()
    [error] = sent(running, data)
    assert error["type"] == "error" and message in error["data"]["text"]
    assert running.metric("ds2_sessions") == 0


def test_wyoming_has_no_keys(serve: Callable[..., Running]) -> None:
    [error] = sent(serve(api_key="secret"), b'{"type": "describe"}\n')
    assert "API key" in error["data"]["text"]


def test_a_server_that_ends_sends_wyomings_clients_their_last_words(serve: Callable[..., Running]) -> None:
    running, data = serve(), speech(2, 1.0)
    wanted = text_alone(running.recogniser, data)

    async def answers() -> list[Any]:
        client, info = pytest.importorskip("wyoming.client"), pytest.importorskip("wyoming.info")
        async with client.AsyncTcpClient("127.0.0.1", running.port) as connection:
            for event in [*utterance(data)[:-1], info.Describe()]:
                await connection.write_event(event.event())
            assert (await connection.read_event()).type == "info"  # all audio was taken, no word is final
            await asyncio.to_thread(running.end)
            events = []
            while (event := await connection.read_event()) is not None:
                events.append(event)
            return events

    texts = [event.data["text"] for event in asyncio.run(answers()) if event.type == "transcript"]
    assert texts == [wanted]
