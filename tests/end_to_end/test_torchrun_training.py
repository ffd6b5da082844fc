"""Training under torchrun: the answer of one process and the bits of MPI, faults told with rank and step, restarts."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch
from support.launch import mpirun, torchrun
from support.rank_runs import SMOOTH, STEPS, Job, arguments, clean, same_bits, scores
from support.run_log import losses

from ds2.system.tensor_file import load

pytestmark = pytest.mark.slow


def train(ranks: int, *jobs: Job, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    return torchrun(ranks, "rank_job.py", *arguments(*jobs), options=options)


def test_ranks_of_torchrun_give_the_answer_of_one_process_and_the_bits_of_mpi(
    tiny_overrides: list[str], tmp_path: Path
) -> None:
    folders = {name: tmp_path / name for name in ("one", "two", "adamw", "again", "mpi")}
    run = train(
        2,
        clean(tiny_overrides, folders["two"], *SMOOTH),
        clean(tiny_overrides, folders["adamw"]),
        clean(tiny_overrides, folders["again"], "comm=gloo"),
    )
    assert run.returncode == 0, run.stdout
    assert "2 ranks over gloo (comm=auto: no NCCL" in run.stdout and "2 ranks over gloo (comm=gloo)" in run.stdout
    assert run.stdout.count("epoch 1: dev WER") == 3  # each training is told by rank 0 alone
    run = mpirun(2, "rank_job.py", *clean(tiny_overrides, folders["mpi"]))
    assert run.returncode == 0, run.stdout
    run = train(1, clean(tiny_overrides, folders["one"], *SMOOTH))
    assert run.returncode == 0, run.stdout
    assert "ranks over" not in run.stdout

    assert len(losses(folders["one"])) == 9
    assert losses(folders["two"]) == pytest.approx(losses(folders["one"]), rel=1e-4)
    assert scores(folders["two"]) == scores(folders["one"])
    assert same_bits(folders["adamw"], folders["again"]) and losses(folders["adamw"]) == losses(folders["again"])
    assert same_bits(folders["adamw"], folders["mpi"])  # both add in order of rank


@pytest.mark.gpu
@pytest.mark.two_gpus
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(
    "more",
    [
        ("comm.batch_norm=local",),
        ("comm.batch_norm=shared",),
        ("train.accumulate=2", "batching.utterances=2", "comm.bucket_mib=0.01"),
    ],
)
def test_recorded_passes_of_ranks_give_the_bits_of_single_launches(
    tiny_overrides: list[str], tmp_path: Path, more: tuple[str, ...]
) -> None:
    graphs = ["device=cuda", "train.graphs=on", "model.batch_norm_momentum=0.5"]
    settings = [*tiny_overrides, *graphs, *more]
    recorded, launched = tmp_path / "recorded", tmp_path / "launched"
    run = train(2, clean(settings, recorded, "train.epochs=8"))
    assert run.returncode == 0, run.stdout
    assert "2 ranks over nccl" in run.stdout
    run = train(2, ("unrecorded", *clean(settings, launched, "train.epochs=8")[1:]))
    assert run.returncode == 0, run.stdout
    assert same_bits(recorded, launched) and losses(recorded) == losses(launched)


def test_sigterm_at_torchrun_saves_and_another_number_of_ranks_goes_on(
    tiny_overrides: list[str], tmp_path: Path
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    sharded = "checkpoint.sharded=true"
    endless = (
        *SMOOTH,
        "train.epochs=100000",
        sharded,
        f"run_dir={broken}",
    )  # ended by the signal, however late it comes
    run = train(2, clean(tiny_overrides, whole, *SMOOTH), ("launcher", "0", "1", *tiny_overrides, *STEPS, *endless))
    assert run.returncode != 0
    assert (stopped := re.search(r"stopped after step (\d+): SIGTERM", run.stdout)), run.stdout
    step = load(broken / "trainer.safetensors")[1]["progress"]["step"]
    assert step == int(stopped[1])
    assert len({*broken.glob("*.shard")}) == 2
    run = train(3, clean(tiny_overrides, broken, *SMOOTH, f"train.epochs={step // 3 + 3}", sharded))
    assert run.returncode == 0, run.stdout
    assert len({*broken.glob("*.shard")}) == 3
    assert sorted(losses(broken)) == list(range(1, 3 * (step // 3 + 3) + 1))
    assert {s: loss for s, loss in losses(broken).items() if s <= 9} == pytest.approx(losses(whole), rel=1e-4)


@pytest.mark.parametrize("sharded", ["false", "true"])
def test_ranks_that_torchrun_starts_again_after_one_was_killed_go_on_from_the_last_save(
    tiny_overrides: list[str], tmp_path: Path, sharded: str
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    saves = ("checkpoint.every_steps=2", f"checkpoint.sharded={sharded}")
    job = ("kill", "1", "5", *tiny_overrides, *STEPS, *saves, f"run_dir={broken}")
    run = train(2, job, clean(tiny_overrides, whole), options=("--max-restarts", "1"))
    assert run.returncode == 0, run.stdout
    told = r"ds2: rank 0 on \S+ failed at step 5, .*: lost contact with another rank"
    assert len(re.findall(told, run.stdout)) == 1, run.stdout
    assert same_bits(broken, whole) and losses(broken) == losses(whole)


def test_an_error_of_one_rank_ends_all_with_rank_step_and_reason(tiny_overrides: list[str], tmp_path: Path) -> None:
    run = train(2, ("throw", "1", "5", *tiny_overrides, "comm.timeout_s=600"))
    assert run.returncode != 0
    told = r"ds2: rank 1 on \S+ failed at step 5, .*: RuntimeError: thrown on purpose"
    assert re.search(told, run.stdout), run.stdout
