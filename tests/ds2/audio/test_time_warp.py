"""SpecAugment's time warping: one frame moves, both ends stay, and all between is stretched evenly."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from ds2.audio.augment import utterance_rngs
from ds2.audio.spec_augment import time_warps, warp_time
from ds2.commands.compose import compose_config
from ds2.config.schema import AugmentConfig, ConfigError

WARPING = AugmentConfig(time_warp_s=0.2)  # 20 frames


def drawn(lengths: list[int], indices: list[int], seed: int = 1, epoch: int = 1) -> torch.Tensor:
    warps = time_warps(torch.tensor(lengths), WARPING, 0.01, partial(utterance_rngs, seed, epoch, indices, 0))
    assert warps is not None
    return warps


def test_moves_reach_their_limits_and_stay_within_the_utterance() -> None:
    frame, moved = drawn([100] * 2000, list(range(2000))).T
    assert int(frame.min()) == 21 and int(frame.max()) == 78  # 20 frames and an end away from each end
    assert int((moved - frame).min()) == -20 and int((moved - frame).max()) == 20
    assert abs(float((moved - frame).double().mean())) < 5 * 11.83 / 2000**0.5  # deviation of 41 equal chances
    assert bool(((moved > 0) & (moved < 99)).all())


@pytest.mark.parametrize("length", range(12))
def test_short_utterances_move_as_far_as_they_can(length: int) -> None:
    frame, moved = drawn([length] * 300, list(range(300))).T
    most = max((length - 3) // 2, 0)
    assert int((moved - frame).abs().max()) == most
    assert bool(((moved > 0) & (moved < length - 1)).all()) == (most > 0)


def test_warps_depend_on_seed_epoch_and_utterance_alone() -> None:
    together = drawn([90, 40], [5, 3])
    assert torch.equal(together, torch.cat([drawn([90], [5]), drawn([40], [3])]))
    assert len({tuple(drawn([400], [i], s, e)[0].tolist()) for i in (0, 1) for s in (1, 2) for e in (1, 2)}) == 8
    assert time_warps(torch.tensor([90]), AugmentConfig(), 0.01, partial(utterance_rngs, 1, 1, [5], 0)) is None


def test_features_are_those_of_an_interpolation_in_float64() -> None:
    torch.manual_seed(1)
    lengths, frames = [60, 41, 7, 1, 0], 64
    warps = torch.tensor([[20, 33], [21, 2], [3, 4], [0, 0], [0, 0]])
    features = torch.randn(5, 3, frames, dtype=torch.float64)
    found = warp_time(features, torch.tensor(lengths), warps)
    for row, length in enumerate(lengths):
        wanted = np.zeros((3, frames))
        at = np.arange(length)
        frame, moved = warps[row].tolist()
        if length > 1:
            at = np.interp(at, [0, moved, length - 1], [0, frame, length - 1]) if moved else at
        for band in range(3):
            wanted[band, :length] = np.interp(at, np.arange(frames), features[row, band].numpy())
        torch.testing.assert_close(found[row], torch.from_numpy(wanted), rtol=0, atol=1e-12)
    assert torch.equal(found[0, :, 33], features[0, :, 20]) and torch.equal(found[0, :, 59], features[0, :, 59])


def test_a_frame_that_stays_where_it_is_changes_no_bit() -> None:
    features = torch.randn(2, 4, 9001)
    features[1, :, 7000:] = 0.0
    lengths = torch.tensor([9001, 7000])
    assert torch.equal(warp_time(features, lengths, torch.tensor([[8123, 8123], [0, 0]])), features)
    assert warp_time(features, lengths, None) is features


def test_a_move_of_less_than_a_frame_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"augment.time_warp_s=0.004 is less than a frame"):
        compose_config(["augment.time_warp_s=0.004"])
