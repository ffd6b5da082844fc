"""Inputs from clients and of commands: uploads and messages to a server, manifests, audio in blocks, shards."""

import asyncio
import base64
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import httpx
import numpy as np
import soundfile
import torch
from fuzzing import files
from fuzzing.damage import BYTES, JSON_LINES, TEXT
from fuzzing.files import CPU, RATE_HZ, Target, digest, make_manifest, make_model, noise
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect
from support.corpora_cases import write_text

from ds2.audio.read import audio_blocks
from ds2.audio.shard import Shard
from ds2.config.schema import DecodeConfig
from ds2.data.manifest import read_manifest
from ds2.data.shards import write_shards
from ds2.data.splits import scored_utterances
from ds2.model.checkpoint import load_model
from ds2.recognition.evaluate import recognition_loader
from ds2.recognition.recogniser import Recogniser
from ds2.recognition.transcripts import align_utterances
from ds2.serve.engine import LocalRecogniser
from ds2.serve.http import application
from ds2.serve.limits import Limits
from ds2.serve.protocols.wyoming import FIRST_BYTE
from ds2.system import UserError

LIMITS = Limits(sessions=2, upload_bytes=1 << 20, message_bytes=1 << 20, duration_s=30, idle_s=5)
_MULTIPART = {"content-type": "multipart/form-data; boundary=0123456789abcdef"}
_FORM = {
    "model": "ds2", "response_format": "verbose_json", "language": "en", "prompt": "ab, c", "hot_words": '{"ab": 5}',
    "timestamp_granularities[]": "word",
}  # fmt: skip
_MESSAGES = (*JSON_LINES, *[damage for damage in JSON_LINES if damage not in TEXT] * 9)
_CLOSE_REASON_BYTES = 123  # of the protocol: a longer one breaks the connection


class Refused(UserError):
    """The server answered with an error message."""


def _pcm(seconds: float) -> bytes:
    return (noise(seconds) * 32767).astype("<i2").tobytes()


@dataclass(frozen=True)
class Protocol:
    """A protocol of WebSockets: its path, messages, where `binary` stands for its bytes, and what ends a session."""

    path: str
    messages: Sequence[dict[str, Any]]
    last: str


def _protocols() -> dict[str, Protocol]:
    """The protocols by name, each with messages that use what it can do."""
    sound = [base64.b64encode(_pcm(0.3)[start : start + 4000]).decode() for start in range(0, 9600, 4000)]
    binary = [{"binary": part} for part in sound]
    floats = np.frombuffer(_pcm(0.3), "<i2").astype("<f4") / np.float32(32768)
    hints = {"prompt": "ab, one two", "hot_words": {"ab": 5, "c": 1.5}}
    form, silence = {"type": "audio/pcm", "rate": 24000}, {"type": "server_vad", "silence_duration_ms": 300}
    session = {
        "type": "transcription",
        "audio": {"input": {"format": form, "turn_detection": silence, "transcription": hints}},
    }
    vosk = [
        *[{"config": {"sample_rate": RATE_HZ, "words": True, "hot_words": hints["hot_words"]}}] * 6,
        *[{"config": {"endpoints": {"silence_s": 2.4, "after_speech_s": 1.2, "longest_s": 20}}}] * 3,
        *binary, {"reset": 1}, binary[0], {"eof": 1},
    ]  # fmt: skip
    realtime = [
        *[{"type": "session.update", "event_id": "e1", "session": session}] * 6,
        *({"type": "input_audio_buffer.append", "audio": part} for part in sound),
        {"type": "input_audio_buffer.commit", "event_id": "e2"},
        {"type": "input_audio_buffer.clear"},
    ]
    deepgram = [*binary, *({"type": kind} for kind in ("KeepAlive", "Finalize", "CloseStream"))]
    sherpa_onnx = [{"binary": base64.b64encode(part.tobytes()).decode()} for part in np.split(floats, 4)]
    query = f"encoding=linear16&sample_rate={RATE_HZ}&interim_results=true&utterance_end_ms=1000"
    clear = '{"type": "input_audio_buffer.clear", "event_id": "last"}'
    return {
        "Vosk": Protocol("/", vosk, '{"eof": 1}'),
        "realtime": Protocol("/v1/realtime", realtime, clear),
        "Deepgram": Protocol(f"/v1/listen?{query}", deepgram, '{"type": "CloseStream"}'),
        "sherpa-onnx": Protocol("/sherpa-onnx", sherpa_onnx, "Done"),
    }


@cache
def _recogniser(folder: Path) -> Recogniser:
    return Recogniser.of(load_model(folder / "best.safetensors"), DecodeConfig(method="beam", beam=4), CPU)


@contextmanager
def _server(folder: Path) -> Iterator[TestClient]:
    """A server; raises its own faults."""
    with TestClient(application(LocalRecogniser(_recogniser(folder), LIMITS), LIMITS)) as client:
        try:
            yield client
        except OSError as error:  # a command would print it as one line
            raise AssertionError(f"the server failed: {error}") from error
        if " ds2_sessions 0.0" not in client.get("/metrics").text.replace("\n", " "):
            raise AssertionError("a session was never closed")


def _make_upload(folder: Path) -> None:
    make_model(folder)
    soundfile.write(folder / "a.flac", noise(0.5), RATE_HZ)
    audio = {"file": ("a.flac", (folder / "a.flac").read_bytes())}
    request = httpx.Request("POST", "http://ds2", data=_FORM, files=audio, headers=_MULTIPART)
    (folder / "upload").write_bytes(request.read())


def _upload(folder: Path) -> Any:
    with _server(folder) as client:
        content = (folder / "upload").read_bytes()
        answer = client.post("/v1/audio/transcriptions", content=content, headers=_MULTIPART)
        if answer.status_code >= 400:
            raise Refused(answer.json()["error"]["message"])
    return answer.text


def _make_messages(protocol: Protocol, folder: Path) -> None:
    make_model(folder)
    write_text(folder / "messages.jsonl", *map(json.dumps, protocol.messages))


def _talk(protocol: Protocol, folder: Path) -> Any:
    """Send each line as a message, the value of `binary` as bytes; return all answers."""
    content, answers = (folder / "messages.jsonl").read_bytes(), list[Any]()
    with _server(folder) as client, client.websocket_connect(protocol.path) as socket:
        for line in content.decode("utf-8", "replace").removesuffix("\n").split("\n"):
            binary = _binary(line)
            socket.send_text(line) if binary is None else socket.send_bytes(binary)
        socket.send_text(protocol.last)
        try:
            while not answers or answers[-1].get("type") != "input_audio_buffer.cleared":
                text = socket.receive_text()
                text.encode()  # what the protocol does with it
                if text != "Done!":
                    answers.append(json.loads(text, parse_constant=_no_json))
        except WebSocketDisconnect as end:
            if len((end.reason or "").encode()) > _CLOSE_REASON_BYTES:
                raise AssertionError(f"no reason that can be sent: {end.reason}") from end
    errors = [answer for answer in answers if "error" in answer or answer.get("type") == "Error"]
    if errors:
        raise Refused(str(errors[0].get("error") or errors[0]["description"]))
    if protocol.path.startswith("/v1/listen"):  # Deepgram's other messages hold names and times of the connection
        return [answer["channel"] for answer in answers if answer["type"] == "Results"]
    return [{key: value for key, value in answer.items() if not key.endswith("_id")} for answer in answers]


def _make_events(folder: Path) -> None:
    make_model(folder)
    form = {"rate": RATE_HZ, "width": 2, "channels": 1}
    chunk = {"type": "audio-chunk", "data": form, "payload_length": 9600}
    transcribe = {"type": "transcribe", "data": {"transcript_names": ["ab"]}}
    start = {"type": "audio-start", "data_length": len(json.dumps(form))}
    head = "\n".join(map(json.dumps, ({"type": "describe"}, transcribe, start))) + "\n" + json.dumps(form)
    chunk_and_stop = json.dumps(chunk).encode() + b"\n" + _pcm(0.3) + b'{"type": "audio-stop"}\n'
    (folder / "events").write_bytes(head.encode() + chunk_and_stop)


def _events(folder: Path) -> Any:
    """Send the file as a connection of Wyoming."""
    writer = Mock(drain=AsyncMock(), wait_closed=AsyncMock())

    async def serve(app: Any) -> None:
        reader = asyncio.StreamReader()
        reader.feed_data((folder / "events").read_bytes())
        reader.feed_eof()
        route, kind = app.state.tcp[FIRST_BYTE]
        socket = kind(reader, writer, LIMITS.message_bytes)
        await route(socket.websocket)
        await socket.close()

    with _server(folder) as client:
        client.portal.call(serve, client.app)
    written = b"".join(call.args[0] for call in writer.write.call_args_list)
    answers = [json.loads(line, parse_constant=_no_json) for line in written.splitlines()]
    errors = [answer["data"]["text"] for answer in answers if answer["type"] == "error"]
    if errors:
        raise Refused(errors[0])
    return answers


def _no_json(constant: str) -> None:
    raise AssertionError(f"{constant} was sent, which is no JSON")


def _binary(line: str) -> bytes | None:
    try:
        return base64.b64decode(json.loads(line)["binary"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _make_aligned(folder: Path) -> None:
    make_model(folder)
    make_manifest(folder)


def _aligned(folder: Path) -> Any:
    recogniser = _recogniser(folder)
    utterances = scored_utterances([folder / "m.jsonl"], recogniser.alphabet)
    with torch.inference_mode():
        alignments, _ = align_utterances(recogniser, recognition_loader(utterances, files.TINY.data, CPU))
    return [(one.words, one.surprise) for one in alignments]


def _blocks(folder: Path) -> Any:
    return files.digest_of_samples(np.concatenate(list(audio_blocks(folder / "audio"))))


def _sound(container: str, subtype: str) -> Callable[[Path], None]:
    return lambda folder: soundfile.write(folder / "audio", noise(1.5), RATE_HZ // 2, format=container, subtype=subtype)


def _make_shards(folder: Path) -> None:
    write_shards(files.speech(folder / "files"), folder / "shards", RATE_HZ, 10_000)


def _read_shards(folder: Path) -> Any:
    paths = [utterance.audio_filepath for utterance in read_manifest(folder / "shards" / "manifest.jsonl")]
    return digest(Shard(path.parent).read(path.name) for path in paths)  # opened anew, for they change


TARGETS = (
    *(
        Target(f"audio in blocks {sound.lower()}", _sound(*sound.split("/")), _blocks, BYTES)
        for sound in ("WAV/PCM_16", "FLAC/PCM_16", "OGG/OPUS")
    ),
    Target("shards", _make_shards, _read_shards, TEXT, "shards/[0-9]*", checked=True),
    Target("ds2 align, manifest", _make_aligned, _aligned, JSON_LINES, "m.jsonl"),
    Target("ds2 align, audio", _make_aligned, _aligned, BYTES, "wav/*/*.wav"),
    Target("ds2 serve, upload", _make_upload, _upload, (*BYTES, *TEXT), "upload"),
    *(
        Target(f"ds2 serve, {name}", partial(_make_messages, protocol), partial(_talk, protocol), _MESSAGES,
               "messages.jsonl")
        for name, protocol in _protocols().items()
    ),
    Target("ds2 serve, Wyoming", _make_events, _events, (*BYTES, *TEXT), "events"),
)  # fmt: skip
