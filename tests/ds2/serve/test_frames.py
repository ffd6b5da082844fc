"""Messages between processes, however their bytes are cut."""

from __future__ import annotations

import random

import numpy as np

from ds2.serve.frames import Frames, frame


def test_messages_come_whole_however_they_are_cut() -> None:
    draw, sent = (
        random.Random(0),
        [[("hear", number, np.full(number, number)) for number in range(n)] for n in range(5)],
    )
    data = b"".join(map(frame, sent))
    for _ in range(50):
        frames, found, at = Frames(), list[tuple[str, int, np.ndarray]](), 0
        while at < len(data):
            size = draw.randint(1, draw.choice((3, 40, 500)))
            found += frames.accept(data[at : at + size])
            at += size
        assert str(found) == str([message for messages in sent for message in messages])
