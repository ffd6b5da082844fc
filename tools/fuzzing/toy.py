"""A toy training: what it computes tells which ranks took which steps with which utterances.

A step changes the one weight by the number of its ranks and the sum of their audio, in which each utterance is a power
of two. `weights_of`, `loss_of` and `dev_loss` are what a run must have logged and saved.
"""

import itertools
import random
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
import torch
from fuzzing.disks import DiskPath
from fuzzing.processes import Machine
from torch import Tensor
from torch.utils import tensorboard

from ds2.config.schema import Config
from ds2.data import audio_cache, splits
from ds2.data import loader as loaders
from ds2.data.loader import SpeechLoader, plan_epoch
from ds2.data.manifest import Utterance
from ds2.decoding.hypothesis import Hypothesis
from ds2.distributed.communicator import Communicator
from ds2.recognition import recogniser
from ds2.recognition.recogniser import Recogniser
from ds2.system import tensor_file
from ds2.text.alphabet import Alphabet
from ds2.training import dev_set, loop, run_folder
from ds2.training import state as states
from ds2.training.dev_set import DevEvaluator
from ds2.training.inputs import EpochBatches, PreparedBatches
from ds2.training.metrics import RunLog
from ds2.training.run_folder import RunFiles
from ds2.training.state import TrainState, read_state, state_file
from ds2.training.trainer import LastCommit, Trainer

RANKS, BATCHES, EPOCHS, DEV = 4, 3, 3, 4
LIMIT_S = 1800.0  # virtual time after which a run is stuck
STEP_S = 0.3
SLOW_WORKER, LOST_WORKER = 0.02, 0.001  # of the batches that workers of a loader make
PRIME = 65521
OPTIMIZER: dict[str, Any] = {"state": {}, "param_groups": []}  # without momentum it has no state
SETTINGS = {"optim": {"name": "sgd", "momentum": 0.0}}  # that a state names: all others would be read each time
AUDIO = [DiskPath(f"/audio/{number}.wav") for number in range(3 * BATCHES + DEV - 2)]  # the last batch is short
ALL = [Utterance(path, 1.0 + number % 3, "a") for number, path in enumerate(AUDIO)]
UTTERANCES, DEV_UTTERANCES = ALL[:-DEV], ALL[-DEV:]
ALPHABET = Alphabet(("", " ", "a", "b"))
LENIENT = replace(ALPHABET, unknown="drop")
for alphabet in (ALPHABET, LENIENT):
    vars(alphabet).update(encode=cache(alphabet.encode), normalise=cache(alphabet.normalise))
CPU, CONFIG = torch.device("cpu"), Config()
CONFIG.data.work_dir, CONFIG.data.cache, CONFIG.batching.utterances = "/work", "disk", 3
CONFIG.train.evaluate_every_epochs = 2
CONFIG.comm.max_ranks, CONFIG.comm.timeout_s, CONFIG.comm.wait_s = RANKS, 60.0, LIMIT_S  # nobody is refused
CONFIG.train.epochs, CONFIG.train.log_every_steps = EPOCHS, 1
CONFIG.optim.warmup_steps = 0
CONFIG.optim.name, CONFIG.optim.momentum = "sgd", 0.0


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

    def train(self, mode: bool = True) -> Self:
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


@cache
def plan(epoch: int) -> list[list[int]]:
    """The batches of an epoch."""
    return plan_epoch(np.array([u.duration_s for u in UTTERANCES]), CONFIG.batching, epoch, 1)


class SimulatedTrainer(Trainer):
    """A trainer whose steps are sums over ranks, and hashes."""

    alphabet, utterances, dev_data, noise, _contents = ALPHABET, UTTERANCES, None, None, dict[str, str]()
    statistics, timer = SimpleNamespace(release=lambda: None), SimpleNamespace(means=lambda steps: {})
    _plan, inputs = staticmethod(plan), staticmethod(lambda batch, epoch: batch)

    def __init__(self, config: Config, run_dir: DiskPath, comm: Communicator) -> None:
        self.config, self.run_dir, self.comm = config, run_dir, comm
        model = SimulatedModel()
        groups = [{"params": [model.tensors["weight"]], "rate_factor": 1.0, "lr": 0.1}]
        optimizer = SimpleNamespace(state={}, param_groups=groups, state_dict=OPTIMIZER.copy, load_state_dict=nothing)
        self.model, self.features, self.optimizer, self.device = model, SimulatedFeatures(), optimizer, CPU
        self.state = TrainState(model, self.features, optimizer)
        self.loader = SpeechLoader(UTTERANCES, config.data, CPU, ALPHABET)
        self.dev = DevEvaluator(config.data, self.state.features, ALPHABET, CPU, "fp32")
        if state_file(run_dir).is_file():
            self.state.load(*read_state(run_dir, config, self.state, whole=False), 0.0)
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

    def __init__(self, machine: Machine, dataset: Any, sampler: Any, num_workers: int, **options: Any) -> None:
        self._machine, self._dataset, self._sampler = machine, dataset, sampler
        self._free_s, self._ahead = [0.0] * max(1, num_workers), (options["prefetch_factor"] or 1) * max(1, num_workers)
        self._sent: deque[tuple[Any, float]] = deque()

    def __iter__(self) -> Self:
        self._keys, self._numbers = iter(self._sampler), itertools.count()
        self._drop()
        return self

    def _drop(self) -> None:
        self._sent.clear()

    def __next__(self) -> Any:
        machine, draw = self._machine, self._machine.draw
        while len(self._sent) < self._ahead and (key := next(self._keys, None)) is not None:
            worker = next(self._numbers) % len(self._free_s)
            slow_s = draw.uniform(0, 8) if draw.random() < SLOW_WORKER else 0.01
            self._free_s[worker] = max(machine.now_s, self._free_s[worker]) + slow_s
            self._sent.append((key, self._free_s[worker]))
        if not self._sent:
            raise StopIteration
        key, ready_s = self._sent.popleft()
        if ready_s > machine.now_s:
            machine.sleep(ready_s - machine.now_s)
        if draw.random() < LOST_WORKER:
            raise RuntimeError("DataLoader worker (pid 1) is killed by signal: Killed.")
        return self._dataset[key]


def read_audio(path: Any, *options: Any) -> Any:
    """Stands for the reader: the samples that a file holds."""
    return np.frombuffer(path.read_bytes(), "<i2") / np.float32(32768)


def decode_batch(decoder: Any, logits: Tensor, lengths: Tensor) -> list[Hypothesis]:
    """Stands for the decoder."""
    time.sleep(STEP_S)
    return [Hypothesis("a" if value % 2 else "b", 0.0, (), ()) for value in logits[0, :, 0].tolist()]


def prepare_model(path: Any, model: Any, features: Any, alphabet: Any, config: Any, facts: Any, check: Any) -> Any:
    """Stands for that of `ds2.model.checkpoint`."""
    return tensor_file.prepare_save(path, model.state_dict(), facts, check)


def nothing(*_: Any, **__: Any) -> None:
    """Stands for calls of no interest here."""


def stand_ins(machine: Machine, dev: Sequence[Utterance]) -> list[tuple[Any, str, Any]]:
    """As `fuzzing.processes.stand_ins`, what a training uses; `dev` are the utterances of its dev set."""
    board = SimpleNamespace(add_custom_scalars=nothing, add_scalar=nothing, close=nothing)
    bar = nullcontext(SimpleNamespace(update=nothing, over=iter, set_postfix_str=nothing, disable=True))
    return [
        (tensor_file, "ThreadPoolExecutor", lambda _: nullcontext(SimpleNamespace(map=map))),
        (states, "asdict", lambda _: SETTINGS),
        (loop, "Trainer", SimulatedTrainer),
        (loop, "progress_bar", lambda *_, **__: bar),
        (loop, "not_default", lambda _: {}),
        (loop, "short_collections", nullcontext),
        (loop, "save_config", nothing),
        *[(module, "git_commit", lambda: "") for module in (loop, run_folder)],
        (run_folder, "prepare_model", prepare_model),
        (RunLog, "settings", nothing),
        (tensorboard, "SummaryWriter", lambda *_, **__: board),
        (loaders, "DataLoader", partial(Loader, machine)),
        *[(module, "member_of", nothing) for module in (audio_cache, splits)],
        (audio_cache, "Path", DiskPath),
        (audio_cache, "read_audio", read_audio),
        (audio_cache, "thread_pool", lambda _: nullcontext(SimpleNamespace(imap_unordered=map))),
        (audio_cache, "ProgressBar", lambda *_, **__: bar),
        (dev_set, "scored_utterances", lambda *_: dev),
        (dev_set, "replace", lambda *_, **__: LENIENT),
        (dev_set, "_SHOWN", 0),
        (dev_set, "feasible_rows", lambda lengths, *_: lengths > 0),
        (dev_set, "ctc_losses", lambda logits, *_: logits[0, :, 0]),
        (recogniser, "decode_batch", decode_batch),
        # Without torch's inference mode, which is of the one thread of the system in which all simulated ones run.
        *[(Recogniser, name, getattr(Recogniser, name).__wrapped__) for name in ("recognise", "logits")],
    ]
