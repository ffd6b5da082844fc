"""Appleyard's six stages of a faster LSTM as functions of stock PyTorch; kernels with weights on chip are the seventh.

    python tools/bench.py stages                       Table 1: 4 layers of 512, B 64, T 100
    python tools/bench.py stages --sweep figure1       TFLOP/s of stages over hidden sizes and batches (Figure 1)
    python tools/bench.py stages --sweep figure2       TFLOP/s of RNN, GRU and LSTM, ours and cuDNN's (Figure 2)

"Optimizing performance of recurrent neural networks on GPUs" (Appleyard, Kocisky, Blunsom 2016): every stage keeps what
those before it do. Outputs, and with the backward pass all gradients, are compared with float64 first; the error may be
twice that of a plain loop of torch's operations, which rounds after each. Times are microseconds a cell (one layer, one
time step) of the forward pass and of both passes, launched one by one by the host, and replayed as a CUDA graph;
speed-ups are over the first stage of a column. The backward pass of a stage is what autograd makes of it: the same
products on the same streams, in reverse. "#6, weights at the end" is section 2.6: one product a matrix after the
propagation.
Shape letters: T frames, B batch, H hidden: an input is (T, B, H), a layer's weights are (4 H, H), gates i, f, g, o.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import ds2_ops
import torch
from benchmarks.common import (
    Table,
    add_timing_options,
    facts,
    measure,
    module_call,
    relative_error,
    seconds_or_reason,
    write_json,
)
from dispatch import new_parser, parse
from torch import Tensor, nn

FIGURE_1 = [(hidden, batch) for hidden in (512, 1024, 2048) for batch in (32, 64, 128, 256)]
FIGURE_1_STAGES = ("naive", "#1 grouped GEMMs", "#3 fused pointwise", "#6 overlapped layers", "#7 on chip")
FIGURE_2 = [(hidden, batch) for hidden in (512, 1024) for batch in (32, 64, 128)]
GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
PAPER = {"naive": 1.0, "#1": 1.9, "#2": 2.8, "#3": 5.3, "#4": 6.2, "#5": 6.5, "#6": 11.1}  # Table 1, on an M40


@dataclass(frozen=True)
class Layer:
    """Weights of one layer; its bias, the sum of both of torch.nn, and zeros for an op that asks for two."""

    weight_ih: Tensor
    weight_hh: Tensor
    bias: Tensor
    zero: Tensor


@dataclass
class Trace:
    """Factors and products of a layer by task: inputs, states before each step, and the products of the inputs."""

    inputs: list[Tensor] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)
    products: list[Tensor] = field(default_factory=list)


class Streams:
    """CUDA streams by number, and the waits between them; on a CPU everything runs one after the other."""

    def __init__(self, count: int, device: torch.device) -> None:
        self.streams = [torch.cuda.Stream() for _ in range(count)] if device.type == "cuda" else [None] * count

    @contextmanager
    def all(self) -> Iterator[None]:
        """Let all streams begin after what was launched before, and what is launched later wait for all streams."""
        for stream in filter(None, self.streams):
            stream.wait_stream(torch.cuda.current_stream())
        yield
        for stream in filter(None, self.streams):
            torch.cuda.current_stream().wait_stream(stream)

    def on(self, number: int) -> AbstractContextManager[object]:
        """Launch the body of a `with` on a stream."""
        stream = self.streams[number]
        return torch.cuda.stream(stream) if stream else nullcontext()

    def done(self, number: int) -> Any:
        """Record an event after all launches of a stream so far; None on a CPU."""
        stream = self.streams[number]
        return stream.record_event() if stream else None

    def wait(self, number: int, event: Any) -> None:
        """Let a stream wait for an event."""
        if event is not None:
            self.streams[number].wait_event(event)  # type: ignore[union-attr]


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


def naive(x: Tensor, layers: Sequence[Layer], group: int) -> Tensor:
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


def grouped(x: Tensor, layers: Sequence[Layer], group: int) -> Tensor:
    """#1: the four products of the same operand are one of four times the rows."""
    for layer in layers:
        h = c = torch.zeros_like(x[0])
        outputs = []
        for frame in x:
            h, c = pointwise(frame @ layer.weight_ih.t() + h @ layer.weight_hh.t() + layer.bias, c)
            outputs.append(h)
        x = torch.stack(outputs)
    return x


def _on_streams(
    x: Tensor,
    layers: Sequence[Layer],
    group: int,
    *,
    transposed: bool,
    cell: Callable[..., tuple[Tensor, Tensor]],
    overlap: bool = False,
) -> tuple[Tensor, list[Trace]]:
    """Stages #2 to #6: tasks of `group` steps of a layer, on two streams, or two for each layer."""
    weights = [[w.t().contiguous() if transposed else w.t() for w in (r.weight_ih, r.weight_hh)] for r in layers]
    groups = range((len(x) + group - 1) // group)
    tasks = [(layer, at) for layer in range(len(layers)) for at in groups]
    if overlap:  # nearest to the first cell comes first
        tasks.sort(key=lambda task: (sum(task), task))
    states = [(torch.zeros_like(x[0]), torch.zeros_like(x[0])) for _ in layers]
    made: dict[tuple[int, int], tuple[list[Tensor], Any]] = {}
    traces = [Trace() for _ in layers]  # keep what one stream gives another from being freed before that has read it
    streams = Streams(2 * len(layers) if overlap else 2, x.device)
    with streams.all():
        for layer, at in tasks:
            of_inputs, of_states = (2 * layer, 2 * layer + 1) if overlap else (0, 1)
            w_ih, w_hh = weights[layer]
            inputs, ready = made[layer - 1, at] if layer else (list(x[at * group : (at + 1) * group]), None)
            streams.wait(of_inputs, ready)
            with streams.on(of_inputs):
                operand = inputs[0] if len(inputs) == 1 else torch.cat(inputs)
                product = operand @ w_ih
                ready = streams.done(of_inputs)
            traces[layer].inputs.append(operand)
            traces[layer].products.append(product)
            outputs, (h, c) = [], states[layer]
            with streams.on(of_states):
                for of_input in product.chunk(len(inputs)):
                    traces[layer].states.append(h)
                    of_state = h @ w_hh
                    if not outputs:
                        streams.wait(of_states, ready)
                    h, c = cell(of_input, of_state, layers[layer], c)
                    outputs.append(h)
                made[layer, at] = outputs, streams.done(of_states)
            states[layer] = h, c
    return torch.stack([h for at in groups for h in made[len(layers) - 1, at][0]]), traces


def persistent(x: Tensor, layers: Sequence[Layer], group: int) -> Tensor:
    """#7: weights stay on chip; one product and one kernel a layer."""
    for layer in layers:
        backend = "persistent" if x.is_cuda else "auto"
        x = ds2_ops.lstm(nn.functional.linear(x, layer.weight_ih, layer.bias), layer.weight_hh, backend=backend)[0]
    return x


Stage = Callable[[Tensor, Sequence[Layer], int], Tensor]


def _staged(*, grouped_inputs: bool = False, **options: Any) -> Stage:
    """A stage from #2 to #6; options as of `_on_streams`."""
    return lambda x, layers, group: _on_streams(x, layers, group if grouped_inputs else 1, **options)[0]


STAGES: dict[str, Stage] = {
    "naive": naive,
    "#1 grouped GEMMs": grouped,
    # Listing 2: both products of a cell at the same time, on two streams.
    "#2 streamed GEMMs": _staged(transposed=False, cell=apart),
    # All pointwise operations of a cell are one kernel.
    "#3 fused pointwise": _staged(transposed=False, cell=fused),
    # Listing 3: weights are transposed once a pass, so that products read both operands along their rows.
    "#4 pre-transpose": _staged(transposed=True, cell=fused),
    # The input products of several steps are one.
    "#5 batched inputs": _staged(grouped_inputs=True, transposed=True, cell=fused),
    # Listing 4: a cell runs as soon as the cells below it and before it have, so layers overlap as a wave.
    "#6 overlapped layers": _staged(grouped_inputs=True, transposed=True, cell=fused, overlap=True),
    "#7 on chip": persistent,
}
AT_THE_END = "#6, weights at the end"


def gradients(y: Tensor, x: Tensor, layers: Sequence[Layer], grad_y: Tensor) -> list[Tensor]:
    """Gradients of the input and of each layer's two matrices and bias, as autograd finds them step by step."""
    leaves = [x, *(t for layer in layers for t in (layer.weight_ih, layer.weight_hh, layer.bias))]
    return list(torch.autograd.grad(y, leaves, grad_y))


def weights_at_the_end(x: Tensor, layers: Sequence[Layer], group: int, grad_y: Tensor) -> list[Tensor]:
    """The same with weights that the propagation leaves alone: then one product of all steps a matrix."""
    fixed = [Layer(*(t.detach() for t in (r.weight_ih, r.weight_hh, r.bias, r.zero))) for r in layers]
    y, traces = _on_streams(x, fixed, group, transposed=True, cell=fused, overlap=True)
    products = [product for trace in traces for product in trace.products]
    grad_x, *of_products = torch.autograd.grad(y, [x, *products], grad_y)
    results, remaining = [grad_x], iter(of_products)
    with torch.no_grad():
        for trace in traces:
            grad = torch.cat(list(itertools.islice(remaining, len(trace.products))))
            results += [grad.t() @ torch.cat(trace.inputs), grad.t() @ torch.cat(trace.states), grad.sum(0)]
    return results


@dataclass(frozen=True)
class Size:
    """The size of a network."""

    hidden: int
    batch: int
    frames: int
    layers: int

    @property
    def cells(self) -> int:
        """Layers by time steps."""
        return self.layers * self.frames

    def tflops(self, us_a_cell: float, gates: int = 4, passes: int = 1) -> float:
        """TFLOP/s of products with inputs and states; the backward pass has twice those of the forward pass."""
        return 2 * 2 * gates * self.hidden**2 * self.batch * passes / us_a_cell * 1e-6


class Network:
    """Layers of one size, the truth about them, and how far from it stages may be."""

    def __init__(self, size: Size, device: torch.device, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.size, self.device = size, device
        self.peer = nn.LSTM(size.hidden, size.hidden, size.layers).to(device, dtype)
        shape = (size.frames, size.batch, size.hidden)
        self.x = torch.randn(shape).to(device, dtype).requires_grad_()
        self.grad_y = torch.randn(shape).to(device, dtype)

        def layer(index: int) -> Layer:
            w_ih, w_hh, b_ih, b_hh = self._weights(index)
            leaves = (w_ih.clone(), w_hh.clone(), b_ih + b_hh)
            return Layer(*(leaf.requires_grad_() for leaf in leaves), torch.zeros_like(b_ih))

        self.layers = [layer(index) for index in range(size.layers)]

    def _weights(self, index: int) -> list[Tensor]:
        names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        return [self.peer.get_parameter(f"{name}_l{index}").detach() for name in names]

    def measure_truth(self) -> None:
        """Compute output and gradients in float64, and the errors of stage #1, a plain loop, in the network's dtype."""
        wide_layers = [
            Layer(*(t.detach().double().requires_grad_() for t in (r.weight_ih, r.weight_hh, r.bias)), r.zero.double())
            for r in self.layers
        ]
        wide_x = self.x.detach().double().requires_grad_()
        y = grouped(wide_x, wide_layers, 1)
        self.truth = [y.detach(), *gradients(y, wide_x, wide_layers, self.grad_y.double())]
        y = grouped(self.x, self.layers, 1)
        stock = self.errors([y.detach(), *gradients(y, self.x, self.layers, self.grad_y)])
        self.allowed = [2 * error + torch.finfo(torch.float32).eps for error in stock]

    def errors(self, values: Sequence[Tensor]) -> list[float]:
        """Relative errors of the output and the gradients; without a backward pass, of the output alone."""
        pairs = zip(values, self.truth, strict=False)
        return [relative_error(value, truth) for value, truth in pairs]

    def calls(self, name: str, group: int) -> dict[str, Callable[[], list[Tensor]]]:
        """Forward and both passes of a stage, by the name of what each measures."""

        def forward() -> list[Tensor]:
            with torch.no_grad():
                return [STAGES[name](self.x, self.layers, group)]

        def both() -> list[Tensor]:
            y = STAGES[name](self.x, self.layers, group)
            return [y.detach(), *gradients(y, self.x, self.layers, self.grad_y)]

        if name == AT_THE_END:
            return {"both": lambda: weights_at_the_end(self.x, self.layers, group, self.grad_y)}
        return {"forward": forward, "both": both}

    def us(self, seconds: float) -> float:
        """Microseconds a cell of a pass that takes so long."""
        return round(seconds * 1e6 / self.size.cells, 3)


def table_1(options: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> list[dict[str, Any]]:
    """Check and time every stage; the row of a stage that is wrong says so."""
    size = Size(options.hidden, options.batch, options.frames, options.layers)
    network = Network(size, device, dtype)
    network.measure_truth()
    columns = {"stage": "{stage}"}
    for kind, title in (("forward", "forward"), ("both", "both passes")):
        for way in ("host", "graph"):
            columns[f"{title}, {way}, us"] = f"{{{kind}_{way}_us:.2f}}"
            columns[f"{title}, {way}, speed-up"] = f"{{{kind}_{way}_gain:.1f}}"
    table = Table(columns | {"the paper's forward": "{paper}", "wrong": "{wrong}"})
    rows: list[dict[str, Any]] = []
    for name in [*STAGES, AT_THE_END]:
        row: dict[str, Any] = {"stage": name, "paper": PAPER.get(name.split()[0]), "wrong": ""}
        rows.append(row)
        for kind, call in network.calls(name, options.group).items():
            values = call()
            if name == AT_THE_END:
                values = [network.truth[0], *values]
            row[f"{kind}_errors"] = errors = network.errors(values)
            if any(error > most for error, most in zip(errors, network.allowed, strict=False)):
                row["wrong"] = f"{kind}: errors {errors}, allowed {network.allowed}"
                break
            row[f"{kind}_host_us"] = network.us(measure(call, device, budget_s=options.budget).median_s)
            if device.type == "cuda":
                seconds = seconds_or_reason(call, device, options.budget)
                recorded = isinstance(seconds, float)
                row[f"{kind}_graph_{'us' if recorded else 'error'}"] = network.us(seconds) if recorded else seconds
        add_gains(row, rows[0])
        table.print_row(row)
    return rows


def add_gains(row: dict[str, Any], first: dict[str, Any]) -> None:
    """Speed-up of each time of a row over the first row's."""
    for key in [key for key in row if key.endswith("_us")]:
        if key in first:
            row[key.replace("_us", "_gain")] = first[key] / row[key]


def figure_1(options: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> list[dict[str, Any]]:
    """TFLOP/s of the forward pass by stage, over hidden sizes and batches."""
    table = Table({"H": "{hidden}", "B": "{batch}"} | {name: f"{{tflops[{name}]:.1f}}" for name in FIGURE_1_STAGES})
    rows = []
    for hidden, batch in options.sizes or FIGURE_1:
        network = Network(Size(hidden, batch, options.frames, options.layers), device, dtype)
        tflops, reasons = dict[str, float](), dict[str, str]()
        for name in FIGURE_1_STAGES:
            seconds = seconds_or_reason(network.calls(name, options.group)["forward"], device, options.budget)
            if isinstance(seconds, str):  # weights that do not fit
                reasons[name] = seconds
            else:
                tflops[name] = network.size.tflops(seconds * 1e6 / network.size.cells)
        rows.append({"hidden": hidden, "batch": batch, "tflops": tflops, "not_measured": reasons})
        table.print_row(rows[-1])
    return rows


def figure_2(options: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> list[dict[str, Any]]:
    """TFLOP/s of both kinds of pass by network type, ours and torch's (cuDNN's on a GPU)."""
    columns = {"type": "{kind}", "H": "{hidden}", "B": "{batch}"}
    for whose, of in itertools.product(("ours", "torch"), ("forward", "both")):
        columns[f"{whose}, {of}"] = f"{{{whose}_{of}:.1f}}"
    table, rows = Table(columns), []
    for kind, (hidden, batch) in itertools.product(GATES, options.sizes or FIGURE_2):
        size = Size(hidden, batch, options.frames, options.layers)
        row: dict[str, Any] = {"kind": kind, "hidden": hidden, "batch": batch}
        x = torch.randn(size.frames, batch, hidden, device=device, dtype=dtype, requires_grad=True)
        grad_y = torch.randn_like(x)
        for whose, package in (("ours", ds2_ops), ("torch", nn)):
            module = getattr(package, kind)(hidden, hidden, size.layers, device=device, dtype=dtype)
            for of, passes in (("forward", 1), ("both", 3)):
                call = module_call(module, x, grad_y if of == "both" else None)
                seconds = seconds_or_reason(call, device, options.budget)
                if isinstance(seconds, str):
                    row[f"{whose}_{of}_error"] = seconds
                else:
                    row[f"{whose}_{of}"] = size.tflops(seconds * 1e6 / size.cells, GATES[kind], passes)
        rows.append(row)
        table.print_row(row)
    return rows


def size_of(text: str) -> tuple[int, int]:
    """Parse HxB."""
    hidden, _, batch = text.partition("x")
    return int(hidden), int(batch)


def main(arguments: list[str] | None = None) -> int:
    """Check, time, print; 1 if a stage is wrong."""
    parser = new_parser(__doc__)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    for name, size in (("hidden", 512), ("batch", 64), ("frames", 100), ("layers", 4)):
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--group", type=int, default=5, help="steps whose input products are one, from stage #5 on")
    parser.add_argument("--sweep", choices=("figure1", "figure2"), help="a figure instead of Table 1")
    parser.add_argument("--sizes", nargs="+", type=size_of, metavar="HxB", help="of a sweep, in place of its own")
    add_timing_options(parser, budget_s=0.3)
    options = parse(parser, arguments)
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    title = f"{options.sweep or 'Table 1'}, {options.layers} layers, T {options.frames}, {options.dtype}"
    head = facts(options, device, title)
    rows = {None: table_1, "figure1": figure_1, "figure2": figure_2}[options.sweep](options, device, dtype)
    write_json(options.out, {"benchmark": "stages", **head, "rows": rows})
    return int(any(row.get("wrong") for row in rows))
