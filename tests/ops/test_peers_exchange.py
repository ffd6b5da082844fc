"""Sums by copies: the kernels' own source on the CPU, in a process a rank, and what the compiler says of it."""

from __future__ import annotations

import ctypes
import multiprocessing
import time

import pytest
import torch
from ds2_ops import peers
from ds2_ops.jit.build import build
from ds2_ops.peers import EXCHANGE_THREADS, PeerExchange, exchange_bytes
from support.kernel_on_cpu import patch_run
from torch import Tensor

SIZES = [1, 4, 7, EXCHANGE_THREADS * 4 + 3, 20_011]
ROUNDS = 3


def values(rank: int, turn: int, count: int) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(10 * turn + rank))


def copy(to: int, tensor: Tensor) -> None:
    ctypes.memmove(to, tensor.data_ptr(), 4 * tensor.numel())


def _rank(rank: int, boxes: list[Tensor], results: Tensor) -> None:
    torch.set_num_threads(1)
    made = [PeerExchange(box[rank].data_ptr(), box[1 - rank].data_ptr()) for box in boxes]
    for turn in range(ROUNDS):
        mine = [values(rank, turn, count) for count in SIZES]
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
    monkeypatch.setattr(peers, "_EXCHANGE_BLOCKS", 5)
    warm = torch.zeros(exchange_bytes(1), dtype=torch.uint8)  # alone, the other's words are one's own
    alone = PeerExchange(warm.data_ptr(), warm.data_ptr())
    alone.send(torch.ones(1))
    alone.add(one := torch.ones(1))
    assert one.item() == 2.0
    boxes = [torch.zeros(2, exchange_bytes(count + -count % 4), dtype=torch.uint8).share_memory_() for count in SIZES]
    results = torch.full((2, ROUNDS, len(SIZES), max(SIZES)), torch.nan).share_memory_()
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=_rank, args=(rank, boxes, results)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(1200)  # a last resort, for a busy machine
        assert process.exitcode == 0
    for turn in range(ROUNDS):
        for number, count in enumerate(SIZES):
            expected = values(0, turn, count) + values(1, turn, count)
            for rank in range(2):
                assert torch.equal(results[rank, turn, number, :count], expected), (rank, turn, count)


def test_only_whole_float32_is_taken() -> None:
    numbers = torch.empty(64)
    assert PeerExchange.takes(numbers) and PeerExchange.takes(numbers[4:])
    assert not PeerExchange.takes(numbers.double()) and not PeerExchange.takes(numbers[1:])
    assert not PeerExchange.takes(numbers.view(8, 8).t()) and not PeerExchange.takes(numbers[:0])


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_the_kernels_compile_without_spills(arch: str) -> None:
    for source in (peers._await_source(), peers._add_source()):
        assert build(source.text, arch).local_bytes == 0
