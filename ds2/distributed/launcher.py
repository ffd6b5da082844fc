"""The launcher and the rank of this process, from environment variables, without loading torch or MPI."""

import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ds2.config.schema import ConfigError

_MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
_MPI_RANKS = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK", "SLURM_PROCID")
_TORCH = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_YIELD_TO_RANK_0_S = 1.0  # in this time the exit of rank 0 ends the other ranks
_NUMBER = re.compile(r"[0-9]{1,9}")
_RUN_ID = "TORCHELASTIC_RUN_ID"  # only torchrun sets it; other tools set the four above too


@dataclass(frozen=True)
class Launched:
    """How this process was launched."""

    by: str = ""  # mpi (mpirun, mpiexec or srun), torchrun, or '' without a launcher
    world: int = 1  # ranks
    rank: int = 0


def launched() -> Launched:
    """Return the launcher of this process. With two, the inner one counts: `srun torchrun ...` has torchrun's ranks."""
    world = _number(_MPI_SIZES) or 1
    by_mpi = Launched("mpi", world, _number(_MPI_RANKS) or 0) if world > 1 else Launched()
    if _torch_complete() and (not by_mpi.by or _RUN_ID in os.environ):
        return Launched("torchrun", int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"]))
    return by_mpi


def check_variables() -> None:
    """Raise ConfigError if RANK or WORLD_SIZE is set without all four variables, and MPI did not start this process."""
    named = [name for name in _TORCH[:2] if name in os.environ]  # an address alone makes no rank
    if not named or _torch_complete() or launched().by:
        return
    variables = ", ".join(f"{name}={os.environ[name]!r}" if name in os.environ else f"no {name}" for name in _TORCH)
    raise ConfigError(
        f"the environment has {variables}: a rank needs all four, with RANK below WORLD_SIZE, as torchrun sets them. "
        'For N ranks start torchrun --nproc-per-node N "$(which ds2)" ... or mpirun -n N ds2 ...; for one process '
        f"unset {' '.join(named)}, or set comm=single"
    )


def yield_to_rank_0() -> None:
    """On other ranks, wait before an error is printed: if rank 0 has the same error, its exit ends this rank first."""
    if launched().rank != 0:
        time.sleep(_YIELD_TO_RANK_0_S)


def _torch_complete() -> bool:
    world, rank, port = (_number([name]) for name in ("WORLD_SIZE", "RANK", "MASTER_PORT"))
    return bool(world is not None and rank is not None and rank < world and port and os.environ.get("MASTER_ADDR"))


def _number(names: Sequence[str]) -> int | None:
    """Return the first of the variables that holds a number that a rank or a port can have."""
    return next((int(value) for name in names if _NUMBER.fullmatch(value := os.environ.get(name, ""))), None)
