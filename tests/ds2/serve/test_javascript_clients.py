"""The JavaScript clients of Deepgram and OpenAI, unmodified, in Node: words with times, events, errors, keys.

    npm install --prefix clients @deepgram/sdk openai ws
    NODE_PATH=$PWD/clients/node_modules make test-slow

`ws` is what OpenAI's client connects with in Node.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.serving import WAIT_S, Running, alone, speech, text_alone, wav

from ds2.serve.tls import self_signed

pytestmark = pytest.mark.slow

DEEPGRAM = """
const { DeepgramClient } = require("@deepgram/sdk");
const client = new DeepgramClient({ apiKey: settings.key,
  environment: { production: `ws://127.0.0.1:${settings.port}`, base: "", agent: "", agentRest: "" } });
const options = { model: "nova-3", encoding: "linear16", sample_rate: "16000", interim_results: "true" };
(async () => {
  const connection = await client.listen.v1.connect({ reconnectAttempts: 0, ...options, ...settings.options });
  connection.on("message", print);
  connection.on("close", (event) => print({ type: "close", code: event.code }));
  connection.connect();
  await connection.waitForOpen();
  if (connection.readyState !== 1) return;  // refused at once
  for (let at = 0; at < audio.length; at += 6400) connection.sendMedia(audio.subarray(at, at + 6400));
  connection.sendKeepAlive({ type: "KeepAlive" });
  connection.sendFinalize({ type: "Finalize" });
  connection.sendCloseStream({ type: "CloseStream" });
})();
"""
OPENAI = """
const { default: OpenAI, toFile } = require("openai");
const client = new OpenAI({ baseURL: `http://127.0.0.1:${settings.port}/v1`, apiKey: settings.key, maxRetries: 0 });
(async () => {
  const options = async (name) => ({ model: "ds2", file: await toFile(audio, name) });
  const transcribe = client.audio.transcriptions;
  for await (const model of client.models.list()) print(model);
  for (const response_format of ["json", "text", "verbose_json", "srt", "vtt"]) {
    const times = response_format == "verbose_json" ? { timestamp_granularities: ["word"] } : {};
    print(await transcribe.create({ ...await options("talk.wav"), response_format, ...times }));
  }
  for await (const event of await transcribe.create({ ...await options("talk.wav"), stream: true })) print(event);
  audio.fill(0);
  try { await transcribe.create(await options("talk.wav")); }
  catch (error) { print({ name: error.constructor.name, status: error.status, message: error.message }); }
})();
"""
REALTIME = """
const { default: OpenAI } = require("openai");
globalThis.WebSocket = require("ws");  // which browsers have
const { OpenAIRealtimeWS } = require("openai/realtime/ws");
const { OpenAIRealtimeWebSocket } = require("openai/realtime/websocket");
const client = new OpenAI({ baseURL: `https://127.0.0.1:${settings.port}/v1`, apiKey: settings.key });
const Connection = { ws: OpenAIRealtimeWS, browser: OpenAIRealtimeWebSocket }[settings.kind];
const connection = new Connection({ model: "ds2" }, client);
connection.on("event", print);
connection.on("error", () => connection.close());
connection.socket.onclose = ({ code }) => print({ type: "close", code });
connection.on("session.created", () => {
  const input = { format: { type: "audio/pcm", rate: 24000 }, turn_detection: null, transcription: { model: "ds2" } };
  connection.send({ type: "session.update", session: { type: "transcription", audio: { input } } });
  for (let at = 0; at < audio.length; at += 9600)
    connection.send({ type: "input_audio_buffer.append", audio: audio.subarray(at, at + 9600).toString("base64") });
  connection.send({ type: "input_audio_buffer.commit" });
});
connection.on("conversation.item.input_audio_transcription.completed", () => connection.close());
"""
HEAD = """
const settings = JSON.parse(process.argv[2]), audio = require("fs").readFileSync(settings.audio);
const print = (value) => console.log(JSON.stringify(value));
"""


@pytest.fixture
def node(tmp_path: Path) -> Callable[..., list[Any]]:
    """Run a script with a package; returns what it prints."""
    if not (program := shutil.which("node")):
        pytest.skip("needs node (https://nodejs.org, Debian: apt-get install nodejs)")

    def run(script: str, package: str, data: bytes, certificate: str = "", **settings: Any) -> list[Any]:
        names = " ".join(sorted({package, "ws"}))
        probe = [program, "-e", f"require('{package}'); require('ws')"]
        if subprocess.run(probe, check=False, capture_output=True, timeout=WAIT_S).returncode:
            pytest.skip(f"needs the npm packages {names}: npm install --prefix DIR {names}, NODE_PATH=DIR/node_modules")
        (tmp_path / "client.cjs").write_text(HEAD + script, encoding="utf-8")
        (tmp_path / "audio").write_bytes(data)
        values = json.dumps({"key": "none", "audio": str(tmp_path / "audio"), **settings})
        environment = os.environ | {"NODE_EXTRA_CA_CERTS": certificate}
        command = [program, str(tmp_path / "client.cjs"), values]
        ended = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=WAIT_S)
        assert ended.returncode == 0, ended.stderr
        return [json.loads(line) for line in ended.stdout.splitlines()]

    return run


def test_deepgram(serve: Callable[..., Running], node: Callable[..., list[Any]]) -> None:
    running, data = serve(api_key="secret"), speech(2, 1.0)
    wanted = alone(running.recogniser, data)
    messages = node(DEEPGRAM, "@deepgram/sdk", data, port=running.port, key="secret")
    assert messages[-1] == {"type": "close", "code": 1000}  # after another code it connects again
    assert (messages[-2]["type"], messages[-2]["duration"]) == ("Metadata", 1.0)
    results = [message for message in messages if message["type"] == "Results"]
    assert not results[0]["is_final"] and results[0]["channel"]["alternatives"][0]["transcript"]
    final = next(result["channel"]["alternatives"][0] for result in results if result["from_finalize"])
    assert final["transcript"] == wanted.text != ""
    times = [(word["word"], word["start"], word["end"]) for word in final["words"]]
    assert times == [(word.text, round(word.start_s, 3), round(word.end_s, 3)) for word in wanted.words]


def test_deepgrams_errors(serve: Callable[..., Running], node: Callable[..., list[Any]]) -> None:
    running = serve(api_key="secret")
    settings = {"port": running.port, "key": "secret", "options": {"sample_rate": "1"}}
    wrong = node(DEEPGRAM, "@deepgram/sdk", b"", **settings)[0]
    assert wrong["type"] == "Error" and "sample_rate" in wrong["description"]
    refused = node(DEEPGRAM, "@deepgram/sdk", b"", port=running.port, key="wrong")[0]
    assert refused["type"] == "Error" and "API key" in refused["description"]


def test_openai_files(serve: Callable[..., Running], node: Callable[..., list[Any]]) -> None:
    running, data = serve(), speech(2, 1.0)
    wanted = text_alone(running.recogniser, data)
    assert wanted
    model, json_, text, verbose, srt, vtt, *events, error = node(OPENAI, "openai", wav(data)[1], port=running.port)
    assert model["id"] == "ds2" and json_["text"] == text.strip() == verbose["text"] == wanted
    assert " ".join(word["word"] for word in verbose["words"]) == wanted and "-->" in srt and "WEBVTT" in vtt
    assert [event["type"] for event in events] == ["transcript.text.delta", "transcript.text.done"]
    assert events[-1]["text"] == wanted
    assert (error["name"], error["status"]) == ("BadRequestError", 400) and "talk.wav" in error["message"]


@pytest.mark.parametrize("kind", ["ws", "browser"])
def test_openai_realtime(
    serve: Callable[..., Running], node: Callable[..., list[Any]], tmp_path: Path, kind: str
) -> None:
    """It connects by https only."""
    tls = self_signed(["localhost", "127.0.0.1"])
    running, data = serve(api_key="secret", tls=tls), speech(2, 1.0, 24000)
    of_server = {"port": running.port, "kind": kind, "certificate": str(tls.certificate)}
    *events, closed = node(REALTIME, "openai", data, key="secret", **of_server)
    assert [event["type"].rsplit(".", 1)[-1] for event in events] == [
        *("created", "updated", "committed", "delta", "completed")
    ]
    assert events[-1]["transcript"] == events[-2]["delta"] != "" and events[-1]["usage"]["seconds"] == 1.0
    assert closed == {"type": "close", "code": 1000}
    refused = node(REALTIME, "openai", data, key="wrong", **of_server)[0]
    assert refused["type"] == "error" and "API key" in refused["error"]["message"]
