"""One launch that sums over the GPUs of a host."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from ds2_ops.jit.launch import Launch, run
from ds2_ops.jit.source import Source, parameters, translation_unit

THREADS = 256
MOST = 8192  # numbers of a sum
MOST_RANKS = 8
_MOST_CHUNKS = 64  # each is a load of one thread
_COUNTS_BYTES = 4 * (MOST // THREADS)


def mailbox_bytes(ranks: int) -> int:
    """What a rank's mailbox takes: a count a block, and two halves of 16 bytes a number of each rank."""
    return _COUNTS_BYTES + 2 * ranks * MOST * 16


class PeerSum:
    """Sums over ranks, which all make the same calls in the same order, each on one stream at a time.

    Args:
        rank: this process's.
        mailboxes: addresses of all ranks' mailboxes as this process sees them, `mailbox_bytes` of zeros each.
    """

    def __init__(self, rank: int, mailboxes: Sequence[int]) -> None:
        self._launch = functools.partial(Launch, _source(len(mailboxes)), THREADS)
        numbers = [address + _COUNTS_BYTES for address in mailboxes]
        self._held = [mailboxes[rank], rank, MOST, numbers[rank], *numbers]

    @staticmethod
    def takes(chunks: Tensor) -> bool:
        """Whether chunks (K, ...) are such that they can be summed: float64, few, of up to `MOST` numbers."""
        return chunks.dtype == torch.float64 and 0 < len(chunks) <= _MOST_CHUNKS and chunks[0].numel() <= MOST

    def __call__(self, chunks: Tensor, own: Tensor | None = None) -> Tensor:
        """Add up chunks, then the sums of all ranks in order of rank.

        On torch's current stream; can be captured in a CUDA graph. A kernel waits for those of all other ranks.

        Args:
            chunks: (K, ...) contiguous, for which `takes` holds; the first is overwritten with the result.
            own: (...) float32, contiguous; is given the sum of this rank's chunks.

        Returns:
            The first chunk, (1, ...).

        Raises:
            RuntimeError: the driver's or compiler's error, with size and GPU.
        """
        count = chunks[0].numel()
        if count:
            what = lambda: f"the sum over ranks of {count} numbers"  # noqa: E731
            launch = self._launch(grid=-(-count // THREADS))
            run(launch, [*self._held, chunks, len(chunks), count, own], what, chunks.device)
        return chunks[:1]


@functools.cache
def _source(ranks: int) -> Source:
    of = ["mailbox", *(f"of{rank}" for rank in range(ranks))]
    pointers = ", ".join(f"void* {name}" for name in of)
    mailbox, *others = (f"reinterpret_cast<unsigned long long*>({name})" for name in of)
    return translation_unit(
        "peers/sum.cuh",
        parameters(f"unsigned* sums, int rank, int most, {pointers}, double* chunks, int rows, int count, float* own"),
        f"""    const ds2::Mailboxes<{ranks}> mailboxes{{sums, rank, most, {mailbox}, {{{", ".join(others)}}}}};
    ds2::sum_over_peers(mailboxes, chunks, rows, count, own);
""",
        ahead=f'static_assert(ds2::PEER_THREADS == {THREADS}, "sum.py and sum.cuh disagree");\n',
        launch_bounds=str(THREADS),
    )
