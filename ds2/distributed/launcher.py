"""Which launcher started this process, and as which rank: read from the environment, before anything is loaded."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ds2.config.schema import ConfigError

_MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
_MPI_RANKS = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK", "SLURM_PROCID")
_TORCH = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_YIELD_TO_RANK_0_S = 1.0  # an error that all ranks meet is told once, by rank 0: its exit ends the others in this time
_RUN_ID = "TORCHELASTIC_RUN_ID"  # torchrun alone sets it, other tools set the four above too


@dataclass(frozen=True)
class Launched:
    """What the environment says.

    Attributes:
        by: mpi (mpirun, mpiexec or srun), torchrun, or '' for a process that was started by itself.
        world, rank: the number of ranks, and this one's.
    """

    by: str = ""
    world: int = 1
    rank: int = 0


def launched() -> Launched:
    """Who started this process. Of two the inner one counts: `srun torchrun ...` has the ranks of torchrun."""
    world = _number(_MPI_SIZES) or 1
    by_mpi = Launched("mpi", world, _number(_MPI_RANKS) or 0) if world > 1 else Launched()
    if _torch_complete() and (not by_mpi.by or _RUN_ID in os.environ):
        return Launched("torchrun", int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"]))
    return by_mpi


def check_variables() -> None:
    """Refuse half of a rank: a process that was named one, but cannot find the others.

    Raises:
        ConfigError: RANK or WORLD_SIZE is set as torchrun does, but not all that belongs to them, and MPI says nothing.
    """
    named = [name for name in _TORCH[:2] if name in os.environ]  # an address alone makes nobody a rank
    if not named or _torch_complete() or launched().by:
        return
    given = ", ".join(f"{name}={os.environ[name]!r}" if name in os.environ else f"no {name}" for name in _TORCH)
    raise ConfigError(
        f"the environment has {given}: a rank needs all four, with RANK below WORLD_SIZE, as torchrun sets them. For N "
        'ranks start torchrun --nproc-per-node N "$(which ds2)" ... or mpirun -n N ds2 ...; for one process '
        f"unset {' '.join(named)}, or say comm=single"
    )


def yield_to_rank_0() -> None:
    """Wait, before telling of an error, for rank 0 to tell of the same one: its exit then ends this rank in silence."""
    if launched().rank != 0:
        time.sleep(_YIELD_TO_RANK_0_S)


def _torch_complete() -> bool:
    world, rank, port = (_number([name]) for name in ("WORLD_SIZE", "RANK", "MASTER_PORT"))
    return bool(world is not None and rank is not None and rank < world and port and os.environ.get("MASTER_ADDR"))


def _number(names: Sequence[str]) -> int | None:
    """The first of the variables that holds a number."""
    return next((int(value) for name in names if (value := os.environ.get(name, "")).isdigit()), None)
