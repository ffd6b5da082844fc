"""The server, and ranks that come and go, in simulated time: promises are kept, and planted faults are detected."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, replace

import pytest
import torch
from fuzzing import meetings, simulation
from fuzzing.processes import Process, parsed
from fuzzing.ranks import ranks_of_steps
from fuzzing.seeds import Fault
from fuzzing.toy import BATCHES, EPOCHS, contents_of, loss_of, weights_of
from support.launch import tool

from ds2.distributed.members import View
from ds2.system import tensor_file
from ds2.training.state import state_file

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="seeds run in forked processes")


def simulate(command: str, *arguments: str, workers: int = 1) -> str:
    """Run the tool; return what it prints."""
    done = tool("fuzz", command, "--workers", str(workers), *arguments, hash_seed="0")
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.parametrize(
    ("command", "run_seed", "seeds"), [("simulation", simulation.run_seed, 60), ("meetings", meetings.run_seed, 10)]
)
def test_no_seed_breaks_a_promise_and_each_replays(command: str, run_seed: Callable[[int], str], seeds: int) -> None:
    """One after the other here, and in processes that take turns and whose hashes are others."""
    digests = "".join(map(run_seed, range(seeds)))
    printed = simulate(command, "--seeds", str(seeds), workers=2)
    assert f"digest {hashlib.sha256(digests.encode()).hexdigest()[:16]}" in printed


@pytest.mark.slow
@pytest.mark.parametrize(("command", "seeds"), [("simulation", "500"), ("meetings", "300")])
def test_more_seeds(command: str, seeds: str) -> None:
    simulate(command, "--first", "1000", "--seeds", os.environ.get("DS2_SIMULATION_SEEDS", seeds))


FAULTS = {"simulation": simulation.FAULTS, "meetings": meetings.FAULTS}


@pytest.mark.parametrize("command", FAULTS)
def test_faults_can_be_planted_in_the_present_code(command: str) -> None:
    assert FAULTS[command]
    for plant in FAULTS[command].values():
        with plant():
            pass


# Faults of ranks that few seeds detect, and one that did: the search begins there. After a change
# of what runs it may be another, so the search goes on.
RARE = {
    "a woken rank 0 replaces the log": 1383,
    "a woken rank 0 writes into the log": 2447,
    "a woken rank 0 removes the files of the next one": 8925,
    "a woken rank 0 replaces the state that the next one has read": 58,
    "a rank that lacks the state is taken for one that has it": 1414,
    "a view that another process made is replaced": 458,
    "the shards of a state are removed before the next one is complete": 825,
    "a save of ranks that are gone is not given up": 560,
    "a damaged cache is not noticed": 195,
}


class LastSave(meetings.World):
    """One process, and `happen` after its last step, whenever it is about to write its state, until it has ended."""

    def __init__(self) -> None:
        super().__init__(random.Random(0), sharded=True)  # whose saves have pauses of their own
        self.events, self.times = 0, 0

    def start(self) -> None:
        if all(process.dead for process in self.processes):
            super().start()

    def pause(self, where: str = "call") -> None:
        complete = where == "save" and len(ranks_of_steps(self.run_dir)) == EPOCHS * BATCHES
        if complete and self.process is self.processes[0]:
            self.times += 1
            self.happen()

    def happen(self) -> None:
        raise NotImplementedError


def leave_behind(world: meetings.World) -> None:
    """Let another process seem to go on without those of the view, and to be killed at once."""
    (path,) = (world.run_dir / "members").glob("view-*.json")
    view = parsed(View, path.read_bytes(), path.name)
    later = replace(view, number=view.number + 1, members=[replace(view.members[0], id="f" * 32)])
    world.by_member["f" * 32] = Process(world, len(world.processes) + 1)
    world.by_member["f" * 32].kill()
    (path.parent / f"view-{later.number:06d}.json").write_bytes(json.dumps(asdict(later)).encode())


class LeftBehind(LastSave):
    """Another one goes on without it."""

    def happen(self) -> None:
        if self.times == 1:
            leave_behind(self)


class Overtaken(meetings.World):
    """After the last save of two processes, another one takes the last step again and saves it; rank 0 is killed."""

    times = 0

    def __init__(self) -> None:
        super().__init__(random.Random(0), sharded=False)
        self.events = 0

    def start(self) -> None:
        while len(self.processes) < 2:
            super().start()

    def pause(self, where: str = "call") -> None:
        """Nothing else happens."""

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if (name, value) == ("saved", EPOCHS * BATCHES) and not self.times:
            self.times = 1
            self.process.kill()
            self.overtake(EPOCHS * BATCHES)

    def overtake(self, last: int) -> None:
        weights = weights_of(ranks_of_steps(self.run_dir) | {last: 1})
        log = self.run_dir / "log.jsonl"
        *lines, line = [json.loads(line) for line in log.read_bytes().splitlines()]
        assert (line["event"], line["step"], line["ranks"]) == ("train", last, 2)
        line |= {"ranks": 1, "loss": loss_of(weights[-2], 1, contents_of(last))}
        log.write_bytes("".join(json.dumps(line) + "\n" for line in (*lines, line)).encode())
        for path, name in ((state_file(self.run_dir), "model.weight"), (self.run_dir / "last.safetensors", "weight")):
            tensors, metadata = tensor_file.load(path)
            tensors |= {name: torch.full_like(tensors[name], weights[-1])}
            tensor_file.write_tensors(tensors, path, tensor_file.make_header(metadata, tensors))
        leave_behind(self)


class Unsaved(meetings.World):
    """Three processes. Rank 0 of the first view, which is alone, and that of the second are killed in their first save.

    `states` are the steps of the states that are saved.
    """

    kills, states = 0, ()

    def __init__(self) -> None:
        super().__init__(random.Random(0), sharded=True)  # whose saves have pauses of their own
        self.events = 0

    def start(self) -> None:
        while len(self.processes) < 3:
            super().start()

    def pause(self, where: str = "call") -> None:
        if where == "save" and self.kills < 2:
            self.kills += 1
            self.process.kill()
            self.running.sleep(0.0)

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name == "saved" and self.running is not None:
            self.states = (*self.states, value)


def test_ranks_take_no_step_before_there_is_a_state() -> None:
    """A process that is left behind goes on from it, where nobody else is left: its own steps may not count."""
    world = Unsaved()
    with meetings.simulated(world):
        world.run()
        world.check()
    assert (world.kills, world.states[0], world.states[-1]) == (2, 0, EPOCHS * BATCHES)


class FullDisk(LastSave):
    """The disk has no space for the state."""

    def happen(self) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


# Of thousands of seeds one detects these: a search would take minutes.
DIRECTED = {
    "a process that was left behind ends as if it had saved": LeftBehind,
    "a process that was left behind logs its line again": Overtaken,
    "an error of a write is forgotten": FullDisk,
}


@pytest.mark.parametrize("fault", DIRECTED)
def test_the_last_step_is_logged_and_saved(fault: str) -> None:
    for plant in (nullcontext, FAULTS["meetings"][fault]):
        world = DIRECTED[fault]()
        with plant(), meetings.simulated(world):
            world.run()
            assert world.times
            with nullcontext() if plant is nullcontext else pytest.raises(Fault):
                world.check()


@pytest.mark.slow
@pytest.mark.parametrize(("command", "rare"), [("simulation", {}), ("meetings", RARE)])
def test_planted_faults_are_found(command: str, rare: dict[str, int]) -> None:
    simulate(command, "--seeds", "10000", "--faults", *(FAULTS[command].keys() - rare - DIRECTED.keys()))
    for name, first in rare.items():
        simulate(command, "--first", str(first), "--seeds", "10000", "--faults", name)
