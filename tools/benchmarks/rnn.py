"""Time the recurrence against nn.RNN and a recorded loop of products, after checking it against float64.

    python tools/bench.py rnn                              the standard table: bfloat16, T 512, on a GPU
    python tools/bench.py rnn --cell lstm                  the same for LSTM and GRU (gru_after, gru_before)
    python tools/bench.py rnn --device cpu                 the CPU path against nn.RNN
    python tools/bench.py rnn --figure batch --out DIR     TFLOP/s against batch (Persistent RNNs, 2016, Figure 3);
                                                           with --hidden 1152 512 the same of these widths
    python tools/bench.py rnn --figure frames --out DIR    TFLOP/s against time steps (its Figure 4)

Forward + backward includes the weight gradient. nn.RNN always computes the input projection; our times are without it,
and the columns "+projection" are with it and its gradients, as the ratio to nn.RNN needs. TFLOP/s count the work that
is in the time. Prints one table, then one line of JSON; exits with 1 if an op is wrong. Shape letters: T frames, B
batch, H hidden.
"""

from __future__ import annotations

import argparse
import itertools
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from benchmarks.common import (
    Table,
    Timing,
    facts,
    graphed,
    measure,
    measure_host,
    module_call,
    relative_error,
    write_json,
)
from dispatch import new_parser, parse
from ds2_ops import recurrence
from ds2_ops.recurrent.backends.reference import recurrence_reference
from ds2_ops.recurrent.cells import CELLS, GATED
from torch import Tensor, nn

STANDARD = [(1152, 4), (1152, 16), (1152, 32), (1152, 64), (512, 4), (512, 32), (1760, 4), (2560, 4), (2560, 64)]
STANDARD_GATED = [(256, 4), (512, 4), (512, 8), (512, 16), (512, 32), (512, 64), (1024, 16), (1024, 64)]
STANDARD_CPU = list(itertools.product((256, 512, 1152), (4, 8, 32)))
FIGURES = {
    "batch": [(1152, batch, 512) for batch in (1, 2, 4, 8, 16, 24, 32, 48, 64)],
    "frames": [(1152, 4, frames) for frames in (1, 3, 10, 30, 100, 300, 1000)],
}
Result = dict[str, Any]
PEERS = {"lstm": "nn.LSTM", "gru_after": "nn.GRU", "gru_before": "nn.GRU"}  # of the last, only its time compares


def peer_of(cell: str) -> str:
    """Name torch's module for a cell."""
    return PEERS.get(cell, "nn.RNN")


class LayerProblem:
    """Random tensors of one size, whose states neither vanish nor explode, and the ops that run on them."""

    def __init__(self, size: tuple[int, int, int], dtype: torch.dtype, device: torch.device, cell: str) -> None:
        self.hidden, self.batch, self.frames = hidden, batch, frames = size
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
        make = getattr(nn, peer_of(cell).removeprefix("nn."))
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
                y = self._run([x, *own[1:]], None, None, None, backend)[0]
            return torch.autograd.grad(y, leaves, self.grad_y) if backward else y

        return call

    def _run(
        self, inputs: Sequence[Tensor], h0: Tensor | None, c0: Tensor | None, lengths: Tensor | None, backend: str
    ) -> Sequence[Tensor]:
        x, weight_hh, *bias = inputs
        own = {"bias_hn": bias[0] if bias else None, "c0": c0}
        return recurrence(x, weight_hh, h0, lengths, cell=self.cell, backend=backend, **own)

    def errors(self, backend: str) -> dict[str, tuple[float, float]]:
        """Relative RMS error against float64 of (ours, the stock loop in the same precision), ragged and with h0."""
        lengths = torch.linspace(self.frames, self.frames // 2, self.batch, device=self.device).int()
        h0 = torch.randn(self.batch, self.hidden, dtype=self.dtype, device=self.device)
        own = [self.x, self.weight_hh, *([] if self.bias_hn is None else [self.bias_hn]), h0]

        def ours(x: Tensor, weight_hh: Tensor, *rest: Tensor) -> Sequence[Tensor]:
            return self._run([x, weight_hh, *rest[:-1]], rest[-1], None, lengths, backend)[:2]

        def reference(x: Tensor, weight_hh: Tensor, *rest: Tensor) -> Sequence[Tensor]:
            bias = rest[0] if len(rest) > 1 else None
            return recurrence_reference(x, weight_hh, rest[-1], lengths, cell=self.cell, bias_hn=bias)[:2]

        def run(op: Callable[..., Sequence[Tensor]], dtype: torch.dtype) -> Iterable[Tensor]:
            leaves = [t.detach().to(dtype).requires_grad_() for t in own]
            y, h_n = op(*leaves)
            gradients = torch.autograd.grad((y, h_n), leaves, (self.grad_y.to(dtype), h0.to(dtype)))
            return y.detach(), h_n.detach(), *gradients

        truth = run(reference, torch.float64)
        torch.backends.cuda.matmul.allow_tf32 = backend == "persistent"  # as its kernels multiply float32
        stock = run(reference, self.dtype)
        torch.backends.cuda.matmul.allow_tf32 = False
        names = ("y", "h_n", "grad_x", "grad_weight_hh", *(["grad_bias"] if len(own) > 3 else []), "grad_h0")
        triples = zip(names, run(ours, self.dtype), stock, truth, strict=True)
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
        wrap = graphed if graph else lambda call: call
        try:
            if contender.startswith("nn."):
                other = problem
                if graph:
                    other = LayerProblem(size(row), getattr(torch, graph), problem.device, problem.cell)
                # Its ReLU has no clip, which takes hardly any time.
                both = module_call(other.peer, other.inputs, other.grad_y)
                calls = {"projected_forward": module_call(other.peer, other.inputs), "projected_both": both}
            else:
                row["errors"] = errors = problem.errors(backend)
                wrong = [
                    n for n, (ours, stock) in errors.items() if not ours <= 2 * stock + torch.finfo(problem.dtype).eps
                ]
                if wrong:
                    row["wrong"] = f"WRONG {', '.join(wrong)}: (ours, stock) errors {[errors[n] for n in wrong]}"
                    continue
                calls = {
                    "forward": wrap(problem.op(backend, False, False)),
                    "both": wrap(problem.op(backend, False, True)),
                }
                calls["projected_forward"] = wrap(problem.op(backend, True, False))
                calls["projected_both"] = wrap(problem.op(backend, True, True))
        except RuntimeError as error:  # a size that does not fit, or a capture that failed
            row["skipped"] = str(error)
            continue
        for name, call in calls.items():
            timing: Timing = measure(call, problem.device)
            row[f"{name}_us"] = [round(t * 1e6 / problem.frames, 4) for t in timing]
            if problem.device.type == "cuda":
                row[f"{name}_host_us"] = [round(t * 1e6, 1) for t in measure_host(call, problem.device)]
        products = 2 if contender.startswith("nn.") else 1  # its time holds the input projection, so its work does too
        for name, factor in (("forward", 1), ("both", 3)):  # the backward pass is two more products of this size
            time_us = (row.get(f"{name}_us") or row[f"projected_{name}_us"])[0]
            row[f"{name}_tflops"] = float(f"{products * factor * useful / (time_us * problem.frames) * 1e-6:.4g}")
    return rows


def add_ratios(rows: list[Result]) -> None:
    """How many times faster each row is than its size's nn.RNN (both with projection) and GEMM graph (both without)."""
    for row in rows:
        for peer, prefix, key in (("nn.", "projected_", "vs_rnn"), ("gemm graph", "", "vs_gemm_graph")):
            twin = next((r for r in rows if r["contender"].startswith(peer) and size(r) == size(row)), {})
            for name in ("forward", "both"):
                mine, theirs = row.get(f"{prefix}{name}_us"), twin.get(f"{prefix}{name}_us")
                if mine and theirs and twin is not row:
                    row[f"{name}_{key}"] = round(theirs[0] / mine[0], 2)


def size(row: Result) -> tuple[int, int, int]:
    """Return the size of a row: rows of one size are comparable."""
    return row["hidden"], row["batch"], row["frames"]


def print_table(rows: list[Result]) -> None:
    """Print a row a contender; times are microseconds a step, median and 10th to 90th percentile."""
    columns = {"H": "{hidden}", "B": "{batch}", "T": "{frames}", "op": "{contender}"}
    for name, title in (("forward", "forward"), ("both", "forward + backward")):
        columns[f"{title}, us a step"] = f"{{{name}_us[0]:.2f}} ({{{name}_us[1]:.2f}}-{{{name}_us[2]:.2f}})"
        columns[f"TFLOP/s, {title}"] = f"{{{name}_tflops:.3g}}"
        columns[f"x nn.RNN, {title}"] = f"{{{name}_vs_rnn:.2f}}"
        columns[f"x GEMM graph, {title}"] = f"{{{name}_vs_gemm_graph:.2f}}"
        columns[f"+projection, {title}"] = f"{{projected_{name}_us[0]:.2f}}"
        columns[f"host us, {title}"] = f"{{{name}_host_us[0]:.0f}}"
    table = Table(columns | {"not measured": "{note}"})
    for row in rows:
        table.print_row({"note": row.get("wrong") or row.get("skipped") or "", **row})


def parse_options(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = new_parser(__doc__)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cuda", "cpu"), default=default)
    parser.add_argument("--hidden", type=int, nargs="+", help="H values, with --batch (every pair) or --figure")
    parser.add_argument("--batch", type=int, nargs="+", help="B values; with --hidden")
    parser.add_argument("--frames", type=int, help="T; 512 on a GPU, 200 on a CPU")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), help="bfloat16 on a GPU, else float32")
    parser.add_argument("--cell", "--nonlinearity", choices=tuple(CELLS), default="relu")
    contenders = "backends, 'BACKEND graph' for its CUDA graph, nn.RNN, 'nn.LSTM float16'"
    parser.add_argument("--contenders", nargs="+", help=contenders)
    parser.add_argument("--figure", choices=tuple(FIGURES), help="sweep instead of the table")
    parser.add_argument("--out", type=Path, help="folder for the data (JSON)")
    options = parse(parser, arguments)
    if options.batch and options.figure:
        parser.error("--figure has batches of its own: pass --hidden alone, or neither")
    if (options.hidden is None) != (options.batch is None) and not options.figure:
        parser.error("--hidden and --batch go together: pass both or neither")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; 1 if an op was wrong, 130 if Ctrl-C ended it."""
    options = parse_options(arguments)
    device, gpu = torch.device(options.device), options.device == "cuda"
    frames = options.frames or (512 if gpu else 200)
    dtype = getattr(torch, options.dtype or ("bfloat16" if gpu else "float32"))
    peer, standard = peer_of(options.cell), STANDARD if gpu else STANDARD_CPU
    if options.cell in GATED:
        standard = STANDARD_GATED
    others = [peer, f"{peer} float16"] if options.cell in GATED else ["gemm graph", peer]
    contenders = options.contenders or (["persistent", *others] if gpu else ["cpu", peer])
    if options.figure:
        widths = options.hidden or [FIGURES[options.figure][0][0]]
        sizes = [(hidden, batch, steps) for hidden in widths for _, batch, steps in FIGURES[options.figure]]
    elif options.hidden:
        sizes = [(hidden, batch, frames) for hidden in options.hidden for batch in options.batch]
    else:
        sizes = [(hidden, batch, frames) for hidden, batch in standard]
    # PyTorch packs the weights of a bfloat16 nn.RNN in every call, and warns; that is part of its time.
    warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous chunk")
    head = facts(options, device, f"{options.cell} {dtype}")
    rows: list[Result] = []
    data = {"benchmark": "rnn", **head, "dtype": str(dtype), "figure": options.figure, "rows": rows}
    path = options.out / f"rnn_{options.figure or 'table'}.json" if options.out else None
    stopped = False
    try:
        for size_of_problem in sizes:
            rows += bench(LayerProblem(size_of_problem, dtype, device, options.cell), contenders)
            if path:
                write_json(path, data)  # a run that is interrupted has what it measured
    except KeyboardInterrupt:  # print what was measured
        stopped = True
    add_ratios(rows)
    print_table(rows)
    if path:
        write_json(path, data)
    write_json(None, data)
    return 130 if stopped else int(any("wrong" in row for row in rows))
