"""Kill -9 in the middle of steps and of saves, by jobs that share one device: not one bit changes."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.launch import SUPPORT, TIMEOUT_S, torchrun
from support.rank_runs import same_bits
from support.run_log import losses

from ds2.system.tensor_file import load

RESUMED = ("train.epochs=15", "optim.schedule=constant", "checkpoint.every_steps=1", "model.dropout=0.1",
           "train.average_decay=0.9", "augment.speed=[0.9,1.0]", "model.batch_norm_momentum=0.5")  # fmt: skip


def job(run_dir: Path, overrides: list[str], *killed: object) -> tuple[int, str]:
    """Train in a process of its own; its status and what it said."""
    command = [
        sys.executable,
        str(SUPPORT / "killed_job.py"),
        *map(str, killed or ("none", 0, 0)),
        *overrides,
        *RESUMED,
    ]
    done = subprocess.run(
        [*command, f"run_dir={run_dir}"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("device", "unbroken", "chains", "kills"),
    [
        pytest.param("cpu", 0, 1, 2, marks=pytest.mark.slow),
        pytest.param("cuda", 2, 5, 4, marks=pytest.mark.gpu),
    ],
)
def test_kills_in_steps_and_saves_of_jobs_that_share_a_device_change_no_bit(
    tiny_overrides: list[str], tmp_path: Path, device: str, unbroken: int, chains: int, kills: int
) -> None:
    overrides = [*tiny_overrides, f"device={device}", *(["model.hidden=256"] if device == "cuda" else [])]
    alone = tmp_path / "alone"
    status, said = job(alone, overrides)
    assert status == 0, said
    print(*re.findall(r".*recurrence H.*", said), sep="\n")

    def beside(number: int) -> Path:
        status, said = job(tmp_path / f"beside{number}", overrides)
        assert status == 0, said
        return tmp_path / f"beside{number}"

    def chain(number: int) -> Path:
        draw, folder = random.Random(number), tmp_path / f"chain{number}"
        for kill in range(kills):
            phase = ("step", "save")[(number + kill) % 2]
            status, said = job(folder, overrides, phase, draw.randint(4, 8), draw.random())
            assert status == -9, said
            print(*re.findall("killed in .*", said))
        status, said = job(folder, overrides)
        assert status == 0 and "resumed" in said, said
        return folder

    with ThreadPoolExecutor(unbroken + chains) as jobs:  # all at once, on the one device
        folders = [*jobs.map(beside, range(unbroken)), *jobs.map(chain, range(chains))]
    assert len(losses(alone)) == 45
    for folder in folders:
        assert losses(folder) == losses(alone), folder
        assert same_bits(folder, alone), folder
        assert not list(folder.glob(".*.partial")), folder


@pytest.mark.gpu
def test_a_gpu_that_fails_in_a_step_ends_the_job_with_reason_and_the_run_goes_on(
    tiny_overrides: list[str], tmp_path: Path
) -> None:
    whole, lost = tmp_path / "whole", tmp_path / "lost"
    overrides = [*tiny_overrides, "device=cuda", "checkpoint.every_steps=1", "train.epochs=3"]

    def run(fault: str, folder: Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(SUPPORT / "rank_job.py"), fault, "0", "5", *overrides, f"run_dir={folder}"]
        return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)

    ended = run("lose", lost)
    assert ended.returncode == 2, ended.stdout
    assert re.search(r"ds2: cuda:0 on \S+ was lost at step 5, .*: .*\. What was saved stays", ended.stdout)
    assert load(lost / "trainer.safetensors")[1]["progress"]["step"] == 5
    for folder in (lost, whole):
        again = run("none", folder)
        assert again.returncode == 0, again.stdout
    assert losses(lost) == losses(whole) and same_bits(lost, whole)


@pytest.mark.gpu
def test_a_gpu_that_fails_one_of_two_ranks_ends_both_with_rank_and_reason(
    tiny_overrides: list[str], tmp_path: Path
) -> None:
    run = torchrun(2, "rank_job.py", "lose", "1", "5", *tiny_overrides, "device=cuda:0", "comm.timeout_s=600")
    assert run.returncode != 0
    told = r"ds2: rank 1 on \S+ failed at step 5, .*: cuda:0 on \S+ was lost at step 5, .*: .*\. What was saved stays"
    assert re.search(told, run.stdout), run.stdout
