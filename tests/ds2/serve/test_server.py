"""A server and its clients over loopback: OpenAI's package, Vosk's messages, and clients that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import signal
import socket
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
import soundfile
import torch
from support.serving import (
    RATE_HZ,
    WAIT_S,
    Running,
    alone,
    connect,
    printed_port,
    samples_of,
    speech,
    start_server,
    text_alone,
    until,
    vosk,
)
from websockets.exceptions import ConnectionClosed

from ds2.cli import main
from ds2.config.schema import ConfigError, DecodeConfig
from ds2.model.checkpoint import load_model
from ds2.recognition.open_segments import Endpoints
from ds2.recognition.recogniser import Recogniser
from ds2.serve.engine import LocalRecogniser, transcripts
from ds2.serve.limits import Limits


def flac(data: bytes) -> io.BytesIO:
    file = io.BytesIO()
    soundfile.write(file, samples_of(data), RATE_HZ, format="FLAC")
    file.seek(0)
    file.name = "talk.flac"
    return file


def words_of(answers: list[dict[str, Any]]) -> str:
    return " ".join(answer["text"] for answer in answers if answer.get("text"))


@pytest.mark.parametrize("method", ["greedy", "beam"])
def test_openais_client_gets_every_format(shared: Callable[..., Running], method: str) -> None:
    running, data = shared(method), speech(1, 2.0)
    wanted, create = text_alone(running.recogniser, data), running.client().audio.transcriptions.create
    assert wanted
    assert create(model="ds2", file=flac(data)).text == wanted
    assert create(model="ds2", file=flac(data), response_format="text") == wanted + "\n"
    assert "-->" in create(model="ds2", file=flac(data), response_format="srt")
    assert create(model="ds2", file=flac(data), response_format="vtt").startswith("WEBVTT")
    transcription = create(
        model="ds2", file=flac(data), response_format="verbose_json", timestamp_granularities=["word", "segment"]
    )
    assert transcription.text == wanted and transcription.duration == pytest.approx(2.0)
    assert " ".join(word.word for word in transcription.words) == wanted
    assert all(0 <= word.start < word.end <= 2.0 for word in transcription.words)
    assert " ".join(segment.text for segment in transcription.segments) == wanted
    events = list(create(model="ds2", file=flac(data), stream=True))
    assert [event.type for event in events[-2:]] == ["transcript.text.delta", "transcript.text.done"]
    assert "".join(event.delta for event in events[:-1]) == events[-1].text == wanted
    assert events[-1].duration == pytest.approx(2.0) and not hasattr(events[0], "words")
    for name, value in (("stream", "maybe"), ("timestamp_granularities[]", "words")):  # no setting is dropped
        with pytest.raises(openai.BadRequestError, match=f"'{value}' is not"):
            create(model="ds2", file=flac(data), extra_body={name: value})
    assert transcription.language == "unknown"
    named = create(model="ds2", file=flac(data), response_format="verbose_json", language="tr")
    assert named.language == "tr"
    by_hand = {"timestamp_granularities": "word"}  # without the brackets that OpenAI's clients add
    timed = create(model="ds2", file=flac(data), response_format="verbose_json", extra_body=by_hand)
    assert timed.words == transcription.words and timed.segments is None
    for name, meant in (("hot_word", "hot_words"), ("keywords", "keywords\\[\\]"), ("only_keyword", "only_keywords")):
        with pytest.raises(openai.BadRequestError, match=f"{name} is no setting; did you mean {meant}"):
            create(model="ds2", file=flac(data), extra_body={name: "a"})
    create(model="ds2", file=flac(data), extra_body={"of_a_newer_client": "a", "include[]": "logprobs"})
    for form in ("json", "text", "srt"):
        with pytest.raises(openai.BadRequestError, match=f"response_format=verbose_json or stream=true; {form} has"):
            create(model="ds2", file=flac(data), response_format=form, timestamp_granularities=["word"])
    with pytest.raises(openai.BadRequestError, match="sends events, not srt"):
        create(model="ds2", file=flac(data), stream=True, response_format="srt")
    events = create(model="ds2", file=flac(data), stream=True, timestamp_granularities=["word"])
    assert [word["word"] for event in events for word in getattr(event, "words", [])] == wanted.split()


@pytest.mark.parametrize("method", ["greedy", "beam"])
def test_a_vosk_client_gets_one_answer_a_message_and_all_words(shared: Callable[..., Running], method: str) -> None:
    running, data = shared(method), speech(2, 1.5)
    answers = asyncio.run(
        vosk(running.websocket, data, chunk=4001, config={"words": True})
    )  # samples cut in halves too
    assert len(answers) == -(-len(data) // 4001) + 1
    assert all(answer.keys() & {"partial", "text"} for answer in answers)
    assert words_of(answers) == text_alone(running.recogniser, data)
    result = [word for answer in answers for word in answer.get("result", [])]
    assert " ".join(word["word"] for word in result) == words_of(answers)
    assert all(word["start"] < word["end"] and 0 < word["conf"] <= 1 for word in result)
    until(lambda: running.metric("ds2_sessions") == 0)


def test_transcripts_are_logged_only_if_asked_for(
    shared: Callable[..., Running], caplog: pytest.LogCaptureFixture
) -> None:
    running, data = shared(), speech(2, 1.5)
    caplog.set_level(logging.DEBUG, "ds2")
    wanted = words_of(asyncio.run(vosk(running.websocket, data)))
    assert wanted and wanted not in caplog.text
    caplog.set_level(logging.INFO, transcripts.name)
    asyncio.run(vosk(running.websocket, data))
    assert wanted in caplog.text


def test_a_vosk_client_says_when_segments_end(shared: Callable[..., Running]) -> None:
    running, data, rules = shared(), speech(2, 12.0), {"longest_s": 0.5}
    live = running.recogniser.live(sample_rate_hz=RATE_HZ, endpoints=Endpoints(**rules))
    live.accept_waveform(samples_of(data))
    live.flush()
    wanted = [segment.hypothesis.text for segment in live.segments]
    assert len(wanted) > 1
    answers = asyncio.run(vosk(running.websocket, data, chunk=3200, config={"endpoints": rules}))
    assert [answer["text"] for answer in answers if answer.get("text")] == wanted


def test_a_reset_ends_an_utterance_and_the_session_goes_on(shared: Callable[..., Running]) -> None:
    running, data = shared(), speech(3, 1.0)

    async def twice() -> list[str]:
        async with connect(running.websocket) as ws:
            await ws.send(json.dumps({"config": {"sample_rate": RATE_HZ}}))
            texts = []
            for end in ('{"reset" : 1}', '{"eof" : 1}'):
                await ws.send(data + b"\0")  # half a sample, which is no part of the next utterance
                first = json.loads(await ws.recv())
                await ws.send(end)
                texts.append(" ".join(filter(None, [first.get("text"), json.loads(await ws.recv())["text"]])))
            return texts

    assert asyncio.run(twice()) == [text_alone(running.recogniser, data)] * 2


def test_two_hundred_streams_get_their_own_words_while_others_misbehave(serve: Callable[..., Running]) -> None:
    running = serve(sessions=210)
    sources = [speech(seed, 0.4 + 0.004 * seed) for seed in range(200)]
    wanted = [
        [(word.text, round(word.start_s, 3), round(word.end_s, 3)) for word in alone(running.recogniser, data).words]
        for data in sources
    ]
    assert len(set(map(str, wanted))) > 50

    async def vanish() -> None:
        ws = await connect(running.websocket)
        await ws.send(speech(0, 0.3))
        ws.transport.abort()

    async def all_at_once() -> list[list[tuple[str, float, float]]]:
        streams = [vosk(running.websocket, data, chunk=6400, config={"words": True}) for data in sources]
        answers, _ = await asyncio.gather(asyncio.gather(*streams), asyncio.gather(*(vanish() for _ in range(5))))
        return [
            [(word["word"], word["start"], word["end"]) for answer in client for word in answer.get("result", [])]
            for client in answers
        ]

    assert asyncio.run(all_at_once()) == wanted
    assert running.metric("ds2_words_total") > 0
    until(lambda: running.metric("ds2_sessions") == 0)
    assert json.loads(running.text("/healthz")) == {"status": "ok"}


BAD_MESSAGES = {
    "no json": ("hello", "JSON"),
    "no object": ("[1]", "objects"),
    "config": ('{"config": 3}', "config is an object"),
    "rate": ('{"config": {"sample_rate": "fast"}}', "is not allowed: give numbers from 1000 to 768000"),
    "words as text": ('{"config": {"words": "false"}}', "config.words='false' is not allowed: give true or false"),
    "alternatives": ('{"config": {"max_alternatives": 3}}', "max_alternatives"),
    "phrases": ('{"config": {"phrase_list": 7}}', "list of phrases"),
    "weights": ('{"config": {"hot_words": {"one": "much"}}}', "weight of 'one'='much' is not allowed"),
    "rate that is no number": ('{"config": {"sample_rate": NaN}}', "NaN"),
    "infinite rate": ('{"config": {"sample_rate": 1e999}}', "sample_rate=inf is not allowed"),
    "nested without end": ("[" * 100_000, "JSON"),
    "wide characters, which a close reason holds few of": (
        '{"config": {"sample_rate": "' + "日" * 200 + '"}}',
        "日",
    ),
    "hot words nested without end": ('{"config": {"hot_words": "' + "[" * 100_000 + '"}}', "config.hot_words is"),
    "infinite weight": ('{"config": {"hot_words": {"ab": 1e999}}}', "weight of 'ab'=inf is not allowed"),
    "endpoints": ('{"config": {"endpoints": {"after_speech_s": 0}}}', "after_speech_s=0 is not allowed"),
    "unknown endpoints": ('{"config": {"endpoints": {"after": 1}}}', "after_speech_s"),
    "endpoints that are none": ('{"config": {"endpoints": 3}}', "config.endpoints is an object"),
    "no command": ('{"bye": 1}', "a text message has config, reset or eof, this one has 'bye'"),
    "an empty one": ("{}", "this one has nothing"),
    "a setting that is none": ('{"config": {"grammer": ["a"]}}', "no setting 'grammer': sample_rate, words, "),
    "a surrogate as setting": (r'{"config": {"\ud800": 1}}', "ud800"),
    "half a surrogate pair": (r'{"config": {"sample_rate": "\ud800"}}', "ud800"),
}


@pytest.mark.parametrize("case", BAD_MESSAGES)
def test_a_bad_message_is_answered_by_what_is_wrong(shared: Callable[..., Running], case: str) -> None:
    running = shared()
    message, reason = BAD_MESSAGES[case]

    async def send() -> str:
        async with connect(running.websocket) as ws:
            await ws.send(message)
            error = str(json.loads(await ws.recv())["error"])
            with pytest.raises(ConnectionClosed) as closed:
                await ws.recv()
            assert closed.value.rcvd is not None and closed.value.rcvd.code == 1007 and closed.value.rcvd.reason
            return error

    assert reason in asyncio.run(send())


def test_limits_are_named(serve: Callable[..., Running]) -> None:
    running = serve(sessions=1, message_bytes=10_000, upload_bytes=50_000, duration_s=1.0)
    impatient = serve(idle_s=0.5)

    async def closes(*messages: str | bytes, running: Running = running) -> tuple[str, int]:
        async with connect(running.websocket) as ws:
            reason = ""
            try:
                for message in messages:
                    await ws.send(message)
                while True:
                    reason = json.loads(await ws.recv()).get("error", "")
            except ConnectionClosed as closed:
                return reason, closed.rcvd.code if closed.rcvd else 0

    rate = '{"config": {"sample_rate": 16000}}'
    assert asyncio.run(closes(b"\0" * 20_000)) == ("", 1009)
    assert asyncio.run(closes(running=impatient)) == ("nothing came for 0.5 s", 1013)
    assert asyncio.run(closes('{"config": {"sample_rate": 1}}', b"\0" * 10))[0].startswith(
        "config.sample_rate=1 is not allowed"
    )
    reason, code = asyncio.run(closes(rate, *[speech(1, 0.25)] * 5))
    assert (reason, code) == ("a session takes 1 s of audio at most: begin a new one", 1008)

    async def one_too_many() -> tuple[str, int]:
        async with connect(running.websocket) as ws:
            await ws.send(rate)
            await ws.send(speech(1, 0.1))
            await ws.recv()
            return await closes(rate, speech(1, 0.1))

    reason, code = asyncio.run(one_too_many())
    assert "1 session at most" in reason and code == 1013
    create = running.client().audio.transcriptions.create
    with pytest.raises(openai.APIStatusError, match="50000 bytes") as caught:
        create(model="ds2", file=("big.raw", b"\0" * 60_000))
    assert caught.value.status_code == 413


def test_damaged_uploads_and_unknown_formats_are_named(shared: Callable[..., Running]) -> None:
    running = shared()
    create = running.client().audio.transcriptions.create
    for file, message in ((("a.wav", b"not audio"), r"a\.wav: not readable"), (("a.wav", b""), "empty")):
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError, match=message):
                create(model="ds2", file=file, stream=stream)
    with pytest.raises(openai.BadRequestError, match="diarized_json"):
        create(model="ds2", file=flac(speech(1, 0.2)), response_format="diarized_json")
    with pytest.raises(urllib.error.HTTPError, match="400"):
        urllib.request.urlopen(running.web + "/v1/audio/transcriptions", data=b"{}", timeout=WAIT_S)
    with socket.create_connection(("127.0.0.1", running.port)) as half:  # closes amid its request
        half.sendall(b"POST /v1/audio/transcriptions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 999\r\n\r\nabc")
    assert create(model="ds2", file=flac(speech(1, 1.0))).text == text_alone(running.recogniser, speech(1, 1.0))
    assert running.metric("ds2_sessions") == 0


@pytest.mark.parametrize("name", ["a." + "x" * 300, "a.\0wav", "a.日本", "../../a.wav", "a./b"])
def test_an_upload_may_be_called_anything(shared: Callable[..., Running], name: str) -> None:
    body = b'--x\r\nContent-Disposition: form-data; name="file"; filename="' + name.encode() + b'"\r\n\r\n'
    body += flac(speech(1, 0.5)).read() + b"\r\n--x--\r\n"
    headers = {"content-type": "multipart/form-data; boundary=x"}
    running = shared()
    request = urllib.request.Request(running.web + "/v1/audio/transcriptions", body, headers)
    with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
        assert json.load(answer) == {"text": text_alone(running.recogniser, speech(1, 0.5))}


def test_a_full_disk_is_named(shared: Callable[..., Running], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    running = shared()
    monkeypatch.setattr("ds2.serve.protocols.openai_rest.tempfile.NamedTemporaryFile", full)
    with pytest.raises(openai.InternalServerError, match="cannot store the upload: No space left") as caught:
        running.client().audio.transcriptions.create(model="ds2", file=flac(speech(1, 0.2)))
    assert caught.value.status_code == 507


def test_a_key_is_asked_for(serve: Callable[..., Running]) -> None:
    running = serve(api_key=(key := "s/e(c)r%20et=="))
    with pytest.raises(openai.AuthenticationError, match="API key"):
        running.client("guess").audio.transcriptions.create(model="ds2", file=flac(speech(1, 0.2)))
    assert running.client(key).audio.transcriptions.create(model="ds2", file=flac(speech(1, 0.5))).text

    async def answer(headers: dict[str, str], *protocols: Any) -> dict[str, Any]:
        async with connect(running.websocket, additional_headers=headers, subprotocols=protocols or None) as ws:
            with contextlib.suppress(ConnectionClosed):  # refused already
                await ws.send(speech(1, 0.1))
            reply: dict[str, Any] = json.loads(await ws.recv())
            return reply

    assert "API key" in asyncio.run(answer({}))["error"]
    assert "partial" in asyncio.run(answer({"Authorization": f"Bearer {key}"}))
    quoted = "s%2Fe%28c%29r%2520et%3D%3D"  # as browsers have to
    assert "partial" in asyncio.run(answer({}, "realtime", f"openai-insecure-api-key.{quoted}"))
    assert "API key" in asyncio.run(answer({}, "realtime", "openai-insecure-api-key.guess")).get("error", "")


def test_a_model_that_cannot_stream_is_refused(
    make_model: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_model("model.bidirectional=true", "model.max_lookahead_ms=0", "model.row_convs=0")
    recogniser = Recogniser.of(load_model(model), DecodeConfig(), torch.device("cpu"))
    with pytest.raises(ConfigError, match="cannot stream"):
        LocalRecogniser(recogniser, Limits())
    assert main(["serve", str(model), "--device", "cpu", "--port", "0"]) == 2
    assert "cannot stream" in capsys.readouterr().err


@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, *(pytest.param(other, marks=pytest.mark.slow) for other in (signal.SIGINT, signal.SIGHUP))],
)
def test_a_signal_right_after_the_start_ends_a_server_in_order(make_model: Callable[..., Path], number: int) -> None:
    """As soon as it says so, before its loop runs."""
    server = start_server(str(make_model()))
    printed_port(server)
    server.send_signal(number)
    errors = server.communicate(timeout=WAIT_S)[1]
    assert (server.returncode, "Traceback" in errors, "Warning" in errors) == (0, False, False), errors
