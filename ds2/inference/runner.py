"""Runs the network on sources: on blocks of any streams in batches of a few sizes, or on whole utterances.

On a GPU features and network of a batch size are one CUDA graph. Launch by launch, hundreds of small kernels a block
take the host milliseconds, for one stream as for sixty.
"""

import bisect
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ds2.audio.features import Features
from ds2.inference.network import UNBOUNDED, BlockNetwork, StreamState, parallel_layers
from ds2.model.acoustic import AcousticModel
from ds2.system.cuda_graph import GraphRecorder

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # a batch in between takes the next one
_CPU_FILE_S = 8.0  # audio of a file that a CPU takes at once; recurrent layers skip what is past its end
_PIECE_FRAMES = 44  # output frames that a layer runs at once where others run at its side
_FILE_PIECES = 8  # of a block of a file
# A batch has four numbers of each stream: its row of samples, blocks that have run, feature frames of the stream and of
# this block. These are the numbers of a row without a stream, which runs on slot 0.
_EMPTY_ROW = 0, 0, UNBOUNDED, 0
_NUMBERS = len(_EMPTY_ROW)


@dataclass(frozen=True)
class BlockOutput:
    """Logits of the next frames of some streams of a batch."""

    rows: list[int]  # which of the streams
    logits: Tensor  # (T', B, V), B as many as rows; valid until the next step
    lengths: list[int]  # frames of each


class _MappedMemory:
    """Pinned memory at the address under which a GPU sees it."""

    def __init__(self, pinned: Tensor) -> None:
        kind = "<f4" if pinned.dtype == torch.float32 else "<i8"
        where = {"data": (pinned.data_ptr(), False), "shape": tuple(pinned.shape)}
        self._pinned, self.__cuda_array_interface__ = pinned, where | {"typestr": kind, "version": 2}


def _on_device(pinned: Tensor, device: torch.device) -> Tensor:
    """Pinned memory as a tensor of a GPU, without a copy; on the CPU the tensor itself."""
    return pinned if device.type != "cuda" else torch.as_tensor(_MappedMemory(pinned), device=device)


@dataclass(eq=False)
class Slot:
    """A stream's slot and how far the stream is."""

    index: int
    step: int  # the last of the runner's steps that may read the slot's samples
    blocks: int = 0  # that have run
    ends: int = UNBOUNDED  # feature frames


class SlotTable:
    """State and input of all streams, in tables that grow. Slot 0 is for the empty rows of a batch.

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
        self._allocate(capacity)

    def _allocate(self, capacity: int) -> None:
        state = self._new_state(capacity)
        # Samples of the next two blocks of every slot, in rows that a GPU reads where they are, without a copy.
        pinned = torch.zeros(2 * capacity, self._samples, pin_memory=self._device.type == "cuda")
        self.device_rows = _on_device(pinned, self._device)
        self.rows: list[NDArray[np.float32]] = list(pinned.numpy())
        self.state = state  # once nothing can fail any more: else streams would go on with an empty state

    def take(self, step: int) -> Slot:
        """Give a stream a slot, free again when the `Slot` is gone; any thread may ask."""
        with self._lock:
            index = self.free.pop() if self.free else self.used
            self.used = max(self.used, index + 1)
        slot = Slot(index, step)
        weakref.finalize(slot, self.free.append, index)
        return slot

    def grow(self, slots: int) -> None:
        """Make the tables at least so large; all of them are new tensors then. If that fails, none are."""
        capacity, smaller = self.state.capacity, self.state
        while capacity < slots:
            capacity *= 2
        self._allocate(capacity)
        for state, old in zip(self.state.by_slot(), smaller.by_slot(), strict=True):
            state[: len(old)] = old


class _BlockBatch:
    """A batch size: the numbers of `_EMPTY_ROW` of each stream, pinned and on the device, and what runs the batch."""

    def __init__(self, size: int, frames: int, device: torch.device) -> None:
        self.done = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        pinned = torch.zeros(_NUMBERS, size, dtype=torch.int64, pin_memory=self.done is not None)
        self._pinned, self._mapped = pinned.numpy(), _on_device(pinned, device)
        self.numbers = torch.zeros_like(pinned, device=device)
        self.full_blocks = torch.full_like(self.numbers[0], frames)
        self.run: dict[bool, Callable[[], Tensor]] = {}  # by `edges` of `BlockNetwork.run`; returns (T', B, V)

    def fill(self, numbers: Sequence[Sequence[int]]) -> None:
        """Write the first kinds of numbers, of each the streams'; further rows of the batch have no stream."""
        if self.done is not None:
            self.done.synchronize()  # the last step has read what was there
        for row, values, empty in zip(self._pinned, numbers, _EMPTY_ROW, strict=False):
            row[: len(values)], row[len(values) :] = values, empty

    def copy_to_device(self, kinds: int) -> None:
        """Copy the first kinds of numbers, by a kernel: kernels after a copy start later."""
        torch.add(self._mapped[:kinds], 0, out=self.numbers[:kinds])

    def launch(self, edges: bool) -> Tensor:
        logits = self.run[edges]()
        if self.done is not None:
            self.done.record()
        return logits


class BlockRunner:
    """Runs a model on blocks of `block_frames` feature frames of any number of streams.

    One thread steps; others may start streams.

    Args:
        model: unidirectional, in evaluation mode.
        features: of its input, on the same device.
        dtype: of weights and activations.
        capacity: streams for which there is room at first.
        batch_sizes: on a GPU, rising.

    Raises:
        ConfigError: a bidirectional model.
    """

    def __init__(
        self,
        model: AcousticModel,
        features: Features,
        block_frames: int,
        dtype: torch.dtype,
        *,
        capacity: int = 64,
        batch_sizes: Sequence[int] = BATCH_SIZES,
    ) -> None:
        self.features, self.device = features, model.classifier.weight.device
        self.batch_sizes, self.max_batch = batch_sizes, batch_sizes[-1]
        piece = min(block_frames, _PIECE_FRAMES * model.time_stride) if parallel_layers(model, dtype) else None
        self.network = BlockNetwork(model, block_frames, dtype, piece)
        self.samples = features.span(block_frames)
        self.slots = SlotTable(self.network.new_state, self.samples, self.device, capacity)
        self.batches: dict[int, _BlockBatch] = {}
        self._recorder = GraphRecorder(self.device) if self.device.type == "cuda" else None
        self._steps = self._steps_done = 0  # begun, and those whose samples were read
        self._last_step: torch.cuda.Event | None = None

    def start_stream(self) -> Slot:
        """Start a stream; its slot is free again when the `Slot` is gone."""
        return self.slots.take(self._steps)

    def input_buffer(self, slot: Slot, number: int) -> NDArray[np.float32]:
        """Return the buffer for the samples (N,) of a stream's block: samples that are written there are not copied."""
        row = 2 * slot.index + number % 2
        if number - slot.blocks >= 2 or row >= len(self.slots.rows):  # the row is in use, or not there yet
            return np.empty(self.samples, np.float32)
        if slot.step > self._steps_done and self._last_step is not None:  # a step on the GPU may still read the row
            steps = self._steps
            self._last_step.synchronize()
            self._steps_done = steps
        return self.slots.rows[row]

    @torch.inference_mode()
    def prepare(self, streams: int) -> None:
        """Make room for so many streams and, on a GPU, record their graphs: seconds, the first time more."""
        self._grow(streams + 1)
        if self.device.type != "cuda":
            return
        sizes = self.batch_sizes[: bisect.bisect_left(self.batch_sizes, streams) + 1]  # up to the first that suffices
        for size in reversed(sizes):  # the largest first: the others fit into its memory
            for edges in (True, False):
                self._record(self._batch(size), edges)

    @torch.inference_mode()
    def step(self, slots: Sequence[Slot], blocks: Sequence[NDArray[np.float32]]) -> BlockOutput:
        """Run the next block of streams, all different, `max_batch` at most.

        Args:
            blocks: samples (N,) float32 in [-1, 1] of each; a shorter one ends its stream, see `final_blocks`.
        """
        count, network = len(slots), self.network
        size = next(size for size in self.batch_sizes if size >= count) if self._recorder is not None else count
        self._grow(self.slots.used)
        batch = self._batch(size)
        edges = any(network.has_edges(slot.blocks, slot.ends) for slot in slots)
        if edges not in batch.run:
            self._record(batch, edges)
        numbers = [self._input_rows(slots, blocks)]
        if edges:
            frames = {length: self.features.windows(length) for length in set(map(len, blocks))}
            numbers += [s.blocks for s in slots], [s.ends for s in slots], [frames[len(block)] for block in blocks]
        batch.fill(numbers)
        logits = batch.launch(edges) if self._recorder is not None else self._launch_or_restore(batch, edges, slots)
        self._steps, self._last_step = self._steps + 1, batch.done
        for slot in slots:
            slot.step = self._steps
            slot.blocks += 1
        if edges:
            return self._valid_output(slots, logits)
        return BlockOutput(list(range(count)), logits[:, :count], [network.frames] * count)

    def final_blocks(self, slot: Slot, rest: NDArray[np.float32], waiting: int) -> list[NDArray[np.float32]]:
        """End a stream; return its last blocks for `step`; empty ones give the frames that wait for their lookahead.

        Args:
            slot: gets no other blocks than the returned ones.
            rest: its last samples (N,), fewer than a block's.
            waiting: blocks before these that `step` has not had yet.
        """
        network, blocks = self.network, slot.blocks + waiting
        slot.ends = blocks * network.block_frames + self.features.windows(len(rest))
        missing = network.output_frames(slot.ends) - (blocks * network.frames - network.delay)
        count = -(-missing // network.frames)
        return [rest, *[rest[:0]] * (count - 1)] if count > 0 else []

    def _valid_output(self, slots: Sequence[Slot], logits: Tensor) -> BlockOutput:
        """The frames of a block that belong to their streams, of each from its first one on."""
        spans = [self.network.valid_span(slot.blocks - 1, slot.ends) for slot in slots]
        rows = [row for row, (first, end) in enumerate(spans) if end > first]
        firsts = [spans[row][0] for row in rows]
        lengths = [spans[row][1] - spans[row][0] for row in rows]
        longest = max(lengths, default=0)
        if len(rows) == len(slots) and len(set(firsts)) == 1:
            selected = logits[firsts[0] : firsts[0] + longest, : len(slots)]
        else:  # one launch for streams that begin at different frames
            indices = torch.tensor([rows, firsts], dtype=torch.int64).to(logits.device)
            frames = indices[1] + torch.arange(longest, device=logits.device)[:, None]
            selected = logits[frames.clamp_max(len(logits) - 1), indices[0]]
        return BlockOutput(rows, selected, lengths)

    def _launch_or_restore(self, batch: _BlockBatch, edges: bool, slots: Sequence[Slot]) -> Tensor:
        """Run a batch on the CPU; where that fails, streams carry what they did before, so that they can go on."""
        tables, rows = self.slots.state.by_slot(), torch.tensor([slot.index for slot in slots])
        before = [table.index_select(0, rows) for table in tables]
        try:
            return batch.launch(edges)
        except Exception:
            for table, old in zip(tables, before, strict=True):
                table.index_copy_(0, rows, old)
            raise

    def _input_rows(self, slots: Sequence[Slot], blocks: Sequence[NDArray[np.float32]]) -> list[int]:
        """The rows of samples of streams' next blocks; blocks that lie elsewhere are copied into them."""
        numbers, rows = [2 * slot.index + slot.blocks % 2 for slot in slots], self.slots.rows
        for slot, number, block in zip(slots, numbers, blocks, strict=True):
            if block is not rows[number]:
                self.input_buffer(slot, slot.blocks)  # waits until the row was read
                rows[number][: len(block)], rows[number][len(block) :] = block, 0.0
        return numbers

    def _batch(self, size: int) -> _BlockBatch:
        if size not in self.batches:
            self.batches[size] = _BlockBatch(size, self.network.block_frames, self.device)
        return self.batches[size]

    def _grow(self, slots: int) -> None:
        """Make room for so many slots; graphs of the old tables go."""
        if slots <= self.slots.state.capacity:
            return
        if self._last_step is not None:
            self._last_step.synchronize()  # nothing reads the old tables any more
        self.slots.grow(slots)
        self.batches.clear()
        if self._recorder is not None:
            self._recorder.new_pool()

    def _record(self, batch: _BlockBatch, edges: bool) -> None:
        def run() -> Tensor:
            batch.copy_to_device(_NUMBERS if edges else 1)
            row, block, ends, frames = batch.numbers
            lengths = frames if edges else batch.full_blocks
            features = self.features.of_rows(self.slots.device_rows, row, lengths, self.network.dtype)
            return self.network.run(features, self.slots.state, row >> 1, block, ends, edges=edges)

        batch.fill([[]] * _NUMBERS)  # all rows at slot 0
        batch.run[edges] = run if self._recorder is None else self._recorder.record(run)


def file_block_frames(model: AcousticModel, step_s: float) -> int:
    """Feature frames of the blocks in which files run fastest on the model's device.

    Args:
        model: unidirectional.
        step_s: seconds from one feature frame to the next.
    """
    stride = model.time_stride
    on_gpu = model.classifier.weight.is_cuda
    return stride * (_FILE_PIECES * _PIECE_FRAMES if on_gpu else max(1, round(_CPU_FILE_S / (step_s * stride))))


def window_logits(model: AcousticModel, blocks: Iterator[Tensor], context_frames: int) -> Iterator[Tensor]:
    """Logits (T', 1, V) of each block of an utterance by a model that needs its end, computed with context.

    Args:
        model: bidirectional, or any other.
        blocks: features (1, F, T); T a multiple of the model's stride but for the last.
        context_frames: feature frames on each side of a block, a multiple of the stride.
    """
    block = next(blocks, None)
    before = None if block is None else block[:, :, :0]
    while block is not None and before is not None:
        following = next(blocks, None)
        after = block[:, :, :0] if following is None else following[:, :, :context_frames]
        window = torch.cat([before, block, after], dim=2)
        logits, _ = model(window, torch.tensor([window.shape[2]]))
        first = model.output_frames(before.shape[2])
        yield logits[first : first + model.output_frames(block.shape[2])]
        before = block[:, :, block.shape[2] - context_frames :]
        block = following
