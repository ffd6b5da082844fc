"""Appleyard's six stages of a faster LSTM, each a small function on stock PyTorch; a persistent kernel is the seventh.

    python tools/bench_stages.py                     his network: 4 layers of 512, B 64, T 100, forward
    python tools/bench_stages.py --batch 8 --group 4

"Optimizing performance of recurrent neural networks on GPUs" (Appleyard, Kocisky, Blunsom 2016), Table 1: every stage
keeps what those before it do. Before it is timed, a stage's error against nn.LSTM in float64 must be at most twice that
of torch's own cells in the same dtype. Times are microseconds a cell (one layer, one time step), launched one by one by
the host, and replayed as a CUDA graph, which leaves what the GPU itself takes; speed-ups are over the first stage of a
column. Shape letters: T frames, B batch, H hidden: an input is (T, B, H), a layer's weights are (4 H, H), gates i,
f, g, o.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from ds2_ops import lstm
from timing import graphed, machine, measure
from torch import Tensor, nn


@dataclass(frozen=True)
class Layer:
    """Weights of one layer; its bias, the sum of both of torch.nn, and zeros for an op that asks for two."""

    weight_ih: Tensor
    weight_hh: Tensor
    bias: Tensor
    zero: Tensor


class Lanes:
    """Streams that work is put on, and the waits between them; on a CPU all is one after the other."""

    def __init__(self, count: int, device: torch.device) -> None:
        self.streams = [torch.cuda.Stream() for _ in range(count)] if device.type == "cuda" else [None] * count

    @contextmanager
    def all(self) -> Iterator[None]:
        """Around everything: lanes begin after what was launched before, and what comes later waits for them."""
        for stream in filter(None, self.streams):
            stream.wait_stream(torch.cuda.current_stream())
        yield
        for stream in filter(None, self.streams):
            torch.cuda.current_stream().wait_stream(stream)

    def on(self, lane: int) -> AbstractContextManager[object]:
        """Put what follows on a lane."""
        stream = self.streams[lane]
        return torch.cuda.stream(stream) if stream else nullcontext()

    def done(self, lane: int) -> Any:
        """Mark what a lane has been given by now."""
        stream = self.streams[lane]
        return stream.record_event() if stream else None

    def wait(self, lane: int, event: Any) -> None:
        """Let a lane wait for a mark."""
        if event is not None:
            self.streams[lane].wait_event(event)  # type: ignore[union-attr]


def pointwise(pre: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """h and c from (B, 4 H) sums: an operation after the other, each a kernel."""
    i, f, g, o = pre.chunk(4, 1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def apart(of_input: Tensor, of_state: Tensor, layer: Layer, c: Tensor) -> tuple[Tensor, Tensor]:
    """The same of two products and a bias."""
    return pointwise(of_input + of_state + layer.bias, c)


def fused(of_input: Tensor, of_state: Tensor, layer: Layer, c: Tensor) -> tuple[Tensor, Tensor]:
    """All of that as the one kernel that PyTorch has for it, on GPUs."""
    if not of_input.is_cuda:
        return apart(of_input, of_state, layer, c)
    h, c, _ = torch.ops.aten._thnn_fused_lstm_cell(of_input, of_state, c, layer.bias, layer.zero)
    return h, c


def naive(x: Tensor, layers: list[Layer], group: int) -> Tensor:
    """Listing 1, before any grouping: eight products a cell, a kernel an operation."""
    for layer in layers:
        w_ih, w_hh, bias = layer.weight_ih.chunk(4), layer.weight_hh.chunk(4), layer.bias.chunk(4)
        h = c = torch.zeros_like(x[0])
        outputs = []
        for frame in x:
            pre = [frame @ w_ih[k].t() + h @ w_hh[k].t() + bias[k] for k in range(4)]
            c = torch.sigmoid(pre[1]) * c + torch.sigmoid(pre[0]) * torch.tanh(pre[2])
            h = torch.sigmoid(pre[3]) * torch.tanh(c)
            outputs.append(h)
        x = torch.stack(outputs)
    return x


def grouped(x: Tensor, layers: list[Layer], group: int) -> Tensor:
    """#1: the four products of the same operand are one of four times the rows."""
    for layer in layers:
        h = c = torch.zeros_like(x[0])
        outputs = []
        for frame in x:
            h, c = pointwise(frame @ layer.weight_ih.t() + h @ layer.weight_hh.t() + layer.bias, c)
            outputs.append(h)
        x = torch.stack(outputs)
    return x


def streamed(x: Tensor, layers: list[Layer], group: int) -> Tensor:
    """#2, Listing 2: both products of a cell at the same time, on two streams."""
    return _on_lanes(x, layers, 1, transposed=False, cell=apart)


def fused_pointwise(x: Tensor, layers: list[Layer], group: int) -> Tensor:
    """#3: all pointwise operations of a cell are one kernel."""
    return _on_lanes(x, layers, 1, transposed=False, cell=fused)


def pre_transposed(x: Tensor, layers: list[Layer], group: int) -> Tensor:
    """#4, Listing 3: weights are transposed once a pass, so that products read both operands along their rows."""
    return _on_lanes(x, layers, 1, transposed=True, cell=fused)


def batched_inputs(x: Tensor, layers: list[Layer], group: int) -> Tensor:
    """#5: the input products of several steps are one."""
    return _on_lanes(x, layers, group, transposed=True, cell=fused)


def overlapped_layers(x: Tensor, layers: list[Layer], group: int) -> Tensor:
    """#6, Listing 4: a cell runs as soon as the cells below it and before it have, so layers overlap as a wave."""
    return _on_lanes(x, layers, group, transposed=True, cell=fused, overlap=True)


def _on_lanes(
    x: Tensor, layers: list[Layer], group: int, *, transposed: bool, cell: Callable[..., Any], overlap: bool = False
) -> Tensor:
    """Stages #2 to #6: tasks of `group` steps of a layer, on two lanes, or two for each layer."""
    weights = [[w.t().contiguous() if transposed else w.t() for w in (r.weight_ih, r.weight_hh)] for r in layers]
    groups = range((len(x) + group - 1) // group)
    tasks = [(layer, at) for layer in range(len(layers)) for at in groups]
    if overlap:  # nearest to the first cell comes first
        tasks.sort(key=lambda task: (sum(task), task))
    states = [(torch.zeros_like(x[0]), torch.zeros_like(x[0])) for _ in layers]
    made: dict[tuple[int, int], tuple[list[Tensor], Any]] = {}
    kept = []  # what one lane gives another must not be freed, and used anew, before that has read it
    lanes = Lanes(2 * len(layers) if overlap else 2, x.device)
    with lanes.all():
        for layer, at in tasks:
            of_inputs, of_states = (2 * layer, 2 * layer + 1) if overlap else (0, 1)
            w_ih, w_hh = weights[layer]
            given, ready = made[layer - 1, at] if layer else (list(x[at * group : (at + 1) * group]), None)
            lanes.wait(of_inputs, ready)
            with lanes.on(of_inputs):
                operand = given[0] if len(given) == 1 else torch.cat(given)
                products = (operand @ w_ih).chunk(len(given))
                ready = lanes.done(of_inputs)
            kept += [operand, products]
            outputs, (h, c) = [], states[layer]
            with lanes.on(of_states):
                for product in products:
                    of_state = h @ w_hh
                    if not outputs:
                        lanes.wait(of_states, ready)
                    h, c = cell(product, of_state, layers[layer], c)
                    outputs.append(h)
                made[layer, at] = outputs, lanes.done(of_states)
            states[layer] = h, c
    return torch.stack([h for at in groups for h in made[len(layers) - 1, at][0]])


def persistent(x: Tensor, layers: list[Layer], group: int) -> Tensor:
    """#7: weights stay on chip; one product and one kernel a layer."""
    for layer in layers:
        x = lstm(nn.functional.linear(x, layer.weight_ih, layer.bias), layer.weight_hh)[0]
    return x


STAGES: dict[str, Callable[[Tensor, list[Layer], int], Tensor]] = {
    "naive": naive,
    "#1 grouped GEMMs": grouped,
    "#2 streamed GEMMs": streamed,
    "#3 fused pointwise": fused_pointwise,
    "#4 pre-transpose": pre_transposed,
    "#5 batched inputs": batched_inputs,
    "#6 overlapped layers": overlapped_layers,
    "#7 on chip": persistent,
}
THEIRS = {"naive": 1.0, "#1": 1.9, "#2": 2.8, "#3": 5.3, "#4": 6.2, "#5": 6.5, "#6": 11.1}  # Table 1, on an M40


class Bench:
    """One network, the truth about it, and how far from it stages may be."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.device, self.dtype = torch.device(options.device), getattr(torch, options.dtype)
        self.cells = options.layers * options.frames
        torch.manual_seed(0)
        self.peer = nn.LSTM(options.hidden, options.hidden, options.layers).to(self.device, self.dtype)
        self.x = torch.randn(options.frames, options.batch, options.hidden).to(self.device, self.dtype)

        def layer(index: int) -> Layer:
            names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
            w_ih, w_hh, b_ih, b_hh = (self.peer.get_parameter(f"{name}_l{index}").detach() for name in names)
            return Layer(w_ih, w_hh, b_ih + b_hh, torch.zeros_like(b_ih))

        self.layers = [layer(index) for index in range(options.layers)]
        wide = nn.LSTM(options.hidden, options.hidden, options.layers).to(self.device, torch.float64)
        wide.load_state_dict({name: weight.double() for name, weight in self.peer.state_dict().items()})
        self.truth = wide(self.x.double())[0]
        self.allowed = 2 * self.error(self._stock()) + torch.finfo(torch.float32).eps

    def _stock(self) -> Tensor:
        """torch's cells, one after the other."""
        x = self.x
        for layer in self.layers:
            h = c = torch.zeros_like(x[0])
            outputs = []
            for frame in x:
                h, c = torch.lstm_cell(frame, (h, c), layer.weight_ih, layer.weight_hh, layer.bias, layer.zero)
                outputs.append(h)
            x = torch.stack(outputs)
        return x

    def error(self, y: Tensor) -> float:
        """Relative error."""
        return float((y.double() - self.truth).norm() / self.truth.norm())

    def us(self, call: Callable[[], object]) -> float:
        """Microseconds a cell."""
        return round(measure(call, self.device, budget_s=0.3).median_s * 1e6 / self.cells, 3)


def main() -> int:
    """Check, time, print; 1 if a stage is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cuda", "cpu"), default=default)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    for name, size in (("hidden", 512), ("batch", 64), ("frames", 100), ("layers", 4), ("group", 5)):
        parser.add_argument(f"--{name}", type=int, default=size)
    options = parser.parse_args()
    on_gpu, wrong, rows = options.device == "cuda", False, []
    with torch.no_grad():
        bench = Bench(options)
        calls: dict[str, Callable[[], Tensor]] = {
            name: lambda stage=stage: stage(bench.x, bench.layers, options.group)  # type: ignore[misc]
            for name, stage in STAGES.items()
        }
        calls["nn.LSTM"] = lambda: bench.peer(bench.x)[0]
        size = f"{options.layers} LSTM layers of {options.hidden}, B {options.batch}, T {options.frames}"
        print(f"{size}, {options.dtype}, us a cell on {machine(bench.device)}")
        print(f"{'stage':<22}{'by the host':>12}{'speed-up':>10}{'CUDA graph':>12}{'speed-up':>10}{'his':>8}")
        for name, call in calls.items():
            row: dict[str, Any] = {"stage": name, "error": bench.error(call())}
            rows.append(row)
            if row["error"] > bench.allowed:
                wrong = True
                print(f"{name:<22} WRONG: error {row['error']:.2e}, allowed {bench.allowed:.2e}", flush=True)
                continue
            row["host_us"] = bench.us(call)
            if on_gpu:
                row["graph_us"] = bench.us(graphed(call))
            print(f"{name:<22}" + "".join(_column(rows, key) for key in ("host_us", "graph_us"))
                  + f"{THEIRS.get(name.split()[0], ''):>8}", flush=True)  # fmt: skip
    print(json.dumps({"benchmark": "stages", **vars(options), "rows": rows}))
    return int(wrong)


def _column(rows: list[dict[str, Any]], key: str) -> str:
    mine, first = rows[-1].get(key), rows[0].get(key)
    return f"{mine:>12.2f}{first / mine:>9.1f}x" if mine and first else f"{'-':>12}{'-':>10}"


if __name__ == "__main__":
    raise SystemExit(main())
