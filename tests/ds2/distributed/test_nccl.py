"""Mailboxes of ranks: all have them or none; sums that are aborted; two GPUs give the bits of NCCL."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
from support.launch import torchrun

from ds2.distributed import nccl
from ds2.distributed.communicator import Communicator
from ds2.distributed.nccl import NcclError, NcclSums, PeerMemory
from ds2.distributed.process_group import LostRankError
from ds2.distributed.watchdog import RankStatus


class Ranks(Communicator):
    """Rank 0 of two, with what the other answers to each question."""

    world = 2

    def __init__(self, answers: list[Any]) -> None:
        super().__init__(torch.device("cuda", 0))
        self.host, self._answers = "here", answers

    def allgather(self, value: Any) -> list[Any]:
        answer = self._answers.pop(0)
        return [value, value if answer == "alike" else answer]


class Box:
    """A mailbox of nothing."""

    address, handle = 1, b"own"
    closed = 0

    def __init__(self, size: int, device_index: int) -> None:
        assert size > 0 and device_index == 0

    def open(self, handle: bytes) -> int:
        assert handle == b"other"
        return 2

    def close(self) -> None:
        Box.closed += 1


def refuse(*_: Any) -> Any:
    raise RuntimeError("cuIpc failed: CUDA_ERROR_X")


@pytest.mark.parametrize(
    ("answers", "broken", "reason"),
    [
        ([("elsewhere", "")], "", "there are 2 ranks on 2 hosts"),
        ([("here", "rank 1: the driver is too old")], "", "rank 1: the driver is too old"),
        (["alike", b"other", ""], "__init__", "rank 0: cuIpc failed: CUDA_ERROR_X"),
        (["alike", b"", "rank 1: cuIpc failed"], "", "rank 1: cuIpc failed"),
        (["alike", b"other", ""], "open", "rank 0: cuIpc failed: CUDA_ERROR_X"),
        (["alike", b"other", "rank 1: cuIpc failed"], "", "rank 1: cuIpc failed"),
    ],
)
def test_where_one_rank_cannot_map_the_others_all_sum_over_nccl_and_say_why(
    answers: list[Any], broken: str, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mailbox: type[Box] = type("Mailbox", (Box,), {broken: refuse} if broken else {})
    monkeypatch.setattr(nccl, "Mailbox", mailbox)
    monkeypatch.setattr(nccl, "why_no_gpu", lambda device: None)
    comm = Ranks(answers)
    with caplog.at_level(logging.INFO):
        opened = PeerMemory(comm)
    assert not answers  # every rank answers as many questions
    assert f"summed by NCCL: {reason}" in caplog.text
    assert opened.sum_chunks(torch.zeros(1, 1, dtype=torch.float64)) is None


def test_what_cannot_be_summed_here_is_left_to_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    summed: list[int] = []
    make: Callable[..., Any] = lambda rank, addresses: Sum(rank, addresses, summed)  # noqa: E731
    monkeypatch.setattr(nccl, "Mailbox", Box)
    monkeypatch.setattr(nccl, "why_no_gpu", lambda device: None)
    monkeypatch.setattr(nccl, "PeerSum", make)
    before = Box.closed
    opened = PeerMemory(Ranks(["alike", b"other", ""]))
    assert opened.sum_chunks(torch.zeros(1, 3, dtype=torch.float64)) is not None
    assert opened.sum_chunks(torch.zeros(1, 5)) is None
    assert summed == [3]
    opened.close()
    assert Box.closed == before + 1


@pytest.mark.parametrize(("last", "made"), [(["alike", b"other", ""], 2), (["alike", b"", "rank 1: no memory"], 0)])
def test_sums_by_copies_are_mapped_on_both_ranks_or_on_none(
    last: list[Any], made: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(nccl, "Mailbox", Box)
    monkeypatch.setattr(nccl, "why_no_gpu", lambda device: None)
    comm = Ranks(["alike", b"other", "", b"other", "", *last[1:]])
    opened = PeerMemory(comm)
    with caplog.at_level(logging.INFO):
        exchanges = opened.exchanges([4, 8])
    assert len(exchanges or []) == made
    assert not comm._answers and ("not made by copies: rank 1: no memory" in caplog.text) == (made == 0)
    before = Box.closed
    opened.close()
    assert Box.closed == before + 3
    assert opened.exchanges([4]) is None


class Sum(nccl.PeerSum):
    def __init__(self, rank: int, addresses: list[int], summed: list[int]) -> None:
        assert (rank, addresses) == (0, [1, 2])
        self._summed = summed

    def __call__(self, chunks: torch.Tensor, own: torch.Tensor | None = None) -> torch.Tensor:
        self._summed.append(chunks.numel())
        return chunks


class Library:
    """NCCL whose communicators are numbers: a sum takes until one is aborted, an abort until `lost` is set."""

    def __init__(self) -> None:
        self.summing, self.aborted, self.lost = threading.Event(), dict[int, threading.Event](), threading.Event()
        self.ended = 0

    def ncclAllReduce(self, *arguments: Any) -> int:
        self.summing.set()
        return 0 if self.aborted[arguments[5]].wait(60) else 6

    def ncclCommAbort(self, opened: int) -> None:
        self.aborted[opened].set()
        self.lost.wait(60)
        self.ended += 1


def sums_of(library: Any, monkeypatch: pytest.MonkeyPatch) -> NcclSums:
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(nccl, "_CALL_S", 0.05)
    sums: Any = NcclSums.__new__(NcclSums)
    sums._library, sums._device, sums._opened = library, torch.device("cuda", 0), [1, 2, 3]
    sums._calling, sums._ending, sums._aborted = threading.Lock(), threading.Lock(), False
    library.aborted = {opened: threading.Event() for opened in sums._opened}
    return sums


def test_an_abort_ends_the_sums_of_all_communicators_although_each_looks_long_for_the_lost_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = Library()
    sums = sums_of(library, monkeypatch)
    call = threading.Thread(target=sums._all_reduce, args=(torch.zeros(3), 2, Mock()))
    call.start()  # it waits for the GPU, as where the queue of a stream is full
    assert library.summing.wait(60)
    for _ in range(2):
        sums.abort()
    call.join(60)
    assert not call.is_alive()
    assert all(aborted.wait(60) for aborted in library.aborted.values()) and not library.ended
    library.lost.set()
    with pytest.raises(LostRankError):
        sums._all_reduce(torch.zeros(3), cast(Any, 1), Mock())


@pytest.mark.parametrize(("rank", "sent"), [(0, []), (1, []), (0, [b"a" * 128] * 3), (1, [b"a" * 128] * 3)])
def test_where_rank_0_has_no_identifiers_no_rank_waits_for_the_others(
    rank: int, sent: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    library = Mock(
        ncclGetUniqueId=Mock(return_value=0 if sent else 2),
        ncclGetErrorString=lambda result: f"error {result}".encode(),
        ncclCommInitRankConfig=Mock(return_value=0),
    )
    sums = sums_of(library, monkeypatch)
    comm = Mock(rank=rank, world=2, broadcast=Mock(return_value=sent), status=RankStatus())
    if sent:
        assert len(sums._open(comm, [32, 1, 8])) == 3
    else:
        with pytest.raises(NcclError, match="NCCL: error 2" if rank == 0 else "NCCL: error 6"):
            sums._open(comm, [32, 1, 8])
    assert library.ncclGetUniqueId.call_count == 3 * (rank == 0)
    assert library.ncclCommInitRankConfig.call_count == len(sent)
    ((values,), _) = comm.broadcast.call_args
    assert rank == 1 or len(values) == len(sent)


@pytest.mark.gpu
@pytest.mark.two_gpus
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_give_the_bits_of_nccl_launched_and_recorded() -> None:
    run = torchrun(2, "peers_check.py")
    assert run.returncode == 0, run.stdout
    assert "2 ranks agree" in run.stdout
