"""Ranks: the single process that never loads MPI, what is refused and why, and the promises kept on 2 and 4 ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.launch import mpirun

from ds2.config.device import resolve_device
from ds2.config.schema import CommConfig, ConfigError
from ds2.data.batching import deal
from ds2.distributed.communicator import Communicator
from ds2.distributed.launch import connect, launched_rank, launched_world

LAUNCHERS = ("OMPI_COMM_WORLD_", "PMI_", "PMIX_", "MV2_", "SLURM_")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(LAUNCHERS):
            monkeypatch.delenv(name)


def test_a_single_process_is_its_own_world() -> None:
    with connect(CommConfig(), "cpu") as comm:
        assert (comm.name, comm.rank, comm.world) == ("single", 0, 1)
        tensor = torch.tensor([1.0, 2.0])
        comm.sum_(tensor)
        comm.broadcast_(tensor)
        assert tensor.tolist() == [1.0, 2.0]
        assert comm.allgather("x") == ["x"] and comm.broadcast("y") == "y"
        assert torch.equal(comm.broadcast_tensors({"a": tensor})["a"], tensor)
        with comm.in_turn():
            pass


def test_training_alone_never_imports_mpi() -> None:
    code = (
        "import sys, ds2.training.loop, ds2.training.trainer\nfrom ds2.config.schema import CommConfig\n"
        "from ds2.distributed.launch import connect\n"
        "with connect(CommConfig(), 'cpu'): pass\nsys.exit('mpi4py' in sys.modules)"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0


@pytest.mark.parametrize(
    ("variables", "world", "rank"),
    [
        ({}, 1, 0),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3"}, 4, 3),
        ({"PMI_SIZE": "2", "PMI_RANK": "1"}, 2, 1),
        ({"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "5"}, 8, 5),
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, 1, 0),  # a batch script before srun: one process
    ],
)
def test_launchers_are_known_by_their_variables(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], world: int, rank: int
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert (launched_world(), launched_rank()) == (world, rank)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 8])
def test_a_batch_is_dealt_whole_and_ranks_without_a_part_repeat_one(size: int) -> None:
    batch = list(range(10, 10 + size))
    parts = [deal(batch, rank, 4) for rank in range(4)]
    assert sorted(index for part in parts[:size] for index in part) == batch
    assert all(part == [batch[-1]] for part in parts[size:])


def test_single_under_a_launcher_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match=r"launcher started 4 ranks.*comm=auto"), connect(CommConfig("single"), "cpu"):
        pass


def test_an_mpi_that_sees_another_world_is_refused() -> None:
    code = (
        "from ds2.config.schema import CommConfig, ConfigError\nfrom ds2.distributed.launch import connect\n"
        "try:\n    with connect(CommConfig('mpi'), 'cpu'): print('joined')\nexcept ConfigError as error: print(error)"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**environment, "SLURM_STEP_NUM_TASKS": "2"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "started 2 ranks" in run.stdout and "sees 1" in run.stdout and "mpirun beside" in run.stdout


def test_devices_go_round_by_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_device("cpu", 3) == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    names = [str(resolve_device("auto", local)) for local in range(3)]
    assert names == ["cuda:0", "cuda:1", "cuda:0"] == [str(device) for device in chosen]
    with pytest.raises(ConfigError, match="torch sees 2 GPUs"):
        resolve_device("cuda:2")
    with pytest.raises(ConfigError, match="not one of auto"):
        resolve_device("gpu")


def test_the_single_process_has_no_sums_to_start() -> None:
    with pytest.raises(NotImplementedError):
        Communicator(torch.device("cpu")).start_sum(torch.zeros(1))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_sum_in_order_and_agree(ranks: int, tmp_path: Path) -> None:
    run = mpirun(ranks, "ranks_check.py", str(tmp_path))
    assert run.returncode == 0, run.stdout
    assert f"{ranks} ranks agree" in run.stdout
