"""What the communicator promises, checked on every rank; started under mpirun or torchrun by the tests.

python ranks_check.py COMM FOLDER
"""

from __future__ import annotations

import math
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from ds2.config.schema import CommConfig
from ds2.distributed.communicator import Communicator, GroupCommunicator
from ds2.distributed.launch import connect
from ds2.distributed.watchdog import RankStatus


def values(rank: int, n: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Numbers of very different sizes, so that another order of addition gives other bits."""
    rng = np.random.default_rng([rank, n])
    return torch.from_numpy(rng.standard_normal(n) * 10.0 ** rng.integers(-4, 5, n)).to(dtype)


def in_order(world: int, n: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The sum from rank 0 to the last."""
    total = values(0, n, dtype)
    for rank in range(1, world):
        total += values(rank, n, dtype)
    return total


def check_sums(comm: Communicator) -> None:
    """Blocking and pending sums have the bits of the sum in order of rank, also with several under way."""
    for dtype in (torch.float32, torch.float64):
        tensor = values(comm.rank, 37, dtype).view(37, 1)
        comm.sum_(tensor)
        assert torch.equal(tensor.view(-1), in_order(comm.world, 37, dtype))
    sizes = [1, comm.world - 1, comm.world, 1000, 70_001, 300_000]
    for _ in range(3):  # the same tensors again: their buffers are kept
        tensors = [values(comm.rank, n) for n in sizes]
        pending = [comm.start_sum(tensor) for tensor in tensors]
        comm.allgather("something else meanwhile")
        moments = [work.wait() for work in pending]
        for n, tensor in zip(sizes, tensors, strict=True):
            assert torch.equal(tensor, in_order(comm.world, n)), n
        assert all(float(ended) >= float(began) for began, ended in moments)  # type: ignore[arg-type]


def check_values(comm: Communicator) -> None:
    """Objects and tensors travel unchanged."""
    assert comm.allgather(comm.rank**2) == [rank**2 for rank in range(comm.world)]
    assert comm.broadcast({"from": comm.rank}) == {"from": 0}
    mine = {"a": torch.full((2, 3), comm.rank), "b": torch.tensor(1.5 + comm.rank), "c": torch.zeros(0)}
    theirs = comm.broadcast_tensors(mine if comm.rank == 0 else {})
    assert torch.equal(theirs["a"], torch.zeros(2, 3, dtype=torch.int64)) and theirs["b"] == 1.5 and len(theirs) == 3


def check_turns(comm: Communicator, folder: Path) -> None:
    """Rank 0 is done with its turn before any other begins."""
    with comm.in_turn():
        if comm.rank == 0:
            time.sleep(0.2)
            (folder / "made").write_text("by rank 0")
        assert (folder / "made").read_text() == "by rank 0"


def check_channel(ranks: GroupCommunicator) -> None:
    """What the watchdog tells others arrives in order, from whom it says, and with a farewell at the end."""
    channel = ranks.group.channel()
    to, sender = (ranks.rank + 1) % ranks.world, (ranks.rank - 1) % ranks.world
    status = RankStatus(ranks.rank, "forward", limit_factor=math.inf, collective="sum", changes=7)
    channel.send(status, to)
    received: list[tuple[int, RankStatus | None]] = []
    while len(received) < 2:
        if message := channel.receive():
            received.append(message)
            if len(received) == 1:
                channel.send(None, to)
    assert received == [(sender, replace(status, step=sender)), (sender, None)]
    ranks.barrier()
    assert channel.receive() is None


if __name__ == "__main__":
    with connect(CommConfig(backend=sys.argv[1], timeout_s=600), "cpu") as joined:
        check_sums(joined)
        check_values(joined)
        assert isinstance(joined, GroupCommunicator)
        check_channel(joined)
        check_turns(joined, Path(sys.argv[2]))
        if joined.rank == 0:
            print(f"{joined.world} ranks agree", flush=True)
