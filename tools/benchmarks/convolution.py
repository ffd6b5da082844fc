"""The convolution primitive on the layers of cuDNN's first paper (Chetlur et al. 2014, Tables 2 and 3).

    python tools/bench.py convolution                      its five layers, float32, 128 images
    python tools/bench.py convolution --images 16 64 128   against the number of images (its Figure 2)

Each pass is compared with torch's in float64 on a part of the images first. TFLOP/s, in float32 without the matrix
unit, as in the paper, and the part of the GPU's peak in it (two operations a core and clock); beside it torch's
convolution, which is today's cuDNN, with TF32 off. Needs a GPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from benchmarks.common import Table, facts, gpu_of, measure, relative_error, write_json
from dispatch import new_parser, parse
from ds2_ops.jit.runtime import attribute
from ds2_ops.primitives.convolution import Convolution
from torch import Tensor
from torch.nn import functional

LAYERS = [  # channels, outputs, height = width, taps = R = S
    (3, 96, 128, 11), (96, 128, 64, 9), (128, 128, 32, 9), (128, 128, 16, 7), (128, 384, 13, 3),
]  # fmt: skip
CORES = 128  # of a multiprocessor, in float32, since compute capability 8.6 and on 9.0
PAPER = [(23, 30), (35, 51), (35, 49), (32, 45), (24, 38)]  # % of the peak of a K40 and a GTX 980
PASSES = {"forward": "y", "data_gradient": "x", "weight_gradient": "weight"}
Arrays = dict[str, Tensor]


def layer(number: int, images: int) -> Convolution:
    """The primitive of a layer of Table 2, numbered from 1."""
    channels, outputs, size, taps = LAYERS[number - 1]
    return Convolution(images=images, channels=channels, outputs=outputs, size=(size, size), taps=(taps, taps))


def run(op: Convolution, kind: str, arrays: Arrays, result: Tensor, workspace: Tensor) -> None:
    """Queue a pass on torch's current stream."""
    stream = torch.cuda.current_stream()
    if kind == "forward":
        op.forward(arrays["x"], arrays["weight"], result, stream=stream)
    elif kind == "data_gradient":
        op.data_gradient(arrays["y"], arrays["weight"], result, stream=stream)
    else:
        op.weight_gradient(arrays["x"], arrays["y"], result, workspace, stream=stream)


def by_torch(kind: str, arrays: Arrays) -> Tensor:
    """The same by torch; `y` holds the gradient of the result in backward passes."""
    x, weight, y = arrays["x"], arrays["weight"], arrays["y"]
    if kind == "forward":
        return functional.conv2d(x, weight)
    if kind == "data_gradient":
        return torch.nn.grad.conv2d_input(x.shape, weight, y)
    return torch.nn.grad.conv2d_weight(x, weight.shape, y)


def error(op: Convolution, kind: str, arrays: Arrays, result: Tensor) -> float:
    """Relative error of a pass against float64."""
    wide = {name: tensor.double() for name, tensor in arrays.items()}
    return relative_error(result, by_torch(kind, wide))


def main(arguments: list[str] | None = None) -> int:
    """Check and time every layer and pass; 1 if one is wrong."""
    parser = new_parser(__doc__)
    parser.add_argument("--images", nargs="+", type=int, default=[128])
    parser.add_argument("--budget", type=float, default=0.1, help="seconds of each measurement")
    parser.add_argument("--out", type=Path, help="file for the data (JSON)")
    options = parse(parser, arguments)
    device = gpu_of(parser, "primitives on the CPU are for checking")
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    peak = 2e-12 * CORES * attribute(0, "MULTIPROCESSOR_COUNT") * attribute(0, "CLOCK_RATE") * 1e3
    head = facts(options, device, f"layers of cuDNN's Table 2, float32, peak {peak:.1f} TFLOP/s")
    columns = {"layer": "{layer}", "images": "{images}", "pass": "{kind}", "TFLOP/s": "{tflops:.1f}"}
    columns |= {"of the peak": "{share:.0%}", "the paper, %": "{paper}", "torch, TFLOP/s": "{torch_tflops:.1f}"}
    table, rows = Table(columns | {"error": "{error:.1e}"}), list[dict[str, Any]]()
    for number in range(1, len(LAYERS) + 1):
        for images in options.images:
            op, few = layer(number, images), layer(number, 4)
            for kind, name in PASSES.items():
                arrays = _drawn(few, device)
                result = torch.empty(few.shapes[name], device=device)
                workspace = torch.empty(max(op.workspace_bytes, few.workspace_bytes), dtype=torch.uint8, device=device)
                run(few, kind, arrays, result, workspace)
                row: dict[str, Any] = {"layer": number, "images": images, "kind": kind, "paper": None}
                row["error"] = error(few, kind, arrays, result)
                if kind == "forward":
                    row["paper"] = "{} and {}".format(*PAPER[number - 1])
                arrays, result = _drawn(op, device), torch.empty(op.shapes[name], device=device)
                seconds = measure(lambda: run(op, kind, arrays, result, workspace), device, budget_s=options.budget)[0]  # noqa: B023
                of_torch = measure(lambda: by_torch(kind, arrays), device, budget_s=options.budget)[0]  # noqa: B023
                row["tflops"], row["torch_tflops"] = (op.operations / t * 1e-12 for t in (seconds, of_torch))
                row["share"] = row["tflops"] / peak
                rows.append(row)
                table.print_row(row)
    write_json(options.out, {"benchmark": "convolution", **head, "peak_tflops": peak, "rows": rows})
    return int(any(row["error"] > 1e-5 for row in rows))


def _drawn(op: Convolution, device: torch.device) -> Arrays:
    generator = torch.Generator(device).manual_seed(0)
    return {name: torch.randn(shape, generator=generator, device=device) for name, shape in op.shapes.items()}
