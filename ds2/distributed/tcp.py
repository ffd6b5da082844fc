"""The process group over TCP connections of our own, for ranks that come and go.

Gloo's transfers cannot be ended while a peer is stopped: `abort` and `shutdown` of torch 2.13 leave them waiting, and
what the peer sends when it goes on is written into memory that is in use again. Here every transfer ends as soon as
the group is closed or a rank is lost.
"""

import platform
import select
import socket
import struct
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from ds2.distributed.process_group import IsDone, LostRankError, ProcessGroup, SumBuffers
from ds2.distributed.watchdog import RankStatus, read_report, write_report
from ds2.system import UserError

STREAMS = 4  # connections of two ranks: blocking calls, scatter, gather, reports of the watchdog
CLOSED = "closed its connection"
"""What `TcpGroup.lost` says first of a rank whose process may go on: only the connection is known to have ended."""
_WAIT_MS = 100  # after which a blocking call looks whether a rank was lost
_REPORT_LENGTH = struct.Struct("<I")
_LONGEST_REPORT = 1 << 16  # bytes


class _Part:
    """What is left of the bytes that one transfer sends to or receives from one rank."""

    def __init__(self, tensor: Tensor) -> None:
        octets: Any = tensor.view(-1).view(torch.uint8).numpy()
        self.view = memoryview(octets)


class _Stream:
    """One sequence of transfers: a connection to every other rank, used by one thread."""

    def __init__(self, group: "TcpGroup", links: Mapping[int, socket.socket]) -> None:
        self._group, self.links = group, links
        self._sending: dict[int, deque[_Part]] = {rank: deque() for rank in links}
        self._receiving: dict[int, deque[_Part]] = {rank: deque() for rank in links}
        for link in links.values():
            link.setblocking(False)

    def start(self, sent: Mapping[int, Tensor], received: Mapping[int, Tensor]) -> IsDone:
        """Start to send and receive contiguous tensors on the CPU, by rank; calls of the result move the bytes."""
        parts: list[_Part] = []
        for tensors, queues in ((sent, self._sending), (received, self._receiving)):
            for rank in queues.keys() & tensors.keys():
                part = _Part(tensors[rank])
                if part.view:
                    queues[rank].append(part)
                    parts.append(part)

        def is_done() -> bool:
            self._move()
            return not any(part.view for part in parts)

        return is_done

    def finish(self, sent: Mapping[int, Tensor], received: Mapping[int, Tensor]) -> None:
        """Send and receive, and wait until that is complete."""
        is_done = self.start(sent, received)
        while not is_done():
            ready = select.poll()
            for rank, link in self.links.items():
                events = select.POLLIN * bool(self._receiving[rank]) | select.POLLOUT * bool(self._sending[rank])
                if events and link.fileno() >= 0:
                    ready.register(link, events)
            ready.poll(_WAIT_MS)

    def _move(self) -> None:
        """Send and receive what can be without waiting; raises LostRankError where a rank was lost, or has left."""
        if self._group.lost:
            raise LostRankError(self._group.reason)
        for rank, link in self.links.items():
            try:
                with suppress(BlockingIOError):
                    _advance(self._sending[rank], link.send)
                with suppress(BlockingIOError):
                    _advance(self._receiving[rank], link.recv_into)
            except OSError as error:
                self._group.lose(rank, f"{CLOSED} ({error.strerror or error})")
                raise LostRankError(self._group.reason) from error


def _advance(parts: deque[_Part], move: Any) -> None:
    while parts:
        moved = move(parts[0].view)
        if not moved:
            raise ConnectionResetError("end of file")
        parts[0].view = parts[0].view[moved:]
        if not parts[0].view:
            parts.popleft()


class TcpGroup(ProcessGroup):
    """Ranks with a connection of their own for each pair and each sequence of calls.

    Args:
        hosts: the machine names of all ranks.
        links: `STREAMS` times the connections to the other ranks, by rank.
    """

    name = "tcp"
    library = "TCP connections of ds2"

    def __init__(self, rank: int, hosts: Sequence[str], links: Sequence[Mapping[int, socket.socket]]) -> None:
        self.rank, self.size, self.hosts = rank, len(hosts), list(hosts)
        self.lost: dict[int, str] = {}  # why ranks, -1 for no single one, are gone; if any is, all transfers fail
        self.on_loss: Callable[[], object] = lambda: None  # called, in any thread, whenever a rank is lost
        self._streams = [_Stream(self, stream) for stream in links]
        self._blocking, self._scatter, self._gather, self._reports = self._streams

    @property
    def reason(self) -> str:
        """Which ranks were lost and why."""
        return "; ".join(f"rank {r} on {self.hosts[r]} {why}" if r >= 0 else why for r, why in self.lost.items())

    def lose(self, rank: int, reason: str) -> None:
        """Let all transfers fail from now on, in all threads: a rank is gone."""
        self.lost.setdefault(rank, reason)
        self.on_loss()

    def _others(self, tensor: Tensor) -> dict[int, Tensor]:
        return dict.fromkeys(self._blocking.links, tensor)

    def broadcast_(self, octets: Tensor) -> None:
        self.send_(octets, self._blocking.links)

    def send_(self, octets: Tensor, receivers: Collection[int]) -> None:
        if self.rank == 0:
            self._blocking.finish(dict.fromkeys(receivers, octets), {})
        else:
            self._blocking.finish({}, {0: octets})

    def allgather_(self, parts: Tensor, own: Tensor) -> None:
        parts[self.rank].copy_(own)
        self._blocking.finish(self._others(own), dict(enumerate(parts)))

    def scatter(self, buffers: SumBuffers) -> IsDone:
        pieces = torch.split(buffers.host, buffers.counts)
        buffers.parts[self.rank].copy_(pieces[self.rank])
        return self._scatter.start(dict(enumerate(pieces)), dict(enumerate(buffers.parts)))

    def gather(self, buffers: SumBuffers) -> IsDone:
        pieces = torch.split(buffers.host, buffers.counts)
        pieces[self.rank].copy_(buffers.parts[0])
        return self._gather.start(self._others(buffers.parts[0]), dict(enumerate(pieces)))

    def channel(self) -> "TcpChannel":
        return TcpChannel(self, self._reports.links)

    def abort(self, status: int) -> None:
        """Leave: the others go on without this rank."""
        self.close()

    def close(self) -> None:
        """Close all connections, so that transfers of the other ranks fail too."""
        for stream in self._streams:
            for link in stream.links.values():
                with suppress(OSError):
                    link.shutdown(socket.SHUT_RDWR)  # workers of the loader hold copies of it
                link.close()


class TcpChannel:
    """The channel of the watchdog. A rank whose connection ends without a last message is lost."""

    def __init__(self, group: TcpGroup, links: Mapping[int, socket.socket]) -> None:
        self._group, self.rank = group, group.rank
        self._links = dict(links)
        self._unsent: dict[int, bytes] = dict.fromkeys(links, b"")
        self._received: dict[int, bytes] = dict.fromkeys(links, b"")
        self._finished: set[int] = set()

    def send(self, value: RankStatus | None, to: int) -> None:
        if to not in self._links:
            return
        if not self._unsent[to] or value is None:
            data = write_report(self.rank, value)
            self._unsent[to] += _REPORT_LENGTH.pack(len(data)) + data
        with suppress(BlockingIOError, OSError):
            self._unsent[to] = self._unsent[to][self._links[to].send(self._unsent[to]) :]

    def receive(self) -> tuple[int, RankStatus | None] | None:
        if (message := self._next_message()) is None:
            for rank in list(self._links):
                self._read(rank)
            message = self._next_message()
        return message

    def _next_message(self) -> tuple[int, RankStatus | None] | None:
        for rank, data in self._received.items():
            if len(data) < _REPORT_LENGTH.size:
                continue
            end = _REPORT_LENGTH.size + min(_LONGEST_REPORT, _REPORT_LENGTH.unpack_from(data)[0])
            if len(data) >= end:
                self._received[rank] = data[end:]
                with suppress(UserError):
                    sender, status = read_report(data[_REPORT_LENGTH.size : end])
                    if sender == rank:
                        self._finished |= {rank} if status is None else set()
                        return rank, status
        return None

    def _read(self, rank: int) -> None:
        try:
            data = self._links[rank].recv(_LONGEST_REPORT)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._received[rank] += data
        if not data:
            del self._links[rank]
            if rank not in self._finished:
                self._group.lose(rank, CLOSED)


def alone() -> TcpGroup:
    """Return the group of this process alone."""
    return TcpGroup(0, [platform.node()], [{} for _ in range(STREAMS)])
