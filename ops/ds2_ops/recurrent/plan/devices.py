"""Facts of real GPUs, to plan for them where they are not at hand.

Multiprocessors, L2 and clocks (the boost clock) are those of NVIDIA's data sheets, shared memory of a block that of the
CUDA programming guide for the compute capability. On a GPU that is there, `calibrate.device_facts` asks the driver.
"""

from ds2_ops.recurrent.plan.problem import DeviceFacts

_SMEM_KIB = {(8, 0): 163, (8, 6): 99, (8, 9): 99, (9, 0): 227, (10, 0): 227, (12, 0): 99}  # of a block, at most
_CLUSTERS = {2: 66, 3: 39, 4: 30, 5: 22, 6: 17, 8: 15, 9: 9, 16: 7}  # that run at once on an H200, as its driver says


def _device(name: str, capability: tuple[int, int], sms: int, l2_mib: int, clock_mhz: int) -> DeviceFacts:
    clusters = _CLUSTERS if capability == (9, 0) else {}
    return DeviceFacts(name, capability, sms, _SMEM_KIB[capability] << 10, clusters, clock_mhz, l2_mib << 20)


DEVICES = {
    device.name: device
    for device in (
        _device("A100", (8, 0), 108, 40, 1410),
        _device("A10", (8, 6), 72, 6, 1695),
        _device("RTX 3090", (8, 6), 82, 6, 1695),
        _device("L4", (8, 9), 58, 48, 2040),
        _device("L40S", (8, 9), 142, 96, 2520),
        _device("RTX 4090", (8, 9), 128, 72, 2520),
        _device("H100", (9, 0), 132, 50, 1980),
        _device("H200", (9, 0), 132, 50, 1980),
        _device("B200", (10, 0), 148, 126, 1965),
        _device("RTX 5090", (12, 0), 170, 96, 2407),
    )
}
