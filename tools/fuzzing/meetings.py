"""Ranks that come and go in one process under a virtual clock: a seed replays any failure.

    python tools/fuzz.py meetings --seeds 1000             from seed 0 on, on all cores
    python tools/fuzz.py meetings --first 421 --seeds 1    one of them again
    python tools/fuzz.py meetings --faults                 how soon each planted fault is detected

What runs is the training loop with its views, commits, states and log (`ds2.training`, `ds2.distributed.elastic`), the
loader with its cache of audio above torch's `DataLoader` (`ds2.data`), and the evaluation but for model and decoder.
Simulated are the clock, threads, processes with their locks and signals, what their connections carry, the loader's
workers, and the disk (`fuzzing.disks`), which may be full or slow for a while. Processes are started, asked to leave,
stopped and killed at random moments, also between two calls that read and write a file, workers are slow or end, the
cache is damaged, audio changes, and the power may be cut. In a quarter of the seeds all ranks write a part of each
state. A step changes the one weight by the number of its ranks and the sum of their audio, in which each utterance is a
power of two: a step that was taken by other ranks than the log says, or whose utterances were not each taken once,
changes all losses after it.

After every event: the state is complete, none before the last one that was saved, and that of the steps in the log;
ranks that nothing disturbs take a step within 30 s; a start reports audio that has changed since the one before.
After every run: each step is in the log once, each loss, evaluation, model and the last state are those of the ranks
that the log names, no process ended with an error but that of a full disk or a lost worker, and none waited for ever.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import heapq
import itertools
import json
import os
import random
import re
import signal
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from functools import cache, lru_cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from fuzzing.disks import Disk, DiskPath, Node
from fuzzing.ranks import changes, lines_of, ranks_of_steps
from fuzzing.seeds import Fault, planted, simulate
from greenlet import GreenletExit, getcurrent, greenlet
from torch import Tensor
from torch.utils import tensorboard

from ds2.config.schema import Config
from ds2.data import audio_cache, splits
from ds2.data import loader as loaders
from ds2.data.loader import LoaderError, SpeechLoader, plan_epoch
from ds2.data.manifest import Utterance
from ds2.decoding.hypothesis import Hypothesis
from ds2.distributed import elastic
from ds2.distributed.communicator import Communicator
from ds2.distributed.elastic import ElasticCommunicator, Members, View
from ds2.distributed.process_group import LostRankError
from ds2.distributed.tcp import TcpGroup
from ds2.recognition import recogniser
from ds2.recognition.recogniser import Recogniser
from ds2.system import files as file_system
from ds2.system import tensor_file
from ds2.system.messages import decode, encode
from ds2.system.plain import from_plain, parse_json
from ds2.system.signals import Stopped
from ds2.text.alphabet import Alphabet
from ds2.training import dev_set, inputs, metrics, run_folder
from ds2.training import loop as training
from ds2.training import state as states
from ds2.training import trainer as trainers
from ds2.training.dev_set import DevEvaluator, DevMonitor
from ds2.training.inputs import EpochBatches, PreparedBatches
from ds2.training.metrics import RunLog
from ds2.training.run_folder import RunFiles
from ds2.training.state import TrainState, state_file
from ds2.training.stopping import Interrupts
from ds2.training.trainer import LastCommit, Trainer

RANKS, BATCHES, EPOCHS, DEV = 4, 3, 3, 4
CACHE = DiskPath("/work/audio_cache")
SILENT_S = 4.0
STEP_S = 0.3
POLL_S = 0.1
LIMIT_S = 1800.0  # virtual time after which a run is stuck
STEPLESS_S = 30.0  # longer than ranks may take to a step after the last disturbance
SLOW = 0.02  # of what is sent
SLOW_WORKER, LOST_WORKER = 0.02, 0.001  # of the batches that workers of a loader make
LOST = "DataLoader worker (pid 1) is killed by signal: Killed."
KINDS = (
    "kill", "kill", "kill all", "stop", "stop", "leave", "join", "join", "join", "cut power", "bad disk",
    "damage cache", "change audio",
)  # fmt: skip
# How often something happens between two calls that need each other: anywhere, in a save by all ranks, at the end of a
# meeting. The last two are seldom.
AT_A_CALL, AT_A_SAVE, AT_A_MEETING = (0.01, 0.04), 0.1, 0.25
PRIME = 65521
OPTIMIZER: dict[str, Any] = {"state": {}, "param_groups": []}  # without momentum it has no state
SETTINGS = {"optim": {"name": "sgd", "momentum": 0.0}}  # that a state names: all others would be read each time


class Process:
    """A simulated process: its threads run only while it is neither stopped nor dead."""

    def __init__(self, world: World, number: int) -> None:
        self.world, self.number = world, number
        self.dead = self.stopped = False
        self.stopped_s = 0.0
        self.waiting: list[tuple[Thread, int]] = []  # whose time has come while it was stopped
        self.threads: list[Thread] = []
        self.interrupts = Interrupts()
        self.signals: list[int] = []
        self.status: int | None = None

    def spawn(self, target: Callable[[], object]) -> None:
        """Start a thread."""
        thread = Thread(self, target)
        self.threads.append(thread)
        self.world.call_later(0.0, thread)

    def kill(self) -> None:
        """Let it run no more."""
        self.dead = True

    def stop(self, seconds: float) -> None:
        """Let it rest for a while."""
        if not (self.stopped or self.dead):
            self.stopped, self.stopped_s = True, self.world.now_s
            self.world.call_later(seconds, self._go_on)

    def _go_on(self) -> None:
        self.stopped, self.world.disturbed_s = False, self.world.now_s
        due, self.waiting = self.waiting, []
        for thread, wait in due:
            self.world.call_later(0.0, thread, wait)


class Thread:
    """A thread of a simulated process. Of all of them one runs at a time, until it waits."""

    def __init__(self, process: Process, target: Callable[[], object]) -> None:
        self.process, self._target = process, target
        self.waits = 0  # the number of its present wait: an event that would end a previous one does nothing
        self.is_main = not process.threads
        self.stack = greenlet(self._run, process.world.stack)

    def sleep(self, seconds: float) -> None:
        """Wait; called in the thread itself."""
        world, process = self.process.world, self.process
        self.waits += 1
        world.call_later(seconds, self)
        world.stack.switch()
        if world.over:
            raise GreenletExit
        if self.is_main:
            while process.signals:
                process.interrupts._handle(process.signals.pop(0), None)

    def wake(self, at_s: float) -> None:
        """Let its wait end by a time."""
        world = self.process.world
        world.call_later(at_s - world.now_s, self)

    def _run(self) -> None:
        world = self.process.world
        try:
            self._target()
        except BaseException as error:
            if not (world.over or isinstance(error, GreenletExit)):
                where = traceback.extract_tb(error.__traceback__)[-3:]
                places = " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(where))
                world.faults.append(f"process {self.process.number}: {error!r} at {places}")
        self.waits += 1


class Lock:
    """Stands for the functions of `fcntl`; a lock belongs to a process, as those of POSIX."""

    LOCK_EX, LOCK_SH, LOCK_NB = fcntl.LOCK_EX, fcntl.LOCK_SH, fcntl.LOCK_NB

    def __init__(self, world: World) -> None:
        self._world, self._owners = world, dict[Node, Process]()

    def lockf(self, file: Any, how: int) -> None:
        node, own = file.fileno(), self._world.process
        owner = self._owners.get(node)
        if owner is not None and owner is not own and not owner.dead:
            raise OSError(errno.EAGAIN, "locked")
        if how & self.LOCK_EX:
            self._owners[node] = own


class Event:
    """Stands for `threading.Event`."""

    def __init__(self, world: World) -> None:
        self._world, self._set = world, False

    def set(self) -> None:
        self._set = True

    def wait(self, timeout: float) -> bool:
        if not self._set:
            self._world.sleep(timeout)
        return self._set


class Writer:
    """Stands for the `ThreadPoolExecutor` of a writer."""

    def __init__(self, world: World) -> None:
        self._world, self._work = world, list[tuple[Future[None], Callable[[], None]]]()
        self._started = False

    def submit(self, work: Callable[[], None]) -> Future[None]:
        future: Future[None] = Future()
        self._work.append((future, work))
        if not self._started:
            self._started = True
            self._world.process.spawn(self._run)
        return future

    def _run(self) -> None:
        while self._work:
            future, work = self._work.pop(0)
            self._world.sleep(self._world.draw.expovariate(20))
            try:
                work()
                future.set_result(None)
            except Exception as error:
                future.set_exception(error)
        self._started = False


class Link:
    """What travels from one process to another in a view: when it arrives, and the bytes; None at its end."""

    def __init__(self) -> None:
        self.items: list[tuple[float, bytes | None]] = []
        self.reader: Thread | None = None
        self.open = False  # whether the sender is connected

    def append(self, at_s: float, data: bytes | None) -> None:
        """Send; who waits for it wakes up when it arrives."""
        self.items.append((at_s, data))
        if self.reader is not None:
            self.reader.wake(at_s)


@lru_cache(1 << 12)
def decoded(message: bytes, classes: tuple[type, ...]) -> Any:
    """The value of a message; nobody changes it."""
    return decode(memoryview(message), classes)


class Group(TcpGroup):
    """A `TcpGroup` that is its own stream: what ranks send each other arrives in order, some time later."""

    def __init__(self, world: World, number: int, rank: int, members: Sequence[str]) -> None:
        self.rank, self.size, self.hosts, self.local_rank = rank, len(members), ["host"] * len(members), rank
        self.lost, self.world, self._blocking, self._began_s = {}, world, self, world.now_s
        self.links = [other for other in range(len(members)) if other != rank]
        self._from = {r: world.link(number, members[r], members[rank]) for r in self.links}
        self._to = {r: world.link(number, members[rank], members[r]) for r in self.links}
        self._processes = {r: world.by_member[members[r]] for r in self.links}
        for link in self._to.values():
            link.open = True

    def finish(self, sent: Mapping[int, Tensor], received: Mapping[int, Tensor]) -> None:
        data = {rank: tensor.detach().view(-1).view(torch.uint8).numpy().tobytes() for rank, tensor in sent.items()}
        for rank, octets in self._exchange(data, received).items():
            received[rank].view(-1).view(torch.uint8).copy_(torch.frombuffer(bytearray(octets), dtype=torch.uint8))

    def _exchange(self, sent: Mapping[int, bytes], received: Iterable[int]) -> dict[int, bytes]:
        """Send to some ranks and wait for what others have sent."""
        world, arrived = self.world, dict[int, bytes]()
        for rank in self.links if world.draw.random() < 0.5 else reversed(self.links):
            self._check_rank(rank)
            if rank in sent:
                slow_s = world.draw.uniform(0, 2) if world.draw.random() < SLOW else 0.0
                self._to[rank].append(world.now_s + slow_s + world.draw.expovariate(200), sent[rank])
                world.pause()
        missing = [rank for rank in received if rank in self.links]
        while missing:
            next_s = world.now_s + world.draw.expovariate(1 / POLL_S)
            for rank in list(missing):
                items = self._from[rank].items
                if items and items[0][0] > world.now_s:
                    next_s = min(next_s, items[0][0])
                elif items and (data := items[0][1]) is not None:
                    items.pop(0)
                    arrived[rank] = data
                    missing.remove(rank)
            if missing:
                self.check()
                for rank in missing:
                    self._from[rank].reader = world.running
                world.sleep(next_s - world.now_s)
                for rank in missing:
                    self._from[rank].reader = None
        if self.lost:
            raise LostRankError(self.reason)
        return arrived

    def check(self) -> None:
        """Raise LostRankError if a rank is gone."""
        for rank in self.links:
            self._check_rank(rank)

    def _check_rank(self, rank: int) -> None:
        """As the watchdog does: rank 0 listens to all, the others to rank 0."""
        process, world, link = self._processes[rank], self.world, self._from[rank]
        alive_s = process.stopped_s if process.stopped else world.now_s if link.open else self._began_s
        if process.dead or (link.items and link.items[-1][1] is None):
            if world.draw.random() < 0.5:  # what has arrived is read before the end is seen, or not
                self.lose(rank, "closed its connection")
        elif 0 in (rank, self.rank) and world.now_s - alive_s > SILENT_S:
            self.lose(rank, f"has been silent for {SILENT_S:.0f} s")
        if self.lost:
            raise LostRankError(self.reason)

    def allgather(self, value: Any, classes: Iterable[type] = ()) -> list[Any]:
        """See `ProcessGroup`: a message and its length are one here."""
        own = encode(value)
        parts = {self.rank: own, **self._exchange(dict.fromkeys(self.links, own), self.links)}
        return [decoded(bytes(parts[rank]), classes) for rank in range(self.size)]

    def broadcast(self, value: Any, classes: Iterable[type] = ()) -> Any:
        own = encode(value)
        if self.rank == 0:
            self._exchange(dict.fromkeys(self.links, own), ())
        return decoded(bytes(own if self.rank == 0 else self._exchange({}, (0,))[0]), classes)

    def close(self) -> None:
        """Tell the others."""
        for link in self._to.values():
            link.append(self.world.now_s, None)


class SimulatedMembers(Members):
    """Members without sockets."""

    world: World

    def connect(self, view: View) -> TcpGroup:
        """See `Members`: a process waits for the calls of higher ranks; lower ones need only listen."""
        own, ids = view.rank(self.me.id), [member.id for member in view.members]
        self.world.calls.add((view.number, self.me.id))
        began_s = time.monotonic()
        if any(self.world.by_member[member].dead for member in ids[:own]):
            raise LostRankError("a rank of the new group cannot be reached")
        while not all((view.number, member) in self.world.calls for member in ids[own:]):
            self._check_view(view, own, [], time.monotonic() - began_s)
            time.sleep(POLL_S)
        return Group(self.world, view.number, own, ids)


class SimulatedCommunicator(ElasticCommunicator):
    """An `ElasticCommunicator` whose watchdog is in `Group`."""

    world_of: World

    def __init__(self, *args: Any) -> None:
        with patch.object(elastic, "Members", SimulatedMembers):
            super().__init__(*args)
        self.world_of.by_member[self.members.me.id] = self.world_of.process

    def _use(self, group: Any) -> None:
        self.rank, self.world, self.group = group.rank, group.size, group
        self.watchdog = self._progress_thread = SimpleNamespace(stop=_nothing, drop=_nothing)

    def check(self) -> None:
        """See `Communicator`; what the watchdog has noticed by now."""
        if isinstance(self.group, Group):
            self.group.check()
        super().check()

    def superseded(self) -> bool:
        """See `Communicator`; then a signal may come."""
        superseded = super().superseded()
        self.world_of.pause()
        return superseded


class SimulatedFeatures:
    """Stands for the features, which compute nothing here. A module of torch would take 10 % of a seed."""

    step_s, training = 1, False

    def __init__(self, **tensors: Tensor) -> None:
        self.tensors = tensors

    def __call__(self, waveforms: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        return waveforms, lengths

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self.tensors)

    def load_state_dict(self, state: Mapping[str, Tensor], strict: bool = True) -> None:
        for name, value in state.items():
            self.tensors[name].copy_(value)

    def modules(self) -> list[Any]:
        return []

    parameters = buffers = named_modules = modules  # what ranks compare before an evaluation

    def train(self, mode: bool = True) -> SimulatedFeatures:
        return self

    eval = train


class SimulatedModel(SimulatedFeatures):
    """Stands for the model: its weight tells which ranks took which steps."""

    time_stride = 1

    def __init__(self) -> None:
        super().__init__(weight=torch.zeros(1, dtype=torch.float64), seen=torch.zeros(1, dtype=torch.float64))

    def __call__(self, waveforms: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        values = [dev_loss(int(self.tensors["weight"]), content_of(row)) for row in waveforms]
        return torch.tensor([[[value] for value in values]]), torch.ones(len(values), dtype=torch.int64)

    def named_buffers(self) -> list[tuple[str, Tensor]]:
        return [("seen", self.tensors["seen"])]


@cache
def step_s(step: int, rank: int) -> float:
    """How long a rank computes for a step."""
    return STEP_S * random.Random(f"{step} {rank}").uniform(0.5, 1.5)


def content_of(samples: Tensor) -> int:
    """What the audio of utterances adds up to: a power of two for each."""
    return round(32768 * float(samples.sum()))


def contents_of(step: int) -> int:
    """What all utterances of a step add up to."""
    epoch, batch = divmod(step - 1, BATCHES)
    return sum(1 << number for number in plan(epoch + 1)[batch])


def after_step(weight: int, step: int, ranks: int, content: int) -> int:
    """The weight after a step that so many ranks took."""
    return (31 * weight + 7 * step + ranks + content) % PRIME


def shards_in(run_dir: Any) -> list[Any]:
    """The shards of states in a run folder."""
    return sorted(run_dir.glob("trainer.*.shard"))


def step_of(path: Any) -> tuple[int, int]:
    """The step of a state, which must be complete, and its weight."""
    return _step_of(path, path.read_bytes(), *(shard.read_bytes() for shard in shards_in(path.parent)))


@lru_cache(1 << 10)
def _step_of(path: Any, *content: bytes) -> tuple[int, int]:
    tensors, metadata = tensor_file.load(path)
    return metadata["progress"]["step"], int(tensors["model.weight"])


def weights_of(ranks: Mapping[int, int]) -> list[int]:
    """The weight before the first step and after each, by the ranks that took them."""
    weights = [0]
    for step, of in ranks.items():
        weights.append(after_step(weights[-1], step, of, contents_of(step)))
    return weights


def loss_of(weight: int, ranks: int, content: int) -> float:
    """The loss of a step."""
    return float((weight * 17 + ranks + content) % PRIME)


def dev_loss(weight: int, content: int) -> float:
    """The loss of a dev utterance; where it is odd, its word is recognised."""
    return float((weight * 13 + content) % 101)


AUDIO = [DiskPath(f"/audio/{number}.wav") for number in range(3 * BATCHES + DEV - 2)]  # the last batch is short
ALL = [Utterance(path, 1.0 + number % 3, "a") for number, path in enumerate(AUDIO)]
UTTERANCES, DEV_UTTERANCES = ALL[:-DEV], ALL[-DEV:]
ALPHABET = Alphabet(("", " ", "a", "b"))
vars(ALPHABET).update(encode=cache(ALPHABET.encode), normalise=cache(ALPHABET.normalise))
# Without torch's inference mode, which is of the one thread of the system in which all simulated ones run.
RECOGNISE, LOGITS = (method.__wrapped__ for method in (Recogniser.recognise, Recogniser.logits))
CPU, CONFIG = torch.device("cpu"), Config()
CONFIG.data.work_dir, CONFIG.data.cache, CONFIG.batching.utterances = "/work", "disk", 3
CONFIG.train.evaluate_every_epochs = 2
CONFIG.comm.max_ranks, CONFIG.comm.timeout_s, CONFIG.comm.wait_s = RANKS, 60.0, LIMIT_S  # nobody is refused
CONFIG.train.epochs, CONFIG.train.log_every_steps = EPOCHS, 1
CONFIG.optim.warmup_steps = 0
CONFIG.optim.name, CONFIG.optim.momentum = "sgd", 0.0
BAR = nullcontext(SimpleNamespace(update=lambda *_: None, set_postfix_str=lambda _: None, disable=True))


@cache
def plan(epoch: int) -> list[list[int]]:
    """The batches of an epoch."""
    return plan_epoch(np.array([u.duration_s for u in UTTERANCES]), CONFIG.batching, epoch, 1)


class SimulatedTrainer(Trainer):
    """A trainer whose steps are sums over ranks, and hashes."""

    alphabet, utterances, dev_data, noise = ALPHABET, UTTERANCES, None, None
    statistics, timer = SimpleNamespace(release=lambda: None), SimpleNamespace(means=lambda steps: {})
    _plan, inputs = staticmethod(plan), staticmethod(lambda batch, epoch: batch)

    def __init__(self, config: Config, run_dir: DiskPath, comm: Communicator) -> None:
        self.config, self.run_dir, self.comm = config, run_dir, comm
        model = SimulatedModel()
        groups = [{"params": [model.tensors["weight"]], "rate_factor": 1.0, "lr": 0.1}]
        optimizer = SimpleNamespace(state={}, param_groups=groups, state_dict=OPTIMIZER.copy, load_state_dict=_nothing)
        self.state = TrainState(model, SimulatedFeatures(), optimizer)
        self.loader = SpeechLoader(UTTERANCES, config.data, CPU, ALPHABET)
        self.dev = DevEvaluator(config.data, self.state.features, ALPHABET, CPU, "fp32")
        if state_file(run_dir).is_file():
            parts, progress = trainers.read_state(run_dir, config, self.state)
            self.state.load(parts, progress, 0.0)
        self.files = RunFiles(run_dir, config, self.state, ALPHABET, "fp32", None, comm)
        self._batches = EpochBatches(self.loader, plan, EPOCHS, comm)
        self._last_commit = LastCommit(model)

    def _prepare_steps(self) -> None: ...

    def describe(self) -> str:
        return "a simulated run"

    def step(self, batches: PreparedBatches, group: Sequence[Sequence[int]], extra_counts: Callable[[], Any]) -> float:
        content = 0
        for whole in group:
            batch, _ = next(batches)
            time.sleep(step_s(self.progress.step, self.comm.rank))
            batches.prepare_next()
            content += content_of(batch.waveforms) if self.comm.rank < len(whole) else 0
        weight, seen = self.model.tensors.values()
        seen += 1
        self.comm.allgather(0)  # gradients
        sums = self.comm.allgather([self.comm.world, content, *extra_counts()])
        ranks, content, *self.extra_sums = (sum(column) for column in zip(*sums, strict=True))
        ranks = round(ranks / self.comm.world)
        loss = loss_of(int(weight), ranks, content)
        weight.fill_(after_step(int(weight), self.progress.step + 1, ranks, content))
        self.progress.step += 1
        self.progress.batch += len(group)
        return loss


class Loader:
    """Stands for torch's `DataLoader`: workers take keys in turn, batches come in order.

    As there, one object iterates, which starts anew for each new order, and the end of a worker is an error.
    """

    def __init__(self, world: World, dataset: Any, sampler: Any, num_workers: int, **options: Any) -> None:
        self._world, self._dataset, self._sampler = world, dataset, sampler
        self._free_s, self._ahead = [0.0] * max(1, num_workers), (options["prefetch_factor"] or 1) * max(1, num_workers)
        self._sent: deque[tuple[Any, float]] = deque()

    def __iter__(self) -> Loader:
        self._keys, self._numbers = iter(self._sampler), itertools.count()
        self._drop()
        return self

    def _drop(self) -> None:
        self._sent.clear()

    def __next__(self) -> Any:
        world, draw = self._world, self._world.draw
        while len(self._sent) < self._ahead and (key := next(self._keys, None)) is not None:
            worker = next(self._numbers) % len(self._free_s)
            slow_s = draw.uniform(0, 8) if draw.random() < SLOW_WORKER else 0.01
            self._free_s[worker] = max(world.now_s, self._free_s[worker]) + slow_s
            self._sent.append((key, self._free_s[worker]))
        if not self._sent:
            raise StopIteration
        key, ready_s = self._sent.popleft()
        if ready_s > world.now_s:
            world.sleep(ready_s - world.now_s)
        if draw.random() < LOST_WORKER:
            raise RuntimeError(LOST)
        return self._dataset[key]


def read_audio(path: Any, *options: Any) -> Any:
    """Stands for the reader: the samples that a file holds."""
    return np.frombuffer(path.read_bytes(), "<i2") / np.float32(32768)


def decode_batch(decoder: Any, logits: Tensor, lengths: Tensor) -> list[Hypothesis]:
    """Stands for the decoder."""
    time.sleep(STEP_S)
    return [Hypothesis("a" if value % 2 else "b", 0.0, (), ()) for value in logits[0, :, 0].tolist()]


def prepare_model(
    path: Any, model: Any, features: Any, alphabet: Any, config: Any, facts: Any, check: Callable[[], None]
) -> Callable[[], None]:
    """Stands for that of `ds2.model.checkpoint`."""
    return tensor_file.prepare_save(path, model.state_dict(), facts, check)


class World:
    """One run: processes, their clock and what they share."""

    def __init__(self, draw: random.Random, *, sharded: bool) -> None:
        self.draw, self.disk = draw, Disk(draw, self.pause)
        CONFIG.checkpoint.sharded, CONFIG.checkpoint.every_steps = sharded, draw.choice((1, 2))
        self.run_dir, self.saved, DiskPath.disk = DiskPath("/run"), 0, self.disk
        self.stack = getcurrent()  # the event loop's, to which a thread that waits returns
        self.now_s, self.running, self.over = 0.0, None, False
        self.disturbed_s = 0.0  # when the last thing happened that may delay a step, or the last one was logged
        self._events: list[tuple[float, int, Thread | Callable[[], None], int]] = []
        self._numbers = itertools.count()
        self.faults: list[str] = []
        self._seen: list[bytes | None] = []  # the log and the state at the last look
        self.processes: list[Process] = []
        self.by_member: dict[str, Process] = {}
        self.changes = self.reported = 0  # of audio at the same length
        self.calls: set[tuple[int, str]] = set()
        self._links: dict[tuple[int, str, str], Link] = {}
        self.dev_utterances = self.draw.choice((DEV_UTTERANCES, [], []))
        self.events = self.draw.randint(3, 12)
        self._at = {  # what happens there at most, and how often
            "call": (self.events, self.draw.choice(AT_A_CALL)),
            "save": (self.events * sharded, AT_A_SAVE),
            "meeting": (3, AT_A_MEETING),
        }

    @property
    def process(self) -> Process:
        """The one that runs."""
        assert self.running is not None
        return self.running.process

    def link(self, number: int, sender: str, receiver: str) -> Link:
        """What travels between two processes in a view."""
        return self._links.setdefault((number, sender, receiver), Link())

    def call_later(self, seconds: float, what: Thread | Callable[[], None], wait: int | None = None) -> None:
        """Call a function, or end the wait of a thread, some time later."""
        wait = wait if wait is not None else what.waits if isinstance(what, Thread) else 0
        heapq.heappush(self._events, (self.now_s + max(0.0, seconds), next(self._numbers), what, wait))

    def run(self) -> None:
        """Disturb the run until it is done."""
        self.run_dir.mkdir()
        DiskPath("/audio").mkdir()
        for number, path in enumerate(AUDIO):
            path.write_bytes((1 << number).to_bytes(4, "little"))  # two samples
        CONFIG.data.workers = self.draw.randint(0, 2)
        CONFIG.data.cache = self.draw.choice(("disk", "none", "none", "none"))
        for _ in range(self.draw.randint(1, RANKS)):
            self.start()
        self.call_later(self.draw.expovariate(1.0), self._go_on)
        while self._events:
            self.now_s, _, what, wait = heapq.heappop(self._events)
            if not isinstance(what, Thread):
                what()
            elif what.process.stopped and not what.process.dead:
                what.process.waiting.append((what, wait))
            elif wait == what.waits and not what.process.dead:
                self.running = what
                what.stack.switch()
                self.running = None
        self.over = True
        for process in self.processes:
            for thread in process.threads:
                thread.stack.throw(GreenletExit)

    def sleep(self, seconds: float) -> None:
        if self.over:
            raise GreenletExit
        if self.running is not None:
            self.running.sleep(seconds)

    def pause(self, where: str = "call") -> None:
        """Let a signal come now and then."""
        most, often = self._at[where]
        if self.running is None or not most or self.draw.random() >= often:
            return
        self._at[where], self.disturbed_s = (most - 1, often), self.now_s
        kind = self.draw.choice(("kill", "stop", "stop", "stop", "cut power"))
        if kind == "kill":
            self.process.kill()
        elif kind == "stop":
            self.process.stop(self.stop_s())
        else:
            self.cut_power()
        self.running.sleep(0.0)

    def stop_s(self) -> float:
        """How long a process is stopped: sometimes for longer than the others may wait for it."""
        return self.draw.uniform(0.1, self.draw.choice((3, 3, 3, 3, 3, 3, 3, 30)) * SILENT_S)

    def cut_power(self) -> None:
        """End all processes, and with them what the disk does not hold."""
        for process in self.processes:
            process.kill()
        for folder in (self.run_dir, self.run_dir / "members", CACHE):
            if folder.is_dir():
                self.disk.cut_power(folder)
        self.look()

    def look(self) -> None:
        """Note a fault where the state is not complete, is an old one, or counts on lines that the log lacks."""
        path = state_file(self.run_dir)
        files = [file.find() for file in (self.run_dir / "log.jsonl", path, *shards_in(self.run_dir))]
        content = [file and file.data for file in files]
        if content == self._seen:
            return
        self._seen, self.disturbed_s = content, self.now_s
        try:
            step, weight = step_of(path) if self.saved or path.is_file() else (0, 0)
            weights = weights_of(ranks_of_steps(self.run_dir.parent))
        except (tensor_file.CheckpointError, Fault) as error:
            self.faults.append(str(error))
            return
        if step < self.saved or weights[step : step + 1] != [weight]:
            self.faults.append(f"the state is of step {step}, saved were {self.saved}, or not that of the log")

    def start(self) -> None:
        """Start a process that trains."""
        process = Process(self, len(self.processes) + 1)
        self.processes.append(process)
        process.spawn(partial(self._train, process))

    def _train(self, process: Process) -> None:
        comm = SimulatedCommunicator(CONFIG.comm, "cpu", self.run_dir)
        try:
            process.status = training._train(CONFIG, self.run_dir, comm, process.interrupts)
            comm.close()
        except Stopped as stopped:
            process.status = stopped.status
            comm.leave()
        except Exception as error:
            comm.leave()
            if os.strerror(errno.ENOSPC) not in str(error) and not isinstance(error, LoaderError):
                raise
        finally:
            process.dead = True

    def _go_on(self) -> None:
        self.look()
        living = [process for process in self.processes if not process.dead]
        done = not living and any(process.status == 0 for process in self.processes)
        views = sorted((self.run_dir / "members").glob("view-*.json"))
        ranks = [self.by_member[m.id] for m in _parsed(View, views[-1].read_bytes(), "").members] if views else living
        if all(process.stopped for process in ranks if not process.dead):  # they stay the ranks
            self.disturbed_s = self.now_s
        if self.now_s > min(LIMIT_S, self.disturbed_s + STEPLESS_S):
            states = [(p.number, p.stopped, p.status) for p in living]
            self.faults.append(f"no step since {self.disturbed_s:.0f} s, or not done at {self.now_s:.0f} s: {states}")
        if self.faults or done:
            self._events.clear()
            return
        if not living:
            self.start()
        elif self.events:
            self.disturb(living)
        self.call_later(self.draw.expovariate(1.0), self._go_on)

    def disturb(self, living: Sequence[Process]) -> None:
        """Do something to the processes."""
        self.events, self.disturbed_s = self.events - 1, self.now_s
        process = self.draw.choice(living)
        kind = self.draw.choice(KINDS)
        if kind == "kill":
            process.kill()
        elif kind == "kill all":
            for each in living:
                self.call_later(self.draw.uniform(0, 1.5), each.kill)
        elif kind == "stop":
            process.stop(self.stop_s())
        elif kind == "leave":
            process.signals.append(signal.SIGTERM)
        elif kind == "cut power":
            self.cut_power()
        elif kind == "bad disk":
            self.disk.is_full, self.disk.slowness = self.draw.choice(((True, 1.0), (False, 30.0)))
            self.call_later(self.draw.uniform(1, 10), self.disk.mend)
        elif kind == "damage cache":
            for path in CACHE.glob("*.audio"):
                data, place = path.stat().data, self.draw.randrange(len(path.stat().data))
                path.stat().data = data[:place] + bytes([data[place] ^ 1 << self.draw.randrange(8)]) + data[place + 1 :]
        elif kind == "change audio":
            self.changes += 1
            for number, path in list(enumerate(AUDIO))[: self.draw.randint(1, len(AUDIO))]:  # what they add up to stays
                path.stat().data = np.array([(1 << number) + self.changes, -self.changes], "<i2").tobytes()
                path.stat().st_mtime_ns += self.draw.randint(0, 1)
        elif len(living) < RANKS:
            self.start()

    def check(self) -> None:
        """Raise Fault where the log and the weights do not belong together."""
        if self.faults:
            raise Fault("; ".join(self.faults))
        ranks = ranks_of_steps(self.run_dir.parent)
        if len(ranks) != EPOCHS * BATCHES:
            raise Fault(f"{len(ranks)} steps were logged")
        logged = {(line["event"], line["step"]): line for line in lines_of(self.run_dir.parent)}
        weights, models = weights_of(ranks), {"last": len(ranks)}
        for step, of in ranks.items():
            if logged["train", step]["loss"] != loss_of(weights[step - 1], of, contents_of(step)):
                raise Fault(f"the loss of step {step} is not that of its ranks and utterances, {changes(ranks)}")
        scores = {}
        for step in (2 * BATCHES, EPOCHS * BATCHES) if self.dev_utterances else ():
            losses = [dev_loss(weights[step], 1 << len(UTTERANCES) + number) for number in range(DEV)]
            scores[step] = sum(loss % 2 == 0 for loss in losses) / DEV
            line = logged.get(("dev", step), {})
            if (line.get("wer"), line.get("loss")) != (scores[step], sum(losses) / DEV):
                raise Fault(f"the evaluation of step {step} has {line}, expected were losses {losses}")
            models["best"] = min(scores, key=lambda step: scores[step])
        state, _ = tensor_file.load(state_file(self.run_dir))
        if (int(state["model.weight"]), int(state["model.seen"])) != (weights[-1], len(ranks)):
            raise Fault(f"the last state is not that of the log, {changes(ranks)}")
        for name, step in models.items():
            if int(tensor_file.load(self.run_dir / f"{name}.safetensors")[0]["weight"]) != weights[step]:
                raise Fault(f"{name}.safetensors is not the model of step {step}")

    def digest(self) -> str:
        """Of what was logged, and of the time that it took."""
        text = f"{self.now_s} {[(line['step'], line.get('loss')) for line in lines_of(self.run_dir.parent)]}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@contextmanager
def _atomic_file(world: World, path: Path) -> Iterator[Path]:
    where = "save" if path.name.startswith("trainer.") and CONFIG.checkpoint.sharded else "call"
    world.pause(where)
    with file_system.atomic_file(path) as partial_file:
        world.pause(where)
        yield partial_file
        world.disk.check_space()
        write_s = world.disk.slowness * world.draw.expovariate(10)
        world.disturbed_s = max(world.disturbed_s, world.now_s + write_s)
        world.sleep(write_s)
        world.pause(where)
    if where == "save":
        world.pause(where)
    if path == state_file(world.run_dir):
        world.saved, _ = step_of(path)


def _event(world: World, write: Callable[..., None], board: RunLog, *values: Any) -> None:
    try:
        world.disk.check_space()
    except OSError:
        if board.writes:
            board._jsonl.write('{"event": "tra')  # what there was space for
            board._jsonl.flush()
        raise
    write(board, *values)
    if not board.writes or ElasticCommunicator.superseded(board._superseded.__self__):
        return
    *_, last = board._path.read_text().removesuffix("\n").rpartition("\n")
    if not last.startswith(json.dumps({"event": values[0], "step": values[1]})[:-1]):
        world.faults.append(f"the log has no {values[0]} line of step {values[1]}")


def _report_changes(world: World, report: Callable[..., None], path: Any, utterances: Any, _: object) -> None:
    changes = world.changes

    def check(line: str) -> None:
        if changes > world.reported and not re.search("[1-9][0-9]* of .* other content", line):
            world.faults.append(f"audio has changed since the last start, and the report is: {line}")
        world.reported = max(world.reported, changes)

    if not path.is_file():
        world.reported = changes
    report(path, utterances, check)


def _wait(world: World, futures: Sequence[Future[None]]) -> None:
    while not all(future.done() for future in futures):
        world.sleep(POLL_S)


def share_cores(comm: Communicator) -> None:
    """Stands for that of `ds2.distributed.launch`: the last call of a meeting."""
    comm.world_of.pause("meeting")
    comm.allgather(0)


@contextmanager
def simulated(world: World) -> Iterator[None]:
    """Put the world's clock, threads, locks and signals under the modules."""
    lock, draw, event = Lock(world), world.draw, RunLog.event
    threads = SimpleNamespace(
        Event=lambda: Event(world),
        Thread=lambda target, **_: SimpleNamespace(start=lambda: world.process.spawn(target)),
    )
    server = SimpleNamespace(getsockname=lambda: ("", 1), close=lambda: None)
    secrets = SimpleNamespace(token_hex=lambda count: draw.randbytes(count).hex())
    board = SimpleNamespace(add_custom_scalars=_nothing, add_scalar=_nothing, close=_nothing)
    changed: list[tuple[Any, str, Any]] = [
        *[(module, "os", world.disk) for module in (elastic, file_system, run_folder, audio_cache, splits)],
        *[(module, "shutil", world.disk) for module in (file_system, metrics, run_folder, audio_cache)],
        *[(module, "fcntl", lock) for module in (elastic, file_system)],
        *[(module, "host_id", lambda: "host") for module in (file_system, run_folder)],
        *[(tensor_file, name, getattr(world.disk, name)) for name in ("write_tensors", "safe_open")],
        (elastic, "asdict", _nothing_changed),
        (elastic, "json", SimpleNamespace(dumps=partial(json.dumps, default=vars))),
        (elastic, "parse_json", _nothing_changed),
        (elastic, "from_plain", _parsed),
        (file_system, "parse_json", _line),
        (elastic, "threading", threads),
        (elastic, "socket", SimpleNamespace(create_server=lambda *_, **__: server)),
        *[(module, "secrets", secrets) for module in (elastic, run_folder)],
        (elastic, "_own_address", lambda: "127.0.0.1"),
        (elastic, "SILENT_S", SILENT_S),
        (elastic, "_POLL_S", POLL_S),
        (SimulatedMembers, "world", world),
        (SimulatedCommunicator, "world_of", world),
        (file_system, "_is_dead", lambda _, writer: world.processes[int(writer["process"]) - 1].dead),
        (os, "getpid", lambda: world.process.number if world.running else 0),
        (tensor_file, "describe_full_disk", lambda _: ""),  # its path is one of the system's disk
        (tensor_file, "ThreadPoolExecutor", lambda _: nullcontext(SimpleNamespace(map=map))),
        (states, "config_to_dict", lambda _: SETTINGS),
        (training, "not_default", lambda _: {}),
        (training, "short_collections", nullcontext),
        (tensorboard, "SummaryWriter", lambda *_, **__: board),
        (run_folder, "ThreadPoolExecutor", lambda *_: Writer(world)),
        (run_folder, "wait", partial(_wait, world)),
        (run_folder, "prepare_model", prepare_model),
        (run_folder, "git_commit", lambda: ""),
        (loaders, "DataLoader", partial(Loader, world)),
        (audio_cache, "Path", DiskPath),
        (audio_cache, "member_of", _nothing),
        (audio_cache, "read_audio", read_audio),
        (audio_cache, "ThreadPool", lambda _: nullcontext(SimpleNamespace(imap_unordered=map))),
        (audio_cache, "tqdm", lambda *_, **__: BAR),
        (dev_set, "scored_utterances", lambda *_: world.dev_utterances),
        (dev_set, "_SHOWN", 0),
        (dev_set, "feasible_rows", lambda lengths, *_: lengths > 0),
        (dev_set, "ctc_losses", lambda logits, *_: logits[0, :, 0]),
        (recogniser, "decode_batch", decode_batch),
        (Recogniser, "recognise", RECOGNISE),
        (Recogniser, "logits", LOGITS),
        *[(module, "atomic_file", partial(_atomic_file, world)) for module in (tensor_file, metrics, audio_cache)],
        (RunLog, "event", lambda board, *values: _event(world, event, board, *values)),
        (trainers, "share_cores", share_cores),
        (training, "Trainer", SimulatedTrainer),
        (training, "progress_bar", lambda *_, **__: BAR),
        (training, "git_commit", lambda: ""),
        (training, "report_changes", partial(_report_changes, world, splits.report_changes)),
        (splits, "member_of", _nothing),
        (training, "save_config", _nothing),
        (RunLog, "settings", _nothing),
        (time, "monotonic", lambda: world.now_s),
        (time, "time", lambda: world.now_s),  # the log has it: what is left of a torn line depends on its length
        (time, "sleep", world.sleep),
    ]
    previous = [(target, name, getattr(target, name, None)) for target, name, _ in changed]
    try:
        for target, name, value in changed:
            setattr(target, name, value)
        yield
    finally:
        for target, name, value in previous:
            setattr(target, name, value)


@lru_cache(1 << 12)
def _parsed(kind: Any, content: bytes, name: str) -> Any:
    return from_plain(kind, parse_json(content), name)


@lru_cache(1 << 12)
def _line(text: str) -> Any:
    return parse_json(text)


def _nothing_changed(value: Any) -> Any:
    return value


def _nothing(*_: Any, **__: Any) -> None:
    """Stands for calls of no interest here."""


def run_seed(seed: int) -> str:
    """Run one seed and return its digest; raises Fault."""
    world = World(random.Random(seed), sharded=seed % 8 < 2)
    with simulated(world):
        world.run()
        world.check()
        return world.digest()


def _in_place(path: Path, original: Any = file_system.atomic_file) -> Any:
    return nullcontext(path) if path.suffix == ".safetensors" else original(path)


def _replace(disk: Disk, source: Path, target: Path, make_link: Any = Disk.make_link) -> None:
    target.unlink(missing_ok=True)
    make_link(disk, source, target)


FAULTS = planted(
    ("a step that is logged again counts for the last group", training, "_log_again", "*trainer.logged)",
     '*trainer.logged[:2], trainer.logged[2] | {"ranks": trainer.comm.world})'),
    ("a step that is repeated begins with the buffers of its first try", LastCommit, "restore",
     "self._model.load_state_dict(", "dict("),
    ("a signal that ranks agreed on holds among other ranks", Trainer, "regroup", "interrupts.agreed = 0", "pass"),
    ("a rank that is lost at the end of a meeting ends the others", Trainer, "regroup", "share_cores(comm)",
     "try: share_cores(comm)\n            except LostRankError as lost: raise RuntimeError from lost"),
    ("a line that is lost with its writer is not logged again", training, "_log_again", _nothing),
    ("a woken rank 0 replaces the log", RunLog, "_replace_by_copy", "if self._superseded()", "if False"),
    ("a woken rank 0 writes into the log", RunLog, "_replace_by_copy", lambda _: True),
    ("a woken rank 0 removes the files of the next one", RunFiles, "remove_partial_files",
     " and not self.comm.superseded()", ""),
    ("a woken rank 0 replaces the state that the next one has read", RunFiles, "remove_partial_files", _nothing),
    ("a state names shards that are not complete", run_folder, "prepare_state", "shard.wait(run_dir)",
     '{shard.file(run_dir, rank).name: "" for rank in range(shard.world)}'),
    ("the shards of a state are removed before the next one is complete", states, "_replace_shards",
     "yield", "[path.unlink() for path in others]; yield"),
    ("shards of two saves have one name", RunFiles, "_next_shard", "Shard(name", "Shard('a'"),
    ("a save of ranks that are gone is not given up", RunFiles, "give_up_shards", _nothing),
    ("a run that resumes begins its epoch again", training, "resolve_position", "known = ",
     "progress.batch = 0; known = "),
    ("a process that was left behind counts its commits", Trainer, "regroup",
     "self._last_commit.number, self.logged = JOINER", "_, self.logged = JOINER"),
    ("a process that was left behind ends as if it had saved", training, "_run", "if comm.superseded()", "if False"),
    ("a process that was left behind logs its line again", Trainer, "regroup", "self.logged = JOINER,", "_ = JOINER,"),
    ("a rank that lacks the state is taken for one that has it", trainers, "ranks_with_state",
     "== commits[0] !=", "!="),
    ("an error of a write is forgotten", run_folder.BackgroundWriter, "run", "self._failed = True\n", "return\n"),
    ("a state is written in place", file_system, "atomic_file", _in_place),
    ("a file is named before its content is flushed", file_system, "_sync_file", _nothing),
    ("the name of a file is not flushed", file_system, "_sync_folder", _nothing),
    ("the log is not flushed before the state", run_folder, "sync", _nothing),
    ("a torn line swallows the next one", RunLog, "__init__", 'self._jsonl.write("\\n")', "pass"),
    ("a request is written in place", Members, "_write", '{name}.new"', '{name}"'),
    ("a view that another process made is replaced", Disk, "make_link", _replace),
    ("a damaged cache is not noticed", audio_cache.CacheFile, "samples", "!= checksum", "is None"),
    ("audio that changed at its length and time is not noticed", splits, "_content", lambda *_: ""),
    ("changed audio is recorded before it is reported", splits, "report_changes", "else:\n",
     "else:\n        write_text(path, json.dumps(now))\n"),
    ("a batch that was prepared is lost", PreparedBatches, "prepare_next", "self._next is None and ", ""),
    ("batches that workers made for the ranks of before are used", Loader, "_drop", _nothing),
    ("the rest of a batch that ranks cannot share evenly is lost", inputs, "rank_part", "batch[rank::world]",
     "batch[rank * (len(batch) // world) : (rank + 1) * (len(batch) // world)]"),
    ("an evaluation counts what one before it, cut off, has counted", DevMonitor, "start",
     "self._loss, self._feasible, self._alignments =", "_ ="),
)  # each must be detected  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run seeds, or look for the planted faults."""
    return simulate("meetings", __doc__, run_seed, FAULTS, arguments)
