"""The server's sessions, workers and engine in one process under a virtual clock: a seed replays any failure.

    python tools/fuzz.py simulation --seeds 10000            from seed 0 on, on all cores
    python tools/fuzz.py simulation --first 421 --seeds 1    one of them again
    python tools/fuzz.py simulation --faults                 how soon each planted fault is found

What runs is the server itself: ASGI application, protocols, sessions, batches, decoder, messages between processes.
Simulated are the clock, sockets, threads, and the network, whose labels depend on all samples of a stream so far, so
that a lost, doubled or foreign sample changes the text. Clients speak well or badly, leave, stop reading, or say
nothing; one may bring audio that makes the network fail; a worker may be killed; the server may be stopped.

After every run:

- no connection waits for ever, nothing but a refusal ends one, and every session is closed;
- every client that speaks well has the text that its audio has alone, or an answer that says why it has not;
- a client whose server is stopped has the text of all the audio that was taken;
- a run takes no more than two seconds of a processor, whatever a client sent, and phrases, which each take a
  millisecond of the virtual clock, keep the event loop from nobody.
"""

import asyncio
import base64
import hashlib
import json
import logging.handlers
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from fuzzing.seeds import Fault, planted, simulate
from fuzzing.virtual import Connection, PeerSocket, VirtualLoop
from numpy.typing import NDArray

from ds2.audio.features import Features
from ds2.audio.stream import Pcm
from ds2.config.schema import FeaturesConfig
from ds2.decoding.greedy import GreedyDecoder
from ds2.inference.runner import BlockOutput
from ds2.recognition import session as sessions
from ds2.recognition.open_segments import NEVER, Endpoints
from ds2.recognition.recogniser import Recogniser
from ds2.recognition.session import LiveSession
from ds2.serve import client as engine_client
from ds2.serve import http, phrases
from ds2.serve.client import EngineClient, RemoteRecogniser, SessionSettings, resolve
from ds2.serve.engine import Chunk, Engine, LocalRecogniser
from ds2.serve.limits import Limits
from ds2.serve.phrases import PhraseReader
from ds2.serve.processes import WorkerLink
from ds2.serve.protocols import vosk, websocket
from ds2.text.alphabet import Alphabet

RATE_HZ = 1000  # of the model: little audio makes many blocks
REALTIME_HZ = 24000
STRIDE = 2  # feature frames of an output frame
LOOKAHEAD = 7  # output frames
POISON = 0.99  # a block of samples above it makes the network fail
IDLE_S = 60.0
LONGEST_S = 2.0  # processor time of a run: more is work that grows with what a client sent
PHRASE_S = 0.001  # that a phrase costs: as a decoder that starts
BUSY_S, LONGEST_WORK_S = 0.1, 2.0  # the longest that the event loop may serve nobody, and that a thread may take
STUCK_S = 3600.0  # virtual time after which a run is stuck
ALPHABET, FEATURES = Alphabet(("", " ", *"abcdefgh")), Features(FeaturesConfig(), RATE_HZ)
LOGITS = 9 * np.eye(len(ALPHABET), dtype=np.float32)  # of each label


@dataclass(eq=False)
class NetworkState:
    """The network's state of a stream."""

    state: int = 1
    labels: list[int] = field(default_factory=list)  # that wait for their lookahead


class SimulatedRunner:
    """Stands for `ds2.inference.runner.BlockRunner`."""

    def __init__(self, block_frames: int) -> None:
        self.samples, self.max_batch = FEATURES.span(block_frames), 256
        self.ended: list[NetworkState] = []

    def prepare(self, streams: int) -> None: ...

    def start_stream(self) -> NetworkState:
        return NetworkState()

    def input_buffer(self, slot: NetworkState, number: int) -> NDArray[np.float32]:
        return np.empty(self.samples, np.float32)

    def final_blocks(self, slot: NetworkState, rest: NDArray[np.float32], waiting: int) -> list[NDArray[np.float32]]:
        return [rest]

    def step(self, slots: Sequence[NetworkState], blocks: Sequence[NDArray[np.float32]]) -> BlockOutput:
        if any(len(block) and block.min() > POISON for block in blocks):
            raise RuntimeError("the network fails")
        rows = [self._labels(slot, block) for slot, block in zip(slots, blocks, strict=True)]
        longest = max(map(len, rows))
        padded = np.array([labels + [0] * (longest - len(labels)) for labels in rows], int)
        return BlockOutput(list(range(len(rows))), torch.from_numpy(LOGITS[padded.T]), [len(labels) for labels in rows])

    def _labels(self, stream: NetworkState, block: NDArray[np.float32]) -> list[int]:
        last = len(block) < self.samples
        frame = STRIDE * FEATURES.step_samples
        frames = FEATURES.windows(len(block)) // STRIDE
        means = np.abs(block[: frames * frame]).reshape(frames, frame).sum(1) / frame
        for level in np.rint(8 * means).tolist():
            if level:
                stream.state = (5 * stream.state + int(level)) % 65521
            stream.labels.append(1 + stream.state % (len(ALPHABET) - 1) if level else 0)
        count = self.count_ready(len(stream.labels), last)
        ready, stream.labels = stream.labels[:count], stream.labels[count:]
        if last:
            self.ended.append(stream)
        return ready

    def count_ready(self, labels: int, last: bool) -> int:
        """Of so many labels, those whose lookahead is there."""
        return labels if last else max(0, labels - LOOKAHEAD)


class ServedRunner(SimulatedRunner):
    """That of the server: a fault planted here does not change the texts that clients must have."""


class SimulatedRecogniser(Recogniser):
    """A recogniser with a simulated network and a greedy decoder."""

    def __init__(self, runner: type[SimulatedRunner]) -> None:
        model, decoder = SimpleNamespace(time_stride=STRIDE), GreedyDecoder(ALPHABET, FEATURES.step_s * STRIDE)
        super().__init__(model, FEATURES, ALPHABET, decoder, torch.device("cpu"))
        self.runner = runner

    def block_runner(self, block_frames: int) -> Any:
        if block_frames not in self.runners:
            self.runners[block_frames] = self.runner(block_frames)
        return self.runners[block_frames]


class EngineHost:
    """The engine's thread as a task: takes what has arrived, runs a turn, and rests."""

    def __init__(self, engine: Engine, draw: random.Random) -> None:
        self.engine, self.draw = engine, draw
        self.chunks: list[Chunk] = []
        self.links: list[WorkerLink] = []
        self.woken = asyncio.Event()

    def put(self, chunk: Chunk) -> None:
        """Take a chunk of a `LocalClient`."""
        self.chunks.append(chunk)
        self.woken.set()

    async def run(self) -> None:
        """Run until cancelled."""
        waiting: list[Chunk] = []
        while True:
            if not waiting:
                await self.woken.wait()
            self.woken.clear()
            arrived, self.chunks = self.chunks, []
            for link in list(self.links):
                received = link.receive()
                if received is None:
                    link.close()
                    self.links.remove(link)
                arrived += received or []
            waiting = self.engine.turn(waiting, arrived)
            await asyncio.sleep(self.draw.expovariate(50))


class LocalClient(LocalRecogniser):
    """A `LocalRecogniser` whose thread is an `EngineHost`."""

    def __init__(self, host: EngineHost) -> None:
        EngineClient.__init__(self, PhraseReader(ALPHABET, frozenset()), RATE_HZ)
        self.engine, self.hangs, self._chunks = host.engine, False, host

    async def open_handle(self, settings: SessionSettings) -> LiveSession:
        return self.engine.open(settings)


@dataclass
class Audio:
    """Audio of a client, 16-bit samples; after some of its messages it asks for the last result."""

    rate_hz: int
    messages: list[bytes]
    flushes: set[int]  # numbers of the messages
    endpoints: Endpoints

    def text(self, count: int) -> str:
        """The text of the first messages, then a flush, when nobody else is there."""
        live = _ALONE.live(sample_rate_hz=self.rate_hz, endpoints=self.endpoints)
        pcm = Pcm()
        for number, message in enumerate(self.messages[:count]):
            live.accept_waveform(pcm.accept(message))
            while live.is_ready():
                live.decode()
            if number in self.flushes or number == count - 1:
                live.flush()
                pcm = Pcm()  # half a sample at the end of an utterance is dropped
        return " ".join(segment.hypothesis.text for segment in live.segments)


_ALONE = SimulatedRecogniser(SimulatedRunner)


def make_audio(draw: random.Random, rate_hz: int, longest_s: float, endpoints: Endpoints, flushes: float) -> Audio:
    """Draw speech, which has levels of 20 ms, and pauses; messages are up to 5 s long and may split a sample."""
    levels: list[float] = []
    seconds = draw.uniform(0, longest_s)
    while len(levels) < 50 * seconds:
        levels += [draw.randint(1, 7) / 8 for _ in range(draw.randint(1, 40))]
        levels += [0.0] * draw.choice((0, 2, 8, 15, 30, 60))
    samples = np.repeat(np.array(levels[: int(50 * seconds)]), rate_hz // 50)
    data = (samples * 32767).astype("<i2").tobytes()
    messages: list[bytes] = []
    while data:
        size = draw.randint(1, draw.choice((4, 4, 10)) * rate_hz)
        messages.append(data[:size])
        data = data[size:]
    return Audio(rate_hz, messages, {n for n in range(len(messages)) if draw.random() < flushes}, endpoints)


@dataclass
class Received:
    """The answers that a client received."""

    name: str
    texts: list[str] = field(default_factory=list)
    answered: int = 0  # messages of audio
    sent: int = 0
    code: int | None = None  # with which the server closed
    error: str = ""


class SimulatedClient:
    """A client; the method `play` of each kind is its script."""

    path = "/"
    code: int | None = 1000  # with which the server closes; None: nothing is promised to this client

    def __init__(self, run: "Run") -> None:
        self.run, self.connection, self.draw = run, Connection(self.path), run.draw
        self.outcome = Received(type(self).__name__)

    async def pause(self) -> None:
        """Wait as people and networks do."""
        await asyncio.sleep(self.draw.choice((0.0, self.draw.expovariate(5), self.draw.expovariate(50))))

    def send(self, message: Any) -> None:
        """Send bytes, a text, or JSON."""
        kind = "bytes" if isinstance(message, bytes) else "text"
        content = message if isinstance(message, bytes | str) else json.dumps(message)
        self.connection.to_server.put_nowait({"type": "websocket.receive", kind: content})

    async def reply(self) -> dict[str, Any] | None:
        """Return the next message, or None once the server has closed."""
        while True:
            message = await self.connection.to_client.get()
            if message["type"] == "websocket.close":
                self.outcome.code = message.get("code", 1000)
                self.connection.to_server.put_nowait({"type": "websocket.disconnect", "code": self.outcome.code})
                return None
            if message["type"] == "websocket.send":
                answer: dict[str, Any] = json.loads(message["text"])
                if "error" in answer:
                    self.outcome.error = str(answer["error"])
                return answer

    def check(self) -> None:
        """Raise Fault if a promise is broken."""
        if self.code is None:
            return
        if self.outcome.code is None and not self.connection.gone:
            raise Fault(f"{self.outcome}: never closed")
        allowed = {self.code, *self.run.excuses}
        if self.outcome.code not in allowed:
            raise Fault(f"{self.outcome}: closed with another code than {sorted(allowed)}")

    def check_text(self, audio: Audio) -> None:
        outcome = self.outcome
        if outcome.code in (1011, 1013):  # refused, with the reason
            return
        received, allowed = " ".join(filter(None, outcome.texts)), range(outcome.sent, outcome.answered - 1, -1)
        if all(audio.text(count) != received for count in allowed):
            raise Fault(f"{outcome}: its audio alone has {[audio.text(count) for count in allowed]}")


class VoskClient(SimulatedClient):
    """Speaks Vosk's protocol, in lockstep."""

    async def reply(self) -> dict[str, Any] | None:
        answer = await super().reply()
        if answer is not None:
            self.outcome.texts.append(answer.get("text", ""))
        return answer

    async def read_to_end(self) -> None:
        """Read until the server closes."""
        while await self.reply() is not None:
            pass

    async def play(self) -> None:
        draw = self.draw
        rules = Endpoints(draw.uniform(0.3, 2), draw.uniform(0.2, 1), draw.uniform(1, 5))
        self.audio = make_audio(draw, RATE_HZ, 3, rules, 0.1)
        self.send({"config": {"sample_rate": RATE_HZ, "endpoints": asdict(rules), "words": draw.random() < 0.5}})
        await self.speak()
        if self.outcome.code is None:
            self.send('{"eof" : 1}')
            await self.read_to_end()

    async def speak(self) -> bool:
        """Send the audio; return whether the server took all of it."""
        outcome = self.outcome
        for number, message in enumerate(self.audio.messages):
            await self.pause()
            outcome.sent += 1
            for request in (message, '{"reset": 1}') if number in self.audio.flushes else (message,):
                self.send(request)
                answer = await self.reply()
                if answer is None:
                    return False
                if "error" in answer:
                    await self.read_to_end()
                if outcome.code is not None or await self.ended():
                    return False
            outcome.answered += 1
        return True

    async def ended(self) -> bool:
        """Whether the server has closed; reads what it said before."""
        while not self.connection.to_client.empty():
            if await self.reply() is None:
                return True
        return False

    def check(self) -> None:
        super().check()
        if self.code == 1000:
            self.check_text(self.audio)


class RealtimeClient(SimulatedClient):
    """Speaks OpenAI's realtime protocol: turns are found by the server, or end where it commits."""

    path = "/v1/realtime"
    deltas = ""  # of the open item

    async def play(self) -> None:
        draw, outcome = self.draw, self.outcome
        silence_ms = draw.choice((None, draw.randint(200, 900)))
        rules = NEVER if silence_ms is None else Endpoints(after_speech_s=silence_ms / 1000)
        self.audio = make_audio(draw, REALTIME_HZ, 1, rules, 0.2)
        detection = None if silence_ms is None else {"type": "server_vad", "silence_duration_ms": silence_ms}
        prompt = ", ".join(["a b"] * draw.choice((0, 3, 1000)))
        audio = {"turn_detection": detection, "transcription": {"prompt": prompt}}
        settings = {"type": "transcription", "audio": {"input": audio}}
        self.send({"type": "session.update", "session": settings})
        for number, message in enumerate(self.audio.messages):
            await self.pause()
            outcome.sent += 1
            self.send({"type": "input_audio_buffer.append", "audio": base64.b64encode(message).decode()})
            if number in self.audio.flushes:
                self.send({"type": "input_audio_buffer.commit"})
        outcome.sent += 1  # the commit
        self.send({"type": "input_audio_buffer.commit"})
        self.send({"type": "input_audio_buffer.clear"})
        while (event := await self.reply()) is not None:
            if event["type"].endswith("transcription.delta"):
                self.deltas += event["delta"]
            if event["type"].endswith("transcription.completed"):
                outcome.texts.append(event["transcript"])
                if self.deltas != event["transcript"]:
                    self.run.faults.append(f"{outcome}: its deltas were {self.deltas!r}")
                self.deltas = ""
            if event["type"] == "input_audio_buffer.cleared":
                outcome.answered = outcome.sent = len(self.audio.messages)
                self.connection.leave()
                return

    def check(self) -> None:
        """See `SimulatedClient`; an empty commit is answered with an error, and the session goes on."""
        if self.connection.gone:
            self.outcome.code = 1000
        super().check()
        self.check_text(self.audio)


class Leaver(VoskClient):
    """Leaves without a word."""

    code = None

    async def play(self) -> None:
        self.run.loop.call_later(self.draw.expovariate(0.5), self.connection.leave)
        await super().play()


class Deaf(VoskClient):
    """Takes no answers from some moment on."""

    code = None

    async def play(self) -> None:
        self.run.loop.call_later(self.draw.expovariate(1), self.connection.reads.clear)
        await super().play()


class Silent(VoskClient):
    """Says nothing more after its audio: the server gives the last result and ends the session."""

    code = 1013

    async def play(self) -> None:
        self.audio = make_audio(self.draw, RATE_HZ, 1.5, Endpoints(), 0)
        self.send({"config": {"sample_rate": RATE_HZ}})
        if await self.speak():
            await self.read_to_end()

    def check(self) -> None:
        super().check()
        if self.outcome.code == 1013 and "nothing came" in self.outcome.error:
            self.outcome.code = 1000
            self.check_text(self.audio)


HUGE = int("1" + "0" * 400)
HOSTILE: tuple[Any, ...] = (
    {"config": {"sample_rate": RATE_HZ, "endpoints": {"longest_s": HUGE}}},
    {"config": {"sample_rate": HUGE}},
    {"config": {"sample_rate": -1}},
    {"config": {"sample_rate": "1000"}},
    {"config": {"sample_rate": True}},
    '{"config": {"endpoints": {"silence_s": NaN}}}',
    '{"config": {"endpoints": {"silence_s": 1e999}}}',
    {"config": {"endpoints": {"silence_s": 0}}},
    {"config": {"endpoints": {"unknown": 1}}},
    {"config": {"endpoints": []}},
    {"config": []},
    {"config": {"hot_words": {"a": HUGE}}},
    {"config": {"phrase_list": ["a b"] * 1001}},
    {"config": {"phrase_list": ["a" * 20_001]}},
    {"config": {"max_alternatives": 2}},
    json.dumps({"config": {"phrase_list": [f"a {number}" for number in range(180_000)]}}),
    "[" * 100_000,
    "no JSON",
    "\0",
    "[]",
)


class Hostile(VoskClient):
    """Sends what is not allowed, then audio: it is refused as what it is."""

    code = 1007

    async def play(self) -> None:
        self.send({"config": {"sample_rate": RATE_HZ}})
        data = b"".join(make_audio(self.draw, RATE_HZ, 0.5, Endpoints(), 0).messages)
        if self.draw.random() < 0.5:
            self.send(data)
        self.send(self.draw.choice(HOSTILE))
        self.send(data)
        await self.read_to_end()


class Poisonous(VoskClient):
    """Its audio makes the network fail: it alone gets the error."""

    code = 1011

    async def play(self) -> None:
        self.send({"config": {"sample_rate": RATE_HZ}})
        await self.pause()
        self.send(b"\xff\x7f" * RATE_HZ)
        await self.read_to_end()


CLIENTS: dict[type[SimulatedClient], float] = {
    VoskClient: 6, RealtimeClient: 2, Leaver: 1, Deaf: 0.5, Silent: 1, Hostile: 1, Poisonous: 0.7,
}  # fmt: skip


class Run:
    """One run of a server with its clients."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop, self.draw = loop, loop.draw
        count = self.draw.randint(1, 5)
        self.limits = Limits(sessions=self.draw.choice((2, 64)), idle_s=IDLE_S, duration_s=600)
        self.excuses: set[int] = {1013} if self.limits.sessions < count else set()
        self.engine = Engine(SimulatedRecogniser(ServedRunner), self.limits)
        self.host = EngineHost(self.engine, self.draw)
        self.faults: list[str] = []
        loop.set_exception_handler(lambda _, context: self.faults.append(str(context)))
        workers = self.draw.randint(0, 2)
        self.engines = [self._worker() for _ in range(workers)] or [LocalClient(self.host)]
        self.apps = [http.application(engine, self.limits) for engine in self.engines]
        self.clients = [kind(self) for kind in self.draw.choices(list(CLIENTS), list(CLIENTS.values()), k=count)]

    def _worker(self) -> EngineClient:
        peer = PeerSocket(self.loop, self.host.woken.set)
        self.host.links.append(WorkerLink(self.engine, peer))
        return RemoteRecogniser(peer.other, PhraseReader(ALPHABET, frozenset()), RATE_HZ)

    async def main(self) -> str:
        """Run all to their end and check the promises; return a digest of what the clients saw."""
        host = asyncio.ensure_future(self.host.run())
        for engine in self.engines:
            await engine.start()
        served = [asyncio.ensure_future(self._serve(client)) for client in self.clients]
        ending = [asyncio.ensure_future(self._end())] if self.draw.random() < 0.3 else []
        if self.draw.random() < 0.1 and self.host.links:
            self.excuses.add(1011)
            self.loop.call_later(self.draw.expovariate(1), self.host.links[0].end.close)
        _, waiting = await asyncio.wait([*served, *ending], timeout=STUCK_S)
        if waiting:
            outcomes = [client.outcome for client, task in zip(self.clients, served, strict=True) if task in waiting]
            raise Fault(f"still waiting after an hour: {outcomes}")
        await asyncio.sleep(1)
        host.cancel()
        if self.faults:
            raise Fault("; ".join(self.faults))
        if self.engine.metrics.registry.get_sample_value("ds2_sessions") != 0:
            raise Fault("a session was never closed")
        for client in self.clients:
            client.check()
        return hashlib.sha256(repr([client.outcome for client in self.clients]).encode()).hexdigest()[:16]

    async def _serve(self, client: SimulatedClient) -> None:
        await asyncio.sleep(self.draw.expovariate(1))
        connection, app = client.connection, self.draw.choice(self.apps)
        server = asyncio.ensure_future(app(connection.scope, connection.receive, connection.send))
        player = asyncio.ensure_future(client.play())
        await asyncio.wait([server])
        if server.cancelled() or server.exception() is not None:
            error = "cancelled" if server.cancelled() else repr(server.exception())
            self.faults.append(f"{client.outcome}: its connection ended with {error}")
        await asyncio.wait([player], timeout=IDLE_S)  # to read what was sent
        player.cancel()

    async def _end(self) -> None:
        """Stop the server as SIGTERM does."""
        await asyncio.sleep(self.draw.expovariate(1))
        self.excuses |= {1012, 1013}
        await asyncio.gather(*(asyncio.wait_for(app.state.end(), 30) for app in self.apps))


def run_seed(seed: int) -> str:
    """Run one seed and return its digest; raises Fault."""
    draw = random.Random(seed)
    logger, handler = logging.getLogger("ds2"), logging.handlers.BufferingHandler(capacity=1 << 30)
    logger.addHandler(handler)
    began_s = time.process_time()
    try:
        with asyncio.Runner(loop_factory=lambda: VirtualLoop(draw)) as runner:
            loop, written = runner.get_loop(), PhraseReader._written
            spend = patch.object(PhraseReader, "_written", lambda *each: (loop.spend(PHRASE_S), written(*each))[1])
            silent = patch.object(Engine, "_warm_up", lambda _: None)  # builds nothing here
            no_page = patch.object(http, "page", lambda: http.error_response)  # which nobody opens
            with patch("time.monotonic", loop.time), spend, silent, no_page:  # chunks carry when they arrived
                digest = runner.run(Run(loop).main())
    finally:
        logger.removeHandler(handler)
    passed_s = time.process_time() - began_s
    if loop.longest_s > BUSY_S or loop.longest_work_s > LONGEST_WORK_S:
        raise Fault(f"busy: event loop {loop.longest_s:.1f}, a thread {loop.longest_work_s:.1f} s")
    tracebacks = [f"{record.getMessage()}: {record.exc_info[1]!r}" for record in handler.buffer if record.exc_info]
    unexpected = [line for line in tracebacks if "the network fails" not in line]
    if unexpected or passed_s > LONGEST_S:
        raise Fault(f"took {passed_s:.1f} s; in the log: {unexpected}")
    return digest


_CONNECTION = websocket.Connection
FAULTS = planted(
    ("a stream starts with the state of another", ServedRunner, "start_stream",
     "return ", "return self.ended.pop() if self.ended else "),
    ("the frames behind the lookahead are lost", ServedRunner, "count_ready", "labels if last else ", ""),
    ("numbers of clients have no bounds", vosk, "check_number", lambda value, *_: value),
    ("phrases are read in the event loop", PhraseReader, "run", "await", "work(*arguments) if work else await"),
    ("phrases have no bound", phrases, "_check_size", lambda *_: None),
    ("one failure in a batch fails all", sessions, "run_contained", "if len(items) == 1:\n            on_error",
     "if items:\n            for one in items[1:]: on_error(one, error)\n            on_error"),
    ("sessions of clients that left stay open", _CONNECTION, "close_session", lambda _: None),
    ("answers are crossed", engine_client, "resolve", lambda pairs: resolve(
        [(call, answer) for (call, _), (_, answer) in zip(pairs, reversed(pairs), strict=True)])),
    ("half a sample between two messages is lost", _CONNECTION, "sample_reader",
     lambda _: SimpleNamespace(accept=lambda data: Pcm().accept(data))),
    ("a client that says nothing stays for ever", _CONNECTION, "receive", "(self.limits.idle_s)", "(None)"),
    ("a client that takes nothing stays for ever", _CONNECTION, "send", "(self.limits.idle_s)", "(None)"),
    ("a server that stops gives no last result", EngineClient, "end", lambda _: None),
    ("a server that stops interrupts a message", websocket.ProtocolRoute, "end", "connection.interruptible",
     "connection"),
)  # each must be found  # fmt: skip


main = partial(simulate, __doc__, run_seed, FAULTS)
