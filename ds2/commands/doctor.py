"""`ds2 doctor`: the versions, devices and kernels of this machine, for bug reports."""

import importlib.metadata
import os
import platform
import shutil
from collections.abc import Mapping, Sequence

import torch
from ds2_ops import classifier, convolution, optimizer, row_convolution, spectrum
from ds2_ops.batch_norm import op as batch_norm
from ds2_ops.ctc import align, beam, loss
from ds2_ops.jit.build import cache_dir, sources_digest
from ds2_ops.recurrent import calibrate
from ds2_ops.recurrent.layer import why_no_projection, why_not_concurrent
from ds2_ops.recurrent.plan.choose import choose, hopper, largest_grid_hidden
from ds2_ops.recurrent.plan.model import recorded_gpus
from ds2_ops.recurrent.plan.problem import Problem

from ds2.commands.common import Parser
from ds2.commands.compose import config_dir
from ds2.model.wavefront import LAYER_SMS
from ds2.system.machine import VERSION, git_commit

_PACKAGES = ("torch", "numpy", "soundfile", "soxr", "hydra-core", "safetensors", "tensorboard", "triton", "cuda-core",
             "nvidia-cuda-nvrtc", "mpi4py")  # fmt: skip
_OPEN_MPI_AS_ROOT = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")


def make_parser() -> Parser:
    parser = Parser(prog="ds2 doctor", description="versions, devices, disk: what a bug report needs")
    parser.add_argument("--forget-tiles", action="store_true", help="remove what was calibrated here")
    return parser


def run(arguments: Sequence[str]) -> None:
    """Print versions, devices and calibrated kernels."""
    if make_parser().parse_args(arguments).forget_tiles:
        print(f"calibrated kernels: {calibrate.forget()} records removed from {cache_dir()}")
        return
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
        for name, reason in why_no_kernels(torch.device("cuda", index)).items():
            print(f"  {name}: {'own kernels' if reason is None else f'library or PyTorch, as {reason}'}")
    print(f"kernels: {cache_dir()}, sources {_sources()}")
    for path, record in calibrate.records():
        stale = "" if record["sources"] == _sources() else ", of other sources"
        print(f"calibrated kernels: {record['gpu']}, CUDA {record['driver']}{stale} ({path.name})")
        if factors := record.get("factors"):
            print(f"  constants of the planner, relative to the recorded ones: {calibrate.listed(factors)}")
        for problem, choice in record["choices"].items():
            step_us = choice["us"][choice["name"]]
            print(f"  {problem}: {choice['name']}, {step_us:.2f} us per step, fastest of {choice['most']}")


def recurrence_facts(index: int) -> str:
    """Return which persistent kernels run the recurrence on a GPU, up to which size, and how they are chosen.

    Where none can, return why torch's layers run.
    """
    try:
        facts = calibrate.device_facts(index)
        choose(Problem(1, 64, "bfloat16", "relu", backward=False), facts)
        relu, lstm, gru = (
            largest_grid_hidden(Problem(1, 1, "bfloat16", cell, backward=False), facts, facts.sms)
            for cell in ("relu", "lstm", "gru_after")
        )
        recorded = facts.name in recorded_gpus()
        fitted = not recorded and bool(calibrate.saved_factors(index))
    except (RuntimeError, ValueError) as error:
        return f"matrix products and cuDNN, as {error}"
    if hopper(facts):
        design, times = "kernels of clusters", "measured on an H200"
    else:
        design = "portable kernels"
        times = f"measured on an H100, for this clock {1 / facts.processor.clock:.2f} x as long"
    if not recorded:
        times += ", and fitted to this GPU" if fitted else "; fitted to this GPU at first use, see DS2_OPS_CALIBRATE"
    return (
        f"{design}, in bfloat16 up to {relu} hidden units, LSTM {lstm}, GRU {gru}; larger ones by matrix products; "
        f"chosen by times {times}"
    )


def why_no_kernels(device: torch.device) -> dict[str, str | None]:
    """Say of each kernel but the recurrence's why a CUDA device cannot run it; None if it can.

    Each is asked for a case of the training recipes or of streams, in bfloat16 where that is its dtype: 32 channels,
    29 labels, windows of 20 ms, layers of 768 units.
    """

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    features, outputs, frames = empty(1, 1, 161, 8), empty(1, 32, 81, 8), empty(8, 1, 768)
    weight = torch.nn.Parameter(empty(8, dtype=torch.float32))
    sgd = torch.optim.SGD([weight], lr=torch.tensor(0.1), momentum=0.9, nesterov=True)
    return {
        "batch norm": batch_norm.why_not(torch.bfloat16, 32, device),
        "CTC loss": loss.why_not(200, 29, device),
        "alignment": align.why_not(200, device),
        "beam search": beam.why_not(32, 29, 1000, 3, device),
        "optimizer": optimizer.why_not(sgd),
        "first convolution": convolution.why_not(features, empty(32, 1, 41, 11), (2, 2)),
        "later convolutions": convolution.why_not(outputs, empty(32, 32, 21, 11), (2, 1)),
        "row convolution": row_convolution.why_not_triton(frames, empty(768, 20)),
        "spectrum in streams": spectrum.why_not(empty(320, dtype=torch.float32)),
        "projection in streams": why_no_projection(frames, empty(768, 768), empty(768)),
        "row convolution in streams": row_convolution.why_not_chain(frames, empty(1, 20, 768)),
        "layers side by side in streams": why_not_concurrent(1, 768, torch.bfloat16, device, "relu", LAYER_SMS),
        "classifier in streams": classifier.why_not(frames, empty(29, 768, dtype=torch.float32)),
    }


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
