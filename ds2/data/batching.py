"""Batches of an epoch: a pure function of durations, config, epoch and seed.

The plan is the same on every rank, so all ranks take the same number of steps, and a resumed run continues with
plan[step:].
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ds2.config.schema import BatchingConfig

_BUCKETS = 10  # by duration, each shuffled separately


def padded_durations_s(durations_s: Sequence[float], speed: Sequence[float]) -> NDArray[np.float64]:
    """Return the longest duration of each utterance after augmentation: (U,) over the slowest factor (`speed_range`).

    With these durations in `plan_epoch`, an audio budget holds for every draw of speed and tempo.
    """
    return np.asarray(durations_s, dtype=np.float64) / min([1.0, *speed])


def plan_epoch(durations_s: NDArray[np.float64], config: BatchingConfig, epoch: int, seed: int) -> list[list[int]]:
    """Return the batches of an epoch: lists of utterance indices, longest first; each utterance is in exactly one.

    Epoch 1 is SortaGrad (Deep Speech 2, section 3.2): batches in order of duration. In later epochs, or without it,
    utterances are shuffled inside 10 duration buckets and the batches made of them are shuffled.
    A batch holds a fixed count of utterances, or as many as keep its padded audio (longest duration x count) within
    the budget; an utterance over the budget makes its own batch. The last batch may be short; nothing is dropped.

    Args:
        durations_s: (U,) seconds, see `padded_durations_s`.
        config: count or budget, of all ranks together.
        epoch: counted from 1.
        seed: of the run.
    """
    if epoch < 1:
        raise ValueError(f"epoch {epoch}: epochs count from 1")
    ascending = np.argsort(durations_s, kind="stable")
    rng = np.random.default_rng([seed, epoch])
    sorted_epoch = config.sortagrad and epoch == 1
    order = ascending if sorted_epoch else np.concatenate([rng.permutation(b) for b in _buckets(ascending)])
    batches = _cut(order.tolist(), durations_s.tolist(), config)
    batches = [sorted(batch, key=lambda index: -durations_s[index]) for batch in batches]
    if not sorted_epoch:
        batches = [batches[position] for position in rng.permutation(len(batches))]
    if config.longest_first:
        padded_s = [durations_s[batch[0]] * len(batch) for batch in batches]
        batches.insert(0, batches.pop(int(np.argmax(padded_s))))
    return batches


def deal(batch: Sequence[int], rank: int, world: int) -> list[int]:
    """Return one rank's part of a batch: every `world`-th utterance, so that all ranks get similar durations.

    Where a batch is shorter than `world`, the other ranks repeat its last utterance so that they make the same calls;
    the trainer gives it no weight.
    """
    return list(batch[rank::world]) or list(batch[-1:])


def _buckets(ascending: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    return [bucket for bucket in np.array_split(ascending, _BUCKETS) if len(bucket)]


def _cut(order: list[int], durations_s: list[float], config: BatchingConfig) -> list[list[int]]:
    """Cut an order of utterances into batches."""
    batches: list[list[int]] = []
    longest_s = 0.0
    for index in order:
        longest_s = max(longest_s, durations_s[index])
        size = len(batches[-1]) if batches else 0
        full = size == config.utterances if config.utterances else longest_s * (size + 1) > config.audio_s
        if full or not batches:
            batches.append([])
            longest_s = durations_s[index]
        batches[-1].append(index)
    return batches
