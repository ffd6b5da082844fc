"""`ds2 doctor`: the versions, devices and kernels of this machine, for bug reports."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from collections.abc import Mapping, Sequence

import torch
from ds2_ops.jit.build import cache_dir, sources_digest
from ds2_ops.recurrent import calibrate
from ds2_ops.recurrent.plan.choose import choose, hopper, largest_grid_hidden
from ds2_ops.recurrent.plan.problem import Problem

from ds2.commands.common import Parser
from ds2.commands.compose import config_dir
from ds2.system.machine import VERSION, git_commit

_PACKAGES = ("torch", "numpy", "soundfile", "soxr", "hydra-core", "safetensors", "tensorboard", "triton", "cuda-core",
             "nvidia-cuda-nvrtc", "mpi4py")  # fmt: skip
_OPEN_MPI_AS_ROOT = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")


def make_parser() -> Parser:
    """Return the parser of `ds2 doctor`."""
    parser = Parser(prog="ds2 doctor", description="versions, devices, disk: what a bug report needs")
    parser.add_argument("--forget-tiles", action="store_true", help="remove what train.calibrate has measured here")
    return parser


def run(arguments: Sequence[str]) -> int:
    """Print versions, devices and calibrated kernels; always 0."""
    if make_parser().parse_args(arguments).forget_tiles:
        print(f"calibrated kernels: {calibrate.forget()} records removed from {cache_dir()}")
        return 0
    print(f"ds2 {VERSION} (commit {git_commit()}), Python {platform.python_version()}, {platform.platform()}")
    for name in _PACKAGES:
        try:
            print(f"  {name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            print(f"  {name} not installed")
    print(f"cores: {os.cpu_count()}, torch threads: {torch.get_num_threads()}")
    print(f"disk: {shutil.disk_usage('.').free / 2**30:.1f} GiB free in the working folder")
    print(f"config tree: {config_dir()}")
    print(f"mpirun: {mpirun_facts(os.geteuid(), os.environ)}")
    if not torch.cuda.is_available():
        print("GPU: none that torch sees; training runs on the CPU")
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        print(
            f"GPU {index}: {facts.name}, capability {facts.major}.{facts.minor}, {facts.multi_processor_count} SMs, "
            f"{facts.total_memory / 2**30:.0f} GiB"
        )
        print(f"  recurrent layers: {recurrence_facts(index)}")
    print(f"kernels: {cache_dir()}, sources {_sources()}")
    for path, record in calibrate.records():
        stale = "" if record["sources"] == _sources() else ", of other sources"
        print(f"calibrated kernels: {record['gpu']}, CUDA {record['driver']}{stale} ({path.name})")
        for problem, choice in record["choices"].items():
            step_us = choice["us"][choice["name"]]
            print(f"  {problem}: {choice['name']}, {step_us:.2f} us per step, fastest of {choice['most']}")
    return 0


def recurrence_facts(index: int) -> str:
    """Return which persistent kernels run the recurrence on a GPU, up to which size, and how they are chosen.

    Where none can, return why torch's layers run.

    Args:
        index: number of the CUDA device.
    """
    try:
        facts = calibrate.device_facts(index)
        choose(Problem(1, 64, "bfloat16", "relu", backward=False), facts)
        relu, lstm, gru = (
            largest_grid_hidden(Problem(1, 1, "bfloat16", cell, backward=False), facts, facts.sms)
            for cell in ("relu", "lstm", "gru_after")
        )
    except (RuntimeError, ValueError) as error:
        return f"matrix products and cuDNN, as {error}"
    if hopper(facts):
        design, times = "kernels of clusters", "measured on an H200"
    else:
        design = "portable kernels"
        times = f"measured on an H100, for this clock {1 / facts.processor.clock:.2f} x as long"
    return (
        f"{design}, in bfloat16 up to {relu} hidden units, LSTM {lstm}, GRU {gru}; larger ones by matrix products; "
        f"chosen by times {times}"
    )


def mpirun_facts(user_id: int, environment: Mapping[str, str]) -> str:
    """Return where mpirun is, and what keeps this user from starting it.

    Args:
        user_id: of the user, 0 for root.
        environment: the variables, of which PATH and those of Open MPI are read.
    """
    path = environment.get("PATH", "")
    mpirun = shutil.which("mpirun", path=path)
    if mpirun is None:
        return "not on PATH; torchrun needs none"
    missing = [name for name in _OPEN_MPI_AS_ROOT if name not in environment]
    if user_id == 0 and missing and shutil.which("ompi_info", path=path):
        return (
            f"{mpirun}; Open MPI refuses to start it as root unless {' and '.join(_OPEN_MPI_AS_ROOT)} are 1: export "
            "them where root can do no harm, as in a container, or start torchrun, or another user"
        )
    return mpirun


def _sources() -> str:
    try:
        return sources_digest()
    except RuntimeError as error:
        return f"unknown: {error}"
