"""Small sums between GPUs of one host, over mailboxes in one another's memory; who cannot, sums over NCCL."""

from __future__ import annotations

import logging

from ds2_ops.peers.memory import Mailbox
from ds2_ops.peers.sum import MOST_RANKS, PeerSum, mailbox_bytes
from torch import Tensor

from ds2.distributed.communicator import Communicator

log = logging.getLogger(__name__)


class Peers:
    """Mailboxes of all ranks, mapped by each: either all ranks have them or none. All ranks call what is here together.

    Args:
        comm: the ranks; their devices are GPUs.
    """

    def __init__(self, comm: Communicator) -> None:
        self._mailbox: Mailbox | None = None
        self._sum: PeerSum | None = None
        reason = self._open(comm, comm.device.index or 0)
        if reason:
            self.close()
            if comm.rank == 0:
                log.info("statistics of batch norm are summed by NCCL: %s", reason)

    def _open(self, comm: Communicator, device_index: int) -> str:
        """Map all mailboxes; returns why some rank cannot."""
        hosts = len(set(comm.allgather(comm.host)))
        if hosts > 1 or comm.world > MOST_RANKS:
            return f"there are {comm.world} ranks on {hosts} hosts"
        reason = ""
        try:
            self._mailbox = Mailbox(mailbox_bytes(comm.world), device_index)
        except RuntimeError as error:
            reason = f"rank {comm.rank}: {error}"
        handles = comm.allgather(self._mailbox.handle if self._mailbox else b"")
        addresses = []
        if self._mailbox and all(handles):
            try:
                own = self._mailbox.address
                addresses = [own if r == comm.rank else self._mailbox.open(h) for r, h in enumerate(handles)]
            except RuntimeError as error:
                reason = f"rank {comm.rank}: {error}"
        reason = next((text for text in comm.allgather(reason) if text), "")
        if not reason:
            self._sum = PeerSum(comm.rank, addresses)
        return reason

    def sum_chunks(self, chunks: Tensor, own: Tensor | None = None) -> Tensor | None:
        """As `Communicator.sum_chunks`, of chunks on the GPU; None if it cannot.

        A rank that has too many chunks adds them up first, and then meets the others here with one.
        """
        return self._sum(chunks, own) if self._sum is not None and self._sum.takes(chunks) else None

    def close(self) -> None:
        """Unmap what others own."""
        if self._mailbox:
            self._mailbox.close()
        self._mailbox = self._sum = None
