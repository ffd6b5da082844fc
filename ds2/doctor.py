"""`ds2 doctor`: what this machine has, in the words a bug report needs."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil

import torch

from ds2 import __version__
from ds2.commands.compose import config_dir
from ds2.system.machine import git_commit

_PACKAGES = ("torch", "numpy", "soundfile", "soxr", "hydra-core", "safetensors", "tensorboard", "triton", "cuda-core",
             "nvidia-cuda-nvrtc", "mpi4py")  # fmt: skip


def run() -> int:
    """Print versions, devices and the recurrent backends that work here; always 0."""
    print(f"ds2 {__version__} (commit {git_commit()}), Python {platform.python_version()}, {platform.platform()}")
    for name in _PACKAGES:
        try:
            print(f"  {name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            print(f"  {name} not installed")
    print(f"cores: {os.cpu_count()}, torch threads: {torch.get_num_threads()}")
    print(f"disk: {shutil.disk_usage('.').free / 2**30:.1f} GiB free in the working folder")
    print(f"config tree: {config_dir()}")
    if not torch.cuda.is_available():
        print("GPU: none that torch sees; training runs on the CPU")
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        print(
            f"GPU {index}: {facts.name}, capability {facts.major}.{facts.minor}, {facts.multi_processor_count} SMs, "
            f"{facts.total_memory / 2**30:.0f} GiB"
        )
    return 0
