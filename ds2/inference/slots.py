"""Slots of streams in tables of state and of input samples, which grow when all slots are taken.

Shapes: N slots, C channels, F bins, L layers, H hidden, R rows that a stream carries.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

UNBOUNDED = 2**62  # feature frames of a stream whose end is not known yet


@dataclass
class StreamState:
    """The state that streams carry from block to block."""

    conv_tails: list[Tensor]  # (N, F, R, C) of each convolution
    hidden: Tensor  # (L, N, H) h of the recurrent layers
    cells: Tensor  # (L, N, H) c of LSTM layers, float32 at least; L = 0 without any
    rows: Tensor  # (R, N, H) tails of row convolutions and waiting frames of the skips, module by module

    @property
    def capacity(self) -> int:
        """N."""
        return self.hidden.shape[1]

    def tables(self) -> tuple[Tensor, ...]:
        """The tables (., N, H) of the recurrent modules."""
        return self.hidden, self.cells, self.rows

    def by_slot(self) -> list[Tensor]:
        """Everything as views (N, ...)."""
        return [*self.conv_tails, *(table.transpose(0, 1) for table in self.tables())]

    def read(self, slots: Tensor) -> list[Tensor]:
        """Copy what the streams of these slots (B,) carry, for `write`."""
        return [state.index_select(0, slots) for state in self.by_slot()]

    def write(self, slots: Tensor, saved: Sequence[Tensor]) -> None:
        """Put back what `read` returned for the same slots."""
        for state, old in zip(self.by_slot(), saved, strict=True):
            state.index_copy_(0, slots, old)

    def copy_from(self, smaller: StreamState) -> None:
        """Take over the states of the first slots."""
        for state, old in zip(self.by_slot(), smaller.by_slot(), strict=True):
            state[: len(old)] = old


class MappedMemory:
    """Pinned memory (N, M) at the address under which a GPU sees it."""

    def __init__(self, pinned: Tensor) -> None:
        kind = "<f4" if pinned.dtype == torch.float32 else "<i8"
        where = {"data": (pinned.data_ptr(), False), "shape": tuple(pinned.shape)}
        self._pinned, self.__cuda_array_interface__ = pinned, where | {"typestr": kind, "version": 2}


def on_device(pinned: Tensor, device: torch.device) -> Tensor:
    """Pinned memory as a tensor of a GPU, without a copy; on the CPU the tensor itself."""
    return pinned if device.type != "cuda" else torch.as_tensor(MappedMemory(pinned), device=device)


class InputSlots:
    """Samples of the next two blocks of every slot, in rows that a GPU reads where they are, without a copy."""

    def __init__(self, capacity: int, samples: int, device: torch.device) -> None:
        pinned = torch.zeros(2 * capacity, samples, pin_memory=device.type == "cuda")
        self.rows: list[NDArray[np.float32]] = list(pinned.numpy())
        self.device_rows = on_device(pinned, device)


@dataclass(eq=False)
class Slot:
    """A stream's slot and how far the stream is."""

    index: int
    step: int  # the last of the runner's steps that may read the slot's samples
    blocks: int = 0  # that have run
    ends: int = UNBOUNDED  # feature frames


class SlotTable:
    """State and input of all streams. Slot 0 is for the empty rows of a batch.

    Args:
        new_state: makes the state of so many slots.
        samples: of a block.
        capacity: slots at first; doubled when all are taken.
    """

    def __init__(
        self, new_state: Callable[[int], StreamState], samples: int, device: torch.device, capacity: int
    ) -> None:
        self._new_state, self._samples, self._device = new_state, samples, device
        self._lock = threading.Lock()
        self.free, self.used = list[int](), 1  # slots that are free again; slots that any stream has had
        self.state, self.inputs = new_state(capacity), InputSlots(capacity, samples, device)

    def take(self, step: int) -> Slot:
        """Give a stream a slot, free again when the `Slot` is gone; any thread may ask."""
        with self._lock:
            index = self.free.pop() if self.free else self.used
            self.used = max(self.used, index + 1)
        slot = Slot(index, step)
        weakref.finalize(slot, self.free.append, index)
        return slot

    def grow(self, slots: int) -> None:
        """Make the tables at least so large; all of them are new tensors then."""
        capacity, smaller = self.state.capacity, self.state
        while capacity < slots:
            capacity *= 2
        self.state = self._new_state(capacity)
        self.state.copy_from(smaller)
        self.inputs = InputSlots(capacity, self._samples, self._device)
