"""Steps as CUDA graphs: what a step launches for one shape is recorded once, then launched as a whole.

At few utterances a GPU the host, not the GPU, would set the pace: hundreds of launches a step.
"""

from __future__ import annotations

import contextlib
import logging
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from ds2.config.schema import Config, ConfigError
from ds2.distributed.communicator import Communicator
from ds2.training.inputs import Inputs
from ds2.training.passes import Passes

log = logging.getLogger(__name__)

# train-clean-5 in batches of 16 at five speeds comes in 55 shapes; with 32 graphs, four an epoch were recorded again.
MOST_GRAPHS = 64
_REMEMBERED_SHAPES = 1024


def wanted(config: Config, comm: Communicator, no_loss: str | None, why_torch: str | None = None) -> bool:
    """Whether steps run as CUDA graphs (`train.graphs`).

    Args:
        config: of the run.
        comm: the ranks, with their device.
        no_loss: why the CTC loss cannot be captured there; None if it can.
        why_torch: why recurrent layers run through torch's kernels; None if they do not.

    Raises:
        ConfigError: they are asked for and cannot be had.
    """
    hosts = len(set(comm.allgather(comm.host)))
    apart = config.train.graphs == "auto" and hosts > 1
    reasons = (
        (comm.device.type != "cuda", f"the device is {comm.device}, they need a CUDA GPU"),
        (comm.world > 1 and comm.name != "nccl", f"the ranks' sums go over {comm.name}, which cannot be recorded"),
        (apart, f"on {hosts} hosts gradients travel during back-propagation; train.graphs=on sends them behind it"),
        (
            why_torch is not None,
            f"torch's kernels of model.cell={config.model.cell} use streams of their own: {why_torch}",
        ),
        (no_loss is not None, f"the CTC loss: {no_loss}"),
    )
    reason = next((text for applies, text in reasons if applies), None)
    if config.train.graphs == "on" and reason:
        raise ConfigError(f"train.graphs=on cannot run: {reason}; set train.graphs=auto or off")
    if config.train.graphs == "auto" and reason and comm.device.type == "cuda" and comm.rank == 0:
        log.info("steps run without CUDA graphs: %s", reason)
    return config.train.graphs != "off" and reason is None


class Recorder:
    """Records what is launched, on a stream and in memory of its own."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._pool: Any = None

    def forget(self) -> None:
        """Record into other memory from now on; what graphs that are gone held goes back to the device."""
        self._pool = torch.cuda.graph_pool_handle()
        torch.cuda.empty_cache()

    @contextmanager
    def recording(self) -> Iterator[torch.cuda.CUDAGraph]:
        """What the block launches is not run but becomes the graph."""
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            # The loader's thread may pin memory meanwhile: only this thread is watched.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                yield graph
            except BaseException:
                with contextlib.suppress(RuntimeError):  # of the broken recording: the error that broke it is told
                    graph.capture_end()
                raise
            graph.capture_end()


def _room() -> bool:
    """Whether what passes take in memory fits twice: launched one by one and recorded."""
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return 2 * torch.cuda.max_memory_allocated() <= total


@runtime_checkable
class HostState(Protocol):
    """An object whose passes change numbers on the host, which a recorded pass does not repeat by itself.

    A module of the model that counts its passes gives these two and takes part in recordings.
    """

    @property
    def steady(self) -> bool:
        """Whether the next pass launches what all later ones of its shape will."""
        ...

    def advance(self) -> None:
        """Count a pass that is replayed from a recording, as the pass itself would have."""
        ...


class _Recorded:
    """Both passes of a shape, with where they read and write."""

    def __init__(self, inputs: Inputs, losses: Tensor, graphs: tuple[torch.cuda.CUDAGraph, torch.cuda.CUDAGraph]):
        self.inputs, self.losses, self.graphs = inputs, losses, graphs


class GraphedPasses(Passes):
    """Passes of which those of a shape that came before are recorded, and from then on launched as two graphs.

    Launch by launch run a shape that comes for the first time, all while running averages still weigh batches by their
    number, copies that weigh nothing on ranks past the end of a batch, and what is not recorded yet once half of the
    GPU's memory is in use: the same kernels on the same shapes, so the same bits. Graphs share their working memory,
    which the largest shape made: a larger one starts anew. At most `MOST_GRAPHS` are kept, those used last.

    Between ranks batch norm's sums are part of a recording, and so are those of gradients where these overlap: beside
    the backward pass, on a stream that forks from it as buckets fill.

    Inputs must be padded, `InputMaker(padded=True)`, for shapes to come back. Arguments are those of `Passes`.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._counting = [part for part in (*self.model.modules(), self.gradients) if isinstance(part, HostState)]
        self._recorder = Recorder()
        self._seen: OrderedDict[tuple[int, ...], None] = OrderedDict()
        self._kept: OrderedDict[tuple[int, ...], _Recorded] = OrderedDict()
        self._waveforms, self._numbers = torch.empty(0), torch.empty(0)
        self._count, self._utterances = 0, torch.zeros(())  # of a step, for the host and for the device
        self._running: _Recorded | None = None
        self.replays = 0

    def forward(self, inputs: Inputs, utterances: int | Tensor, *, last: bool, idle: bool) -> Tensor:
        """As `Passes.forward`."""
        if utterances != self._count:
            self._count = int(utterances)
            self._utterances = self._utterances.to(inputs.waveforms.device).fill_(self._count)
        sums = last and self.gradients.overlaps
        shape = (*inputs.shape, *self.gradients.variant)
        key = (*shape, int(sums), int(self.gradients.copied))
        came_before = shape in self._seen
        self._seen[shape] = None
        self._seen.move_to_end(shape)
        if len(self._seen) > _REMEMBERED_SHAPES:
            self._seen.popitem(last=False)
        self._running, self.usual = None, False
        if idle or not came_before or not all(part.steady for part in self._counting):
            return super().forward(inputs, self._utterances, last=last, idle=idle)
        recorded = self._kept.get(key)
        if recorded is None and not _room():
            return super().forward(inputs, self._utterances, last=last, idle=idle)
        if recorded is None:
            recorded = self._record(key, inputs, sums=sums)  # which counts the batch, as if it had run
        else:
            self.usual = True
            inputs.into(self._waveforms, self._numbers)
            self.gradients.start_pass(last=sums)
            for part in self._counting:
                part.advance()
        self._kept.move_to_end(key)
        self._running = recorded
        self.replays += 1
        recorded.graphs[0].replay()
        return recorded.losses.clone()  # the next replay writes over them

    def backward(self) -> None:
        """As `Passes.backward`."""
        if self._running is None:
            super().backward()
        else:
            self._running.graphs[1].replay()

    def _record(self, key: tuple[int, ...], inputs: Inputs, *, sums: bool) -> _Recorded:
        waveforms, numbers = inputs.waveforms.numel(), inputs.numbers.numel()
        if waveforms > len(self._waveforms) or numbers > len(self._numbers):
            self._kept.clear()
            self._waveforms = inputs.waveforms.new_empty(max(waveforms, len(self._waveforms)))
            self._numbers = inputs.numbers.new_empty(max(numbers, len(self._numbers)))
            self._recorder.forget()
        static = inputs.into(self._waveforms, self._numbers)
        with self._recorder.recording() as forward:
            losses = super().forward(static, self._utterances, last=sums, idle=False)
        with self._recorder.recording() as backward:
            super().backward()
            if sums:
                self.gradients.finish_step()
        self._kept[key] = _Recorded(static, losses, (forward, backward))
        if len(self._kept) > MOST_GRAPHS:
            self._kept.popitem(last=False)
        return self._kept[key]
