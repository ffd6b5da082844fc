"""Latency of forward passes beside the tables and figures of GRNN (Holmes et al. 2019).

    python tools/bench.py grnn table1       100 frames of a layer, ours, cuDNN's, a CPU's (Table 1, Figures 11 to 13)
    python tools/bench.py grnn figure15     latency against batch of its language model and its classifier
    python tools/bench.py grnn table3       a GRU that resets before the product, with two synchronisations a step,
                                            beside one that resets after it, which needs one

Times are milliseconds of a pass with the input's product, replayed as a CUDA graph; on a CPU, of the call. "+copies"
includes the copies of the input from the host and of the last state to it, as the paper's times do.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from typing import Any

import ds2_ops
import torch
from benchmarks.common import (
    Table,
    add_timing_options,
    facts,
    module_call,
    relative_error,
    seconds_or_reason,
    write_json,
)
from benchmarks.rnn import LayerProblem
from dispatch import new_parser, parse
from ds2_ops.recurrent.cells import GATED
from torch import nn

HIDDEN, BATCHES, FRAMES = (64, 256, 1024), (1, 10, 20), 100
FIGURE_15_BATCHES = (1, 2, 5, 10, 15, 20, 64)
Call = Callable[[], object]
Row = dict[str, Any]


# The paper's two models (section 8.5), LSTM layers whose input has their width: layers, hidden, frames.
STACKS = {"classifier": (2, 256, 20), "language model": (3, 128, 100)}


def ms(call: Call, device: torch.device, budget_s: float) -> float | str:
    """Milliseconds of `seconds_or_reason`."""
    seconds = seconds_or_reason(call, device, budget_s)
    return seconds if isinstance(seconds, str) else round(seconds * 1e3, 4)


def with_copies(problem: LayerProblem, call: Call) -> Call:
    """Copy the layer's input from pinned memory first, and the last frame back."""
    source = problem.inputs.detach().cpu().pin_memory()
    target = torch.empty(problem.batch, problem.hidden, dtype=problem.dtype).pin_memory()

    def copied() -> object:
        problem.inputs.detach().copy_(source, non_blocking=True)
        y = call()
        target.copy_(y[-1], non_blocking=True)  # type: ignore[index]
        return y

    return copied


def tflops(problem: LayerProblem, time_ms: float | str) -> float | None:
    """TFLOP/s of the products with the inputs and with the state."""
    if isinstance(time_ms, str):
        return None
    return 2 * 2 * problem.gates * problem.hidden**2 * problem.batch * problem.frames / time_ms * 1e-9


def table_1(options: argparse.Namespace, device: torch.device) -> list[Row]:
    """Each cell, hidden size and batch; on a GPU also cuDNN's time, and the CPU's of the same machine."""
    columns = {"cell": "{cell}", "H": "{hidden}", "B": "{batch}", "ours": "{ours}"}
    columns |= {"TFLOP/s": "{tflops:.3g}", "+copies": "{copies}", "cuDNN bf16": "{torch_bfloat16}"}
    columns |= {"cuDNN fp16": "{torch_float16}", "CPU, torch": "{cpu_torch}", "CPU, ours": "{cpu_ours}"}
    table, rows = Table(columns), []
    for cell, hidden, batch in itertools.product(options.cells, options.hidden, options.batch):
        row: Row = {"cell": cell, "hidden": hidden, "batch": batch}
        if device.type == "cuda":
            for dtype in (torch.bfloat16, torch.float16):
                problem = LayerProblem((hidden, batch, FRAMES), dtype, device, cell)
                row[f"torch_{str(dtype)[6:]}"] = ms(module_call(problem.peer, problem.inputs), device, options.budget)
                if dtype == torch.bfloat16:
                    call = problem.op("auto", True, False)
                    row["ours"] = ms(call, device, options.budget)
                    row["copies"] = ms(with_copies(problem, call), device, options.budget)
                    row["tflops"] = tflops(problem, row["ours"])
        if options.cpu or device.type == "cpu":
            cpu = torch.device("cpu")
            problem = LayerProblem((hidden, batch, FRAMES), torch.float32, cpu, cell)
            row["cpu_torch"] = ms(module_call(problem.peer, problem.inputs), cpu, options.budget)
            row["cpu_ours"] = ms(problem.op("cpu", True, False), cpu, options.budget)
        rows.append(row)
        table.print_row(row)
    return rows


def figure_15(options: argparse.Namespace, device: torch.device) -> list[Row]:
    """Both models at each batch: our modules and torch's with the same weights."""
    columns = {"model": "{model}", "B": "{batch}", "ours": "{ours}", "cuDNN bf16": "{torch_bfloat16}"}
    table = Table(columns | {"cuDNN fp16": "{torch_float16}", "CPU, torch": "{cpu_torch}", "error": "{error:.1e}"})
    rows = []
    for (name, (layers, hidden, frames)), batch in itertools.product(STACKS.items(), options.batch):
        row: Row = {"model": name, "batch": batch}
        torch.manual_seed(0)
        cpu_peer = nn.LSTM(hidden, hidden, layers)
        x = torch.randn(frames, batch, hidden)
        dtypes = (torch.bfloat16, torch.float16) if device.type == "cuda" else (torch.float32,)
        for dtype in dtypes:
            peer = nn.LSTM(hidden, hidden, layers).to(device, dtype)
            peer.load_state_dict(cpu_peer.state_dict())
            peer.flatten_parameters()
            inputs = x.to(device, dtype)
            row[f"torch_{str(dtype)[6:]}"] = ms(module_call(peer, inputs), device, options.budget)
            if dtype == dtypes[0]:
                mine = ds2_ops.LSTM(hidden, hidden, layers).to(device, dtype)
                mine.load_state_dict(peer.state_dict())
                call = module_call(mine, inputs)
                truth = cpu_peer.double()(x.double())[0].detach()
                row["error"] = relative_error(call().cpu(), truth)
                cpu_peer.float()
                row["ours"] = ms(call, device, options.budget)
        if options.cpu or device.type == "cpu":
            row["cpu_torch"] = ms(module_call(cpu_peer, x), torch.device("cpu"), options.budget)
        rows.append(row)
        table.print_row(row)
    return rows


def table_3(options: argparse.Namespace, device: torch.device) -> list[Row]:
    """Two synchronisations a step where the weights fit, else a recorded loop of products, beside one."""
    columns = {"H": "{hidden}", "B": "{batch}", "before the product, two": "{gru_before}"}
    table = Table(columns | {"by": "{by}", "after the product, one": "{gru_after}", "ratio": "{ratio:.2f}"})
    rows = []
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    kernels = "persistent" if device.type == "cuda" else "cpu"
    for hidden, batch in itertools.product(options.hidden, options.batch):
        row: Row = {"hidden": hidden, "batch": batch, "by": kernels}
        for cell in ("gru_before", "gru_after"):
            problem = LayerProblem((hidden, batch, FRAMES), dtype, device, cell)
            row[cell] = ms(problem.op(kernels, True, False), device, options.budget)
            if isinstance(row[cell], str):
                row["why_not"], row["by"] = row[cell], "products"
                row[cell] = ms(problem.op("gemm", True, False), device, options.budget)
        if not isinstance(row["gru_before"], str):
            row["ratio"] = row["gru_before"] / row["gru_after"]
        rows.append(row)
        table.print_row(row)
    return rows


FIGURES = {"table1": table_1, "figure15": figure_15, "table3": table_3}


def main(arguments: list[str] | None = None) -> int:
    """Print one table or figure."""
    parser = new_parser(__doc__)
    parser.add_argument("figure", choices=tuple(FIGURES))
    parser.add_argument("--cells", nargs="+", choices=tuple(GATED), default=list(GATED), help="of table1")
    parser.add_argument("--hidden", nargs="+", type=int, default=list(HIDDEN), help="of the tables")
    parser.add_argument("--batch", nargs="+", type=int)
    parser.add_argument("--cpu", action="store_true", help="on a GPU's machine, time its CPU too (float32)")
    add_timing_options(parser, budget_s=0.2)
    options = parse(parser, arguments)
    options.batch = options.batch or list(FIGURE_15_BATCHES if options.figure == "figure15" else BATCHES)
    device = torch.device(options.device)
    head = facts(options, device, f"GRNN's {options.figure}, ms, {torch.get_num_threads()} CPU threads")
    write_json(options.out, {"benchmark": "grnn", **head, "rows": FIGURES[options.figure](options, device)})
    return 0
