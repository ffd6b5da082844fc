"""Plans of batches: every utterance once, budgets, order, purity; parts of ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds2.config.schema import BatchingConfig
from ds2.data.loader import padded_durations_s, plan_epoch, rank_part
from ds2.data.manifest import Utterance

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
    epoch=st.integers(1, 3),
    world=st.integers(1, 5),
    flags=st.tuples(st.booleans(), st.booleans()),
)
def test_every_utterance_exactly_once_within_the_budget(
    durations: list[float],
    budget: float,
    epoch: int,
    world: int,
    flags: tuple[bool, bool],
) -> None:
    array = np.array(durations)
    count, audio_s = (budget, 0.0) if isinstance(budget, int) else (0, budget)
    config = BatchingConfig(count, audio_s, sortagrad=flags[0], longest_first=flags[1])
    plan = plan_epoch(array, config, epoch, 3)
    assert sorted(index for batch in plan for index in batch) == list(range(len(durations)))
    for batch in plan:
        assert list(array[batch]) == sorted(array[batch], reverse=True)
        if isinstance(budget, int):
            assert len(batch) <= budget
        else:
            assert array[batch].max() * len(batch) <= budget or len(batch) == 1
        parts = [rank_part(batch, rank, world) for rank in range(world)]
        assert sorted(index for part in parts[: len(batch)] for index in part) == sorted(batch)
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


@pytest.mark.parametrize("config", [by_count(), by_audio(200.0)])
def test_sortagrad_puts_copies_into_different_batches(config: BatchingConfig) -> None:
    listed = [Utterance(Path(f"{n}.wav"), s, "") for n, s in enumerate(DURATIONS) for _ in range(1 + 21 * (n < 50))]
    durations_s = np.array([u.duration_s for u in listed])
    plan = plan_epoch(durations_s, config, 1, 1, listed)
    assert sorted(index for batch in plan for index in batch) == list(range(len(listed)))
    assert all(len({listed[index].audio_filepath for index in batch}) == len(batch) for batch in plan)
    assert max(durations_s[batch].max() * len(batch) for batch in plan) <= (config.audio_s or np.inf)
    assert len(plan) <= len(plan_epoch(durations_s, config, 1, 1)) + 21
    means = np.array([durations_s[batch].mean() for batch in plan])
    assert np.corrcoef(means, np.arange(len(plan)))[0, 1] > 0.95
    assert plan_epoch(durations_s, config, 2, 1, listed) == plan_epoch(durations_s, config, 2, 1)
    once = [Utterance(Path(f"{n}.wav"), s, "") for n, s in enumerate(DURATIONS)]
    assert plan_epoch(DURATIONS, config, 1, 1, once) == plan_epoch(DURATIONS, config, 1, 1)


def test_plans_are_pure_and_differ_by_epoch_and_seed() -> None:
    plan = plan_epoch(DURATIONS, by_audio(200.0), 2, 1)
    assert plan == plan_epoch(DURATIONS, by_audio(200.0), 2, 1)
    assert plan != plan_epoch(DURATIONS, by_audio(200.0), 3, 1)
    assert plan != plan_epoch(DURATIONS, by_audio(200.0), 2, 2)
    assert {frozenset(batch) for batch in plan} != {frozenset(b) for b in plan_epoch(DURATIONS, by_audio(200.0), 3, 1)}


def test_buckets_keep_padding_low() -> None:
    assert padding(plan_epoch(DURATIONS, by_count(), 1, 1)) < 0.05
    assert padding(plan_epoch(DURATIONS, by_count(), 2, 1)) < 0.25


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


def test_ranks_get_like_durations() -> None:
    for batch in plan_epoch(DURATIONS, by_count(50), 2, 1):
        means = [DURATIONS[rank_part(batch, rank, 4)].mean() for rank in range(4)]
        assert max(means) < 1.15 * min(means)


def test_padded_durations_hold_for_the_slowest_factor() -> None:
    assert padded_durations_s([9.0, 1.8], [0.9, 1.0, 1.1]).tolist() == [10.0, 2.0]
    assert padded_durations_s([9.0], []).tolist() == [9.0]
    assert padded_durations_s([9.0], [1.1]).tolist() == [9.0]


def test_epochs_count_from_one() -> None:
    with pytest.raises(ValueError, match="epochs count from 1"):
        plan_epoch(DURATIONS, by_count(), 0, 1)
