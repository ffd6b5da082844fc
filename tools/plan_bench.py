"""What tools/sweep_plans.py times: random tensors of one problem, launches of its tiles, a kernel that reads the clock.

Shape letters: T frames, B batch, H hidden.
"""

import statistics
from collections.abc import Callable

import torch
from ds2_ops.jit import runtime
from ds2_ops.jit.launch import Source, run_loaded
from ds2_ops.recurrent.backends import gemm
from ds2_ops.recurrent.cells import CELLS, Options
from ds2_ops.recurrent.plan.problem import Choice, Problem, array_bytes, pass_arguments
from torch import Tensor

FRAMES, CHECKED_FRAMES, LAUNCHES = 256, 5, 2
_CLOCK = "if (threadIdx.x == 0 && blockIdx.x == 0) { clocks[%d] = clock64(); clocks[%d] = ds2::now_ns(); }"


def clocked_text(choice: Choice) -> str:
    """Write the kernel so that it notes cycles and nanoseconds at its beginning and end."""
    head, _, body = choice.launch.source.text.partition("ds2_kernel(")
    signature, _, statements = body.partition(") {\n")
    end = statements.rindex("}")
    begin, finish = _CLOCK % (0, 1), _CLOCK % (2, 3)
    return (
        f"{head}ds2_kernel({signature}, unsigned long long* clocks) {{\n    {begin}\n"
        f"{statements[:end]}    __syncthreads();\n    {finish}\n}}\n"
    )


class Bench:
    """Tensors of one problem, and what is done to them."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.device = problem, torch.device("cuda")
        self.index, self.cell = torch.cuda.current_device(), CELLS[problem.nonlinearity]
        torch.manual_seed(problem.hidden + problem.batch)
        dtype = getattr(torch, problem.dtype)
        self.arrays: list[Tensor | None] = []
        for place, size in enumerate(array_bytes(problem, FRAMES)):
            kind = torch.float32 if place in (9, 10) else dtype  # c is
            count = size // kind.itemsize
            self.arrays.append(torch.randn(count, dtype=kind, device=self.device) if size else None)
        if self.arrays[1] is not None:
            self.arrays[1].clamp_min_(0)  # an output
        self.arrays[2].mul_(0.9 * problem.hidden**-0.5)
        if self.cell.gates > 1 and problem.backward:
            self.arrays[7].uniform_(-0.9, 0.9)  # what a forward pass may have saved
        self.exchange: Tensor | None = None
        self.truth = self._truth().flatten()

    def _few(self, place: int, width: int) -> Tensor:
        """The first few frames of an array, in float64."""
        rows = CHECKED_FRAMES * self.problem.batch
        array = self.arrays[place]
        assert array is not None
        return array[: rows * width].double().view(CHECKED_FRAMES, self.problem.batch, width)

    def _truth(self) -> Tensor:
        """The result of a few frames in float64."""
        problem, hidden, gates = self.problem, self.problem.hidden, self.cell.gates
        matrix = self.arrays[2]
        assert matrix is not None
        if gates > 1:
            carry = self.arrays[9].double().view(problem.batch, hidden) if self.arrays[9] is not None else None
            if problem.backward:  # is given the transpose
                saved = self._few(7, self.cell.saved * hidden).unflatten(2, (self.cell.saved, hidden))
                weight = matrix.double().view(hidden, gates * hidden).t()
                grads = (self._few(0, hidden), None, carry)
                return gemm.backward_data(*grads, grads[0], saved, weight, None, Options(problem.nonlinearity))[0]
            weight = matrix.double().view(gates * hidden, hidden)
            given = (self._few(0, gates * hidden), weight, None, None, carry, None)
            return gemm.forward(*given, Options(problem.nonlinearity))[0]
        double, outputs = matrix.double().view(hidden, hidden), []
        x, state = self._few(0, hidden), matrix.new_zeros(problem.batch, hidden, dtype=torch.float64)
        for t in range(CHECKED_FRAMES):
            if problem.backward:
                frame = CHECKED_FRAMES - 1 - t
                state = (x[frame] + state @ double.t()) * (self._few(1, hidden)[frame] > 0)
            else:
                state = (x[t] + state @ double.t()).clamp_min(0)
            outputs.append(state)
        return torch.stack(outputs[::-1] if problem.backward else outputs)

    def launcher(self, choice: Choice, frames: int, clocks: Tensor | None = None) -> Callable[[], None]:
        """Make ready all that a launch takes."""
        launch = choice.launch
        if choice.exchange_words and (self.exchange is None or self.exchange.numel() < choice.exchange_words):
            self.exchange = torch.empty(choice.exchange_words, dtype=torch.int32, device=self.device)
        addresses = [0 if array is None else array.data_ptr() for array in self.arrays]
        exchange = 0 if self.exchange is None else self.exchange.data_ptr()
        numbers, source = pass_arguments(choice, self.problem, frames, addresses, 1.0, exchange), launch.source
        if clocks is not None:
            numbers.append(clocks.data_ptr())
            source = Source(clocked_text(choice), (*source.parameters, ("void*", "clocks")))
        packed, stream = source.pack(numbers), torch.cuda.current_stream().cuda_stream
        kernel = runtime.load(source.text, self.index)

        def call() -> None:
            run_loaded(launch, kernel, packed, stream)

        return call

    def error(self, choice: Choice) -> float:
        """Relative error of a few frames."""
        call = self.launcher(choice, CHECKED_FRAMES)
        self.arrays[5].fill_(torch.nan)
        call()
        result = self.arrays[5][: self.truth.numel()].double()
        return float((result - self.truth).norm() / self.truth.norm())

    def times_us(self, choices: list[Choice], frames: int, rounds: int) -> list[float]:
        """Median time of a launch of each, in turns, so that a drift of the clock meets all."""
        calls = [self.launcher(choice, frames) for choice in choices]
        spans: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in choices]
        for turn in range(rounds):
            for call, span in zip(calls, spans, strict=True):
                for launch in range(-1 if turn == 0 else 0, LAUNCHES):
                    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                    start.record()
                    call()
                    stop.record()
                    if launch >= 0:  # the others warm up
                        span.append((start, stop))
        torch.cuda.synchronize()
        return [statistics.median(start.elapsed_time(stop) for start, stop in span) * 1e3 for span in spans]

    def clock_mhz(self, choice: Choice) -> float:
        """Cycles over time of a kernel that has been running for a while."""
        clocks = torch.zeros(4, dtype=torch.int64, device=self.device)
        call = self.launcher(choice, FRAMES, clocks)
        for _ in range(8):
            call()
        cycles_0, ns_0, cycles_1, ns_1 = clocks.tolist()
        return (cycles_1 - cycles_0) * 1e3 / (ns_1 - ns_0)
