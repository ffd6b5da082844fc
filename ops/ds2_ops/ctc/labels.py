"""The labels of prefixes that a beam search on the GPU left: read out at the end, or kept from chunk to chunk.

Shape letters: T frames, B utterances, K beam, R best hypotheses, L labels at most, M taken away at once.
"""

from typing import Any

import torch
from torch import Tensor

from ds2_ops.ctc.beam import Found
from ds2_ops.jit.launch import Launch, run
from ds2_ops.jit.source import names, parameters, translation_unit

_TRACE_THREADS = 64
_SPELL_THREADS = 128

# struct Spelled of csrc/ctc/labels.cuh
_SPELLED = parameters(
    """const long long* frames, const int* places, const int2* grown, const double* halves, const long long* names,
    const short* before, const int* had, short* labels, int* counts, short* certain, int length, int rows, int beam,
    int room, int most"""
)
# of trace_entries in csrc/ctc/labels.cuh
_TRACE = parameters(
    """const long long* entries, const int2* grown, short* labels, int count, int utterances, int slots, int width"""
)


def trace(entries: Tensor, grown: Tensor) -> Tensor:
    """Follow entries to the root.

    Args:
        entries: (B, R) int64 contiguous, on the GPU: the last column of ``Found.names``.
        grown: of the same ``Found``.

    Returns:
        (B, R, T) int16 labels, the last label first and -1 after the first label; what follows is not defined.

    Raises:
        RuntimeError: as ``search``.
    """
    batch, count = entries.shape
    length, beam = grown.shape[1:3]
    labels = torch.empty(batch, count, length, dtype=torch.int16, device=entries.device)
    arguments: list[Any] = [entries, grown, labels, count, batch, length * beam, length]
    launch = Launch(TRACE, _TRACE_THREADS, grid=-(-batch * count // _TRACE_THREADS))
    run(launch, arguments, lambda: f"trace of {batch} x {count} hypotheses", entries.device)
    return labels


def spell(frames: Tensor, places: Tensor, found: Found, labels: Tensor, counts: Tensor, most: int) -> Tensor:
    """Put the labels that prefixes got in a chunk behind those that they had; what all share is taken away.

    Args:
        frames: (B,) int64 on the GPU, of the chunk.
        places: (B,) int32 on the GPU, rows of the tables.
        found: the tables after the chunk, and its `grown`.
        labels: (rows, K, L) int16, updated; there must be place for those of the chunk.
        counts: (rows, K) int32, updated.
        most: M, as many are taken away at once.

    Returns:
        (B, M + 2) int16: how many labels an utterance's prefixes shared, how many one has left at most, the shared.

    Raises:
        RuntimeError: as ``search``.
    """
    (batch, length, beam, _), (rows, _, room) = found.grown.shape, labels.shape
    at = places.long()
    certain = torch.empty(batch, most + 2, dtype=torch.int16, device=labels.device)
    arguments: list[Any] = [frames, places, found.grown, found.halves, found.names]
    arguments += [labels.index_select(0, at), counts.index_select(0, at), labels, counts, certain]
    arguments += [length, rows, beam, room, most]
    launch = Launch(SPELL, _SPELL_THREADS, grid=batch, smem_bytes=4 * (beam + most))
    run(launch, arguments, lambda: f"spelling of {batch} x {beam} prefixes", labels.device)
    return certain


SPELL = translation_unit(
    "ctc/labels.cuh",
    _SPELLED,
    f"""    extern __shared__ __align__(16) unsigned char shared[];
    const ds2::Spelled spelled{{{names(_SPELLED)}}};
    ds2::Speller<{_SPELL_THREADS}>(spelled, shared).run();
""",
)
TRACE = translation_unit("ctc/labels.cuh", _TRACE, f"    ds2::trace_entries({names(_TRACE)});\n")
