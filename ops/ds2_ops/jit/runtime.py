"""The CUDA driver: properties of a device, loading of kernels, launching. Needs no framework."""

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ds2_ops.jit.build import ENTRY, build, check_registers, compiler_version

# Of the GPUs that any kernel runs on: conversions of bfloat16 and products of it, asynchronous copies.
MIN_CAPABILITY = (8, 0)


@functools.cache
def arch(device_index: int) -> str:
    """Return the architecture that kernels for this device are built for: a real one, or the one that is tried out."""
    major, minor = capability(device_index)
    return f"{'compute' if _tried() else 'sm'}_{major}{minor}{'a' if (major, minor) == (9, 0) else ''}"


def _tried() -> str:
    """The compute capability that $DS2_OPS_CAPABILITY says to build for, or ""."""
    return os.environ.get("DS2_OPS_CAPABILITY", "").strip()


def capability(device_index: int) -> tuple[int, int]:
    """Compute capability, (major, minor).

    With $DS2_OPS_CAPABILITY, this one or an earlier one such as "8.0", kernels are chosen and built for that one, as
    PTX, which the driver compiles for the GPU that is there. So they are tested without such a GPU.

    Raises:
        ValueError: it is no capability, or a later one than the GPU's.
    """
    real = _capability(device_index)
    if not (text := _tried()):
        return real
    major, _, minor = text.partition(".")
    if not (major.isdecimal() and minor.isdecimal() and (int(major), int(minor)) <= real):
        raise ValueError(
            f"DS2_OPS_CAPABILITY is {text!r}, allowed is a compute capability up to this GPU's, "
            f"{real[0]}.{real[1]}, such as 8.0"
        )
    return int(major), int(minor)


def _capability(device_index: int) -> tuple[int, int]:
    return attribute(device_index, "COMPUTE_CAPABILITY_MAJOR"), attribute(device_index, "COMPUTE_CAPABILITY_MINOR")


@functools.cache
def attribute(device_index: int, name: str) -> int:
    """Read CU_DEVICE_ATTRIBUTE_`name` from the driver; RuntimeError as ``build``."""
    key = getattr(_driver().CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    return int(call("cuDeviceGetAttribute", key, _device(device_index), about=f" {name}"))


@functools.cache
def device_name(device_index: int) -> str:
    """Name of a GPU."""
    name = call("cuDeviceGetName", 100, _device(device_index))
    return str(name.split(b"\0")[0].decode())


@functools.cache
def driver_version() -> str:
    """Version of CUDA that the driver supports, as "13.0"."""
    version = call("cuDriverGetVersion")
    return f"{version // 1000}.{version % 1000 // 10}"


def call(name: str, *arguments: Any, about: str = "") -> Any:
    """Call a function of the driver; return its result, if any. RuntimeError names the function and its status."""
    status, *results = getattr(_driver(), name)(*arguments)
    if int(status) != 0:
        raise RuntimeError(f"{name}{about} failed: {status.name}")
    return results[0] if results else None


@contextmanager
def current(device_index: int) -> Iterator[None]:
    """Make a device the thread's current one, and restore the previous one at the end."""
    _device(device_index)
    before = call("cuCtxGetCurrent")
    set_current(device_index)
    try:
        yield
    finally:
        _driver().cuCtxSetCurrent(before)


@functools.cache
def _driver() -> Any:
    compiler_version()  # its error names the package to install where cuda-python is missing
    from cuda.bindings import driver

    return driver


def _device(device_index: int) -> Any:
    call("cuInit", 0)
    return call("cuDeviceGet", device_index, about=f" of device {device_index}")


def set_current(device_index: int) -> None:
    """Make a device the thread's current one."""
    from cuda.core import Device

    Device(device_index).set_current()


@functools.cache
def load(source: str, device_index: int) -> Any:
    """Build if needed and load a kernel, once a process and device.

    Args:
        source: as ``build``; it must not use static shared memory, which would reduce the limit that is set below.
        device_index: the CUDA device; it becomes the current one.

    Returns:
        Its handle, for `launch`; the kernel may use clusters of 16 and all shared memory of a block.

    Raises:
        RuntimeError: as ``build``; or the driver refuses the binary.
    """
    driver, architecture = _driver(), arch(device_index)
    binary = build(source, architecture)
    set_current(device_index)  # a framework may not have created the device's context yet
    try:
        library = call("cuLibraryLoadData", binary.code, [], [], 0, [], [], 0)  # never unloaded
        kernel = call("cuLibraryGetKernel", library, ENTRY.encode())
    except RuntimeError as error:
        raise RuntimeError(f"the driver cannot load a kernel built for {architecture}: {error}\n{source}") from error
    attributes, device = driver.CUfunction_attribute, _device(device_index)
    if architecture.startswith("compute_"):
        registers = call("cuKernelGetAttribute", attributes.CU_FUNC_ATTRIBUTE_NUM_REGS, kernel, device)
        check_registers(source, registers, f"the driver's compiler, CUDA {driver_version()},")
    for setting, value in (
        (attributes.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1),
        (attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, smem_bytes_per_block(device_index)),
    ):
        call("cuKernelSetAttribute", setting, value, kernel, device, about=f" {setting.name}")
    return driver.CUfunction(int(kernel))


@functools.cache
def why_no_kernel(device_index: int) -> str | None:
    """Say why no kernel can be built, or loaded by the driver, for a device; None if an empty one can."""
    try:
        with current(device_index):
            load(f'extern "C" __global__ void {ENTRY}() {{}}', device_index)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None


def smem_bytes_per_block(device_index: int) -> int:
    """Largest dynamic shared memory of a block on this device; RuntimeError as ``build``."""
    return attribute(device_index, "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN")


@functools.lru_cache(maxsize=1024)  # making one takes longer than a launch
def config(grid: int, block: int, cluster: int, smem_bytes: int, cooperative: bool, early: bool, stream: int) -> Any:
    """Describe a launch to the driver.

    Args:
        grid, block, cluster, smem_bytes, cooperative, early: as of `launch.Launch`, ``block`` its threads.
        stream: handle of a CUDA stream (as ``torch.cuda.current_stream().cuda_stream``).
    """
    driver = _driver()
    settings = driver.CUlaunchConfig()
    settings.gridDimX, settings.gridDimY, settings.gridDimZ = grid, 1, 1
    settings.blockDimX, settings.blockDimY, settings.blockDimZ = block, 1, 1
    settings.sharedMemBytes, settings.hStream = smem_bytes, driver.CUstream(stream)
    attributes = []

    def attribute(name: str) -> Any:
        attributes.append(driver.CUlaunchAttribute())
        attributes[-1].id = getattr(driver.CUlaunchAttributeID, f"CU_LAUNCH_ATTRIBUTE_{name}")
        return attributes[-1].value

    if cluster > 1:
        shape = attribute("CLUSTER_DIMENSION").clusterDim
        shape.x, shape.y, shape.z = cluster, 1, 1
    if cooperative:
        attribute("COOPERATIVE").cooperative = 1
    if early:
        attribute("PROGRAMMATIC_STREAM_SERIALIZATION").programmaticStreamSerializationAllowed = 1
    settings.attrs, settings.numAttrs = attributes, len(attributes)
    return settings


def launch(config: Any, kernel: Any, addresses: int) -> Any:
    """Launch asynchronously.

    Args:
        config: from ``config``.
        kernel: from ``load``.
        addresses: address of an array of the arguments' addresses; the driver has read all when this returns.

    Returns:
        The driver's status, 0 where it accepted the launch.
    """
    return _driver().cuLaunchKernelEx(config, kernel, addresses, 0)[0]


def max_active_clusters(kernel: Any, *, block: int, cluster: int, smem_bytes: int, stream: int) -> int:
    """Return how many clusters of this kernel the current device can run at once (0 if none fits)."""
    settings = config(cluster, block, cluster, smem_bytes, False, False, stream)
    return int(call("cuOccupancyMaxActiveClusters", kernel, settings))
