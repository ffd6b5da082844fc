"""Forced alignment of labels to log-probs on the GPU: a batch in one launch, one block for each utterance.

Shape letters: T frames, B utterances, V labels (0 is the blank), L labels of the longest target.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds2_ops.checks import check_read, why_no_plan
from ds2_ops.jit import runtime
from ds2_ops.jit.launch import Launch, device_index, names, parameters, run, translation_unit

_THREADS = 256
# struct Targets of csrc/ctc/align.cuh
_TARGETS = parameters(
    """const float* log_probs, const long long* frames, const int* labels, const int* sizes, unsigned char* moves,
    float* log_prob, int* spans, float* peaks, int length, int batch, int vocabulary, int longest"""
)
_SOURCE = translation_unit(
    "ctc/align.cuh",
    _TARGETS,
    f"    ds2::align_utterance(ds2::Targets{{{names(_TARGETS)}}}, reinterpret_cast<float*>(shared));\n",
    alignment=16,
    threads=("ALIGN_THREADS", _THREADS),
)


@dataclass(frozen=True)
class Aligned:
    """Best paths, on the GPU; values past a target's labels are not defined."""

    log_prob: Tensor  # (B,) float32 of the whole path; -inf: fewer frames than the labels need
    spans: Tensor  # (B, 2, L) int32: the first frame of each label, and the frame after its last
    peaks: Tensor  # (B, L) float32: log-prob of each label at its most certain frame


def plan(longest: int, smem_bytes_per_block: int, utterances: int = 1) -> Launch:
    """Choose the launch for targets of up to `longest` labels.

    Raises:
        ValueError: the scores of a frame do not fit into a block's shared memory.
    """
    smem_bytes = 2 * (2 * longest + 1) * 4
    if smem_bytes > smem_bytes_per_block:
        raise ValueError(
            f"{longest} labels need {smem_bytes} B of shared memory, a block has {smem_bytes_per_block}: cut the text"
        )
    return Launch(_SOURCE, _THREADS, grid=utterances, smem_bytes=smem_bytes)


def why_not(longest: int, device: torch.device) -> str | None:
    """Say why the kernel cannot align targets of up to `longest` labels to log-probs on a device; None if it can."""
    return why_no_plan(device, lambda smem_bytes: plan(longest, smem_bytes))


def align(log_probs: Tensor, frames: Tensor, labels: Tensor, sizes: Tensor) -> Aligned:
    """Find the most probable path of each utterance that collapses to its target, on torch's current stream.

    Args:
        log_probs: (T, B, V) float32 contiguous, on the GPU.
        frames: (B,) int64 on the GPU, 1 to T.
        labels: (B, L) int32 on the GPU, contiguous.
        sizes: (B,) int32 on the GPU, labels of each target.

    Raises:
        ValueError: as ``plan``, or a device that is not allowed.
        TypeError: a dtype that is not allowed.
        RuntimeError: the driver's or compiler's error, with shape and GPU.
    """
    check_read("log_probs", log_probs, torch.float32, log_probs)
    check_read("frames", frames, torch.int64, log_probs)
    for name, tensor in (("labels", labels), ("sizes", sizes)):
        check_read(name, tensor, torch.int32, log_probs)
    length, batch, vocabulary = log_probs.shape
    longest, device = labels.shape[1], log_probs.device
    launch = plan(longest, runtime.smem_bytes_per_block(device_index(device)), batch)
    moves = torch.empty(batch, length, 2 * longest + 1, dtype=torch.uint8, device=device)
    log_prob = torch.empty(batch, dtype=torch.float32, device=device)
    spans = torch.zeros(batch, 2, longest, dtype=torch.int32, device=device)
    peaks = torch.zeros(batch, longest, dtype=torch.float32, device=device)
    arguments: list[Any] = [log_probs, frames, labels, sizes, moves, log_prob, spans, peaks]
    arguments += [length, batch, vocabulary, longest]
    run(launch, arguments, lambda: f"alignment, (T, B, V) = {tuple(log_probs.shape)}, {longest} labels", device)
    return Aligned(log_prob, spans, peaks)
