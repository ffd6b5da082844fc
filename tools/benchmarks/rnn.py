"""Time the recurrence against nn.RNN and a recorded loop of products, after checking it against float64.

    python tools/bench.py rnn                              the standard table: bfloat16, T 512, on a GPU
    python tools/bench.py rnn --cell lstm                  the same for LSTM and GRU (gru_after, gru_before)
    python tools/bench.py rnn --device cpu                 the CPU path against nn.RNN
    python tools/bench.py rnn --hidden 1152 --batch 1 2 4 8 16 24 32 48 64             Persistent RNNs (2016), Figure 3
    python tools/bench.py rnn --hidden 1152 --batch 4 --frames 1 3 10 30 100 300 1000  its Figure 4

Forward + backward includes the weight gradient. nn.RNN always computes the input projection; our times are without it,
and the columns "+projection" are with it and its gradients, as the ratio to nn.RNN needs. TFLOP/s count the work that
is in the time. Prints a table, then one line of JSON; exits with 1 if an op is wrong. Shape letters: T frames, B
batch, H hidden.
"""

import itertools
import json
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from benchmarks.common import Table, facts, measure, measure_host
from dispatch import new_parser, parse
from ds2_ops import recurrence
from ds2_ops.recurrent.backends.reference import recurrence_reference
from ds2_ops.recurrent.cells import CELLS, GATED
from torch import Tensor, nn

from ds2.system.cuda_graph import GraphRecorder
from ds2.system.files import write_json

STANDARD = [(1152, 4), (1152, 16), (1152, 32), (1152, 64), (512, 4), (512, 32), (1760, 4), (2560, 4), (2560, 64)]
STANDARD_GATED = [(256, 4), (512, 4), (512, 8), (512, 16), (512, 32), (512, 64), (1024, 16), (1024, 64)]
STANDARD_CPU = list(itertools.product((256, 512, 1152), (4, 8, 32)))
Result = dict[str, Any]
PEERS = {"lstm": "nn.LSTM", "gru_after": "nn.GRU", "gru_before": "nn.GRU"}  # of the last, only its time compares


def relative_error(value: Tensor, truth: Tensor) -> float:
    """The norm of the error over that of the truth, which is float64."""
    return float((value.double() - truth).norm() / truth.norm())


class LayerProblem:
    """Random tensors of one size, whose states neither vanish nor explode, and the ops that run on them."""

    def __init__(self, size: tuple[int, int, int], dtype: torch.dtype, device: torch.device, cell: str) -> None:
        self.size = self.hidden, self.batch, self.frames = hidden, batch, frames = size
        self.dtype, self.device, self.cell, self.gates = dtype, device, cell, CELLS[cell].gates
        torch.manual_seed(hidden + batch)

        def draw(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(shape, dtype=dtype, device=device) * scale).requires_grad_()

        rows = self.gates * hidden
        self.inputs = draw(frames, batch, hidden)  # of a layer
        self.x = draw(frames, batch, rows) if cell in GATED else self.inputs
        self.grad_y = draw(frames, batch, hidden).detach()
        self.weight_hh = draw(rows, hidden, scale=(1.0 if cell in GATED else 0.9) * hidden**-0.5)
        self.weight_ih, self.bias = draw(rows, hidden, scale=hidden**-0.5), draw(rows, scale=0.1)
        self.bias_hn = draw(hidden, scale=0.1) if cell in GATED and cell != "lstm" else None
        options = {} if cell in GATED else {"nonlinearity": "tanh" if cell == "tanh" else "relu"}
        make = getattr(nn, PEERS.get(cell, "nn.RNN").removeprefix("nn."))
        self.peer = make(hidden, hidden, dtype=dtype, device=device, **options)
        with torch.no_grad():
            for mine, theirs in ((self.weight_ih, "weight_ih_l0"), (self.weight_hh, "weight_hh_l0")):
                self.peer.get_parameter(theirs).copy_(mine)
        self.peer.flatten_parameters()

    def op(self, backend: str, projection: bool, backward: bool) -> Callable[[], object]:
        """Our op as a callable: forward alone, or with all gradients."""
        own = [self.inputs if projection else self.x, self.weight_hh, *([] if self.bias_hn is None else [self.bias_hn])]
        leaves = [*own, *([self.weight_ih, self.bias] if projection else [])]

        def call() -> object:
            with torch.set_grad_enabled(backward):
                x = nn.functional.linear(self.inputs, self.weight_ih, self.bias) if projection else self.x
                y = recurrence(x, self.weight_hh, cell=self.cell, bias_hn=self.bias_hn, backend=backend)[0]
            return torch.autograd.grad(y, leaves, self.grad_y) if backward else y

        return call

    def peer_op(self, backward: bool) -> Callable[[], object]:
        """The same of torch's module, projection included. Its ReLU has no clip, which takes hardly any time."""

        def call() -> object:
            with torch.set_grad_enabled(backward):
                y = self.peer(self.inputs)[0]
            return torch.autograd.grad(y, [self.inputs, *self.peer.parameters()], self.grad_y) if backward else y

        return call

    def errors(self, backend: str) -> dict[str, tuple[float, float]]:
        """Relative RMS error against float64 of (ours, the stock loop in the same precision), ragged and with h0."""
        lengths = torch.linspace(self.frames, self.frames // 2, self.batch, device=self.device).int()
        h0 = torch.randn(self.batch, self.hidden, dtype=self.dtype, device=self.device)
        own = [self.x, self.weight_hh, *([] if self.bias_hn is None else [self.bias_hn]), h0]

        def run(op: Callable[..., Sequence[Tensor]], dtype: torch.dtype, **options: str) -> Iterable[Tensor]:
            leaves = [t.detach().to(dtype).requires_grad_() for t in own]
            x, weight_hh, *bias, first = leaves
            y, h_n = op(x, weight_hh, first, lengths, cell=self.cell, bias_hn=bias[0] if bias else None, **options)[:2]
            gradients = torch.autograd.grad((y, h_n), leaves, (self.grad_y.to(dtype), h0.to(dtype)))
            return y.detach(), h_n.detach(), *gradients

        truth = run(recurrence_reference, torch.float64)
        torch.backends.cuda.matmul.allow_tf32 = backend == "persistent"  # as its kernels multiply float32
        stock = run(recurrence_reference, self.dtype)
        torch.backends.cuda.matmul.allow_tf32 = False
        names = ("y", "h_n", "grad_x", "grad_weight_hh", *(["grad_bias"] if len(own) > 3 else []), "grad_h0")
        triples = zip(names, run(recurrence, self.dtype, backend=backend), stock, truth, strict=True)
        return {n: (relative_error(o, t), relative_error(s, t)) for n, o, s, t in triples}


def bench(problem: LayerProblem, contenders: list[str]) -> list[Result]:
    """Check, then time every contender on one size; the row of an op that is wrong or cannot run has the reason."""
    rows: list[Result] = []
    useful = 2.0 * problem.gates * problem.hidden**2 * problem.batch * problem.frames
    for contender in contenders:
        row: Result = {"hidden": problem.hidden, "batch": problem.batch, "frames": problem.frames}
        row["contender"] = contender
        rows.append(row)
        backend, _, graph = contender.partition(" ")  # of torch's modules, a dtype
        try:
            if contender.startswith("nn."):
                dtype = getattr(torch, graph) if graph else problem.dtype
                peer = LayerProblem(problem.size, dtype, problem.device, problem.cell) if graph else problem
                calls = {"projected_forward": peer.peer_op(False), "projected_both": peer.peer_op(True)}
            else:
                row["errors"] = errors = problem.errors(backend)
                most = torch.finfo(problem.dtype).eps
                if wrong := {n: pair for n, pair in errors.items() if not pair[0] <= 2 * pair[1] + most}:
                    row["wrong"] = f"WRONG, errors (ours, stock): {wrong}"
                    continue
                calls = {"forward": problem.op(backend, False, False), "both": problem.op(backend, False, True)}
                calls["projected_forward"] = problem.op(backend, True, False)
                calls["projected_both"] = problem.op(backend, True, True)
                if graph:  # a replay keeps the graph's memory alive
                    calls = {name: GraphRecorder().record(call) for name, call in calls.items()}
        except RuntimeError as error:  # a size that does not fit, or a capture that failed
            row["skipped"] = str(error)
            continue
        for name, call in calls.items():
            row[f"{name}_us"] = [round(t * 1e6 / problem.frames, 4) for t in measure(call, problem.device)]
            if problem.device.type == "cuda":
                row[f"{name}_host_us"] = [round(t * 1e6, 1) for t in measure_host(call, problem.device)]
        for name, products in (("forward", 1), ("both", 3)):  # the backward pass is two more products of this size
            own_us = row.get(f"{name}_us")
            time_us = (own_us or row[f"projected_{name}_us"])[0]  # that of nn.RNN has the input projection, so work too
            work = useful * products * (1 if own_us else 2)
            row[f"{name}_tflops"] = float(f"{work / (time_us * problem.frames) * 1e-6:.4g}")
    return rows


def add_ratios(rows: list[Result]) -> None:
    """How many times faster each row of a size is than its nn.RNN (both with projection) and GEMM graph (without)."""
    for row in rows:
        for peer, prefix, key in (("nn.", "projected_", "vs_rnn"), ("gemm graph", "", "vs_gemm_graph")):
            twin = next((r for r in rows if r["contender"].startswith(peer)), {})
            for name in ("forward", "both"):
                mine, theirs = row.get(f"{prefix}{name}_us"), twin.get(f"{prefix}{name}_us")
                if mine and theirs and twin is not row:
                    row[f"{name}_{key}"] = round(theirs[0] / mine[0], 2)


def make_table() -> Table:
    """Begin a table of contenders; times are microseconds a step, median and 10th to 90th percentile."""
    columns = {"H": "{hidden}", "B": "{batch}", "T": "{frames}", "op": "{contender}"}
    for name, title in (("forward", "forward"), ("both", "forward + backward")):
        columns[f"{title}, us a step"] = f"{{{name}_us[0]:.2f}} ({{{name}_us[1]:.2f}}-{{{name}_us[2]:.2f}})"
        columns[f"TFLOP/s, {title}"] = f"{{{name}_tflops:.3g}}"
        columns[f"x nn.RNN, {title}"] = f"{{{name}_vs_rnn:.2f}}"
        columns[f"x GEMM graph, {title}"] = f"{{{name}_vs_gemm_graph:.2f}}"
        columns[f"+projection, {title}"] = f"{{projected_{name}_us[0]:.2f}}"
        columns[f"host us, {title}"] = f"{{{name}_host_us[0]:.0f}}"
    return Table(columns | {"not measured": "{note}"})


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; 1 if an op was wrong."""
    parser = new_parser(__doc__)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cuda", "cpu"), default=default)
    parser.add_argument("--hidden", type=int, nargs="+", help="H values, each with all of --batch")
    parser.add_argument("--batch", type=int, nargs="+", help="B values; with --hidden")
    parser.add_argument("--frames", type=int, nargs="+", help="T values; 512 on a GPU, 200 on a CPU")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), help="bfloat16 on a GPU, else float32")
    parser.add_argument("--cell", choices=tuple(CELLS), default="relu")
    contenders = "backends, 'BACKEND graph' for its CUDA graph, nn.RNN, 'nn.LSTM float16'"
    parser.add_argument("--contenders", nargs="+", help=contenders)
    parser.add_argument("--out", type=Path, help="file for the data (JSON)")
    options = parse(parser, arguments)
    if (options.hidden is None) != (options.batch is None):
        parser.error("--hidden and --batch go together: pass both or neither")
    device, gpu, gated = torch.device(options.device), options.device == "cuda", options.cell in GATED
    frames = options.frames or [512 if gpu else 200]
    dtype = getattr(torch, options.dtype or ("bfloat16" if gpu else "float32"))
    peer = PEERS.get(options.cell, "nn.RNN")
    others = ["persistent", peer, f"{peer} float16"] if gated else ["persistent", "gemm graph", peer]
    contenders = options.contenders or (others if gpu else ["cpu", peer])
    standard = STANDARD_GATED if gated else STANDARD if gpu else STANDARD_CPU
    pairs = itertools.product(options.hidden, options.batch) if options.hidden else standard
    sizes = [(hidden, batch, steps) for (hidden, batch), steps in itertools.product(pairs, frames)]
    # PyTorch packs the weights of a bfloat16 nn.RNN in every call, and warns; that is part of its time.
    warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous chunk")
    rows: list[Result] = []
    head = facts(options, device, f"{options.cell} {dtype}")
    data = {"benchmark": "rnn", **head, "dtype": str(dtype), "rows": rows}
    table = make_table()
    for one in sizes:
        of_size = bench(LayerProblem(one, dtype, device, options.cell), contenders)
        add_ratios(of_size)
        for row in of_size:
            table.print_row({"note": row.get("wrong") or row.get("skipped") or "", **row})
        rows += of_size
        if options.out:
            write_json(options.out, data)  # a run that is interrupted has what it measured
    print(json.dumps(data))
    return int(any("wrong" in row for row in rows))
