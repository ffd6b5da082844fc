"""Cost of synchronising all multiprocessors of a GPU: a barrier inside a kernel, or a launch for each step.

    python tools/bench.py barrier                      microseconds of a step that does nothing else

"Persistent RNNs" (Diamos et al. 2016) puts a software barrier at about a tenth of a launch. Each row has as many blocks
of 256 threads as the GPU has multiprocessors. "barrier" is the one of `csrc/ptx/grid_barrier.cuh` in one cooperative
kernel; the others launch an empty kernel a step, by the host or as one recorded CUDA graph. Needs a GPU.
"""

from __future__ import annotations

import torch
from benchmarks.common import Table, facts, gpu_of, graphed, measure, write_json
from dispatch import new_parser, parse
from ds2_ops.jit.launch import Launch, parameters, run, translation_unit

_STEPS = parameters("int steps")
BARRIER = translation_unit(
    "ptx/grid_barrier.cuh",
    _STEPS,
    """    for (int step = 0; step < steps; step++) {
        __syncthreads();
        if (threadIdx.x == 0) {
            const unsigned before = ds2::grid_arrive();
            while (!ds2::grid_complete(before)) {}
        }
        __syncthreads();
    }
""",
)
EMPTY = translation_unit("ptx/grid_barrier.cuh", _STEPS, "")


def main(arguments: list[str] | None = None) -> int:
    """Time steps in each way and print their ratios to the barrier."""
    parser = new_parser(__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    options = parse(parser, arguments)
    device, steps = gpu_of(parser, "it measures the GPU's own barrier"), options.steps
    blocks = torch.cuda.get_device_properties(device).multi_processor_count
    head = facts(options, device, f"{steps} steps of {blocks} blocks")
    together = Launch(BARRIER, 256, grid=blocks, cooperative=True)
    each = Launch(EMPTY, 256, grid=blocks)

    def barrier() -> None:
        run(together, [steps], lambda: "barriers", device)

    def launches() -> None:
        for _ in range(steps):
            run(each, [steps], lambda: "an empty kernel", device)

    us = {
        way: measure(call, device).median_s * 1e6 / steps
        for way, call in (("barrier", barrier), ("launches", launches), ("recorded launches", graphed(launches)))
    }
    table = Table({"way": "{way}", "us a step": "{us:.3f}", "times the barrier": "{ratio:.1f}"})
    rows = [{"way": way, "us": time, "ratio": time / us["barrier"]} for way, time in us.items()]
    for row in rows:
        table.print_row(row)
    write_json(None, {"benchmark": "barrier", **head, "rows": rows})
    return 0
