"""Which utterances make up each batch of an epoch: a pure function of durations, config, epoch and seed.

Because the plan is pure and the same on every rank, a resume is (epoch, step) -> plan[step:], and every rank takes the
same number of steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ds2.config import BatchingConfig, ConfigError


def padded_durations_s(durations_s: Sequence[float], speed: Sequence[float]) -> NDArray[np.float64]:
    """Return the longest that each utterance can get: durations (U,) over the slowest speed factor.

    `plan_epoch` sees durations before augmentation; planning with these makes an audio budget hold for every draw.
    """
    return np.asarray(durations_s, dtype=np.float64) / min([1.0, *speed])


def plan_epoch(
    durations_s: NDArray[np.float64], config: BatchingConfig, epoch: int, seed: int, world: int = 1
) -> list[list[int]]:
    """Return the batches of an epoch: lists of utterance indices, each utterance in exactly one, longest first inside.

    Epoch 1 is SortaGrad (Deep Speech 2, section 3.2): batches in order of duration. In later epochs, or without it,
    utterances are shuffled inside `config.buckets` duration buckets and the batches made of them are shuffled.
    A batch holds a fixed count of utterances, or as many as keep its padded audio (longest duration x count) within
    the budget, but never fewer than `world`, so that no rank is without work; an utterance over the budget makes its
    own batch, or with several ranks shares it with world - 1 others. The last batch may be short, or up to world - 1
    utterances over where they cannot make a batch of their own; nothing is dropped.

    Args:
        durations_s: (U,) seconds, as long as they can get (`padded_durations_s`).
        config: count or budget, over all ranks together.
        epoch: 1-based.
        seed: of the run.
        world: ranks that share each batch.
    Raises:
        ConfigError: not exactly one of count and budget is set, or there is less than one utterance a rank.
    """
    _check(config, len(durations_s), world)
    if epoch < 1:
        raise ValueError(f"epoch {epoch}: epochs count from 1")
    ascending = np.argsort(durations_s, kind="stable")
    rng = np.random.default_rng([seed, epoch])
    sorted_epoch = config.sortagrad and epoch == 1
    order = (
        ascending if sorted_epoch else np.concatenate([rng.permutation(b) for b in _buckets(ascending, config.buckets)])
    )
    batches = _cut(order.tolist(), durations_s.tolist(), config, world)
    batches = [sorted(batch, key=lambda index: -durations_s[index]) for batch in batches]
    if not sorted_epoch:
        batches = [batches[position] for position in rng.permutation(len(batches))]
    if config.longest_first:
        padded_s = [durations_s[batch[0]] * len(batch) for batch in batches]
        batches.insert(0, batches.pop(int(np.argmax(padded_s))))
    return batches


def shard(batch: Sequence[int], rank: int, world: int) -> list[int]:
    """Return one rank's part of a batch of `plan_epoch`, dealt out in turns so that all ranks get like durations.

    Parts differ by at most one utterance, and none is empty for a batch planned with this `world`.

    Raises:
        ValueError: the batch is smaller than the world, or the rank is not in it.
    """
    if not 0 <= rank < world:
        raise ValueError(f"rank {rank} is outside a world of {world}")
    if len(batch) < world:
        raise ValueError(
            f"a batch of {len(batch)} utterances cannot be dealt to {world} ranks: plan with world={world}"
        )
    return list(batch[rank::world])


def deal(batch: Sequence[int], rank: int, world: int) -> list[int]:
    """Return one rank's part of any batch: as `shard`, and for a rank past the end of a short batch its last utterance.

    That rank repeats what another one has, so that it makes the same calls; the trainer gives it no weight.
    """
    return shard(batch, rank, min(world, len(batch))) if rank < len(batch) else list(batch[-1:])


def _check(config: BatchingConfig, utterances: int, world: int) -> None:
    if (config.utterances > 0) == (config.audio_s > 0) or config.utterances < 0 or config.audio_s < 0:
        raise ConfigError(
            f"batching.utterances={config.utterances} and batching.audio_s={config.audio_s}: set exactly one of them"
        )
    if config.buckets < 1:
        raise ConfigError(f"batching.buckets={config.buckets}: must be at least 1 (1: one shuffle of everything)")
    if 0 < config.utterances < world:
        raise ConfigError(f"batching.utterances={config.utterances} is less than one a rank: set at least {world}")
    if utterances < world:
        raise ConfigError(
            f"{utterances} utterances cannot be shared by {world} ranks: start at most {max(1, utterances)}"
        )


def _buckets(ascending: NDArray[np.int64], buckets: int) -> list[NDArray[np.int64]]:
    return [bucket for bucket in np.array_split(ascending, buckets) if len(bucket)]


def _cut(order: list[int], durations_s: list[float], config: BatchingConfig, world: int) -> list[list[int]]:
    """Cut an order of utterances into batches of at least `world` each."""
    batches: list[list[int]] = []
    batch: list[int] = []
    longest_s = 0.0
    for index in order:
        grown_s = max(longest_s, durations_s[index])
        if config.utterances:
            full = len(batch) == config.utterances
        else:
            full = len(batch) >= world and grown_s * (len(batch) + 1) > config.audio_s
        if full:
            batches.append(batch)
            batch, grown_s = [], durations_s[index]
        batch.append(index)
        longest_s = grown_s
    if batches and len(batch) < world:
        batch = batches.pop() + batch
        if len(batch) >= 2 * world:  # one a rank: taking more could put many beside a long one, over the budget
            batches.append(batch[:-world])
            batch = batch[-world:]
    if batch:
        batches.append(batch)
    return batches
