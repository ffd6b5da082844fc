"""Samples of a source cut into blocks: every window's once, wherever the pieces end."""

from __future__ import annotations

import random

import numpy as np
import pytest

from ds2.audio.features import Features
from ds2.audio.stream import SampleBlocks
from ds2.config.schema import FeaturesConfig

RATE_HZ = 1000


@pytest.mark.parametrize(("window", "step"), [(20, 10), (10, 10)])
@pytest.mark.parametrize("longest", [1, 30, 400])
def test_blocks_hold_the_samples_of_their_windows(window: int, step: int, longest: int) -> None:
    config, draw = FeaturesConfig(window_s=window / RATE_HZ, step_s=step / RATE_HZ), random.Random(1)
    rooms = np.zeros((200, 3 * step + window), np.float32)
    blocks, samples = (
        SampleBlocks(Features(config, RATE_HZ), 4, rooms.__getitem__),
        np.arange(1, 1234, dtype=np.float32),
    )
    found, at = list[np.ndarray](), 0
    while at < len(samples):
        end = at + draw.randint(0, longest)
        found += blocks.accept(samples[at:end])
        at = end
    starts = range(0, len(samples) - rooms.shape[1] + 1, 4 * step)
    assert blocks.samples == len(samples) and len(found) == len(starts)
    for number, (block, start) in enumerate(zip(found, starts, strict=True)):
        assert block.base is rooms and (rooms[number] == samples[start : start + rooms.shape[1]]).all()
    assert (blocks.finish() == samples[4 * step * len(found) :]).all()
