"""SpecAugment: masks within their limits, drawn for each utterance alone."""

from __future__ import annotations

from functools import partial

import torch

from ds2.audio.augment import utterance_rngs
from ds2.audio.spec_augment import apply_masks, spectrogram_masks
from ds2.config.schema import AugmentConfig

MASKING = AugmentConfig(frequency_masks=2, frequency_width=27, time_masks=3, time_width_s=0.4, time_fraction=0.2)


def masked(lengths: list[int], indices: list[int], epoch: int = 1, config: AugmentConfig = MASKING) -> torch.Tensor:
    masks = spectrogram_masks(torch.tensor(lengths), 161, config, 0.01, partial(utterance_rngs, 1, epoch, indices, 0))
    return apply_masks(torch.ones(len(lengths), 161, max(lengths)), masks, config.frequency_masks)


def test_masks_are_bars_within_their_limits() -> None:
    one_time = AugmentConfig(time_masks=1, time_width_s=0.4, time_fraction=0.2)
    one_frequency = AugmentConfig(frequency_masks=1, frequency_width=27)
    for index in range(30):
        time = masked([100], [index], config=one_time)[0]
        assert torch.equal(time, time[:1].expand(161, 100))
        assert (time[0] == 0).sum() <= 20
        frequency = masked([100], [index], config=one_frequency)[0]
        assert torch.equal(frequency, frequency[:, :1].expand(161, 100))
        assert (frequency[:, 0] == 0).sum() <= 27
    widths = {int((masked([100], [i], config=one_time)[0, 0] == 0).sum()) for i in range(200)}
    assert widths == set(range(21))
    assert max(int((masked([1000], [i], config=one_time)[0, 0] == 0).sum()) for i in range(200)) == 40


def test_masks_reach_both_ends_and_never_leave_the_utterance() -> None:
    config = AugmentConfig(time_masks=1, time_width_s=1.0, time_fraction=0.5)
    hit = torch.zeros(20, dtype=torch.bool)
    for index in range(200):
        row = masked([20, 50], [index, index + 1000], config=config)[0, 0]
        hit |= row[:20] == 0
        assert row[20:].all()
    assert hit.all()


def test_masks_do_not_depend_on_batch_mates() -> None:
    together = masked([90, 40, 7, 0], [5, 3, 8, 9])
    for row, (length, index) in enumerate([(90, 5), (40, 3), (7, 8)]):
        assert torch.equal(together[row, :, :length], masked([length], [index])[0])
    assert not torch.equal(together, masked([90, 40, 7, 0], [5, 3, 8, 9], epoch=2))


def test_no_masks_leave_the_features_alone() -> None:
    features = torch.ones(1, 161, 9)
    none = spectrogram_masks(torch.tensor([9]), 161, AugmentConfig(), 0.01, partial(utterance_rngs, 1, 1, [0], 0))
    assert none.shape == (1, 0, 2) and apply_masks(features, none, 0) is features
