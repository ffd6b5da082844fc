"""Messages between a worker and the engine's process."""

from __future__ import annotations

import asyncio
import random
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from ds2.audio.read import AudioError
from ds2.config.schema import DecodeConfig
from ds2.decoding.hypothesis import DecodeError, Hypothesis, Word
from ds2.decoding.phrases import LexiconError
from ds2.model.checkpoint import load_model
from ds2.recognition.open_segments import NEVER, Endpoints, Segment
from ds2.recognition.recogniser import Recogniser
from ds2.recognition.session import LiveSession
from ds2.serve.client import (
    TO_ENGINE,
    TO_WORKER,
    AcceptWaveforms,
    Answer,
    CloseSession,
    CountRefusal,
    Failure,
    OpenSession,
    PartialResults,
    ReadMetrics,
    RemoteRecogniser,
    SessionSettings,
    StreamResult,
    Unpacker,
    WorkerStarted,
    pack,
)
from ds2.serve.engine import Chunk, Engine
from ds2.serve.limits import BrokenError, FullError, Limits
from ds2.serve.phrases import PhraseReader
from ds2.serve.processes import WorkerLink
from ds2.system import UserError
from ds2.system.messages import MessageError
from ds2.text.alphabet import Alphabet

WORD = Word("ab", 0.1, 0.5, 0.9)
RESULT = StreamResult([Segment(0.0, 1.0, Hypothesis("ab", -1.5, (1, 2), (WORD,), -1.0))], "\ud800 c")


def test_messages_arrive_complete_in_any_pieces() -> None:
    draw = random.Random(0)
    samples = np.arange(5, dtype=np.float32).tobytes()
    to_engine = [
        [WorkerStarted()],
        [
            OpenSession(0, 1, SessionSettings(16000, Endpoints())),
            OpenSession(7, 2, SessionSettings(8000, NEVER, {"array": 1.5, "tuple": None}, ["a [b]"], True, 0.5)),
        ],
        [AcceptWaveforms([8, 9, 9], [1, 2, 2], [12.5, 12.6, 13.5], [5, 0, None], bytearray(samples))],
        [CloseSession(1), CountRefusal("429"), ReadMetrics(10)],
    ]
    to_worker = [
        [Answer(7, None)],
        [PartialResults([11, 12], ["a", ""], [1, 0], [0.25, None]), Answer(8, RESULT), Answer(9, b"metrics")],
        [Failure(10, "FullError", "all taken")],
    ]
    for sent, classes in ((to_engine, TO_ENGINE), (to_worker, TO_WORKER)):
        data = b"".join(map(pack, sent))
        for _ in range(20):
            unpacker, received, at = Unpacker(classes), list[Any](), 0
            while at < len(data):
                size = draw.randint(1, draw.choice((3, 40, 500)))
                received += unpacker.accept(data[at : at + size])
                at += size
            assert received == [message for messages in sent for message in messages]


def test_more_bytes_than_any_sender_has_are_not_waited_for() -> None:
    with pytest.raises(MessageError, match="9223372036854775808 bytes"):
        list(Unpacker(TO_ENGINE).accept((1 << 63).to_bytes(8, "little")))


def test_a_message_for_the_other_side_is_refused() -> None:
    with pytest.raises(MessageError):
        list(Unpacker(TO_ENGINE).accept(pack([Answer(1, None)])))


@pytest.mark.parametrize("kind", [FullError, LexiconError, AudioError, DecodeError, UserError])
def test_errors_of_users_keep_their_class_and_message(kind: type[UserError]) -> None:
    error = kind("what is wrong")
    arrived = Failure.of(1, error).error()
    assert type(arrived) is type(error) and str(arrived) == str(error)


def test_answers_of_a_batch_are_sent_together_and_nothing_else() -> None:
    ours, theirs = socket.socketpair()
    link, live = WorkerLink(cast(Engine, None), ours), cast(LiveSession, None)
    final, partial = Chunk(live, None, link.deliver, 7), Chunk(live, np.zeros(1, np.float32), link.deliver, 8)
    link.deliver([(final, RESULT)])
    assert list(Unpacker(TO_WORKER).accept(theirs.recv(1 << 16))) == [Answer(7, RESULT)]
    link.deliver([(final, RESULT), (partial, StreamResult([], "a b", 1, 0.5))])
    sent = list(Unpacker(TO_WORKER).accept(theirs.recv(1 << 16)))
    assert sent == [PartialResults([8], ["a b"], [1], [0.5]), Answer(7, RESULT)]
    with_words = StreamResult([], "ab", 0, 0.1, [WORD])
    link.deliver([(partial, with_words)])
    assert list(Unpacker(TO_WORKER).accept(theirs.recv(1 << 16))) == [Answer(8, with_words)]
    with pytest.raises(TypeError):
        link.deliver([(partial, with_words), (final, StreamResult([], 1j))])  # type: ignore[arg-type]
    link.deliver([(final, BrokenError())])
    assert list(Unpacker(TO_WORKER).accept(theirs.recv(1 << 16))) == [Failure(7, "BrokenError", str(BrokenError()))]
    link.close()
    assert ours.fileno() == -1, "the worker reads no end"
    theirs.close()


def test_of_two_answers_to_a_call_a_worker_takes_the_first_and_the_others_get_theirs() -> None:
    ours, theirs = socket.socketpair()
    remote = RemoteRecogniser(theirs, PhraseReader(Alphabet(("", "a", "b")), frozenset("ab")), 16000)

    async def talk() -> list[Any]:
        await remote.start()
        first, second = remote.submit(1, None), remote.submit(1, None)
        partial = PartialResults([1], ["a"], [0], [None])
        remote.data_received(pack([partial, Failure(1, "", ""), Answer(2, RESULT)]))
        remote.data_received(pack([Failure(1, "", "")]))
        remote.close()
        return [await first, await second]

    assert asyncio.run(talk()) == [StreamResult([], "a"), RESULT]
    ours.close()


def test_a_worker_that_takes_no_answers_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets them later, in order; one that never takes them is terminated."""
    ours, theirs = socket.socketpair()
    link, live = WorkerLink(cast(Engine, None), ours), cast(LiveSession, None)
    wanted = [StreamResult([], f"{number} " + "a" * 100_000, 0, None) for number in range(20)]
    start_s = time.monotonic()
    for number, result in enumerate(wanted):
        link.deliver([(Chunk(live, np.zeros(1, np.float32), link.deliver, number), result)])
    assert time.monotonic() - start_s < 5 and len(link.unsent) > 1_000_000
    unpacker, arrived = Unpacker(TO_WORKER), list[PartialResults]()
    while len(arrived) < len(wanted):
        arrived += unpacker.accept(theirs.recv(1 << 16))
        link.send()
    assert [answer.texts for answer in arrived] == [[result.partial] for result in wanted] and not link.unsent
    monkeypatch.setattr("ds2.serve.processes._STUCK_S", 0.0)
    for number, result in enumerate(wanted):
        link.deliver([(Chunk(live, np.zeros(1, np.float32), link.deliver, number), result)])
    assert link.receive() is None and not link.unsent
    link.close()
    theirs.close()


def test_errors_of_the_server_say_nothing_of_it() -> None:
    arrived = Failure.of(1, RuntimeError("CUDA error: secret")).error()
    assert type(arrived) is BrokenError and "secret" not in str(arrived)


class ForeignTransport:
    """A transport as other event loops have them: it does not derive from asyncio's."""

    def __init__(self) -> None:
        self.written = b""

    def write(self, data: bytes) -> None:
        self.written += data

    def close(self) -> None:
        self.written += b"closed"


def test_a_remote_recogniser_works_in_any_loop_and_notices_its_end() -> None:
    lost = list[bool]()
    ours, theirs = socket.socketpair()
    phrases = PhraseReader(Alphabet(("", "a", "b")), frozenset("ab"))
    remote = RemoteRecogniser(theirs, phrases, 16000)
    remote.lost = lambda: lost.append(True)

    async def talk() -> list[Any]:
        await remote.start()
        foreign = ForeignTransport()
        remote.connection_made(foreign)  # type: ignore[arg-type]
        sessions = [await remote.open(SessionSettings(16000, Endpoints())) for _ in range(3)]
        calls = [asyncio.ensure_future(session.accept_waveform(np.zeros(10, np.float32))) for session in sessions]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        sent = list(Unpacker(TO_ENGINE).accept(foreign.written))
        (numbers,) = [message.calls for message in sent if isinstance(message, AcceptWaveforms)]
        answers = [Answer(numbers[0], RESULT), Failure(numbers[1], "FullError", "x"), Failure(numbers[2], "", "")]
        for part in (data := pack(answers))[:7], data[7:]:
            remote.data_received(part)
        received = await asyncio.gather(*calls, return_exceptions=True)
        remote.close()
        assert foreign.written.endswith(b"closed")
        last = asyncio.ensure_future(sessions[0].flush())
        await asyncio.sleep(0)
        remote.connection_lost(None)
        with pytest.raises(BrokenError):
            await last
        with pytest.raises(BrokenError):
            await asyncio.wait_for(sessions[0].flush(), 60)
        return received

    result, full, broken = asyncio.run(talk())
    ours.close()
    assert result == RESULT and lost
    assert type(full) is FullError and type(broken) is BrokenError


def test_a_message_with_values_of_other_types_ends_its_worker_alone(make_model: Callable[..., Path]) -> None:
    recogniser = Recogniser.of(load_model(make_model()), DecodeConfig(), torch.device("cpu"))
    engine, settings = Engine(recogniser, Limits()), SessionSettings(16000, NEVER)
    wrong: list[tuple[object, ...]] = [
        (OpenSession(0, [1], settings),),  # type: ignore[arg-type]
        (OpenSession(0, 1, settings), AcceptWaveforms([1], [1], ["soon"], [None], bytearray())),  # type: ignore[list-item]
        (OpenSession(0, 1, settings), AcceptWaveforms([1], [1], [None], [0], bytearray())),  # type: ignore[list-item]
    ]
    for messages in wrong:
        ours, theirs = socket.socketpair()
        link = WorkerLink(engine, ours)
        theirs.send(pack(messages))
        assert link.receive() is None
        link.close()
        theirs.close()
    assert engine.metrics.text().count(b"ds2_sessions 0.0") == 1
