"""A worker's side of the link to the recogniser."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import numpy as np
import pytest

from ds2.decoding.lexicon import LexiconError
from ds2.recognition.session import Endpoints
from ds2.serve.dispatch import Heard
from ds2.serve.frames import Frames, frame
from ds2.serve.limits import BrokenError, FullError
from ds2.serve.links import Failed
from ds2.serve.phrases import PhraseReader
from ds2.serve.worker import There
from ds2.text.alphabet import Alphabet


class Foreign:
    """A transport as other loops have them: by its methods one of asyncio's, by its class none."""

    def __init__(self) -> None:
        self.written = b""

    def write(self, data: bytes) -> None:
        self.written += data

    def close(self) -> None:
        self.written += b"closed"


def test_any_loop_will_do_and_errors_keep_their_class() -> None:
    lost = list[bool]()
    ours, theirs = socket.socketpair()
    phrases = PhraseReader(Alphabet(("", "a", "b")), frozenset("ab"))
    there = There(theirs, phrases, 16000, lambda: lost.append(True))

    async def talk() -> list[Any]:
        await there.begin()
        transport, foreign = there._transport, Foreign()
        there.connection_made(foreign)  # type: ignore[arg-type]
        sources = [await there.open(16000, Endpoints()) for _ in range(3)]
        asked = [asyncio.ensure_future(source.accept(np.zeros(10, np.float32))) for source in sources]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        calls = [call for call, kind, _ in Frames().accept(foreign.written) if kind == "hear"]
        answers = [Heard([], "words"), Failed(FullError, "all taken"), Failed(LexiconError, "zebra")]
        for part in (data := frame(list(zip(calls, answers, strict=True))))[:7], data[7:]:
            there.data_received(part)
        found = await asyncio.gather(*asked, return_exceptions=True)
        there.close()
        assert foreign.written.endswith(b"closed") and transport is not None
        last = asyncio.ensure_future(sources[0].flush())
        await asyncio.sleep(0)
        there.connection_lost(None)
        with pytest.raises(BrokenError):
            await last
        transport.close()
        return found

    heard, full, unknown = asyncio.run(talk())
    ours.close()
    assert heard == Heard([], "words") and lost
    assert type(full) is FullError and type(unknown) is LexiconError and str(unknown) == "zebra"
