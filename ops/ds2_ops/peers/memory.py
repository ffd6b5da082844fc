"""Memory of a GPU that processes of the same host map: CUDA's interprocess handles."""

from __future__ import annotations

import ctypes

from ds2_ops.jit import runtime

_HANDLE_BYTES = 64
_GRANULE = 2 << 20  # a smaller piece might be part of what CUDA has lent to others, who would be mapped with it
_ENABLE_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


class Mailbox:
    """Zeros on a GPU, into which other processes may write.

    Args:
        size: bytes, at least.
        device_index: the CUDA device.

    Attributes:
        address: of its first byte.
        handle: what another process opens it by.

    Raises:
        RuntimeError: the driver refuses it.
    """

    def __init__(self, size: int, device_index: int) -> None:
        self._device_index = device_index
        self._opened: list[int] = []
        with runtime.current(device_index):
            size += -size % _GRANULE
            self.address = int(runtime.call("cuMemAlloc", size))
            runtime.call("cuMemsetD8", self.address, 0, size)
            runtime.call("cuCtxSynchronize")
            self.handle = ctypes.string_at(runtime.call("cuIpcGetMemHandle", self.address).getPtr(), _HANDLE_BYTES)

    def open(self, handle: bytes) -> int:
        """Map another process's mailbox until `close`; returns its address here. RuntimeError: it cannot be reached."""
        from cuda.bindings import driver

        given = driver.CUipcMemHandle()
        ctypes.memmove(given.getPtr(), handle, _HANDLE_BYTES)
        with runtime.current(self._device_index):
            self._opened.append(int(runtime.call("cuIpcOpenMemHandle", given, _ENABLE_PEER_ACCESS)))
        return self._opened[-1]

    def close(self) -> None:
        """Unmap others' mailboxes; this one stays until the process ends, as others may still have it mapped."""
        with runtime.current(self._device_index):
            for address in self._opened:
                runtime.call("cuIpcCloseMemHandle", address)
        self._opened.clear()
