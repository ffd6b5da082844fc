"""Ranks that come and go sum by NCCL or through host memory, all alike."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch

from ds2.distributed import elastic, nccl
from ds2.distributed.elastic import ElasticCommunicator
from ds2.distributed.nccl import NcclError, NcclSums
from ds2.distributed.process_group import LostRankError
from ds2.distributed.tcp import alone
from ds2.distributed.watchdog import RankStatus


class OnGpu(ElasticCommunicator):
    """A rank of two on a GPU, with the reasons against NCCL that another rank gives, one for each question."""

    def __init__(self, reasons: list[str]) -> None:
        self.device, self.rank, self.world, self.host = torch.device("cuda", 0), 0, 2, "here"
        self.status = RankStatus()
        self._on_the_host, self._nccl, self._why_no_nccl = ("tcp", "through host memory over tcp"), None, ""
        self.group: Any = alone()
        self.group.hosts = ["here", "there"]
        self.group.any_gpu_shared = lambda device: False
        self.group.first_nonempty = lambda own: own or reasons.pop(0)


@pytest.mark.parametrize(
    ("reasons", "logged"),
    [
        (["", ""], ""),
        (["rank 1 on there: NCCL: it failed before"], "rank 1 on there: NCCL: it failed before"),
        (["", "a rank runs on cpu"], "a rank runs on cpu"),
    ],
)
def test_all_ranks_of_a_view_sum_by_nccl_or_none(
    reasons: list[str], logged: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    opening = Mock(return_value=Mock(spec=NcclSums), path=NcclSums.path)
    monkeypatch.setattr(nccl, "load_library", Mock())
    monkeypatch.setattr(elastic, "NcclSums", opening)
    comm = OnGpu(reasons)
    with caplog.at_level("INFO"):
        comm._choose_path()
    assert not reasons  # every rank asks as often
    path = "through host memory over tcp" if logged else NcclSums.path
    assert comm.path == path and f"gradients travel {path}" in caplog.text and logged in caplog.text
    assert comm.confirms is opening.called is not bool(logged)


@pytest.mark.parametrize("lost", [True, False])
def test_a_rank_that_nccl_does_not_connect_waits_for_no_other_and_says_why_in_the_next_view(
    lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl, "load_library", Mock())
    monkeypatch.setattr(elastic, "BEAT_S", 0.1)

    def connect(ranks: OnGpu) -> None:  # the other rank is still inside NCCL, and answers nothing
        ranks.group.first_nonempty = ranks.group.barrier = Mock(side_effect=AssertionError("waits for the other rank"))
        if lost:
            ranks.group.lose(1, "was killed")
        raise NcclError("NCCL: b")

    monkeypatch.setattr(elastic, "NcclSums", connect)
    comm = OnGpu(["", ""])
    with pytest.raises(LostRankError, match="rank 1 on there was killed" if lost else "NCCL: b"):
        comm._choose_path()
    assert not comm.confirms and comm._why_no_nccl == ("" if lost else "rank 0 on here: NCCL: b")


def test_a_lost_rank_ends_the_sums_and_no_later_one_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    sums = Mock(spec=NcclSums)
    monkeypatch.setattr(nccl, "load_library", Mock())
    monkeypatch.setattr(elastic, "NcclSums", Mock(return_value=sums, path=NcclSums.path))
    comm = OnGpu(["", ""])
    comm._choose_path()
    comm.group.lose(1, "was killed")
    sums.abort.assert_called_once_with()
    with pytest.raises(LostRankError, match="rank 1 on there was killed"):
        comm.start_sum(torch.zeros(1))
    sums.start.assert_not_called()


@pytest.mark.parametrize("lost", [True, False])
def test_a_call_of_nccl_that_fails_is_a_lost_rank_and_the_next_view_is_without_nccl_unless_one_was_lost(
    lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl, "load_library", Mock())
    monkeypatch.setattr(elastic, "BEAT_S", 0.1)
    comm = OnGpu(["", ""])

    def start(tensor: torch.Tensor, *, overlapped: bool) -> None:
        if lost:
            comm.group.lose(1, "was killed")
        raise NcclError("NCCL: remote process exited")

    monkeypatch.setattr(elastic, "NcclSums", Mock(return_value=Mock(spec=NcclSums, start=start), path=NcclSums.path))
    comm._choose_path()
    with pytest.raises(LostRankError, match="rank 1 on there was killed" if lost else "remote process exited"):
        comm.start_sum(torch.zeros(1))
    assert bool(comm._why_no_nccl) is not lost
