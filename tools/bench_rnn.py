"""Time the recurrence beside nn.RNN and the CUDA-graphed GEMM loop, after checking it against float64.

    python tools/bench_rnn.py                              the standard table: bfloat16, T 512, on a GPU
    python tools/bench_rnn.py --cell lstm                  the same for LSTM and GRU (gru_after, gru_before)
    python tools/bench_rnn.py --grnn                       forward latency beside cuDNN's (GRNN, 2019, Table 1)
    python tools/bench_rnn.py --device cpu                 the CPU path beside nn.RNN
    python tools/bench_rnn.py --figure batch --out DIR     TFLOP/s against batch (Persistent RNNs, 2016, Figure 3);
                                                           with --hidden 1152 512 the same of these widths
    python tools/bench_rnn.py --figure frames --out DIR    TFLOP/s against time steps (its Figure 4)

Forward+backward includes the weight gradient. nn.RNN always includes the input projection; our figures leave it out,
and the columns "+proj" add it (and its gradients), which is what the ratio to nn.RNN uses; TFLOP/s count the work that
is in the time. Prints one table, then one line of JSON; exits with 1 if an op is wrong. Shape letters: T frames, B
batch, H hidden.
"""

import argparse
import itertools
import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from ds2_ops.recurrent.cells import CELLS, GATED
from rnn_work import Work, peer_of
from timing import Timing, graphed, machine, measure, measure_host

STANDARD = [(1152, 4), (1152, 16), (1152, 32), (1152, 64), (512, 4), (512, 32), (1760, 4), (2560, 4), (2560, 64)]
STANDARD_GATED = [(256, 4), (512, 4), (512, 8), (512, 16), (512, 32), (512, 64), (1024, 16), (1024, 64)]
STANDARD_CPU = list(itertools.product((256, 512, 1152), (4, 8, 32)))
FIGURES = {
    "batch": [(1152, batch, 512) for batch in (1, 2, 4, 8, 16, 24, 32, 48, 64)],
    "frames": [(1152, 4, frames) for frames in (1, 3, 10, 30, 100, 300, 1000)],
}
Result = dict[str, Any]


def bench(work: Work, contenders: list[str]) -> list[Result]:
    """Check, then time every contender on one size; an op that is wrong or cannot run gives a row that says so."""
    rows: list[Result] = []
    useful = 2.0 * work.gates * work.hidden**2 * work.batch * work.frames
    for contender in contenders:
        row: Result = {"hidden": work.hidden, "batch": work.batch, "frames": work.frames, "contender": contender}
        rows.append(row)
        backend, _, graph = contender.partition(" ")  # of torch's modules, a dtype
        wrap = graphed if graph else lambda call: call
        try:
            if contender.startswith("nn."):
                other = work.in_dtype(getattr(torch, graph)) if graph else work
                calls = {"projected_forward": other.torch_rnn(False), "projected_both": other.torch_rnn(True)}
            elif contender == "flashrnn":
                calls = {"forward": work.flashrnn(False), "both": work.flashrnn(True)}
                row["errors"] = {"y": work.error_of(calls["forward"]())}  # type: ignore[arg-type]
            else:
                row["errors"] = errors = work.errors(backend)
                wrong = [
                    n for n, (ours, stock) in errors.items() if not ours <= 2 * stock + torch.finfo(work.dtype).eps
                ]
                if wrong:
                    row["wrong"] = f"WRONG {', '.join(wrong)}: (ours, stock) errors {[errors[n] for n in wrong]}"
                    continue
                calls = {"forward": wrap(work.op(backend, False, False)), "both": wrap(work.op(backend, False, True))}
                calls["projected_forward"] = wrap(work.op(backend, True, False))
                calls["projected_both"] = wrap(work.op(backend, True, True))
        except RuntimeError as error:  # a size that does not fit, or a capture that failed: said in its row
            row["skipped"] = str(error)
            continue
        for name, call in calls.items():
            timing: Timing = measure(call, work.device)
            row[f"{name}_us"] = [round(t * 1e6 / work.frames, 4) for t in timing]
            if work.device.type == "cuda":
                row[f"{name}_host_us"] = [round(t * 1e6, 1) for t in measure_host(call, work.device)]
        products = 2 if contender.startswith("nn.") else 1  # its time holds the input projection, so its work does too
        for name, factor in (("forward", 1), ("both", 3)):  # the backward pass is two more products of this size
            time_us = (row.get(f"{name}_us") or row[f"projected_{name}_us"])[0]
            row[f"{name}_tflops"] = float(f"{products * factor * useful / (time_us * work.frames) * 1e-6:.4g}")
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
    """What makes two rows comparable."""
    return row["hidden"], row["batch"], row["frames"]


def grnn_table(out: Path | None, device: torch.device) -> int:
    """Print GRNN's Table 1: ms of a forward pass of 100 frames in a CUDA graph, projection included, ours and cuDNN's.

    "+copies" adds the input's way from the host and the last state's way back.
    """
    if device.type != "cuda":
        raise SystemExit("--grnn needs a CUDA GPU: its figures are CUDA graphs")
    rows: list[Result] = []
    for cell, hidden, batch in itertools.product(GATED, (64, 256, 1024), (1, 10, 16, 20)):
        row: Result = {"cell": cell, "hidden": hidden, "batch": batch}
        rows.append(row)
        for dtype in (torch.bfloat16, torch.float16):
            work = Work((hidden, batch, 100), dtype, device, cell)
            calls = {f"cudnn {str(dtype)[6:]}": work.torch_rnn(False)}
            if dtype == torch.bfloat16:
                calls["ours"] = work.op("auto", True, False)
                calls["ours +copies"] = with_copies(work, calls["ours"])
            for name, call in calls.items():
                try:
                    row[name] = round(measure(graphed(call), device).median_s * 1e3, 4)
                except RuntimeError as error:
                    row[name] = str(error).splitlines()[0]
        print(json.dumps(row), flush=True)
    if out:
        out.mkdir(parents=True, exist_ok=True)
        (out / "rnn_grnn.json").write_text(json.dumps({"title": machine(device), "rows": rows}, indent=1) + "\n")
    return 0


def with_copies(work: Work, call: Callable[[], object]) -> Callable[[], object]:
    """Bring the layer's input from pinned memory first and take the last frame back."""
    given = work.inputs.detach().cpu().pin_memory()
    taken = torch.empty(work.batch, work.hidden, dtype=work.dtype).pin_memory()

    def copied() -> object:
        work.inputs.detach().copy_(given, non_blocking=True)
        y = call()
        taken.copy_(y[-1], non_blocking=True)  # type: ignore[index]
        return y

    return copied


def print_table(rows: list[Result]) -> None:
    """One line a contender; times are microseconds a step, median and 10th to 90th percentile."""
    print(
        f"{'H':>5} {'B':>3} {'T':>5} {'':<16} {'forward us/step':>22} {'forward+backward':>22} {'TFLOP/s':>12} "
        f"{'x nn.RNN':>12} {'x GEMM graph':>12} {'+proj forward, both':>20} {'host us a call':>16}"
    )
    for row in rows:
        head = f"{row['hidden']:>5} {row['batch']:>3} {row['frames']:>5} {row['contender']:<16} "
        if note := row.get("wrong") or row.get("skipped"):
            print(head + note)
            continue
        spans = [row.get(f"{n}_us") for n in ("forward", "both")]
        cells = [f"{s[0]:.2f} ({s[1]:.2f} - {s[2]:.2f})" if s else "-" for s in spans]
        pairs = [
            " ".join(f"{row[f'{n}_{key}']:.2f}" if f"{n}_{key}" in row else "-" for n in ("forward", "both"))
            for key in ("tflops", "vs_rnn", "vs_gemm_graph")
        ]
        projected = " ".join(f"{row.get(f'projected_{n}_us', [float('nan')])[0]:.2f}" for n in ("forward", "both"))
        host = " ".join(f"{row[f'{n}_host_us'][0]:.0f}" if f"{n}_host_us" in row else "-" for n in ("forward", "both"))
        print(
            head
            + f"{cells[0]:>22} {cells[1]:>22} {pairs[0]:>12} {pairs[1]:>12} {pairs[2]:>12} {projected:>20} {host:>16}"
        )


def plot(rows: list[Result], figure: str, title: str, path: Path) -> None:
    """Draw useful TFLOP/s of forward and forward+backward against batch or time steps."""
    from matplotlib.figure import Figure

    canvas = Figure(figsize=(10, 4), layout="constrained")
    for axes, name in zip(canvas.subplots(1, 2), ("forward", "both"), strict=True):
        lines: dict[str, list[tuple[float, float]]] = {}
        for row in rows:
            if f"{name}_tflops" in row:
                label = f"H {row['hidden']} {row['contender']}"
                lines.setdefault(label, []).append((row[figure], row[f"{name}_tflops"]))
        for label, points in lines.items():
            axes.plot(*zip(*points, strict=True), marker="o", label=label)
        axes.set(xlabel={"batch": "batch", "frames": "time steps"}[figure], ylabel="useful TFLOP/s", ylim=(0, None))
        axes.set(title="forward" if name == "forward" else "forward + backward")
        if figure == "frames":
            axes.set_xscale("log")
        axes.grid(alpha=0.3)
        axes.legend()
    canvas.suptitle(title)
    canvas.savefig(path, dpi=120)


def keep(data: Result, out: Path | None, name: str) -> None:
    """Write the figures to a folder, if one is given."""
    if out:
        out.mkdir(parents=True, exist_ok=True)
        (out / f"{name}.json").write_text(json.dumps(data, indent=1) + "\n")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cuda", "cpu"), default=default)
    parser.add_argument("--hidden", type=int, nargs="+", help="H values, with --batch (every pair) or --figure")
    parser.add_argument("--batch", type=int, nargs="+", help="B values; with --hidden")
    parser.add_argument("--frames", type=int, help="T; 512 on a GPU, 200 on a CPU")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), help="bfloat16 on a GPU, else float32")
    parser.add_argument("--cell", "--nonlinearity", choices=tuple(CELLS), default="relu")
    parser.add_argument(
        "--contenders",
        nargs="+",
        help="backends, 'BACKEND graph' for its CUDA graph, nn.RNN, 'nn.LSTM float16', flashrnn",
    )
    parser.add_argument("--grnn", action="store_true", help="GRNN's Table 1 instead: LSTM and both GRUs, T 100")
    parser.add_argument("--threads", type=int, help="CPU threads")
    parser.add_argument("--figure", choices=tuple(FIGURES), help="sweep instead of the table")
    parser.add_argument("--out", type=Path, help="folder for the data (JSON) and the plot (PNG)")
    options = parser.parse_args(arguments)
    if options.batch and options.figure:
        parser.error("--figure has batches of its own: give it --hidden alone, or leave it out")
    if (options.hidden is None) != (options.batch is None) and not options.figure:
        parser.error("--hidden and --batch go together: give both or neither")
    return options


def main() -> int:
    """Run the benchmark; 1 if an op was wrong, 130 if Ctrl-C ended it."""
    options = parse()
    device, gpu = torch.device(options.device), options.device == "cuda"
    if options.threads:
        torch.set_num_threads(options.threads)
    frames = options.frames or (512 if gpu else 200)
    dtype = getattr(torch, options.dtype or ("bfloat16" if gpu else "float32"))
    peer, standard = peer_of(options.cell), STANDARD if gpu else STANDARD_CPU
    if options.cell in GATED:
        standard = STANDARD_GATED
    others = [peer, f"{peer} float16"] if options.cell in GATED else ["gemm graph", peer]
    contenders = options.contenders or (["persistent", *others] if gpu else ["cpu", peer])
    if options.grnn:
        return grnn_table(options.out, device)
    if options.figure:
        widths = options.hidden or [FIGURES[options.figure][0][0]]
        sizes = [(hidden, batch, steps) for hidden in widths for _, batch, steps in FIGURES[options.figure]]
    elif options.hidden:
        sizes = [(hidden, batch, frames) for hidden in options.hidden for batch in options.batch]
    else:
        sizes = [(hidden, batch, frames) for hidden, batch in standard]
    # PyTorch packs the weights of a bfloat16 nn.RNN anew in every call, and says so; that is part of its time.
    warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous chunk")
    title = f"{options.cell} {dtype} on {machine(device)}"
    print(title)
    rows: list[Result] = []
    data = {"benchmark": "rnn", "title": title, "dtype": str(dtype), "figure": options.figure, "rows": rows}
    name = f"rnn_{options.figure or 'table'}"
    stopped = False
    try:
        for hidden_batch_frames in sizes:
            rows += bench(Work(hidden_batch_frames, dtype, device, options.cell), contenders)
            keep(data, options.out, name)  # a run that is ended has what it measured
    except KeyboardInterrupt:  # what was measured is printed
        stopped = True
    add_ratios(rows)
    print_table(rows)
    keep(data, options.out, name)
    if options.out and options.figure:
        plot(rows, options.figure, title, options.out / f"{name}.png")
    print(json.dumps(data))
    return 130 if stopped else int(any("wrong" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
