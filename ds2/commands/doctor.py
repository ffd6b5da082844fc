"""`ds2 doctor`: what this machine has, in the words a bug report needs."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import shutil
from collections.abc import Sequence

import torch

from ds2 import __version__
from ds2.commands.compose import config_dir
from ds2.system.machine import git_commit

_PACKAGES = ("torch", "numpy", "soundfile", "soxr", "hydra-core", "safetensors", "tensorboard", "triton", "cuda-core",
             "nvidia-cuda-nvrtc", "mpi4py")  # fmt: skip


def run(arguments: Sequence[str]) -> int:
    """Print versions and devices; always 0."""
    argparse.ArgumentParser(
        prog="ds2 doctor", description="versions, devices, disk: what a bug report needs"
    ).parse_args(arguments)
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
