"""Sums over an MPI that reads memory of GPUs."""

from __future__ import annotations

import pytest
from support.launch import mpirun


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_mpi_gets_the_addresses_of_gpu_memory_where_it_reads_it(ranks: int) -> None:
    run = mpirun(ranks, "device_memory_check.py")
    assert run.returncode == 0, run.stdout
    assert f"{ranks} ranks agree; gradients from GPU memory over mpi" in run.stdout
