"""Kernels on a device: what it can hold, loading, launching. Goes through cuda.core and knows no framework."""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ds2_ops.jit.build import ENTRY, build, compiler_version


@functools.cache
def arch(device_index: int) -> str:
    """Name the real architecture that kernels for this device are built for."""
    found = capability(device_index)
    return "sm_90a" if found == (9, 0) else "sm_{}{}".format(*found)


def capability(device_index: int) -> tuple[int, int]:
    """Compute capability, (major, minor)."""
    parts = ("COMPUTE_CAPABILITY_MAJOR", "COMPUTE_CAPABILITY_MINOR")
    major, minor = (attribute(device_index, part) for part in parts)
    return major, minor


@functools.cache
def attribute(device_index: int, name: str) -> int:
    """Ask the driver for CU_DEVICE_ATTRIBUTE_`name`; RuntimeError as ``build``."""
    compiler_version()  # says what to install where cuda-python is missing
    from cuda.bindings import driver

    wanted = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    status, value = driver.cuDeviceGetAttribute(wanted, _device(device_index))
    _check(status, f"cuDeviceGetAttribute {name}")
    return int(value)


@functools.cache
def device_name(device_index: int) -> str:
    """Name of a GPU as its driver gives it."""
    compiler_version()
    from cuda.bindings import driver

    status, name = driver.cuDeviceGetName(100, _device(device_index))
    _check(status, "cuDeviceGetName")
    return str(name.split(b"\0")[0].decode())


@functools.cache
def driver_version() -> str:
    """Version of CUDA that the driver speaks, as "13.0"."""
    compiler_version()
    from cuda.bindings import driver

    status, version = driver.cuDriverGetVersion()
    _check(status, "cuDriverGetVersion")
    return f"{version // 1000}.{version % 1000 // 10}"


def call(name: str, *arguments: Any) -> Any:
    """Call a function of the driver; return its one result, if any. RuntimeError names what failed."""
    from cuda.bindings import driver

    status, *results = getattr(driver, name)(*arguments)
    _check(status, name)
    return results[0] if results else None


@contextmanager
def current(device_index: int) -> Iterator[None]:
    """Make a device the thread's current one, and the one before it afterwards."""
    compiler_version()
    from cuda.bindings import driver
    from cuda.core import Device

    _device(device_index)
    status, before = driver.cuCtxGetCurrent()
    _check(status, "cuCtxGetCurrent")
    Device(device_index).set_current()
    try:
        yield
    finally:
        driver.cuCtxSetCurrent(before)


def _device(device_index: int) -> Any:
    from cuda.bindings import driver

    (status,) = driver.cuInit(0)
    _check(status, "cuInit")
    status, device = driver.cuDeviceGet(device_index)
    _check(status, f"cuDeviceGet of device {device_index}")
    return device


@functools.cache
def load(source: str, device_index: int, arch: str = "sm_90a") -> Any:
    """Build if needed and load a kernel, once a process and device.

    Args:
        source: as ``build``; static shared memory is not allowed, it would eat from the dynamic limit set here.
        device_index: the CUDA device; it becomes the current one.
        arch: as ``build``.

    Returns:
        A ``cuda.core.Kernel`` that may use clusters of 16 and all the shared memory that a block can have.

    Raises:
        RuntimeError: as ``build``; or the driver refuses the binary.
    """
    binary = build(source, arch)
    from cuda.bindings import driver
    from cuda.core import Device, ObjectCode

    Device(device_index).set_current()  # frameworks create a device's context at a first allocation, maybe later
    try:
        kernel = ObjectCode.from_cubin(binary.code, name=ENTRY).get_kernel(ENTRY)
    except Exception as error:
        raise RuntimeError(f"the driver cannot load a kernel built for {arch}: {error}\n{source}") from error
    for wanted in (
        (driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1),
        (
            driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
            smem_bytes_per_block(device_index),
        ),
    ):
        (status,) = driver.cuKernelSetAttribute(*wanted, kernel.handle, _device(device_index))
        _check(status, f"cuKernelSetAttribute {wanted[0].name}")
    return kernel


def smem_bytes_per_block(device_index: int) -> int:
    """The most dynamic shared memory that a block may have on this device; RuntimeError as ``build``."""
    return attribute(device_index, "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN")


def _check(status: Any, call: str) -> None:
    if int(status) != 0:
        raise RuntimeError(f"{call} failed: {status.name}")


@functools.lru_cache(maxsize=256)
def _stream(handle: int) -> Any:
    from cuda.core import Device, Stream

    return Stream.from_handle(handle) if handle else Device().default_stream


@functools.lru_cache(maxsize=1024)  # making one costs more than launching with it
def _config(grid: int, block: int, cluster: int, smem_bytes: int, cooperative: bool, early: bool) -> Any:
    from cuda.core import LaunchConfig

    # With a cluster, cuda.core counts its grid in clusters; ours is in blocks everywhere.
    if cluster > 1:
        grid //= cluster
    return LaunchConfig(
        grid=grid,
        cluster=cluster if cluster > 1 else None,
        block=block,
        shmem_size=smem_bytes,
        is_cooperative=cooperative,
        **({"programmatic_stream_serialization": True} if early and _knows_early(LaunchConfig) else {}),
    )


def _knows_early(config: Any) -> bool:
    """Whether this cuda-core can launch a kernel early; one that cannot launches it in turn, to the same end."""
    return hasattr(config, "programmatic_stream_serialization")


def max_active_clusters(kernel: Any, *, block: int, cluster: int, smem_bytes: int, stream: int) -> int:
    """How many clusters of this kernel the current device can hold at once (0 if none fits)."""
    config = _config(cluster, block, cluster, smem_bytes, False, False)
    return int(kernel.occupancy.max_active_clusters(config, stream=_stream(stream)))


def launch(
    kernel: Any,
    args: Sequence[Any],
    *,
    grid: int,
    block: int,
    cluster: int = 1,
    smem_bytes: int = 0,
    cooperative: bool = False,
    early: bool = False,
    stream: int,
) -> None:
    """Launch on a CUDA stream handle (as ``torch.cuda.current_stream().cuda_stream``), asynchronously.

    Args:
        kernel: from ``load``.
        args: pointers as int, 32-bit integers as ``ctypes.c_int``, floats as ``ctypes.c_float``.
        grid: blocks (not clusters).
        block: threads a block.
        cluster: blocks a cluster.
        smem_bytes: dynamic shared memory a block.
        cooperative: start all blocks at once or none, because they wait for each other.
        early: start while the kernel before it runs, if that one lets it (programmatic dependent launch).
        stream: stream handle.

    Raises:
        RuntimeError: the driver refuses the launch; the caller adds op, shape, dtype and tile.
    """
    from cuda.core import launch as cuda_launch

    try:
        cuda_launch(_stream(stream), _config(grid, block, cluster, smem_bytes, cooperative, early), kernel, *args)
    except Exception as error:
        raise RuntimeError(
            f"launch of {grid} blocks x {block} threads, cluster {cluster}, {smem_bytes} B shared memory: {error}"
        ) from error
