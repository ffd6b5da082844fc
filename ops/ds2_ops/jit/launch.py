"""What the kernels of decoding share: one block an utterance, no waits between blocks, any GPU since compute 8.0."""

import ctypes
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds2_ops.jit import runtime

LEAST_CAPABILITY = (8, 0)  # for reductions over a warp


@dataclass(frozen=True)
class Launch:
    """A kernel and how it is launched."""

    source: str
    threads: int
    smem_bytes: int
    table_columns: int = 0  # of a beam search: global memory for scores, doubles a prefix; 0: they are in shared memory


def parameter_names(parameters: str) -> str:
    """Return the names of a C parameter list, as arguments."""
    return ", ".join(re.findall(r"(\w+)(?:,|$)", parameters))


def why_no_device(device: torch.device) -> str | None:
    """Say why no decoding kernel runs on a device; None if they do."""
    if device.type != "cuda":
        return f"the log-probs are on {device}, these kernels need a CUDA GPU"
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        return f"the GPU has compute capability {capability[0]}.{capability[1]}, these kernels need 8.0 or later"
    return None


def device_index(device: torch.device) -> int:
    """Return the number of a CUDA device; the current one where it has none."""
    return torch.cuda.current_device() if device.index is None else device.index


def launch_kernel(what: str, launch: Launch, arguments: Sequence[Any], blocks: int, device: torch.device) -> None:
    """Build, load and launch on torch's current stream; errors say `what` failed and on which GPU."""
    index = device_index(device)
    with torch.cuda.device(index):
        capability = torch.cuda.get_device_capability(index)
        arch = "sm_90a" if capability == (9, 0) else "sm_{}{}".format(*capability)
        try:
            runtime.launch(
                runtime.load(launch.source, index, arch),
                [_argument(value) for value in arguments],
                grid=blocks,
                block=launch.threads,
                smem_bytes=launch.smem_bytes,
                stream=torch.cuda.current_stream(index).cuda_stream,
            )
        except RuntimeError as error:
            raise RuntimeError(f"{what} failed on {torch.cuda.get_device_name(index)}: {error}") from error


def _argument(value: Tensor | float | None) -> Any:
    if value is None:
        return 0
    if isinstance(value, Tensor):
        return value.data_ptr()
    return ctypes.c_int(value) if isinstance(value, int) else ctypes.c_double(value)
