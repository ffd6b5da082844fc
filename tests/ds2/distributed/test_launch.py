"""Ranks: the single process that never loads MPI, what is refused and why, and the promises kept on 2 and 4 ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.launch import mpirun, torchrun
from support.op_cases import default_dtype

from ds2.config.device import resolve_device
from ds2.config.schema import CommConfig, ConfigError
from ds2.data.loader import rank_part
from ds2.distributed.communicator import Communicator
from ds2.distributed.launch import connect
from ds2.distributed.launcher import Launched, launched

LAUNCHERS = ("OMPI_COMM_WORLD_", "PMI_", "PMIX_", "MV2_", "SLURM_", "RANK", "WORLD_SIZE", "MASTER_", "TORCHELASTIC_")
ADDRESS = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", **ADDRESS, "TORCHELASTIC_RUN_ID": "none"}


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(LAUNCHERS):
            monkeypatch.delenv(name)


def set_all(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


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


@pytest.mark.parametrize(
    ("variables", "by", "world", "rank"),
    [
        ({}, "", 1, 0),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3"}, "mpi", 4, 3),
        ({"PMI_SIZE": "2", "PMI_RANK": "1"}, "mpi", 2, 1),
        ({"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "5"}, "mpi", 8, 5),
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, "", 1, 0),  # a batch script before srun: one process
        (TORCHRUN, "torchrun", 2, 1),
        ({"RANK": "1", "WORLD_SIZE": "2", **ADDRESS}, "torchrun", 2, 1),  # who sets what torchrun sets
        ({"RANK": "0", "WORLD_SIZE": "1", **ADDRESS}, "torchrun", 1, 0),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "", 1, 0),  # nobody to meet
        ({"RANK": "2", "WORLD_SIZE": "2", **ADDRESS}, "", 1, 0),
        ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0", **TORCHRUN}, "torchrun", 2, 1),  # srun torchrun ...
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3", "RANK": "3", "WORLD_SIZE": "4", **ADDRESS},
         "mpi", 4, 3),  # a script that sets torch's variables from MPI's
    ],
)  # fmt: skip
def test_launchers_are_known_by_their_variables(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], by: str, world: int, rank: int
) -> None:
    set_all(monkeypatch, variables)
    assert launched() == Launched(by, world, rank)


@pytest.mark.parametrize(
    ("variables", "backend", "told"),
    [
        ({"RANK": "1"}, "auto", r"RANK='1', no WORLD_SIZE, no MASTER_ADDR.*all four.*torchrun --nproc.*unset RANK,"),
        ({"WORLD_SIZE": "2"}, "gloo", r"no RANK, WORLD_SIZE='2'.*torchrun --nproc-per-node N .*unset WORLD_SIZE,"),
        ({"RANK": "2", "WORLD_SIZE": "2", **ADDRESS}, "auto", r"RANK below WORLD_SIZE"),
        ({"RANK": "1", "WORLD_SIZE": "two", **ADDRESS}, "nccl", r"WORLD_SIZE='two'"),
        ({"RANK": "0", "WORLD_SIZE": "²", **ADDRESS}, "auto", r"WORLD_SIZE='²'"),
        ({"RANK": "0", "WORLD_SIZE": "9" * 5000, **ADDRESS}, "auto", r"WORLD_SIZE='999"),
        (TORCHRUN, "mpi", r"comm=mpi, but torchrun started the 2 ranks.*mpirun -n 2 ds2.*comm=auto"),
        (TORCHRUN, "single", r"comm=single, but the launcher started 2 ranks.*without mpirun, srun or torchrun"),
        ({}, "gloo", r"comm=gloo is for ranks that torchrun started.*torchrun --nproc-per-node N.*comm=auto"),
    ],
)
def test_a_wrong_start_is_refused_with_the_right_one(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], backend: str, told: str
) -> None:
    set_all(monkeypatch, variables)
    with pytest.raises(ConfigError, match=told), connect(CommConfig(backend), "cpu"):
        pass


@pytest.mark.parametrize("missing", ["is_available", "is_gloo_available"])
def test_a_torch_without_gloo_is_refused_before_any_rank_is_met(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    set_all(monkeypatch, TORCHRUN)
    monkeypatch.setattr(torch.distributed, missing, lambda: False)
    with pytest.raises(ConfigError, match=r"built without.*Gloo.*mpirun -n N ds2"), connect(CommConfig(), "cpu"):
        pass


def test_an_address_alone_makes_nobody_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, ADDRESS)
    with connect(CommConfig(), "cpu") as comm:
        assert comm.name == "single"
    set_all(monkeypatch, {"RANK": "1"})  # a wrong start is refused with this way out
    with connect(CommConfig("single"), "cpu") as comm:
        assert comm.name == "single"


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 8])
def test_a_batch_is_dealt_whole_and_ranks_without_a_part_repeat_one(size: int) -> None:
    batch = list(range(10, 10 + size))
    parts = [rank_part(batch, rank, 4) for rank in range(4)]
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


def test_other_default_tensors_are_refused() -> None:
    with default_dtype(torch.float64), pytest.raises(ConfigError, match=r"are torch\.float64 on cpu, ds2 needs"):
        resolve_device("cpu")
    with torch.device("meta"), pytest.raises(ConfigError, match=r"are torch\.float32 on meta, ds2 needs"):
        resolve_device("cpu")


def test_the_single_process_has_no_sums_to_start() -> None:
    with pytest.raises(NotImplementedError):
        Communicator(torch.device("cpu")).start_sum(torch.zeros(1))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_sum_in_order_and_agree(ranks: int, tmp_path: Path) -> None:
    run = mpirun(ranks, "ranks_check.py", "mpi", str(tmp_path))
    assert run.returncode == 0, run.stdout
    assert f"{ranks} ranks agree" in run.stdout


@pytest.mark.slow
def test_ranks_of_torchrun_sum_in_order_and_agree(tmp_path: Path) -> None:
    run = torchrun(3, "ranks_check.py", "gloo", str(tmp_path))
    assert run.returncode == 0, run.stdout
    assert "3 ranks agree" in run.stdout
