"""The protocol of csrc/recurrent/exchange.cuh as a small machine, all of whose interleavings are walked through.

Two clusters, each a thread that publishes and empties one word a state, and two warps, each of which polls one
cluster's words. Stores of a thread become visible in any order, but those to one word in theirs; a fence waits for all.
Loads of a warp are either satisfied in order, as multiprocessors issue them, or as early as PTX allows: any time after
the last fence. What must hold: a warp never takes a word of another state, and nobody waits for ever. A pause before a
poll is no part of it: a warp may poll at any time, so also late.

The words hold something else at first. Each cluster empties those of the other one, by stores that land in any order,
arrives when all have, and goes on when both have arrived.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import pytest
from support.kernel_on_cpu import CSRC

EMPTY, STALE = -1, -2
CLUSTERS = (0, 1)
WARPS = tuple((own, other) for own in CLUSTERS for other in CLUSTERS)  # of a cluster, polling another's words


@dataclass(frozen=True)
class Protocol:
    """What the header says, in small, and what may be wrong with it.

    Attributes:
        slots, every: SLOTS and FENCE_EVERY.
        kept: after publishing e, state e - kept is emptied.
        ordered: the polls of a warp are satisfied in order.
        fenced_after: warps pass a fence after the states e with e % every == fenced_after; None: never.
        writer_fences: whoever empties fences after every `every`th state, before it publishes again.
        consumes: a cluster publishes a state when all of its warps have read the one before.
        states: that are exchanged.
        empties_first: the words are emptied when it begins.
        publishers_wait, warps_wait: who publishes, who polls, waits until all have arrived.
        arrives_late: a cluster arrives when the stores that empty have landed.
    """

    slots: int = 5
    every: int = 2
    kept: int = 2
    ordered: bool = False
    fenced_after: int | None = 0
    writer_fences: bool = True
    consumes: bool = True
    states: int = 9
    empties_first: bool = True
    publishers_wait: bool = True
    warps_wait: bool = True
    arrives_late: bool = True


class Machine(NamedTuple):
    """A state of everything: words in memory, stores under way, what warps have read or been given early."""

    memory: tuple[tuple[int, ...], ...]
    stores: tuple[tuple[tuple[int, int], ...], ...]  # of a cluster: (slot, value), oldest first
    next_state: tuple[int, ...]  # that a cluster publishes
    fencing: tuple[bool, ...]
    reading: tuple[int, ...]  # the state that a warp polls for
    early: tuple[tuple[tuple[int, int], ...], ...]  # (state, value): loads that were satisfied before their turn
    emptying: tuple[frozenset[int], ...]  # slots of the other cluster that this one's stores have not emptied yet
    begun: bool = False  # all have arrived


def put(values: tuple, place: int, value: object) -> tuple:
    """The tuple with another value in one place."""
    return (*values[:place], value, *values[place + 1 :])


class Wrong(Exception):
    """What a protocol must not do."""


def steps(rules: Protocol, now: Machine) -> Iterator[Machine]:
    """Every machine that may come next; polls that find nothing change nothing."""
    if not now.begun and not (rules.arrives_late and any(now.emptying)):
        yield now._replace(begun=True)
    for cluster in CLUSTERS:
        for slot in now.emptying[cluster]:
            words = put(now.memory[1 - cluster], slot, EMPTY)
            left = put(now.emptying, cluster, now.emptying[cluster] - {slot})
            yield now._replace(memory=put(now.memory, 1 - cluster, words), emptying=left)
        yield from _stores_land(now, cluster)
        yield from _publish(rules, now, cluster)
    for warp, (_, other) in enumerate(WARPS):
        state, given = now.reading[warp], dict(now.early[warp])
        if state == rules.states or (rules.warps_wait and not now.begun):
            continue
        value = given.get(state, now.memory[other][state % rules.slots])
        if value == state:
            kept = tuple(item for item in now.early[warp] if item[0] != state)
            yield now._replace(reading=put(now.reading, warp, state + 1), early=put(now.early, warp, kept))
        elif value != EMPTY:
            raise Wrong(f"a warp that polls for state {state} takes a word of state {value}")
        for later in _may_load(rules, state):
            found = now.memory[other][later % rules.slots]
            if found != EMPTY and later not in given:
                loaded = tuple(sorted((*now.early[warp], (later, found))))
                yield now._replace(early=put(now.early, warp, loaded))


def _stores_land(now: Machine, cluster: int) -> Iterator[Machine]:
    seen = set()
    for place, (slot, value) in enumerate(now.stores[cluster]):
        if slot not in seen:
            seen.add(slot)
            left = (*now.stores[cluster][:place], *now.stores[cluster][place + 1 :])
            words = put(now.memory[cluster], slot, value)
            after = put(now.stores, cluster, sorted_by_slot(left))
            yield now._replace(memory=put(now.memory, cluster, words), stores=after)


def sorted_by_slot(stores: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    """The same stores under way: only their order within a slot matters."""
    return tuple(sorted(stores, key=lambda store: store[0]))


def _publish(rules: Protocol, now: Machine, cluster: int) -> Iterator[Machine]:
    state = now.next_state[cluster]
    if rules.publishers_wait and not now.begun:
        return
    if now.fencing[cluster]:
        if not now.stores[cluster]:
            yield now._replace(fencing=put(now.fencing, cluster, False))
        return
    own = [now.reading[warp] for warp, (of, _) in enumerate(WARPS) if of == cluster]
    ready = own if rules.consumes else own[:1]
    if state == rules.states or min(ready) < state:
        return
    stores = [*now.stores[cluster], (state % rules.slots, state)]
    stores.append(((state - rules.kept) % rules.slots, EMPTY))
    fences = state % rules.every == rules.every - 1
    yield now._replace(
        stores=put(now.stores, cluster, sorted_by_slot(tuple(stores))),
        next_state=put(now.next_state, cluster, state + 1),
        fencing=put(now.fencing, cluster, fences and rules.writer_fences),
    )


def _may_load(rules: Protocol, state: int) -> Iterator[int]:
    """Later states whose loads nothing holds back while a warp polls for this one."""
    if rules.ordered:
        return
    for later in range(state + 1, min(rules.states, state + rules.slots)):
        if rules.fenced_after is not None and (later - 1) % rules.every == rules.fenced_after:
            return
        yield later


@functools.cache
def walk(rules: Protocol, most: int = 400_000) -> int:
    """Walk through all machines that can be reached; return how many.

    Raises:
        Wrong: one of them does what it must not, or none comes after it while states are left to read.
    """
    words, slots = (STALE,) * rules.slots, frozenset(range(rules.slots) if rules.empties_first else ())
    nothing = ((),) * len(WARPS)
    first = Machine((words, words), ((), ()), (0, 0), (False, False), (0,) * len(WARPS), nothing, (slots, slots))
    seen, stack = {first}, [first]
    while stack:
        now = stack.pop()
        following = list(steps(rules, now))
        if not following and min(now.reading) < rules.states:
            raise Wrong(f"all wait: {now}")
        for machine in following:
            if machine not in seen:
                seen.add(machine)
                stack.append(machine)
        assert len(seen) <= most, "the model has grown past what a test can walk through"
    return len(seen)


# As little slack as the header needs, and more; the fence wherever a slot's reuse allows it.
@pytest.mark.parametrize(
    ("slots", "every"),
    [(4, 1), (5, 2), (6, 2), *(pytest.param(*most, marks=pytest.mark.slow) for most in ((6, 3), (7, 4)))],
)
@pytest.mark.parametrize("ordered", [False, True])
def test_no_interleaving_takes_a_wrong_word_or_waits_for_ever(slots: int, every: int, ordered: bool) -> None:
    for fenced_after in range(slots - every - 2):
        rules = Protocol(slots=slots, every=every, ordered=ordered, fenced_after=fenced_after, states=2 * slots - 1)
        assert walk(rules) > 1000
    if ordered:
        assert walk(replace(rules, fenced_after=None)) > 1000


FAULTS = [
    pytest.param({"writer_fences": False}, "takes a word of state 0", id="no fence between emptying and publishing"),
    pytest.param({"consumes": False}, "all wait", id="published before all of the cluster have read"),
    pytest.param({"slots": 4}, "takes a word of state 0", id="a slot used again a state too early"),
    pytest.param({"kept": 1}, "all wait", id="emptied a state too early"),
    pytest.param({"every": 3}, "takes a word of state", id="too many states between fences"),
    pytest.param(
        {"ordered": False, "fenced_after": None}, "takes a word of state 0", id="loads in any order, no fence"
    ),
    pytest.param(
        {"ordered": False, "fenced_after": 1}, "takes a word of state 0", id="loads in any order, fenced late"
    ),
    pytest.param({"empties_first": False}, "takes a word of state -2", id="what the buffer came with"),
    pytest.param({"warps_wait": False}, "takes a word of state -2", id="polled before it is empty"),
    pytest.param({"publishers_wait": False}, "all wait", id="published before it is empty"),
    pytest.param({"arrives_late": False}, "takes a word of state -2", id="arrived before it is empty"),
]


@pytest.mark.parametrize(("fault", "message"), FAULTS)
def test_planted_faults_are_found(fault: dict[str, int | bool | None], message: str) -> None:
    rules = Protocol(ordered=True)
    walk(rules)
    with pytest.raises(Wrong, match=message):
        walk(replace(rules, **fault))


def test_the_headers_have_the_slack_that_the_model_needs() -> None:
    (fenced,) = re.findall(r"epoch % Shape::FENCE_EVERY == (\d+)\) fence_loads", _header("exchange.cuh"))
    by_gates = r"\(Cell_::GATES > 1 && !PORTABLE_ \? (\d+) : (\d+)\)"
    narrow = _header("grid_narrow_shape.cuh")
    ((gated, slots, gated_every, every),) = re.findall(f": Slots<{by_gates}, {by_gates}>", narrow)
    pairs = [(gated, gated_every), (slots, every)]
    pairs += re.findall(r"WideShape : Slots<(\d+), (\d+)>", _header("grid_wide_shape.cuh"))
    assert len(pairs) == 3
    for slots, every in pairs:
        # A writer fences after a state that is every - 1 modulo every; slots - every - 2 more come before reuse.
        assert int(fenced) < int(slots) - int(every) - 2 and int(fenced) < int(every)
    for headers in (("grid_narrow.cuh",), ("grid_wide.cuh", "grid_wide_finish.cuh")):
        code = "".join(map(_header, headers))
        assert "Shape::fences(epoch)) fence_stores();" in code and "epoch + Shape::SLOTS - 2)" in code
        assert code.count("order_polls<Shape>(") == 1


def _header(name: str) -> str:
    return (CSRC / "recurrent" / name).read_text()
