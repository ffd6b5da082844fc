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

from ds2.model.blocks import FOR_EVER, WAVE_LANES, BlockModel, runs_waves, why_not
from ds2.model.recurrent import why_torch
from ds2.recognition.parts import Parts, Said

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # of batches; one in between takes the next
_PLACES = 64  # at first; doubled when they are taken
_CPU_FILE_S = 2.0  # audio of a file that a CPU hears at once in bfloat16
_PIECE_FRAMES = 50  # output frames that a layer runs at once where layers run beside each other
_EMPTY = 0, 0, FOR_EVER, 0  # the numbers of a row without a stream
_FRAMES = 3  # row of the numbers: place, blocks heard, end, valid feature frames


@dataclass(eq=False)
class Stream:
    """Where a stream has its place and how far it was heard."""

    place: int
    blocks: int = 0
    ends: int = FOR_EVER
    __weakref__: object = field(init=False, repr=False)


class _Batch:
    """What is heard of a size: samples and numbers in one buffer here and one on the device."""

    def __init__(self, size: int, samples: int, device: torch.device) -> None:
        self.size = size
        self._heard = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._here = torch.zeros(8 * size + size * samples, pin_memory=self._heard is not None)
        self.there = torch.zeros_like(self._here, device=device)
        self._numbers, self._waveforms = (part.numpy() for part in self.parts(self._here))
        self._flat = self._waveforms.reshape(-1)
        self.run: dict[bool, Callable[[], Tensor]] = {}  # by whether a stream may be at its edges; gives (T', B, V)

    def parts(self, buffer: Tensor) -> tuple[Tensor, Tensor]:
        """(4, B) int64 numbers and (B, N) samples."""
        return buffer[: 8 * self.size].view(torch.int64).view(4, self.size), buffer[8 * self.size :].view(self.size, -1)

    def fill(self, numbers: Sequence[Sequence[int]], blocks: Sequence[NDArray[np.float32]]) -> None:
        """Take the numbers, row by row, and samples of some streams; what is left is empty."""
        if self._heard is not None:
            self._heard.synchronize()  # what was there before is read
        count, samples = len(blocks), self._waveforms.shape[1]
        for row, given, empty in zip(self._numbers, numbers, _EMPTY, strict=True):
            row[:count], row[count:] = given, empty
        if count and set(map(len, blocks)) == {samples}:
            np.concatenate(blocks, out=self._flat[: count * samples])  # a call for each row would take longer
            return
        for row, block in zip(self._waveforms, blocks, strict=False):
            row[: len(block)] = block
            row[len(block) :] = 0.0

    def bring(self) -> None:
        """Copy what was filled in to the device."""
        self.there.copy_(self._here, non_blocking=True)

    def hear(self, edges: bool) -> Tensor:
        """Run what was recorded."""
        said = self.run[edges]()
        if self._heard is not None:
            self._heard.record()
        return said


class GraphedBlocks:
    """A model that hears blocks of `block_frames` as `ds2.recognition.hearing.Hearing` says.

    One thread hears; others may `start` streams.

    Args:
        parts: on a GPU.
        block_frames: feature frames.
    """

    def __init__(self, parts: Parts, block_frames: int) -> None:
        self.features, self.device = parts.features, parts.device
        piece_frames = min(block_frames, _piece_frames(parts)) if runs_waves(parts.model, _dtype(parts)) else None
        self.model = BlockModel(parts.model, block_frames, _dtype(parts), piece_frames)
        self.samples = (block_frames - 1) * self.features.step_samples + self.features.window_samples
        self._lock = threading.Lock()
        self.free, self.places = list[int](), 1  # place 0 is for the rows of a batch that are empty
        self.carried = self.model.start(_PLACES)
        self.batches: dict[int, _Batch] = {}
        self._memory = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None

    @staticmethod
    def why_not(parts: Parts, block_frames: int) -> str | None:
        """Why blocks are not heard so; None if they are."""
        if reason := why_not(parts.model):
            return reason
        config, dtype = parts.model.config, _dtype(parts)
        if config.cell == "lstm" and (reason := why_torch("lstm", config.hidden, dtype, parts.device)):
            return f"LSTM layers are torch's, which are heard chunk by chunk: {reason}"
        if block_frames > GraphedBlocks.most_frames(parts):
            return f"blocks of more than {WAVE_LANES * _PIECE_FRAMES} output frames are heard as they come"
        return None

    @staticmethod
    def most_frames(parts: Parts) -> int:
        """Feature frames of the longest block: as many pieces as layers may run beside each other."""
        return WAVE_LANES * _piece_frames(parts)

    @staticmethod
    def file_frames(parts: Parts) -> int | None:
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
            if self.free:
                place = self.free.pop()
            else:
                place, self.places = self.places, self.places + 1
        stream = Stream(place)
        weakref.finalize(stream, self.free.append, place)
        return stream

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
            batch = self._batch(size)
            for edges in (True, False):
                self._record(batch, edges)

    def _batch(self, size: int) -> _Batch:
        if self.device.type != "cuda":  # nothing is recorded, so only memory would be kept: a buffer for every size
            return _Batch(size, self.samples, self.device)
        return self.batches.get(size) or self.batches.setdefault(size, _Batch(size, self.samples, self.device))

    @torch.inference_mode()
    def step(self, streams: Sequence[Stream], blocks: Sequence[NDArray[np.float32]]) -> Iterator[Said]:
        """See `Hearing`."""
        for first in range(0, len(streams), SIZES[-1]):
            rows = range(first, min(first + SIZES[-1], len(streams)))
            yield from self._step([streams[row] for row in rows], [blocks[row] for row in rows], first)

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
        frames = {length: self.features.windows(length) for length in set(map(len, blocks))}
        numbers = [s.place for s in streams], [s.blocks for s in streams], [s.ends for s in streams]
        batch.fill([*numbers, [frames[len(block)] for block in blocks]], blocks)
        said = batch.hear(edges)
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
        self.carried = self.model.start(most)
        for old, new in zip(before.convs, self.carried.convs, strict=True):
            new[: len(old)] = old
        for name in ("states", "cells", "rows"):
            old, new = getattr(before, name), getattr(self.carried, name)
            new[:, : old.shape[1]] = old
        self.batches.clear()
        self._memory = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None

    def _record(self, batch: _Batch, edges: bool) -> None:
        numbers, waveforms = batch.parts(batch.there)

        def run() -> Tensor:
            batch.bring()
            features = self.features.of_windows(waveforms, numbers[_FRAMES])
            place, block, ends, _ = numbers
            return self.model.run(features, self.carried, place, block, ends, edges=edges)

        batch.fill([[]] * 4, [])  # all rows at the empty place
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


def _dtype(parts: Parts) -> torch.dtype:
    return torch.bfloat16 if parts.precision == "bf16" else torch.float32


def _piece_frames(parts: Parts) -> int:
    return _PIECE_FRAMES * parts.model.time_stride
