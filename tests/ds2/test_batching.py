"""Plans of batches: every utterance once, budgets, order, ranks, purity."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds2.batching import padded_durations_s, plan_epoch, shard
from ds2.config import BatchingConfig, ConfigError

DURATIONS = np.random.default_rng(0).gamma(3.0, 2.0, 1000) + 0.3


def by_count(utterances: int = 32, **other: object) -> BatchingConfig:
    return BatchingConfig(utterances=utterances, **other)  # type: ignore[arg-type]


def by_audio(audio_s: float, **other: object) -> BatchingConfig:
    return BatchingConfig(utterances=0, audio_s=audio_s, **other)  # type: ignore[arg-type]


def padding(plan: list[list[int]]) -> float:
    padded = sum(DURATIONS[batch].max() * len(batch) for batch in plan)
    return float(padded / DURATIONS.sum() - 1)


@settings(max_examples=200, deadline=None)
@given(
    durations=st.lists(st.floats(0.0, 60.0), min_size=1, max_size=80),
    budget=st.one_of(st.integers(1, 20), st.floats(0.5, 100.0)),
    buckets=st.integers(1, 7),
    epoch=st.integers(1, 3),
    world=st.integers(1, 5),
    flags=st.tuples(st.booleans(), st.booleans()),
)
def test_every_utterance_exactly_once_within_the_budget(
    durations: list[float],
    budget: float,
    buckets: int,
    epoch: int,
    world: int,
    flags: tuple[bool, bool],
) -> None:
    array = np.array(durations)
    world = min(world, len(durations), budget) if isinstance(budget, int) else min(world, len(durations))
    count, audio_s = (budget, 0.0) if isinstance(budget, int) else (0, budget)
    config = BatchingConfig(count, audio_s, buckets=buckets, sortagrad=flags[0], longest_first=flags[1])
    plan = plan_epoch(array, config, epoch, 3, world)
    assert sorted(index for batch in plan for index in batch) == list(range(len(durations)))
    for batch in plan:
        assert len(batch) >= world
        assert list(array[batch]) == sorted(array[batch], reverse=True)
        if isinstance(budget, int):
            assert len(batch) < budget + world
        else:
            assert array[batch].max() * len(batch) <= budget or len(batch) < 2 * world
        parts = [shard(batch, rank, world) for rank in range(world)]
        assert sorted(index for part in parts for index in part) == sorted(batch)
        assert min(map(len, parts)) >= max(1, max(map(len, parts)) - 1)
    if flags[1]:
        assert array[plan[0]].max() * len(plan[0]) == max(array[batch].max() * len(batch) for batch in plan)


def test_sortagrad_ascends_in_epoch_one_only() -> None:
    first = plan_epoch(DURATIONS, by_count(), 1, 1)
    assert [len(batch) for batch in first] == [32] * 31 + [8]
    flat = [DURATIONS[i] for batch in first for i in reversed(batch)]
    assert flat == sorted(flat)
    longest = [DURATIONS[batch[0]] for batch in plan_epoch(DURATIONS, by_count(), 2, 1)]
    assert longest != sorted(longest)
    longest = [DURATIONS[batch[0]] for batch in plan_epoch(DURATIONS, by_count(sortagrad=False), 1, 1)]
    assert longest != sorted(longest)


def test_plans_are_pure_and_differ_by_epoch_and_seed() -> None:
    plan = plan_epoch(DURATIONS, by_audio(200.0), 2, 1)
    assert plan == plan_epoch(DURATIONS, by_audio(200.0), 2, 1)
    assert plan != plan_epoch(DURATIONS, by_audio(200.0), 3, 1)
    assert plan != plan_epoch(DURATIONS, by_audio(200.0), 2, 2)
    assert {frozenset(batch) for batch in plan} != {frozenset(b) for b in plan_epoch(DURATIONS, by_audio(200.0), 3, 1)}


def test_buckets_keep_padding_low() -> None:
    assert padding(plan_epoch(DURATIONS, by_count(), 1, 1)) < 0.05
    assert padding(plan_epoch(DURATIONS, by_count(), 2, 1)) < 0.25
    assert padding(plan_epoch(DURATIONS, by_count(buckets=1), 2, 1)) > 1.0


def test_the_audio_budget_is_used() -> None:
    plan = plan_epoch(DURATIONS, by_audio(200.0), 1, 1)
    used = [DURATIONS[batch].max() * len(batch) for batch in plan]
    assert max(used) <= 200.0
    assert np.mean(used[:-1]) > 180.0


def test_an_utterance_over_the_budget_goes_alone() -> None:
    plan = plan_epoch(np.array([1.0, 50.0, 2.0, 60.0]), by_audio(10.0), 1, 1)
    assert plan == [[2, 0], [1], [3]]


def test_the_longest_batch_opens_every_epoch_on_request() -> None:
    for epoch in (1, 2, 3):
        plan = plan_epoch(DURATIONS, by_count(longest_first=True), epoch, 1)
        others = [DURATIONS[batch].max() * len(batch) for batch in plan[1:]]
        assert DURATIONS[plan[0]].max() * len(plan[0]) >= max(others)


def test_no_rank_is_left_without_work_at_the_end() -> None:
    plan = plan_epoch(DURATIONS[:67], by_count(16), 1, 1, world=8)
    assert [len(batch) for batch in plan] == [16, 16, 16, 11, 8]
    assert [len(b) for b in plan_epoch(DURATIONS[:9], by_count(8), 1, 1, world=8)] == [9]


def test_a_long_last_utterance_does_not_share_with_more_than_one_a_rank() -> None:
    plan = plan_epoch(np.array([1.0] * 40 + [30.0]), by_audio(40.0), 1, 1, world=2)
    assert [len(batch) for batch in plan] == [39, 2]


def test_shards_get_like_durations() -> None:
    for batch in plan_epoch(DURATIONS, by_count(64), 2, 1, world=4):
        means = [DURATIONS[shard(batch, rank, 4)].mean() for rank in range(4)]
        assert max(means) < 1.15 * min(means)


def test_padded_durations_hold_for_the_slowest_factor() -> None:
    assert padded_durations_s([9.0, 1.8], [0.9, 1.0, 1.1]).tolist() == [10.0, 2.0]
    assert padded_durations_s([9.0], []).tolist() == [9.0]
    assert padded_durations_s([9.0], [1.1]).tolist() == [9.0]


@pytest.mark.parametrize(
    ("config", "world", "message"),
    [
        (by_count(0), 1, "set exactly one"),
        (BatchingConfig(utterances=4, audio_s=3.0), 1, "set exactly one"),
        (by_count(-1), 1, "set exactly one"),
        (by_count(buckets=0), 1, "batching.buckets=0"),
        (by_count(4), 8, "less than one a rank: set at least 8"),
        (by_audio(10.0), 1001, "1000 utterances cannot be shared by 1001 ranks"),
    ],
)
def test_impossible_plans_are_refused(config: BatchingConfig, world: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_epoch(DURATIONS, config, 1, 1, world)


def test_shard_refuses_small_batches_and_foreign_ranks() -> None:
    with pytest.raises(ValueError, match="plan with world=3"):
        shard([1, 2], 0, 3)
    with pytest.raises(ValueError, match="rank 2"):
        shard([1, 2], 2, 2)
    with pytest.raises(ValueError, match="epochs count from 1"):
        plan_epoch(DURATIONS, by_count(), 0, 1)
