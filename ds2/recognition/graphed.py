"""Blocks of any streams in batches of a few sizes: on a GPU features and model of a size are one CUDA graph.

Launch by launch, hundreds of small kernels a block take the host milliseconds, for one stream as for sixty.
"""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ds2.model.blocks import FOR_EVER, BlockModel, runs_waves, why_not
from ds2.model.recurrent import why_torch
from ds2.recognition.pipeline import Pipeline, Said

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # of batches; one in between takes the next
_PLACES = 64  # at first; doubled when they are taken
_CPU_FILE_S = 2.0  # audio of a file that a CPU hears at once in bfloat16
_PIECE_FRAMES = 44  # output frames that a layer runs at once where others run beside it
_PIECES = 8  # of a block, at most
_EMPTY = 0, 0, FOR_EVER, 0  # of a row without a stream: row of samples (all that is needed amid), blocks, end, frames
_NUMBERS = len(_EMPTY)


@dataclass(eq=False)
class Stream:
    """Where a stream has its place and how far it was heard."""

    place: int
    step: int  # of the hearing, which may read its rows until then
    blocks: int = 0
    ends: int = FOR_EVER
    __weakref__: object = field(init=False, repr=False)


class _Rooms:
    """Samples of every place's next two blocks, in rows that a GPU reads where they are: nothing copies them here."""

    def __init__(self, places: int, samples: int, device: torch.device) -> None:
        here = torch.zeros(2 * places, samples, pin_memory=device.type == "cuda")
        self.rows: list[NDArray[np.float32]] = list(here.numpy())
        self.there = _Mapped.seen(here, device)


class _Mapped:
    """Pinned memory (N, M) as a GPU sees it, at the same address."""

    def __init__(self, pinned: Tensor) -> None:
        kind = "<f4" if pinned.dtype == torch.float32 else "<i8"
        where = {"data": (pinned.data_ptr(), False), "shape": tuple(pinned.shape)}
        self._pinned, self.__cuda_array_interface__ = pinned, where | {"typestr": kind, "version": 2}

    @staticmethod
    def seen(pinned: Tensor, device: torch.device) -> Tensor:
        """As a tensor of the device; on the CPU it is what it was."""
        return pinned if device.type != "cuda" else torch.as_tensor(_Mapped(pinned), device=device)


class _Batch:
    """What is heard of a size: numbers in one buffer here and one on the device."""

    def __init__(self, size: int, frames: int, device: torch.device) -> None:
        self.heard = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._here = torch.zeros(_NUMBERS, size, dtype=torch.int64, pin_memory=self.heard is not None)
        self._seen = _Mapped.seen(self._here, device)
        self.there = torch.zeros_like(self._here, device=device)
        self.whole = torch.full_like(self.there[0], frames)
        self._numbers = self._here.numpy()
        self.run: dict[bool, Callable[[], Tensor]] = {}  # by whether a stream may be at its edges; gives (T', B, V)

    def fill(self, numbers: Sequence[Sequence[int]]) -> None:
        """Take the first of the numbers of some streams, row by row; what is left is empty."""
        if self.heard is not None:
            self.heard.synchronize()  # what was there before is read
        for row, given, empty in zip(self._numbers, numbers, _EMPTY, strict=False):
            row[: len(given)], row[len(given) :] = given, empty

    def bring(self, rows: int) -> None:
        """Copy so many rows of what was filled in, by a kernel: what follows a copy begins later."""
        torch.add(self._seen[:rows], 0, out=self.there[:rows])

    def hear(self, edges: bool) -> Tensor:
        """Run what was recorded."""
        said = self.run[edges]()
        if self.heard is not None:
            self.heard.record()
        return said


class GraphedBlocks:
    """A model that hears blocks of `block_frames` as `ds2.recognition.hearing.Hearing` says.

    One thread hears; others may `start` streams.

    Args:
        parts: on a GPU.
        block_frames: feature frames.
    """

    def __init__(self, parts: Pipeline, block_frames: int) -> None:
        self.features, self.device = parts.features, parts.device
        piece_frames = min(block_frames, _piece_frames(parts)) if runs_waves(parts.model, _dtype(parts)) else None
        self.model = BlockModel(parts.model, block_frames, _dtype(parts), piece_frames)
        self.samples = self.features.span(block_frames)
        self._lock = threading.Lock()
        self.free, self.places = list[int](), 1  # place 0 is for the rows of a batch that are empty
        self.carried = self.model.start(_PLACES)
        self.rooms = _Rooms(_PLACES, self.samples, self.device)
        self.batches: dict[int, _Batch] = {}
        self._steps = self._read = 0  # begun, and those whose samples are read
        self._last: torch.cuda.Event | None = None  # of the steps begun
        self._memory = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None

    @staticmethod
    def why_not(parts: Pipeline, block_frames: int) -> str | None:
        """Why blocks are not heard so; None if they are."""
        if reason := why_not(parts.model):
            return reason
        config, dtype = parts.model.config, _dtype(parts)
        if config.cell == "lstm" and (reason := why_torch("lstm", config.hidden, dtype, parts.device)):
            return f"LSTM layers are torch's, which are heard chunk by chunk: {reason}"
        if block_frames > GraphedBlocks.most_frames(parts):
            return f"blocks of more than {_PIECES * _PIECE_FRAMES} output frames are heard as they come"
        return None

    @staticmethod
    def most_frames(parts: Pipeline) -> int:
        """Feature frames of the longest block."""
        return _PIECES * _piece_frames(parts)

    @staticmethod
    def file_frames(parts: Pipeline) -> int | None:
        """Feature frames of the blocks in which files are heard as streams are; None: better as they come.

        In bfloat16 weights with batch norm in them say other words than weights without. On a CPU the last block, which
        is filled up, costs as much as the others, so they are short there; in float32 it does not matter.
        """
        if parts.device.type == "cpu":
            frames = round(_CPU_FILE_S / parts.frame_s) * parts.model.time_stride if parts.precision == "bf16" else 0
        else:
            frames = GraphedBlocks.most_frames(parts)
        return frames if frames and GraphedBlocks.why_not(parts, frames) is None else None

    def start(self) -> Stream:
        """See `Hearing`; the place is free again when the stream is gone."""
        with self._lock:
            place = self.free.pop() if self.free else self.places
            self.places = max(self.places, place + 1)
        stream = Stream(place, self._steps)
        weakref.finalize(stream, self.free.append, place)
        return stream

    def room(self, stream: Stream, number: int) -> NDArray[np.float32]:
        """See `Hearing`."""
        row = 2 * stream.place + number % 2
        if number - stream.blocks >= 2 or row >= len(self.rooms.rows):  # the row waits to be heard, or is not there
            return np.empty(self.samples, np.float32)
        if stream.step > self._read and self._last is not None:
            read = self._steps
            self._last.synchronize()
            self._read = read
        return self.rooms.rows[row]

    def _rows(self, streams: Sequence[Stream], blocks: Sequence[NDArray[np.float32]]) -> list[int]:
        """The rows in which streams' next blocks lie, where those are written that are elsewhere."""
        numbers, rows = [2 * stream.place + stream.blocks % 2 for stream in streams], self.rooms.rows
        for stream, number, block in zip(streams, numbers, blocks, strict=True):
            if block is not rows[number]:
                self.room(stream, stream.blocks)  # what was there is read
                rows[number][: len(block)], rows[number][len(block) :] = block, 0.0
        return numbers

    @torch.inference_mode()
    def prepare(self, streams: int) -> None:
        """Make places for so many streams and, on a GPU, record what they may need: seconds, the first time more."""
        before, self.places = self.places, max(self.places, streams + 1)
        self._grow()
        self.places = before
        if self.device.type != "cuda":
            return
        sizes = [size for at, size in enumerate(SIZES) if at == 0 or SIZES[at - 1] < streams]
        for size in reversed(sizes):  # the largest first: the others fit into its memory
            for edges in (True, False):
                self._record(self._batch(size), edges)

    def _batch(self, size: int) -> _Batch:
        batch = self.batches.get(size) or _Batch(size, self.model.block_frames, self.device)
        if self.device.type == "cuda":  # elsewhere nothing is recorded
            self.batches[size] = batch
        return batch

    @torch.inference_mode()
    def step(self, streams: Sequence[Stream], blocks: Sequence[NDArray[np.float32]]) -> Iterator[Said]:
        """See `Hearing`."""
        for first in range(0, len(streams), SIZES[-1]):
            yield from self._step(streams[first : first + SIZES[-1]], blocks[first : first + SIZES[-1]], first)

    def last(self, stream: Stream, rest: NDArray[np.float32], waiting: int) -> list[NDArray[np.float32]]:
        """See `Hearing`."""
        heard = stream.blocks + waiting
        stream.ends = heard * self.model.block_frames + self.features.windows(len(rest))
        left = self.model.output_frames(stream.ends) - (heard * self.model.frames - self.model.delay)
        count = -(-left // self.model.frames)
        return [rest, *[rest[:0]] * (count - 1)][: max(0, count)]

    def _step(self, streams: Sequence[Stream], blocks: Sequence[NDArray[np.float32]], first_row: int) -> Iterator[Said]:
        count = len(streams)
        size = next(size for size in SIZES if size >= count) if self.device.type == "cuda" else count
        self._grow()
        batch = self._batch(size)
        begun = self.model.delay / self.model.frames  # blocks after which all frames given are a stream's
        edges = any(stream.blocks < begun or stream.ends < FOR_EVER for stream in streams)
        if edges not in batch.run:
            self._record(batch, edges)
        numbers = [self._rows(streams, blocks)]
        if edges:
            frames = {length: self.features.windows(length) for length in set(map(len, blocks))}
            numbers += [s.blocks for s in streams], [s.ends for s in streams], [frames[len(block)] for block in blocks]
        batch.fill(numbers)
        said, self._steps, self._last = batch.hear(edges), self._steps + 1, batch.heard
        for stream in streams:
            stream.step = self._steps
        if not edges:
            for stream in streams:
                stream.blocks += 1
            yield Said(list(range(first_row, first_row + count)), said[:, :count], [self.model.frames] * count)
            return
        of_first: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        for row, stream in enumerate(streams):
            first, last = self.model.given(stream.blocks, stream.ends)
            stream.blocks += 1
            if last > first:
                of_first[first].append((row, last - first))
        for first, found in of_first.items():
            rows, lengths = map(list, zip(*found, strict=True))
            logits = said[first : first + max(lengths)]
            logits = logits[:, :count] if len(rows) == count else logits[:, rows]
            yield Said([first_row + row for row in rows], logits, lengths)

    def _grow(self) -> None:
        """Make more places if need be; graphs know the old ones, so they go."""
        before, most = self.carried, self.carried.states.shape[1]
        if self.places <= most:
            return
        while most < self.places:
            most *= 2
        if self._last is not None:
            self._last.synchronize()  # nothing is read any more that goes here
        self.carried = self.model.start(most)
        for old, new in zip(before.convs, self.carried.convs, strict=True):
            new[: len(old)] = old
        for name in ("states", "cells", "rows"):
            old, new = getattr(before, name), getattr(self.carried, name)
            new[:, : old.shape[1]] = old
        self.rooms = _Rooms(most, self.samples, self.device)
        self.batches.clear()
        self._memory = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None

    def _record(self, batch: _Batch, edges: bool) -> None:
        def run() -> Tensor:
            batch.bring(_NUMBERS if edges else 1)
            row, block, ends, frames = batch.there
            lengths = frames if edges else batch.whole
            features = self.features.of_rows(self.rooms.there, row, lengths, self.model.dtype)
            return self.model.run(features, self.carried, row >> 1, block, ends, edges=edges)

        batch.fill([[]] * _NUMBERS)  # all rows at the empty place
        batch.run[edges] = run if self.device.type != "cuda" else self._graph(run)

    def _graph(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):  # libraries make their plans, kernels are built
            run()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory, stream=stream, capture_error_mode="thread_local"):
            logits = run()

        def replay() -> Tensor:
            graph.replay()
            return logits

        return replay


def _dtype(parts: Pipeline) -> torch.dtype:
    return torch.bfloat16 if parts.precision == "bf16" else torch.float32


def _piece_frames(parts: Pipeline) -> int:
    return _PIECE_FRAMES * parts.model.time_stride
