"""Ranks that come and go in one process under a virtual clock: a seed replays any failure.

    python tools/fuzz.py meetings --seeds 1000             from seed 0 on, on all cores
    python tools/fuzz.py meetings --first 421 --seeds 1    one of them again
    python tools/fuzz.py meetings --faults                 how soon each planted fault is detected

What runs is the training loop with its views, commits, states and log (`ds2.training`, `ds2.distributed.members`,
`ds2.distributed.elastic`), the loader with its cache of audio above torch's `DataLoader` (`ds2.data`), and the
evaluation but for model and decoder. Simulated are the clock, threads, processes with their locks and signals, what
their connections carry, the loader's workers, and the disk (`fuzzing.disks`), which may be full or slow for a while.
Processes are started, asked to leave, stopped and killed at random moments, also between two calls that read and write
a file, workers are slow or end, the cache is damaged, audio changes, and the power may be cut. In a quarter of the
seeds all ranks write a part of each state. A step that was taken by other ranks than the log says, or whose utterances
were not each taken once, changes all losses after it (`fuzzing.toy`).

After every event: the state is complete, none before the last one that was saved, and that of the steps in the log;
ranks that nothing disturbs take a step within 30 s; a start reports audio that has changed since the one before.
After every run: each step is in the log once, each loss, evaluation, model and the last state are those of the ranks
that the log names, no process ended with an error but that of a full disk or a lost worker, and none waited for ever.
"""

import errno
import hashlib
import json
import os
import random
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from fuzzing import processes, toy
from fuzzing.disks import Disk, DiskPath
from fuzzing.processes import SILENT_S, Machine, Process, SimulatedCommunicator, parsed
from fuzzing.ranks import changes, ranks_of_steps
from fuzzing.seeds import Fault, planted, simulate
from fuzzing.toy import AUDIO, BATCHES, CONFIG, DEV, EPOCHS, RANKS, nothing, weights_of

from ds2.data import audio_cache, splits
from ds2.data.loader import LoaderError
from ds2.distributed import members
from ds2.distributed.communicator import Communicator
from ds2.distributed.elastic import ElasticCommunicator
from ds2.distributed.members import Members, View
from ds2.system import files as file_system
from ds2.system import tensor_file
from ds2.system.signals import Stopped
from ds2.training import inputs, metrics, run_folder
from ds2.training import loop as training
from ds2.training import state as states
from ds2.training import trainer as trainers
from ds2.training.dev_set import DevEvaluator
from ds2.training.inputs import PreparedBatches
from ds2.training.metrics import RunLog
from ds2.training.run_folder import RunFiles
from ds2.training.state import state_file
from ds2.training.trainer import LastCommit, Trainer

CACHE = DiskPath("/work/audio_cache")
STEPLESS_S = 30.0  # longer than ranks may take to a step after the last disturbance
KINDS = (
    "kill", "kill", "kill all", "stop", "stop", "leave", "join", "join", "join", "cut power", "bad disk",
    "damage cache", "change audio",
)  # fmt: skip
# How often something happens between two calls that need each other: anywhere, in a save by all ranks, at the end of a
# meeting. The last two are seldom.
AT_A_CALL, AT_A_SAVE, AT_A_MEETING = (0.01, 0.04), 0.1, 0.25


def shards_in(run_dir: Any) -> list[Any]:
    """The shards of states in a run folder."""
    return sorted(run_dir.glob("trainer.*.shard")) if CONFIG.checkpoint.sharded else []


def step_of(path: Any) -> tuple[int, int]:
    """The step of a state, which must be complete, and its weight."""
    return _step_of(path, path.read_bytes(), *(shard.read_bytes() for shard in shards_in(path.parent)))


@lru_cache(1 << 10)
def _step_of(path: Any, *content: bytes) -> tuple[int, int]:
    tensors, metadata = tensor_file.load(path)
    return metadata["progress"]["step"], int(tensors["model.weight"])


class World(Machine):
    """One run: its processes, and what they share."""

    def __init__(self, draw: random.Random, *, sharded: bool) -> None:
        super().__init__(draw)
        self.disk = Disk(draw, self.pause)
        CONFIG.checkpoint.sharded, CONFIG.checkpoint.every_steps = sharded, draw.choice((1, 2))
        self.run_dir, self.saved, DiskPath.disk = DiskPath("/run"), 0, self.disk
        self._seen: list[bytes | None] = []  # the log and the state at the last look
        self.changes = self.reported = 0  # of audio at the same length
        self.dev_utterances = self.draw.choice((toy.DEV_UTTERANCES, [], []))
        self.events = self.draw.randint(3, 12)
        self._at = {  # what happens there at most, and how often
            "call": (self.events, self.draw.choice(AT_A_CALL)),
            "save": (self.events * sharded, AT_A_SAVE),
            "meeting": (3, AT_A_MEETING),
        }

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
        self.call_later(self.draw.expovariate(1.0), self._look_and_disturb)
        self.run_events()

    def pause(self, where: str = "call") -> None:
        """Let a signal come now and then."""
        most, often = self._at[where]
        if self.running is None or not most or self.draw.random() >= often:
            return
        self._at[where], self.disturbed_s = (most - 1, often), self.now_s
        self.strike(self.process, self.draw.choice(("kill", "stop", "stop", "stop", "cut power")))
        self.running.sleep(0.0)

    def strike(self, process: Process, kind: str) -> None:
        """Kill a process, stop it, sometimes for longer than the others may wait for it, or cut the power of all."""
        if kind == "kill":
            process.kill()
        elif kind == "stop":
            process.stop(self.draw.uniform(0.1, self.draw.choice((3, 3, 3, 3, 3, 3, 3, 30)) * SILENT_S))
        else:
            self.cut_power()

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
            weights = weights_of(ranks_of_steps(self.run_dir))
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

    def _look_and_disturb(self) -> None:
        self.look()
        living = [process for process in self.processes if not process.dead]
        done = not living and any(process.status == 0 for process in self.processes)
        newest = max((self.run_dir / "members").glob("view-*.json"), default=None)
        view = newest and parsed(View, newest.read_bytes(), newest.name)
        ranks = [self.by_member[member.id] for member in view.members] if view else living
        if all(process.stopped for process in ranks if not process.dead):  # they stay the ranks
            self.disturbed_s = self.now_s
        if self.now_s > min(toy.LIMIT_S, self.disturbed_s + STEPLESS_S):
            states = [(p.number, p.stopped, p.status) for p in living]
            self.faults.append(f"no step since {self.disturbed_s:.0f} s, or not done at {self.now_s:.0f} s: {states}")
        if self.faults or done:
            self._events.clear()
            return
        if not living:
            self.start()
        elif self.events:
            self.disturb(living)
        self.call_later(self.draw.expovariate(1.0), self._look_and_disturb)

    def disturb(self, living: Sequence[Process]) -> None:
        """Do something to the processes."""
        self.events, self.disturbed_s = self.events - 1, self.now_s
        process = self.draw.choice(living)
        kind = self.draw.choice(KINDS)
        if kind in ("kill", "stop", "cut power"):
            self.strike(process, kind)
        elif kind == "kill all":
            for each in living:
                self.call_later(self.draw.uniform(0, 1.5), each.kill)
        elif kind == "leave":
            process.signals.append(signal.SIGTERM)
        elif kind == "bad disk":
            self.disk.is_full, self.disk.slowness = self.draw.choice(((True, 1.0), (False, 30.0)))
            self.call_later(self.draw.uniform(1, 10), self.disk.mend)
        elif kind == "damage cache":
            for path in CACHE.glob("*.audio"):
                data = bytearray(path.read_bytes())
                data[self.draw.randrange(len(data))] ^= 1 << self.draw.randrange(8)
                path.stat().data = bytes(data)
        elif kind == "change audio":
            self.changes += 1
            for number, path in enumerate(AUDIO[: self.draw.randint(1, len(AUDIO))]):  # what they add up to stays
                path.stat().data = np.array([(1 << number) + self.changes, -self.changes], "<i2").tobytes()
                path.stat().st_mtime_ns += self.draw.randint(0, 1)
        elif len(living) < RANKS:
            self.start()

    def check(self) -> None:
        """Raise Fault where the log and the weights do not belong together."""
        if self.faults:
            raise Fault("; ".join(self.faults))
        ranks = ranks_of_steps(self.run_dir)
        if len(ranks) != EPOCHS * BATCHES:
            raise Fault(f"{len(ranks)} steps were logged")
        logged = {(line["event"], line["step"]): line for line in file_system.read_log(self.run_dir / "log.jsonl")}
        weights, models = weights_of(ranks), {"last": len(ranks)}
        for step, of in ranks.items():
            if logged["train", step]["loss"] != toy.loss_of(weights[step - 1], of, toy.contents_of(step)):
                raise Fault(f"the loss of step {step} is not that of its ranks and utterances, {changes(ranks)}")
        scores = {}
        for step in (2 * BATCHES, EPOCHS * BATCHES) if self.dev_utterances else ():
            losses = [toy.dev_loss(weights[step], 1 << len(toy.UTTERANCES) + number) for number in range(DEV)]
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
        logged = [(line["step"], line.get("loss")) for line in file_system.read_log(self.run_dir / "log.jsonl")]
        return hashlib.sha256(f"{self.now_s} {logged}".encode()).hexdigest()[:16]


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


def share_cores(comm: Communicator) -> None:
    """Stands for that of `ds2.distributed.launch`: the last call of a meeting."""
    comm.machine.pause("meeting")
    comm.allgather(0)


@contextmanager
def simulated(world: World) -> Iterator[None]:
    """Put the world's disk, processes and training under the modules."""
    event = RunLog.event
    changed = [
        *[(module, "os", world.disk) for module in (members, file_system, run_folder, audio_cache, splits)],
        *[(module, "shutil", world.disk) for module in (file_system, metrics, run_folder, audio_cache)],
        *[(tensor_file, name, getattr(world.disk, name)) for name in ("write_tensors", "safe_open")],
        *[(module, "atomic_file", partial(_atomic_file, world)) for module in (tensor_file, metrics, audio_cache)],
        (tensor_file, "describe_full_disk", lambda _: ""),  # its path is one of the system's disk
        (RunLog, "event", lambda board, *values: _event(world, event, board, *values)),
        (trainers, "share_cores", share_cores),
        (training, "report_changes", partial(_report_changes, world, splits.report_changes)),
        *processes.stand_ins(world),
        *toy.stand_ins(world, world.dev_utterances),
    ]
    with ExitStack() as stack:
        for owner, name, value in changed:  # as `patch.object`, which takes ten times as long
            stack.callback(setattr, owner, name, vars(owner)[name])
            setattr(owner, name, value)
        yield


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
    ("a line that is lost with its writer is not logged again", training, "_log_again", nothing),
    ("a woken rank 0 replaces the log", RunLog, "_replace_by_copy", "if self._superseded()", "if False"),
    ("a woken rank 0 writes into the log", RunLog, "_replace_by_copy", lambda _: True),
    ("a woken rank 0 removes the files of the next one", RunFiles, "remove_partial_files",
     " and not self.comm.superseded()", ""),
    ("a woken rank 0 replaces the state that the next one has read", RunFiles, "remove_partial_files", nothing),
    ("a state names shards that are not complete", run_folder, "prepare_state", "shard.wait(run_dir)",
     '{shard.file(run_dir, rank).name: "" for rank in range(shard.world)}'),
    ("the shards of a state are removed before the next one is complete", states, "_replace_shards",
     "yield", "[path.unlink() for path in others]; yield"),
    ("shards of two saves have one name", RunFiles, "_next_shard", "Shard(name", "Shard('a'"),
    ("a save of ranks that are gone is not given up", RunFiles, "give_up_shards", nothing),
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
    ("a file is named before its content is flushed", file_system, "_sync_file", nothing),
    ("the name of a file is not flushed", file_system, "_sync_folder", nothing),
    ("the log is not flushed before the state", run_folder, "sync", nothing),
    ("a torn line swallows the next one", RunLog, "__init__", 'self._jsonl.write("\\n")', "pass"),
    ("a request is written in place", Members, "_write", '{name}.new"', '{name}"'),
    ("a view that another process made is replaced", Disk, "make_link", _replace),
    ("a damaged cache is not noticed", audio_cache.CacheFile, "samples", "!= checksum", "is None"),
    ("audio that changed at its length and time is not noticed", splits, "_content", lambda *_: ""),
    ("changed audio is recorded before it is reported", splits, "report_changes", "else:\n",
     "else:\n        write_text(path, json.dumps(now))\n"),
    ("a batch that was prepared is lost", PreparedBatches, "prepare_next", "self._next is None and ", ""),
    ("batches that workers made for the ranks of before are used", toy.Loader, "_drop", nothing),
    ("the rest of a batch that ranks cannot share evenly is lost", inputs, "rank_part", "batch[rank::world]",
     "batch[rank * (len(batch) // world) : (rank + 1) * (len(batch) // world)]"),
    ("an evaluation counts what one before it, cut off, has counted", DevEvaluator, "evaluate",
     "observed, share = RankResults(),", 'observed, share = vars(self).setdefault("observed", RankResults()),'),
)  # each must be detected  # fmt: skip


main = partial(simulate, __doc__, run_seed, FAULTS)
