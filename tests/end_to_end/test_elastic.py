"""Ranks that come and go: the losses are those of runs with as many ranks, and nothing waits for who is gone.

DS2_RANK_RUNS=200 DS2_FUZZ_SEED=7 does more runs, and others; see tools/fuzz.py ranks.
"""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support.forked import used_elsewhere
from support.launch import TIMEOUT_S, tool
from support.run_log import events

from ds2.cli import main
from ds2.config.schema import CommConfig, Config
from ds2.distributed.communicator import Communicator
from ds2.distributed.elastic import ElasticCommunicator, why_not_elastic
from ds2.distributed.launcher import Launched
from ds2.distributed.members import JOINER, LeftBehindError, View
from ds2.distributed.process_group import LostRankError
from ds2.model.norm import SequenceBatchNorm
from ds2.system import tensor_file
from ds2.system.tensor_file import CheckpointError, load
from ds2.training import loop, trainer
from ds2.training.metrics import LogWindow, RunLog
from ds2.training.passes import Passes
from ds2.training.run_folder import sole_use
from ds2.training.state import Progress, state_file
from ds2.training.stopping import Interrupts

RUNS, SEED = os.environ.get("DS2_RANK_RUNS", "2"), os.environ.get("DS2_FUZZ_SEED", "1")
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="ranks are forked")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (("comm.max_ranks=2", "comm.min_ranks=3"), "comm.min_ranks=3 must be at most comm.max_ranks=2"),
        (("comm.min_ranks=2",), "comm.min_ranks=2 must be at most comm.max_ranks=0"),
        (("comm.max_ranks=-1",), "comm.max_ranks=-1"),
        (("comm.max_ranks=2", "checkpoint.resume=false"), "leave checkpoint.resume=true"),
        (("comm.max_ranks=2", "comm=single"), "comm=single has a fixed number of ranks"),
        (("comm.max_ranks=2", "batching=auto"), "comm.max_ranks lets it change: give batching.utterances"),
        (("comm.max_ranks=2", "train.wavefront=on"), "set train.graphs=on too, or train.wavefront=auto"),
        (
            ("comm.max_ranks=3", "comm.min_ranks=2", "comm.wait_s=0.3"),
            "1 rank for comm.wait_s=0.3 s, fewer than comm.min_ranks=2; step 0 is saved",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused_with_the_reason(
    tiny_overrides: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    settings: tuple[str, ...],
    reason: str,
) -> None:
    assert main(["train", *tiny_overrides, "device=cpu", *settings, f"run_dir={tmp_path / 'run'}"]) == 2
    assert reason in capsys.readouterr().err


def test_launchers_that_cannot_are_named_with_the_way_out() -> None:
    for by, named in (("mpi", "mpirun or srun"), ("torchrun", "torchrun")):
        reason = why_not_elastic(CommConfig(max_ranks=4), Launched(by, 2, 0))
        assert reason.startswith(named) and "start each rank by itself" in reason
    assert why_not_elastic(CommConfig(max_ranks=4), Launched()) == ""


def test_a_rank_alone_ends_as_one_process_does(tiny_overrides: list[str], tmp_path: Path) -> None:
    for name, setting in (("elastic", "comm.max_ranks=2"), ("single", "comm.max_ranks=0")):
        assert main(["train", *tiny_overrides, "device=cpu", setting, f"run_dir={tmp_path / name}"]) == 0
    one, other = (load(tmp_path / name / "trainer.safetensors")[0] for name in ("elastic", "single"))
    assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
    assert {path.name for path in (tmp_path / "elastic" / "members").iterdir()} == {"preparing", "view-000000.json"}


def test_the_tensors_of_a_state_are_read_once_by_the_rank_0_of_the_first_view(
    tiny_overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ["train", *tiny_overrides, "device=cpu", "comm.max_ranks=2", f"run_dir={tmp_path / 'run'}"]
    assert main([*run, "train.max_steps=1"]) == 0
    read = Mock(side_effect=load)
    monkeypatch.setattr(tensor_file, "load", read)
    assert main([*run, "train.max_steps=2"]) == 0
    read.assert_called_once_with(state_file(tmp_path / "run"))
    monkeypatch.setattr(loop, "load_tensorboard", state_file(tmp_path / "run").unlink)  # before the ranks meet
    assert main([*run, "train.max_steps=3"]) == 2
    assert "there is no checkpoint" in capsys.readouterr().err


def test_a_rank_that_is_lost_at_the_end_of_a_meeting_lets_the_others_meet_again(
    tiny_overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meetings = 0

    def lost_at_first(comm: Communicator) -> None:
        nonlocal meetings
        meetings += 1
        if meetings == 1:
            raise LostRankError("rank 1 on host ended")

    monkeypatch.setattr(trainer, "share_cores", lost_at_first)
    settings = ["device=cpu", "comm.max_ranks=2", "train.max_steps=1", f"run_dir={tmp_path / 'run'}"]
    assert main(["train", *tiny_overrides, *settings]) == 0
    assert meetings == 2 and events(tmp_path / "run", "train")[-1]["step"] == 1


def test_before_the_first_step_there_is_a_state_to_go_on_from(
    tiny_overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look(*_: object) -> int:
        assert load(tmp_path / "run" / "trainer.safetensors")[1]["progress"]["step"] == 0
        return 0

    monkeypatch.setattr(loop, "_run", look)
    assert main(["train", *tiny_overrides, "comm.max_ranks=2", f"run_dir={tmp_path / 'run'}"]) == 0


def test_a_new_rank_0_writes_the_files_that_the_lost_one_did_not_write_or_took_along(
    tiny_overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run_dir, run, former = tmp_path / "run", loop._run, list[str]()

    def lose_rank_0(trainer: trainer.Trainer, *others: Any) -> int:
        if not former and not run(trainer, *others):
            for name in ("config.yaml", "corpus.json", "log.jsonl"):
                former.append((run_dir / name).read_text())
                (run_dir / name).unlink()
            raise LostRankError("rank 0 ended")
        return 0

    monkeypatch.setattr(loop, "_run", lose_rank_0)
    settings = ["device=cpu", "comm.max_ranks=2", "train.max_steps=1", f"run_dir={run_dir}"]
    assert main(["train", *tiny_overrides, *settings]) == 0
    assert [(run_dir / name).read_text() for name in ("config.yaml", "corpus.json")] == former[:2]
    assert "has no log.jsonl, so its log begins after step 1" in caplog.text


def test_a_run_of_one_process_is_refused_where_ranks_come_and_go(tmp_path: Path) -> None:
    with used_elsewhere(tmp_path, SimpleNamespace(rank=0, elastic=True, host="here")) as ranks:
        written = rf"written by ranks that come and go, of which process {ranks.pid} on here started last: end that run"
        with pytest.raises(CheckpointError, match=written), sole_use(tmp_path, Communicator(torch.device("cpu"))):
            pass


def test_what_rank_0_needs_is_imported_before_the_ranks_meet(
    tiny_config: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would wait for the next rank 0 otherwise."""
    import torch.utils.tensorboard

    imported = []

    def meet(*_: object) -> None:
        imported.append("torch.utils.tensorboard" in sys.modules)
        raise LostRankError("met")

    monkeypatch.setattr(torch.utils, "tensorboard", torch.utils.tensorboard)  # to have it again after the test
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard")
    monkeypatch.setattr(trainer.Trainer, "regroup", meet)
    with pytest.raises(LostRankError, match="met"):
        loop.train(tiny_config("comm.max_ranks=2"), tmp_path / "run")
    assert imported == [True]


def last_commit(number: int) -> trainer.LastCommit:
    """A last commit with this number and no progress."""
    commit = trainer.LastCommit(torch.nn.Identity())
    commit.number = number
    return commit


def test_a_process_that_was_left_behind_forgets_the_step_that_it_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it is alone then, it reads the others' state of a step that it took too, and must not log its own loss."""
    comm = Mock(spec=ElasticCommunicator, rank=0, world=1, elastic=True, device=torch.device("cpu"))
    comm.regroup.side_effect = [LeftBehindError("the others went on"), View(1, [], fresh=False)]
    comm.allgather = lambda number: [number]
    for name in ("EpochBatches", "share_cores"):
        monkeypatch.setattr(trainer, name, Mock())
    rank = Mock(comm=comm, noise=None, logged=("train", 55, {"loss": 2.0}))
    trainer.Trainer.regroup(rank, Interrupts())
    assert rank.logged is None and rank._last_commit.number == JOINER
    calls = [call[0] for call in rank.files.method_calls]
    assert calls.index("drop_held") < calls.index("write_held")  # nor write its state of that step later


def test_a_state_is_read_once_no_rank_that_was_lost_can_replace_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank is stopped while it writes the state, the others read the one before, and it wakes up."""
    (tmp_path / "trainer.safetensors").touch()
    comm = Mock(rank=0, allgather=lambda value: [value])
    rank = Mock(comm=comm, run_dir=tmp_path, logged=None, _last_commit=last_commit(JOINER))
    for name in ("broadcast_state", "adopt_measurements"):
        monkeypatch.setattr(trainer, name, Mock())
    read = Mock(side_effect=lambda *_: rank.files.remove_partial_files.assert_called_once() or ({}, Progress()))
    monkeypatch.setattr(trainer, "read_state", read)
    trainer.Trainer._take_state(rank, View(1, [], fresh=True))
    assert read.called
    trainer.Trainer._take_state(rank, View(2, [], fresh=False))
    rank.files.remove_partial_files.assert_called_once()  # a rank of the former view may still write: see `regroup`


def test_a_state_that_has_arrived_is_recorded_before_another_rank_can_be_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the next meeting goes back to the progress of its own step with the weights of the step that arrived."""
    comm = Mock(rank=1, allgather=lambda value: [value, value])
    rank = Mock(comm=comm, run_dir=tmp_path, logged=None, _last_commit=last_commit(1))
    lost = Mock(side_effect=LostRankError("rank 0 ended"))
    monkeypatch.setattr(trainer, "adopt_measurements", Mock())
    monkeypatch.setattr(trainer, "broadcast_state", lambda *_: comm.configure_mock(broadcast=lost, allgather=lost))
    trainer.Trainer._take_state(rank, View(1, [], fresh=False))
    assert rank._record.called


def test_the_state_is_sent_to_the_ranks_without_the_commit_of_rank_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 has ended the same step, rank 2 lacks its last sum, rank 3 is new."""
    monkeypatch.setattr(trainer, "adopt_measurements", Mock())
    for commits, fresh, holders in (
        ((7, 7, 6, JOINER), False, [0, 1]),
        ((JOINER, JOINER), True, [0]),  # what each has read or drawn at its start need not be that of rank 0
    ):
        comm = Mock(rank=0, allgather=lambda value, of=commits: [(number, value[1]) for number in of])
        rank = Mock(comm=comm, run_dir=tmp_path, logged=None, _last_commit=last_commit(commits[0]))
        rank.state.progress = Progress()
        monkeypatch.setattr(trainer, "broadcast_state", Mock())
        trainer.Trainer._take_state(rank, View(1, [], fresh=fresh))
        assert trainer.broadcast_state.call_args.args[-1] == holders


class Recorded(Passes):
    """As passes that are recorded."""

    def __init__(self, *args: Any, records_sums: bool, **options: Any) -> None:
        super().__init__(*args, **options)


def test_steps_are_prepared_anew_for_another_number_of_ranks(
    tiny_config: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: recorded passes, whose inputs are padded, while a rank is alone; new weights are rounded."""
    monkeypatch.setattr(trainer.Trainer, "_graphs_possible", lambda self, why_launched: self.comm.world == 1)
    monkeypatch.setattr(trainer, "GraphedPasses", Recorded)
    config = tiny_config("comm.max_ranks=2", "train.average_decay=0.9", "train.precision=bf16")
    comm = ElasticCommunicator(config.comm, "cpu", tmp_path / "run")
    rank = trainer.Trainer(config, tmp_path / "run", comm)
    parameter = next(iter(rank.gradients.rounded))

    def meet(world: int) -> None:
        comm.world = world
        monkeypatch.setattr(comm, "regroup", lambda *_, **__: View(world, [], fresh=False))
        rank.regroup(Interrupts())

    for world in (1, 2, 1):
        recorded, update, average = rank.passes, rank.update, rank.state.average
        rank.gradients.set_copies_current(True)
        with torch.no_grad():
            parameter.add_(1.0)  # of the state that arrives
        meet(world)
        assert type(rank.passes).__name__ == ("Recorded" if world == 1 else "Passes")
        assert rank.passes is not recorded and rank.update is not update and rank.state.average is average
        assert rank.inputs.padded is (world == 1)
        rank.gradients.start_step()
        weight = rank.gradients.start_pass(last=True).weight(parameter)
        assert weight.dtype == torch.bfloat16 and torch.equal(weight, parameter.to(torch.bfloat16))
        norms = [module for module in rank.model.modules() if isinstance(module, SequenceBatchNorm)]
        assert all((norm.reduce is None) == (world == 1) for norm in norms)
    comm.world = 1
    comm.close()


class Breaking(Communicator):
    """A process whose sums end with any values where `lost` is set, as NCCL's do when a rank is lost."""

    confirms, lost = True, False

    def confirm_sums(self) -> None:
        if self.lost:
            raise LostRankError("rank 1 was lost")


def test_sums_that_not_all_ranks_confirm_change_no_weights(
    tiny_config: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer.OptimizerStep, "ignores_nonfinite", True)  # as on a GPU
    comm = Breaking(torch.device("cpu"))
    rank = trainer.Trainer(tiny_config(), tmp_path / "run", comm)
    plan = rank.plan()
    batches = rank.epoch(plan)
    for comm.lost in (False, True):
        before = [parameter.detach().clone() for parameter in rank.model.parameters()]
        progress = replace(rank.progress)
        with pytest.raises(LostRankError) if comm.lost else nullcontext():
            rank.step(batches, plan[:1])
        changed = any(not torch.equal(a, b) for a, b in zip(before, rank.model.parameters(), strict=True))
        assert changed is not comm.lost and (rank.progress == progress) is comm.lost


def test_a_step_that_is_logged_again_and_again_keeps_the_ranks_that_took_it(tmp_path: Path) -> None:
    """Three ranks take step 55; then rank 0 is lost, and the next one before another step."""
    window = LogWindow(Progress())
    window.add(2.0)
    for world in (2, 1):
        former = RunLog(tmp_path, writes=False)
        trainer: Any = SimpleNamespace(
            run_dir=tmp_path,
            comm=SimpleNamespace(rank=0, world=world, elastic=True, superseded=lambda: False),
            progress=Progress(step=55),
            logged=former.scalars("train", 55, window.values({}, 0.1, 1.0, 3)),
            regroup=lambda interrupts: View(2, [], fresh=False),
        )
        loop._regroup(trainer, former, Interrupts()).close()
    assert [event["ranks"] for event in events(tmp_path, "train")] == [3, 3]
    assert [event["ranks"] for event in events(tmp_path, "ranks")] == [2, 1]


def test_a_rank_0_logs_a_step_that_it_has_from_a_rank_which_was_lost_while_they_met(tmp_path: Path) -> None:
    """Rank 0 lacks the last sum of step 55, rank 1 has it, meets as rank 0, sends its state, and is lost."""
    trainer: Any = SimpleNamespace(
        run_dir=tmp_path,
        comm=SimpleNamespace(rank=0, world=1, elastic=True, superseded=lambda: False),
        progress=Progress(step=54),
    )
    former = RunLog(tmp_path)
    trainer.logged = former.scalars("train", 54, {"loss": 2.0})

    def meet(interrupts: Interrupts) -> View:
        trainer.progress.step = 55
        trainer.logged = ("train", 55, {"loss": 1.0})
        return View(2, [], fresh=False)

    trainer.regroup = meet
    former = loop._regroup(trainer, former, Interrupts())
    trainer.regroup = lambda interrupts: View(3, [], fresh=False)
    loop._regroup(trainer, former, Interrupts()).close()
    assert [event["step"] for event in events(tmp_path, "train")] == [54, 55]


def test_a_process_that_waits_alone_for_others_ends_by_a_signal_with_a_save_and_not_as_if_it_had_waited(
    tmp_path: Path,
) -> None:
    interrupts = Interrupts()
    trainer: Any = SimpleNamespace(
        run_dir=tmp_path,
        comm=SimpleNamespace(rank=0, world=1, elastic=True, superseded=lambda: False),
        progress=Progress(step=55),
        logged=None,
        files=Mock(),
        config=Config(),
        regroup=lambda interrupts: setattr(interrupts, "agreed", signal.SIGTERM) or View(2, [], enough=False),
    )
    loop._regroup(trainer, RunLog(tmp_path, writes=False), interrupts).close()
    trainer.files.save_and_wait.assert_called_once_with(alone=True)


def test_a_signal_that_the_former_ranks_agreed_on_does_not_end_a_rank_among_others_that_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A process that is alone is signalled in the step after which another one joins it."""
    comm = Mock(spec=ElasticCommunicator, rank=0, world=2, elastic=True, device=torch.device("cpu"))
    comm.regroup.return_value = View(1, [])
    comm.allgather = lambda number: [number, 0]
    for name in ("EpochBatches", "share_cores"):
        monkeypatch.setattr(trainer, name, Mock())
    interrupts = Interrupts()
    interrupts.received = interrupts.agreed = signal.SIGTERM
    trainer.Trainer.regroup(Mock(comm=comm, noise=None), interrupts)
    assert not interrupts.agreed  # the next step tells the other one
    assert sum(interrupts.send()) == 1


def disturb(*options: str) -> str:
    done = tool("fuzz", "ranks", "--seed", SEED, *options)
    assert done.returncode == 0, done.stdout
    print(done.stdout)
    return done.stdout


@pytest.mark.slow
@needs_fork
def test_losses_of_ranks_that_come_and_go_are_those_of_unbroken_runs() -> None:
    disturb("--runs", RUNS)


FORKED = "PYTORCH_NVML_BASED_CUDA_CHECK", "1"  # a process that has asked CUDA itself for GPUs cannot fork ranks
GPU = ("--device", "cuda", "--runs", "1", "--events", "5", "--commit", "this tree")


def check_events(printed: str) -> None:
    """Check that rank 0 and another one were killed, one was stopped, and one joined."""
    (events,) = re.findall(r"up to seed \d+: 1 of 1 equal, ({.*})", printed)
    counts = ast.literal_eval(events)
    assert counts["kill"] >= 2 and counts["stop"] and counts["join"], printed


@pytest.mark.gpu
@needs_fork
@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        ("3", ()),  # in bf16; passes are recorded while one rank is alone
        ("2", ("train.graphs=on", "comm.batch_norm=local", "comm.overlap=false")),
        (
            "3",
            ("train.graphs=off", "train.precision=fp32", "train.accumulate=2", "optim=sgd", "optim.learning_rate=1e-3"),
        ),
    ],
)
def test_losses_of_ranks_that_share_a_gpu_are_those_of_unbroken_runs(
    monkeypatch: pytest.MonkeyPatch, ranks: str, settings: tuple[str, ...]
) -> None:
    monkeypatch.setenv(*FORKED)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0])
    check_events(disturb(*GPU, "--ranks", ranks, "--settings", *settings))


@pytest.mark.gpu
@pytest.mark.two_gpus
@needs_fork
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("ranks", ["4", "2"])  # two have a GPU each and sum by NCCL
def test_losses_of_ranks_on_two_gpus_are_those_of_unbroken_runs(monkeypatch: pytest.MonkeyPatch, ranks: str) -> None:
    monkeypatch.setenv(*FORKED)
    printed = disturb(*GPU, "--ranks", ranks)
    check_events(printed)
    (over_nccl,) = re.findall(r"(\d+) times ranks met whose gradients then travelled between GPUs over nccl", printed)
    assert int(over_nccl) >= 2 * (ranks == "2")


def wait_for(condition: Callable[[], Any], jobs: list[subprocess.Popen[str]]) -> None:
    until_s = time.monotonic() + TIMEOUT_S
    while not condition():
        running = any(job.poll() is None for job in jobs)
        assert running and time.monotonic() < until_s, [job.poll() for job in jobs]
        time.sleep(0.1)


@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)]
)
def test_a_killed_rank_is_named_another_takes_its_place_and_signals_end_with_a_save(
    tiny_overrides: list[str], tmp_path: Path, device: str
) -> None:
    run_dir = tmp_path / "run"
    jobs: list[subprocess.Popen[str]] = []

    def start(*settings: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "ds2.cli", "train", *tiny_overrides, f"device={device}", "comm.max_ranks=3"]
        endless = ("train.epochs=100000", "optim.schedule=constant", "train.evaluate_every_epochs=100000")
        with (tmp_path / f"{len(jobs)}.txt").open("w") as output:
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            words = [*command, *endless, f"run_dir={run_dir}", *settings]
            jobs.append(subprocess.Popen(words, stdout=output, stderr=output, env=environment, text=True))
        return jobs[-1]

    def groups() -> list[dict[str, Any]]:
        if not (run_dir / "log.jsonl").is_file():
            return []
        return events(run_dir, "start") + events(run_dir, "ranks")  # both may meet before the first step

    try:
        first, second = start(), start()
        wait_for(lambda: any(group["ranks"] == 2 for group in groups()), jobs)
        other = start("optim.learning_rate=0.123")
        assert other.wait(TIMEOUT_S) == 2
        said = (tmp_path / "2.txt").read_text()
        assert "optim.learning_rate: 0.123 instead of" in said, said
        first.kill()
        wait_for(lambda: groups()[-1]["ranks"] == 1, jobs)
        assert f"(process {first.pid}) was killed" in groups()[-1]["left"][0]
        third = start()
        wait_for(lambda: groups()[-1]["ranks"] == 2, jobs)
        second.send_signal(signal.SIGTERM)
        assert second.wait(TIMEOUT_S) == 128 + signal.SIGTERM
        wait_for(lambda: groups()[-1]["ranks"] == 1, jobs)
        third.send_signal(signal.SIGTERM)
        assert third.wait(TIMEOUT_S) == 128 + signal.SIGTERM
    finally:
        for number, job in enumerate(jobs):
            job.kill()
            job.wait()
            print((tmp_path / f"{number}.txt").read_text()[-3000:])
    lines = [json.loads(line) for line in (run_dir / "log.jsonl").read_text().splitlines()]
    last = max(line["step"] for line in lines)
    assert load(run_dir / "trainer.safetensors")[1]["progress"]["step"] >= last
