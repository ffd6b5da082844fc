"""Sums between peers, small ones and by copies, against NCCL's; started under torchrun by the tests.

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
    comm._sums.sum_(nccl)
    return peers, nccl


def recorded_us(comm: NcclCommunicator, way: str, count: int) -> float:
    """Microseconds of one of many sums in a recording, each of what the one before left."""
    tensor = draw(comm.rank, 0, count).to(comm.device)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())

    def sums() -> None:
        for _ in range(SUMS):
            if way == "peers":
                assert comm._peers.sum_chunks(tensor.view(1, -1)) is not None
            else:
                comm._sums.sum_(tensor)
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
    expected = functools.reduce(torch.add, (draw(rank, 0, count) for rank in range(comm.world))) / 2
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


def check_copies(comm: NcclCommunicator) -> None:
    tensors = [torch.empty(count, device=comm.device) for count in (4, 1_000_003, 6_553_600)]
    starts = comm.copy_sums(tensors)
    assert starts is not None, "peers cannot be mapped"

    def fill(turn: int) -> list[torch.Tensor]:
        for number, tensor in enumerate(tensors):
            generator = torch.Generator(comm.device).manual_seed(100 * turn + 10 * number + comm.rank)
            tensor.normal_(generator=generator)
        copies = [tensor.clone() for tensor in tensors]
        for tensor in copies:
            comm.start_sum(tensor).wait()
        return copies

    def sums() -> None:
        pending = [start() for start in starts]
        for one in pending:
            one.wait()

    def same(turn: int) -> None:
        expected = fill(turn)
        if turn % 7 == comm.rank:
            time.sleep(0.002)
        run()
        assert all(map(torch.equal, tensors, expected)), turn

    run = sums
    for turn in range(30):
        same(turn)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        sums()
    run = graph.replay
    for turn in range(30, 60):
        same(turn)
    mixed = iter([sums, graph.replay] * 10)  # one rank records what the other launches
    if comm.rank:
        next(mixed)
    for turn in range(60, 75):
        run = next(mixed)
        same(turn)


if __name__ == "__main__":
    with connect(CommConfig(backend="nccl", timeout_s=60), "cuda") as joined:
        assert isinstance(joined, NcclCommunicator)
        check(joined)
        check_copies(joined)
        if joined.rank == 0:
            print(f"{joined.world} ranks agree", flush=True)
