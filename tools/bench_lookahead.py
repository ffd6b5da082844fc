"""Time the row convolution beside PyTorch's grouped convolution and the bytes that it must move.

    python tools/bench_lookahead.py                 the standard shapes: bfloat16 on a GPU, float32 on a CPU
    python tools/bench_lookahead.py --shape 350 64 1152 6

The floor is the time of copying as many bytes: forward reads x and writes y, backward reads grad_y and x and writes
grad_x. On a GPU the inputs rotate so that no cache holds them, and one CUDA graph holds the calls of one rotation, so
that kernels are timed and not the host; "called" is a call by itself, the host's part in it. Prints one table, then one
line of JSON; exits with 1 if the op is wrong. Shape letters: T frames, B batch, H hidden, K taps.
"""

import argparse
import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from ds2_ops import lookahead
from ds2_ops.row_convolution.reference import lookahead_reference
from timing import Timing, graphed, machine, measure
from torch import Tensor, nn

STANDARD = [(350, 64, 1152, 6), (350, 64, 1152, 20), (350, 4, 1152, 6), (350, 4, 1152, 20), (1500, 32, 1760, 20)]
STANDARD_CPU = [(350, 8, 1152, 3), (350, 8, 1152, 20), (350, 32, 1152, 6)]
RowConvolution = Callable[[Tensor, Tensor], Tensor]
ROTATED_BYTES = 200e6  # four times the L2 of the largest GPUs


def grouped_convolution(x: Tensor, weight: Tensor) -> Tensor:
    """The row convolution as stock PyTorch runs it, transposes included."""
    padded = nn.functional.pad(x.permute(1, 2, 0), (0, weight.shape[1] - 1))
    return nn.functional.conv1d(padded, weight[:, None], groups=len(weight)).permute(2, 0, 1).contiguous()


CONTENDERS: dict[str, RowConvolution] = {"ours": lookahead, "grouped conv1d": grouped_convolution}


def gradients(op: RowConvolution, x: Tensor, weight: Tensor, grad_y: Tensor) -> tuple[Tensor, ...]:
    """Output and both gradients."""
    y = op(x, weight)
    return y.detach(), *torch.autograd.grad(y, (x, weight), grad_y)


def errors(x: Tensor, weight: Tensor, grad_y: Tensor) -> dict[str, tuple[float, float]]:
    """Relative RMS error against float64 of (ours, stock) for y, grad_x and grad_weight."""
    wide = [t.detach().double() for t in (x, weight, grad_y)]
    truth = gradients(lookahead_reference, wide[0].requires_grad_(), wide[1].requires_grad_(), wide[2])
    results = [gradients(op, x, weight, grad_y) for op in CONTENDERS.values()]
    pairs = [[float((r - t).norm() / t.norm()) for r in rs] for *rs, t in zip(*results, truth, strict=True)]
    return {name: (ours, stock) for name, (ours, stock) in zip(("y", "grad_x", "grad_weight"), pairs, strict=True)}


def bench(shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> list[dict[str, Any]]:
    """Check, then time both contenders on one shape."""
    frames, batch, hidden, taps = shape
    torch.manual_seed(frames)
    array_bytes = frames * batch * hidden * dtype.itemsize
    copies = max(1, int(ROTATED_BYTES // array_bytes)) if device.type == "cuda" else 1
    xs, grads = ([torch.randn(shape[:3], dtype=dtype, device=device) for _ in range(copies)] for _ in range(2))
    weight = torch.randn(hidden, taps, dtype=dtype, device=device).requires_grad_()
    for x in xs:
        x.requires_grad_()
    measured = errors(xs[0], weight, grads[0])
    row = {"frames": frames, "batch": batch, "hidden": hidden, "taps": taps, "errors": measured}
    slack = torch.finfo(dtype).eps
    if any(not ours <= 2 * stock + slack for ours, stock in measured.values()):
        return [row | {"contender": "ours", "wrong": True}]
    target = torch.empty_like(xs[0]).detach()
    copied = rotation(lambda x, grad_y: target.copy_(x.detach()), xs, grads, device)
    seconds_per_byte = copied.median_s / (2 * array_bytes)  # half of what is copied is read and half is written
    rows = []
    for name, op in CONTENDERS.items():
        forward, both = passes(op, weight)
        result = row | {"contender": name}
        for pass_name, call, arrays in (("forward", forward, 2), ("both", both, 5)):
            timing = rotation(call, xs, grads, device)
            result[f"{pass_name}_us"] = [round(t * 1e6, 2) for t in timing]
            result[f"{pass_name}_floor_us"] = round(arrays * array_bytes * seconds_per_byte * 1e6, 2)
            called = measure(functools.partial(call, xs[0], grads[0]), device)
            result[f"{pass_name}_called_us"] = round(called.median_s * 1e6, 2)
        rows.append(result)
    return rows


def passes(op: RowConvolution, weight: Tensor) -> tuple[RowConvolution, RowConvolution]:
    """Forward alone, and forward with both gradients, as functions of (x, grad_y)."""

    def forward(x: Tensor, grad_y: Tensor) -> Tensor:
        with torch.no_grad():
            return op(x, weight)

    def both(x: Tensor, grad_y: Tensor) -> Tensor:
        return gradients(op, x, weight, grad_y)[0]

    return forward, both


def rotation(call: RowConvolution, xs: list[Tensor], grads: list[Tensor], device: torch.device) -> Timing:
    """Seconds of one call, over inputs that take turns."""

    def turn() -> None:
        for x, grad_y in zip(xs, grads, strict=True):
            call(x, grad_y)

    timing = measure(graphed(turn) if device.type == "cuda" else turn, device)
    return Timing(*(t / len(xs) for t in timing))


def main() -> int:
    """Run the benchmark; 1 if the op was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cuda", "cpu"), default=default)
    parser.add_argument("--shape", type=int, nargs=4, metavar=("T", "B", "H", "K"), help="one shape instead of all")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), help="bfloat16 on a GPU, else float32")
    parser.add_argument("--threads", type=int, help="CPU threads")
    parser.add_argument("--out", type=Path, help="folder for the data (JSON)")
    options = parser.parse_args()
    device, gpu = torch.device(options.device), options.device == "cuda"
    if options.threads:
        torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype or ("bfloat16" if gpu else "float32"))
    shapes = [tuple(options.shape)] if options.shape else (STANDARD if gpu else STANDARD_CPU)
    title = f"row convolution {dtype} on {machine(device)}"
    print(title)
    print(
        f"{'T':>5} {'B':>3} {'H':>5} {'K':>3} {'':<15} {'forward us':>26} {'x floor':>8} {'both us':>26} {'x floor':>8}"
    )
    rows = [row for shape in shapes for row in bench(shape, dtype, device)]
    for row in rows:
        head = f"{row['frames']:>5} {row['batch']:>3} {row['hidden']:>5} {row['taps']:>3} {row['contender']:<15} "
        if "wrong" in row:
            print(head + f"WRONG, relative errors (ours, stock): {row['errors']}")
            continue
        cells = []
        for name in ("forward", "both"):
            median, low, high = row[f"{name}_us"]
            cells.append(f"{f'{median:.1f} ({low:.1f} - {high:.1f})':>26} {median / row[f'{name}_floor_us']:>8.2f}")
            cells.append(f"{row[f'{name}_called_us']:>8.1f}")
        print(head + " ".join(cells))
    data = {"benchmark": "lookahead", "title": title, "dtype": str(dtype), "rows": rows}
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "lookahead.json").write_text(json.dumps(data, indent=1) + "\n")
    print(json.dumps(data))
    return int(any("wrong" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
