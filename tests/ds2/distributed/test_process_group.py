"""Values between ranks travel as messages: sizes are checked, nothing that another rank sends runs code."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ds2.distributed.process_group import ProcessGroup
from ds2.system.messages import MessageError, encode


class TwoRanks(ProcessGroup):
    """Rank 1 of two, where rank 0 sends the bytes `sent` and says that they are `announced`."""

    name = "test"
    rank, size = 1, 2

    def __init__(self, sent: bytes, announced: int | None = None) -> None:
        self.sent, self.announced = sent, len(sent) if announced is None else announced

    def _answer(self, out: Tensor) -> None:
        if out.dtype == torch.int64 or out.numel() == 8:
            out.view(torch.int64).fill_(self.announced)
        else:
            out[: len(self.sent)] = torch.frombuffer(bytearray(self.sent), dtype=torch.uint8)

    def broadcast_(self, octets: Tensor) -> None:
        self._answer(octets)

    def allgather_(self, parts: Tensor, own: Tensor) -> None:
        self._answer(parts[0])
        parts[1] = own

    def scatter(self, buffers: Any) -> Any: ...
    def gather(self, buffers: Any) -> Any: ...
    def barrier(self) -> None: ...
    def channel(self) -> Any: ...
    def abort(self, status: int) -> None: ...
    def close(self) -> None: ...


def test_values_of_different_lengths_come_back_in_order_of_rank() -> None:
    sent = {"rank": 0, "shape": (1, 2)}
    assert TwoRanks(encode(sent)).allgather("a longer value " * 10) == [sent, "a longer value " * 10]
    assert TwoRanks(encode([sent] * 100)).allgather(None) == [[sent] * 100, None]
    assert TwoRanks(encode(sent)).broadcast(None) == sent


class TouchesAFile:
    """Pickled, this creates a file when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_a_pickle_from_another_rank_does_not_run(tmp_path: Path) -> None:
    world = TwoRanks(pickle.dumps(TouchesAFile(tmp_path / "ran")))
    for exchange in (world.allgather, world.broadcast):
        with pytest.raises(MessageError):
            exchange("mine")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("announced", [-1, 0, 2**40])
def test_a_length_that_no_message_has_is_refused_before_memory_is_taken(announced: int) -> None:
    world = TwoRanks(encode(1), announced)
    for exchange in (world.allgather, world.broadcast):
        with pytest.raises(MessageError, match=f"{announced} bytes"):
            exchange("mine")
