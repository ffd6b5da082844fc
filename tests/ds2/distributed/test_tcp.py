"""Transfers over our own connections: what they carry, and that they end when a rank is gone."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from ds2.distributed.communicator import OrderedCommunicator
from ds2.distributed.process_group import LostRankError, SumBuffers, add_in_order
from ds2.distributed.tcp import STREAMS, TcpGroup, alone
from ds2.distributed.watchdog import RankStatus

WAIT_S = 60  # a last resort


def connected(world: int) -> list[TcpGroup]:
    links: list[list[dict[int, socket.socket]]] = [[{} for _ in range(STREAMS)] for _ in range(world)]
    for one in range(world):
        for other in range(one):
            for stream in range(STREAMS):
                links[one][stream][other], links[other][stream][one] = socket.socketpair()
    return [TcpGroup(rank, [f"host{r}" for r in range(world)], links[rank]) for rank in range(world)]


def on_all(groups: list[TcpGroup], work: Callable[[TcpGroup], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(groups)) as ranks:
        return [result.result(WAIT_S) for result in [ranks.submit(work, group) for group in groups]]


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("length", [1, 3, 100_003])
def test_calls_carry_the_values_of_all_ranks_in_order(world: int, length: int) -> None:
    groups = connected(world) if world > 1 else [alone()]
    generator = torch.Generator().manual_seed(length)
    inputs = torch.randn(world, length, generator=generator)
    counts = [length // world + (rank < length % world) for rank in range(world)]

    def work(group: TcpGroup) -> tuple[Any, ...]:
        group.barrier()
        values = group.allgather({"rank": group.rank})
        sent = torch.arange(length, dtype=torch.uint8) + group.rank
        group.broadcast_(sent)
        host = inputs[group.rank].clone()
        buffers = SumBuffers(host, torch.empty(world, counts[group.rank]), counts)
        for start in (group.scatter, group.gather):
            is_done = start(buffers)
            while not is_done():
                pass
            if start == group.scatter:
                add_in_order(buffers.parts)
        return values, sent, host

    expected = add_in_order(inputs.clone())
    for values, sent, total in on_all(groups, work):
        assert values == [{"rank": rank} for rank in range(world)]
        assert torch.equal(sent, torch.arange(length, dtype=torch.uint8))
        assert torch.equal(total, expected)


def test_tensors_are_sent_to_ranks_that_lack_them_alone() -> None:
    comms = [OrderedCommunicator(group, torch.device("cpu"), WAIT_S) for group in connected(4)]
    own = [{"weight": torch.full((3, 5), float(rank)), "steps": torch.tensor(float(rank))} for rank in range(4)]

    def work(group: TcpGroup) -> dict[str, torch.Tensor]:
        return comms[group.rank].broadcast_tensors(own[group.rank], holders=(0, 2))

    first, second, holder, fourth = on_all([comm.group for comm in comms if isinstance(comm.group, TcpGroup)], work)
    for sent in (first, second, fourth):
        assert torch.equal(sent["weight"], torch.zeros(3, 5)) and sent["steps"] == 0
    assert holder is own[2] and torch.equal(holder["weight"], torch.full((3, 5), 2.0))  # its own, not what came
    for comm in reversed(comms):  # as files of signals were opened
        comm.watchdog.drop()
        comm.end_sums()
        comm.group.close()


def test_a_rank_that_closes_ends_the_waits_of_the_others_and_is_named() -> None:
    groups = connected(3)

    def work(group: TcpGroup) -> str:
        if group.rank == 1:
            group.close()
            return ""
        with pytest.raises(LostRankError) as error:
            group.barrier()
        group.close()
        return str(error.value)

    first, _, third = on_all(groups, work)
    assert "rank 1 on host1 closed its connection" in first
    assert "closed its connection" in third  # of rank 1, or of rank 0, which it left for that


def test_a_rank_that_is_lost_but_silent_ends_waits() -> None:
    group, silent = connected(2)
    timer = threading.Timer(0.2, group.lose, (1, "has been silent for 9 s"))
    timer.start()
    with pytest.raises(LostRankError, match="rank 1 on host1 has been silent for 9 s"):
        group.barrier()
    with pytest.raises(LostRankError):
        group.scatter(SumBuffers(torch.zeros(2), torch.zeros(2, 1), [1, 1]))()
    silent.close()


def test_reports_reach_the_other_rank_and_an_end_without_a_last_message_is_a_loss() -> None:
    for last_message in (True, False):
        group, other = connected(2)
        channel, sender = group.channel(), other.channel()
        sender.send(RankStatus(step=7), 0)
        if last_message:
            sender.send(None, 0)
        other.close()
        received = [channel.receive() for _ in range(4)]
        assert received[0] == (1, RankStatus(step=7))
        assert ((1, None) in received) == last_message
        assert bool(group.lost) != last_message


def test_sums_of_gpus_go_through_page_locked_memory_and_leave_the_gradients_where_a_rank_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CPU tensors stand for those of GPUs."""
    empty, locked = torch.empty, []

    def empty_on_cpu(*size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        locked.append(pin_memory)
        return empty(*size, **options)

    monkeypatch.setattr(torch, "empty", empty_on_cpu)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    groups = connected(2)
    comms = [OrderedCommunicator(group, torch.device("cuda", 0), 600.0) for group in groups]
    assert comms[0].path == "from GPU memory through page-locked host memory over tcp"
    gradients = [torch.randn(1001), torch.randn(1001)]
    total = gradients[0] + gradients[1]
    for work in [comm.start_sum(gradient) for comm, gradient in zip(comms, gradients, strict=True)]:
        work.wait()
    assert all(torch.equal(gradient, total) for gradient in gradients) and any(locked)
    work = comms[0].start_sum(gradients[0])
    comms[1].watchdog.drop()
    groups[1].close()
    with pytest.raises(LostRankError, match="rank 1 on host1"):
        work.wait()
    assert torch.equal(gradients[0], total)
    comms[0].watchdog.drop()
    groups[0].close()
    for comm in comms:
        comm.end_sums()
