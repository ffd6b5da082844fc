"""Sums over ranks, in mailboxes and by copies: the kernels' own source on the CPU, in a process a rank."""

from __future__ import annotations

import ctypes
import multiprocessing
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ds2_ops import peers
from ds2_ops.peers import EXCHANGE_THREADS, MAX_NUMBERS, PeerExchange, PeerSum, exchange_bytes, sum_bytes
from support.kernel_on_cpu import patch_run
from torch import Tensor

SIZES = [1, 255, 256, 257, 2304, MAX_NUMBERS, 0, 3, 2304, 2304, 1]  # blocks without numbers do not count a sum


def in_processes(ranks: int, work: Callable[..., None], *arguments: Any) -> None:
    """Run work(rank, *arguments) in a process a rank."""

    def run(rank: int) -> None:
        torch.set_num_threads(1)
        work(rank, *arguments)

    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=run, args=(rank,)) for rank in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(1200)  # a last resort, for a busy machine
        assert process.exitcode == 0


def values(rank: int, number: int, count: int) -> Tensor:
    """Numbers of very different sizes, so that another order of addition gives other bits."""
    generator = torch.Generator().manual_seed(100 * rank + number)
    draw = torch.randn(count, generator=generator, dtype=torch.float64)
    return draw * 10.0 ** torch.randint(-9, 9, (count,), generator=generator)


def in_order(ranks: int, number: int, count: int) -> Tensor:
    total = of_rank(0, number, count)
    for rank in range(1, ranks):
        total += of_rank(rank, number, count)
    return total


def of_rank(rank: int, number: int, count: int) -> Tensor:
    """Of one chunk, or three."""
    mine = values(rank, number, count)
    return mine + mine * 3 + mine / 7 if number % 2 else mine


def _sum(rank: int, boxes: Tensor, results: Tensor) -> None:
    total = PeerSum(rank, [box.data_ptr() for box in boxes])
    for number, count in enumerate(SIZES):
        if number % len(boxes) == rank:
            time.sleep(0.01)  # each is late at times
        own = torch.empty(count)
        mine = values(rank, number, count)
        chunks = torch.stack([mine, mine * 3, mine / 7]) if number % 2 else mine[None]
        results[rank, number, :count] = total(chunks, own if number % 3 else None)[0]
        if number % 3:
            assert torch.equal(own, of_rank(rank, number, count).float())


@pytest.mark.parametrize(("ranks", "backwards"), [(2, False), (3, True)])
def test_all_ranks_have_the_bits_of_the_sum_in_order_of_rank(
    ranks: int, backwards: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch_run(monkeypatch, peers, backwards)
    warm = torch.zeros(sum_bytes(1), dtype=torch.uint8)
    PeerSum(0, [warm.data_ptr()])(torch.zeros(1, 1, dtype=torch.float64))  # the compiler's start, before processes wait
    boxes = torch.zeros(ranks, sum_bytes(ranks), dtype=torch.uint8).share_memory_()
    results = torch.full((ranks, len(SIZES), MAX_NUMBERS), torch.nan, dtype=torch.float64).share_memory_()
    in_processes(ranks, _sum, boxes, results)
    for number, count in enumerate(SIZES):
        for rank in range(ranks):
            assert torch.equal(results[rank, number, :count], in_order(ranks, number, count)), (rank, number)


def test_numbers_that_are_none_and_signs_of_zero_arrive_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    patch_run(monkeypatch, peers)
    numbers = torch.tensor([torch.inf, torch.nan, -0.0, 5e-324], dtype=torch.float64)
    expected = numbers.clone()
    box = torch.zeros(sum_bytes(1), dtype=torch.uint8)
    PeerSum(0, [box.data_ptr()])(numbers[None])
    assert torch.equal(numbers.view(torch.int64), expected.view(torch.int64))


def test_only_float64_of_a_few_numbers_is_taken() -> None:
    assert PeerSum.takes(torch.empty(64, 2, MAX_NUMBERS // 2, dtype=torch.float64))
    assert not PeerSum.takes(torch.empty(65, 1, dtype=torch.float64))
    assert not PeerSum.takes(torch.empty(1, MAX_NUMBERS + 1, dtype=torch.float64))
    assert not PeerSum.takes(torch.empty(1, 1))


EXCHANGED = [1, 4, 7, EXCHANGE_THREADS * 4 + 3, 20_011]
ROUNDS = 3


def to_exchange(rank: int, turn: int, count: int) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(10 * turn + rank))


def copy(to: int, tensor: Tensor) -> None:
    ctypes.memmove(to, tensor.data_ptr(), 4 * tensor.numel())


def _exchange(rank: int, boxes: list[Tensor], results: Tensor) -> None:
    made = [PeerExchange(box[rank].data_ptr(), box[1 - rank].data_ptr()) for box in boxes]
    for turn in range(ROUNDS):
        mine = [to_exchange(rank, turn, count) for count in EXCHANGED]
        for one, numbers in zip(made, mine, strict=True):
            if turn == rank:
                time.sleep(0.01)  # each is late at times
            one.send(numbers)
        for number, (one, numbers) in enumerate(zip(made, mine, strict=True)):
            one.add(numbers)
            results[rank, turn, number, : len(numbers)] = numbers


@pytest.mark.parametrize("backwards", [False, True])
def test_both_ranks_have_the_sum_time_after_time(backwards: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    patch_run(monkeypatch, peers, backwards)
    monkeypatch.setattr(peers, "_copy", copy)
    monkeypatch.setattr(peers, "multiprocessors", lambda device: 3)
    warm = torch.zeros(exchange_bytes(1), dtype=torch.uint8)  # alone, the other's words are one's own
    alone = PeerExchange(warm.data_ptr(), warm.data_ptr())
    alone.send(torch.ones(1))
    alone.add(one := torch.ones(1))
    assert one.item() == 2.0
    boxes = [
        torch.zeros(2, exchange_bytes(count + -count % 4), dtype=torch.uint8).share_memory_() for count in EXCHANGED
    ]
    results = torch.full((2, ROUNDS, len(EXCHANGED), max(EXCHANGED)), torch.nan).share_memory_()
    in_processes(2, _exchange, boxes, results)
    for turn in range(ROUNDS):
        for number, count in enumerate(EXCHANGED):
            expected = to_exchange(0, turn, count) + to_exchange(1, turn, count)
            for rank in range(2):
                assert torch.equal(results[rank, turn, number, :count], expected), (rank, turn, count)


def test_only_whole_float32_is_taken() -> None:
    numbers = torch.empty(64)
    assert PeerExchange.takes(numbers) and PeerExchange.takes(numbers[4:])
    assert not PeerExchange.takes(numbers.double()) and not PeerExchange.takes(numbers[1:])
    assert not PeerExchange.takes(numbers.view(8, 8).t()) and not PeerExchange.takes(numbers[:0])
