"""Sums between peers against NCCL's on every rank, launched and recorded; started under torchrun by the tests.

python peers_check.py
"""

from __future__ import annotations

import functools
import time

import torch

from ds2.config.schema import CommConfig
from ds2.distributed.launch import connect
from ds2.distributed.nccl import NcclCommunicator

SIZES = (1, 64, 2304, 8192)
REPLAYS, SUMS = 200, 20


def draw(rank: int, number: int, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * number + rank)
    return torch.randn(count, generator=generator, dtype=torch.float64)


def both(comm: NcclCommunicator, mine: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum between peers, and NCCL's."""
    peers, nccl = mine.to(comm.device), mine.to(comm.device)
    assert comm._peers.sum_chunks(peers.view(1, -1)) is not None, "peers cannot be mapped"
    comm._all_reduce(nccl, comm._statistics, torch.cuda.current_stream(comm.device))
    return peers, nccl


def recorded_us(comm: NcclCommunicator, way: str, count: int) -> float:
    """Microseconds of one of many sums in a recording, each of what the one before left."""
    tensor = draw(comm.rank, 0, count).to(comm.device)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())

    def sums() -> None:
        for _ in range(SUMS):
            if way == "peers":
                assert comm._peers.sum_chunks(tensor.view(1, -1)) is not None
            else:
                comm._all_reduce(tensor, comm._statistics, torch.cuda.current_stream())
            tensor.mul_(0.5)  # of two: sums keep their size

    with torch.cuda.stream(stream):
        sums()  # loads what is launched
        tensor.copy_(draw(comm.rank, 0, count))
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            sums()
    torch.cuda.synchronize()
    comm.barrier()
    for turn in range(REPLAYS + 1):
        if turn == 1:
            torch.cuda.synchronize()
            began = time.perf_counter()
        graph.replay()
    torch.cuda.synchronize()
    took = 1e6 * (time.perf_counter() - began) / REPLAYS / SUMS
    expected = sum(draw(rank, 0, count) for rank in range(comm.world)) / 2
    assert torch.equal(tensor.cpu(), expected), (way, count)  # halves of equal numbers' sums: every bit
    return took


def check(comm: NcclCommunicator) -> None:
    for number in range(50):  # eagerly, the sizes mixed, and one rank late at times
        if number % 7 == comm.rank:
            time.sleep(0.002)
        peers, nccl = both(comm, draw(comm.rank, number, SIZES[number % len(SIZES)]))
        assert torch.equal(peers, nccl), number
    parts = [torch.stack([draw(rank, 9, 2304) * chunk for chunk in range(1, 15)]) for rank in range(comm.world)]
    own = torch.empty(2304, device=comm.device)
    total = comm.sum_chunks(parts[comm.rank].to(comm.device), own)
    sums = [functools.reduce(torch.add, part) for part in parts]
    assert torch.equal(own.cpu(), sums[comm.rank].float())
    assert torch.equal(total.cpu()[0], functools.reduce(torch.add, sums))
    for count in SIZES:
        took = {way: [recorded_us(comm, way, count) for _ in range(3)] for way in ("peers", "nccl")}
        if comm.rank == 0:
            words = "  ".join(f"{way} {' '.join(f'{t:.1f}' for t in times)}" for way, times in took.items())
            print(f"{count:>6} numbers, us a sum and a product: {words}", flush=True)


if __name__ == "__main__":
    with connect(CommConfig(backend="nccl", timeout_s=60), "cuda") as joined:
        assert isinstance(joined, NcclCommunicator)
        check(joined)
        if joined.rank == 0:
            print(f"{joined.world} ranks agree", flush=True)
