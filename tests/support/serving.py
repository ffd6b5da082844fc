"""A server that answers, and sounds to send to it."""

from __future__ import annotations

import asyncio
import functools
import io
import json
import os
import re
import signal
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import openai
import soundfile
from numpy.typing import NDArray
from websockets.asyncio.client import connect as connect_within
from websockets.exceptions import ConnectionClosed

from ds2.audio.stream import Pcm
from ds2.decoding.hypothesis import Hypothesis
from ds2.decoding.phrases import HotWords
from ds2.recognition.recogniser import Recogniser
from ds2.system.signals import handle_signals

RATE_HZ = 16000
WAIT_S = 600  # a last resort: what is waited for comes by itself, on a busy machine late
CONFIG = json.dumps({"config": {"sample_rate": RATE_HZ, "words": True}})
# As `websockets` connects, but for its patience, which is ten seconds and twenty.
connect = functools.partial(connect_within, open_timeout=WAIT_S, ping_timeout=None)


@dataclass
class Running:
    """A server that answers."""

    recogniser: Recogniser
    port: int
    end: Callable[[], None]  # as a signal would

    @property
    def web(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def websocket(self) -> str:
        return f"ws://127.0.0.1:{self.port}/"

    def text(self, path: str) -> str:
        with urllib.request.urlopen(self.web + path, timeout=WAIT_S) as answer:
            return str(answer.read().decode())

    def metric(self, name: str) -> float:
        return next(
            float(line.split()[1]) for line in self.text("/metrics").splitlines() if line.startswith(name + " ")
        )

    def client(self, key: str = "none") -> Any:
        return openai.OpenAI(base_url=f"{self.web}/v1", api_key=key, max_retries=0, timeout=WAIT_S)


def start_server(*options: str) -> subprocess.Popen[str]:
    """Start `ds2 serve`; a hang-up ends it, also where the tests themselves ignore hang-ups, as under nohup."""
    command = [sys.executable, "-m", "ds2.cli", "serve", *options, "--device", "cpu", "--port", "0"]
    with handle_signals([signal.SIGHUP], signal.SIG_DFL):
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def printed_port(server: subprocess.Popen[str]) -> int:
    """The port that a `ds2 serve --port 0` prints once it listens."""
    assert server.stdout is not None
    match = re.match(r"ds2 serve: http://127\.0\.0\.1:(\d+) on ", server.stdout.readline())
    assert match and "s after the last word" in server.stdout.readline()
    return int(match[1])


def speech(seed: int, seconds: float, rate_hz: int = RATE_HZ) -> bytes:
    """Tones that change every tenth of a second, as 16-bit samples."""
    draw = np.random.default_rng(seed)
    pitch_hz = np.repeat(draw.uniform(200, 3000, size=int(seconds * 10) + 1), rate_hz // 10)
    samples = draw.uniform(0.05, 0.5) * np.sin(2 * np.pi * np.cumsum(pitch_hz) / rate_hz)
    return (samples[: int(seconds * rate_hz)] * 32767).astype("<i2").tobytes()


def until(true: Callable[[], bool]) -> None:
    """Wait for what must become true."""
    deadline_s = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


async def vosk(
    url: str, data: bytes, chunk: int = 4000, config: dict[str, Any] | None = None, tls: ssl.SSLContext | None = None
) -> list[dict[str, Any]]:
    """Send as Vosk's own client does: a chunk, wait for the answer, the next; then eof, or nothing after an error."""
    async with connect(url, ssl=tls) as ws:
        await ws.send(json.dumps({"config": {"sample_rate": RATE_HZ} | (config or {})}))
        answers = []
        for start in range(0, len(data), chunk):
            await ws.send(data[start : start + chunk])
            answers.append(json.loads(await ws.recv()))
            if "error" in answers[-1]:
                return answers
        await ws.send('{"eof" : 1}')
        answers.append(json.loads(await ws.recv()))
        return answers


def updated(server: Running, **transcription: Any) -> Any:
    """The answer to a session of OpenAI's realtime interface that asks for these options of `transcription`."""

    async def session() -> Any:
        client = openai.AsyncOpenAI(base_url=f"{server.web}/v1", api_key="none")
        async with client.realtime.connect(model="ds2", extra_query={"intent": "transcription"}) as connection:
            await connection.recv()
            audio = {"input": {"transcription": transcription}}
            await connection.send({"type": "session.update", "session": {"type": "transcription", "audio": audio}})
            return await connection.recv()

    return asyncio.run(session())


async def words(url: str, data: bytes) -> list[tuple[str, float, float]]:
    """Words and times of what is sent chunk by chunk."""
    answers = await vosk(url, data, chunk=6400, config={"words": True})
    return [(word["word"], word["start"], word["end"]) for answer in answers for word in answer.get("result", [])]


async def texts_though_killed(server: Running, data: bytes, clients: int, pid: int) -> set[Any]:
    """The texts of clients that all sent `data` before a process was killed; None for the clients of that process."""
    held = [await connect(server.websocket) for _ in range(clients)]
    for ws in held:
        await ws.send(CONFIG)
        await ws.send(data)
    for ws in held:
        await ws.recv()
    assert server.metric("ds2_sessions") == clients
    os.kill(pid, signal.SIGKILL)
    texts = set()
    for ws in held:
        try:
            await ws.send('{"eof" : 1}')
            answer = json.loads(await ws.recv())
            texts.add(None if "error" in answer else answer["text"])
        except ConnectionClosed:
            texts.add(None)
    return texts


def samples_of(data: bytes) -> NDArray[np.float32]:
    return Pcm().accept(data)


def companded(data: bytes, law: str) -> tuple[bytes, bytes]:
    """16-bit samples in 8 bits each, mulaw or alaw, and as 16-bit samples what remains of them."""
    file, settings = (
        io.BytesIO(),
        {"samplerate": RATE_HZ, "format": "RAW", "subtype": {"mulaw": "ULAW", "alaw": "ALAW"}[law]},
    )
    soundfile.write(file, samples_of(data), **settings)
    read, _ = soundfile.read(io.BytesIO(file.getvalue()), dtype="int16", channels=1, **settings)
    return file.getvalue(), read.tobytes()


def wav(data: bytes, rate_hz: int = RATE_HZ) -> tuple[str, bytes]:
    """Name and content of a file to upload."""
    file = io.BytesIO()
    soundfile.write(file, samples_of(data), rate_hz, format="WAV")
    return "talk.wav", file.getvalue()


def alone(recogniser: Recogniser, data: bytes, rate_hz: int = RATE_HZ, hot_words: HotWords | None = None) -> Hypothesis:
    session = recogniser.session(sample_rate_hz=rate_hz, hot_words=hot_words)
    session.accept_waveform(samples_of(data))
    return session.finish()


def text_alone(recogniser: Recogniser, data: bytes, hot_words: HotWords | None = None) -> str:
    return alone(recogniser, data, hot_words=hot_words).text


def text_at(recogniser: Recogniser, data: bytes, rate_hz: int) -> str:
    return alone(recogniser, data, rate_hz).text
