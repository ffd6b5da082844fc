"""Sums between GPUs of one host, over mailboxes in one another's memory; who cannot, sums over NCCL."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ds2_ops.peers.exchange import Exchange, exchange_bytes
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
        self._comm = comm
        self._mailboxes: list[Mailbox] = []
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
        addresses, reason = self._map(comm, mailbox_bytes(comm.world), device_index)
        if not reason:
            self._sum = PeerSum(comm.rank, addresses)
        return reason

    def _map(self, comm: Communicator, size: int, device_index: int) -> tuple[list[int], str]:
        """Map memory of so many bytes of every rank; returns the addresses, and why some rank cannot."""
        reason, mailbox = "", None
        try:
            mailbox = Mailbox(size, device_index)
            self._mailboxes.append(mailbox)
        except RuntimeError as error:
            reason = f"rank {comm.rank}: {error}"
        handles = comm.allgather(mailbox.handle if mailbox else b"")
        addresses = []
        if mailbox and all(handles):
            try:
                addresses = [mailbox.address if r == comm.rank else mailbox.open(h) for r, h in enumerate(handles)]
            except RuntimeError as error:
                reason = f"rank {comm.rank}: {error}"
        return addresses, next((text for text in comm.allgather(reason) if text), "")

    def exchanges(self, sizes: Sequence[int]) -> list[Exchange] | None:
        """What sums so many numbers each over two ranks, by copies; None where there are others, or too little memory.

        All ranks call it together, with the same sizes.
        """
        comm = self._comm
        if self._sum is None or comm.world != 2:
            return None
        made = []
        for size in sizes:
            addresses, reason = self._map(comm, exchange_bytes(size), comm.device.index or 0)
            if reason:
                if comm.rank == 0:
                    log.info("sums of gradients are not made by copies: %s", reason)
                return None
            made.append(Exchange(addresses[comm.rank], addresses[1 - comm.rank]))
        return made

    def sum_chunks(self, chunks: Tensor, own: Tensor | None = None) -> Tensor | None:
        """As `Communicator.sum_chunks`, of chunks on the GPU; None if it cannot.

        A rank that has too many chunks adds them up first, and then meets the others here with one.
        """
        return self._sum(chunks, own) if self._sum is not None and self._sum.takes(chunks) else None

    def close(self) -> None:
        """Unmap what others own."""
        for mailbox in self._mailboxes:
            mailbox.close()
        self._mailboxes, self._sum = [], None
