"""CUDA graphs: what a function launches is recorded once, then launched as a whole.

Training, recognition and beam search record with this class. Launch by launch, hundreds of small kernels take the host
longer than the GPU.
"""

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

Output = TypeVar("Output")


class GraphRecorder:
    """Records graphs that share memory, on a stream of its own; they must run one after the other.

    What a graph returns keeps its memory; other graphs may overwrite all else that it wrote. Without a `device` kernels
    run on the current GPU.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool: Any = torch.cuda.graph_pool_handle()

    def new_pool(self) -> None:
        """Record into other memory from now on; the memory of graphs that are gone goes back to the device."""
        self._pool = torch.cuda.graph_pool_handle()
        torch.cuda.empty_cache()

    @contextlib.contextmanager
    def recording(self) -> Iterator[torch.cuda.CUDAGraph]:
        """Kernels that the block launches do not run but become the graph."""
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            # Other threads may go on calling CUDA, as a data loader does that pins memory: only this one is watched.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                yield graph
            except BaseException:
                with contextlib.suppress(RuntimeError):  # of the broken recording; the error that broke it is raised
                    graph.capture_end()
                raise
            graph.capture_end()

    def record(self, run: Callable[[], Output]) -> Callable[[], Output]:
        """Run a function once, so that libraries make their plans and kernels are built, then record it.

        Returns:
            A function that replays the graph on the current stream and returns what the recorded call returned.
        """
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            run()
        current.wait_stream(self._stream)
        torch.cuda.synchronize(self._device)
        gc.collect()
        torch.cuda.empty_cache()
        with self.recording() as graph:
            output = run()

        def replay() -> Output:
            graph.replay()
            return output

        return replay
