"""Sums over mailboxes: the kernel's own source on the CPU, in a process a rank, and what the compiler says of it."""

from __future__ import annotations

import multiprocessing
import time

import pytest
import torch
from ds2_ops import peers
from ds2_ops.jit.build import build
from ds2_ops.peers import MAX_NUMBERS, PeerSum, sum_bytes
from support.kernel_on_cpu import patch_run
from torch import Tensor

SIZES = [1, 255, 256, 257, 2304, MAX_NUMBERS, 0, 3, 2304, 2304, 1]  # blocks without numbers do not count a sum


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


def _rank(rank: int, boxes: Tensor, results: Tensor) -> None:
    torch.set_num_threads(1)
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
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=_rank, args=(rank, boxes, results)) for rank in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(1200)  # a last resort, for a busy machine
        assert process.exitcode == 0
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


@pytest.mark.parametrize(("ranks", "arch"), [(2, "sm_80"), (2, "sm_90a"), (8, "sm_90a")])
def test_the_kernel_compiles_without_spills(ranks: int, arch: str) -> None:
    assert build(peers._sum_source(ranks).text, arch).local_bytes == 0
