"""What a GPU of this machine can hold, as the planner takes it."""

import functools
from dataclasses import replace

from ds2_ops.jit import runtime
from ds2_ops.recurrent.plan.problem import THREADS, DeviceFacts


@functools.cache
def device_facts(index: int) -> DeviceFacts:
    """Ask the driver what CUDA device ``index`` can hold."""
    facts = DeviceFacts(
        name=runtime.device_name(index),
        capability=runtime.capability(index),
        sms=runtime.attribute(index, "MULTIPROCESSOR_COUNT"),
        smem_bytes_per_block=runtime.smem_bytes_per_block(index),
        active_clusters={},
        clock_mhz=runtime.attribute(index, "CLOCK_RATE") // 1000,
    )
    if facts.capability != DeviceFacts().capability:
        return facts
    with runtime.current(index):
        probe = runtime.load(f'extern "C" __global__ void __launch_bounds__({THREADS}, 1) ds2_kernel() {{}}', index)
        active = {
            cluster: runtime.max_active_clusters(
                probe, block=THREADS, cluster=cluster, smem_bytes=facts.smem_bytes_per_block, stream=0
            )
            for cluster in (2, 3, 4, 5, 6, 8, 9, 16)
        }
    return replace(facts, active_clusters=active)
