"""The persistent recurrence without a framework: DLPack arrays, a stream, and no allocation in a call.

As in cuDNN's first paper (Chetlur et al. 2014), section 2. The caller allocates outputs and a workspace of
`workspace_bytes`. Arrays may be time-major or batch-major or have any strides. Gradients overwrite their arrays, or are
added to them. This module and its imports do not import torch.

    op = Forward(frames=512, batch=8, hidden=1152, dtype="float16", cell="relu")
    workspace = cupy.empty(op.workspace_bytes, cupy.uint8)
    op(x, weight_hh, y, h_n, workspace, stream=cupy.cuda.get_current_stream().ptr)

The gradient of the matrix is one product over all frames, sum_t grad_x_t h_(t-1)^T, which every framework has.
Shape letters: T frames, B batch, H hidden.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ds2_ops.jit import runtime
from ds2_ops.jit.launch import Launch, launch_on, names, parameters, translation_unit
from ds2_ops.recurrent.calibrate import choose_tile
from ds2_ops.recurrent.cells import CELLS
from ds2_ops.recurrent.plan.problem import ELEMENT_BYTES, NUMBERS, DoesNotFit, Problem, check_rows, pass_arguments

ALIGNMENT = 256  # bytes, of each part of a workspace
_MOVE = parameters(
    """const void* source, long long s0, long long s1, long long s2, void* target, long long t0, long long t1,
    long long t2, int count_0, int count_1, int count_2, float beta"""
)


@dataclass(frozen=True)
class Array:
    """Where an array lies: address, and strides in elements."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def plain(self) -> bool:
        """True if the kernels can use it as it is."""
        axes = zip(self.shape, self.strides, contiguous(self.shape), strict=True)
        return self.address % 4 == 0 and all(count == 1 or stride == step for count, stride, step in axes)


def aligned(count: int) -> int:
    """Bytes that a part of a workspace takes."""
    return -(-count // ALIGNMENT) * ALIGNMENT


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of an array whose rows follow one another."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def view(name: str, array: Any, stream: int) -> Any:
    """Read an array of a CUDA device by DLPack, or by the CUDA array interface.

    Stream -1 asks for no synchronisation, which is the caller's. JAX refuses it, and makes the stream wait.

    Raises:
        TypeError: it has neither.
        ValueError: it is on the CPU.
    """
    from cuda.core.utils import StridedMemoryView

    read = StridedMemoryView.from_any_interface
    try:
        try:
            result = read(array, stream_ptr=-1)
        except RuntimeError:
            result = read(array, stream_ptr=stream or 1)  # 1 is JAX's default stream
    except (BufferError, TypeError, AttributeError) as error:
        raise TypeError(f"{name} is {type(array).__name__}, expected an array with __dlpack__: {error}") from error
    if not result.is_device_accessible:
        raise ValueError(f"{name} is on the CPU, expected an array on a CUDA device")
    return result


def stream_handle(stream: Any) -> int:
    """Read the handle of a framework's stream; TypeError where it has none."""
    if isinstance(stream, int):
        return stream
    if hasattr(stream, "__cuda_stream__"):
        return int(stream.__cuda_stream__()[1])
    for attribute in ("cuda_stream", "ptr"):
        if hasattr(stream, attribute):
            return int(getattr(stream, attribute))
    raise TypeError(f"stream is {stream!r}, expected a handle or what has __cuda_stream__, cuda_stream or ptr")


def check_shape(name: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """Raise ValueError unless a shape is the expected one."""
    if tuple(shape) != tuple(expected):
        raise ValueError(f"{name} has shape {tuple(shape)}, expected {tuple(expected)}")


def on_gpu(name: str, array: Any, shape: tuple[int, ...], dtype: str, device: int, stream: int) -> Array:
    """Read where an array of a GPU lies.

    Raises:
        ValueError: its shape or its device is another, or it lies on the CPU.
        TypeError: its dtype is another, or it has neither DLPack nor the CUDA array interface.
    """
    source = view(name, array, stream)
    check_shape(name, source.shape, shape)
    if str(source.dtype) != dtype:
        raise TypeError(f"{name} is {source.dtype}, expected {dtype}")
    if source.device_id != device:
        raise ValueError(f"{name} is on device {source.device_id}, the op is for device {device}")
    return Array(int(source.ptr), tuple(shape), tuple(source.strides or contiguous(tuple(shape))))


def workspace_address(workspace: Any, size: int, stream: int) -> int:
    """Return the address of a workspace of at least ``size`` bytes, 0 for no bytes.

    Raises:
        ValueError: it is smaller or not aligned.
    """
    if size == 0:
        return 0
    source = view("workspace", workspace, stream)
    most, address = source.dtype.itemsize * math.prod(source.shape), int(source.ptr)
    if most < size or address % ALIGNMENT:
        raise ValueError(
            f"workspace has {most} bytes from {address:#x} on, expected workspace_bytes = {size} from a multiple of "
            f"{ALIGNMENT}"
        )
    return address


def move(source: Array, target: Array, beta: float, dtype: str) -> tuple[Launch, list[float]]:
    """What to launch, with which arguments, to make target = source + beta target; with beta 0 it is not read."""
    missing = 3 - len(source.shape)
    numbers: list[float] = []
    for array in (source, target):
        numbers += [array.address, *(0,) * missing, *array.strides]
    launch = replace(_move_launch(dtype), grid=min(-(-math.prod(source.shape) // 1024), 2048))
    return launch, [*numbers, *(1,) * missing, *source.shape, beta]


@functools.cache
def _move_launch(dtype: str) -> Launch:
    body = (
        f"    ds2::move_numbers<ds2::{NUMBERS[dtype][0]}>(source, {{s0, s1, s2}}, target, {{t0, t1, t2}}, "
        f"{names(_MOVE[8:])});\n"
    )
    source = translation_unit("recurrent/layout.cuh", _MOVE, body)
    return Launch(source, threads=256)


class _Op:
    """One pass of one shape.

    Args:
        frames, batch, hidden: T, B, H.
        dtype: "bfloat16", "float16" or "float32", of all arrays but lengths and c.
        cell: a name in ``cells.CELLS``: "relu", "clipped_relu", "tanh", "lstm", "gru_after" (reset after the product).
        clip: of "clipped_relu", representable in the dtype.
        any_layout: arrays may have other strides than contiguous ones, results may be added to what is there: takes a
            larger workspace.
        device: number of the GPU.
        max_sms: the most multiprocessors to use, or None.

    Raises:
        DoesNotFit: no persistent kernel runs this; the message says why.
    """

    backward = False
    # Names of arrays in the order of struct Pass, "" for one that the pass has no use of.
    _inputs: tuple[str, ...]
    _results: tuple[str, ...]
    _gates: tuple[str, ...]

    def __init__(
        self,
        *,
        frames: int,
        batch: int,
        hidden: int,
        dtype: str,
        cell: str = "clipped_relu",
        clip: float = 20.0,
        any_layout: bool = False,
        device: int = 0,
        max_sms: int | None = None,
    ) -> None:
        if min(frames, batch, hidden) < 1:
            raise DoesNotFit(f"(T, B, H) is {(frames, batch, hidden)}, allowed are sizes of 1 or more")
        check_rows(frames, batch)
        self.problem = Problem(batch, hidden, dtype, cell, self.backward)
        self.choice = choose_tile(self.problem, device, max_sms)
        self.frames, self.clip, self.device = frames, clip, device
        self.cell = CELLS[cell]
        self._shapes = self._arrays()
        self.workspace_bytes = aligned(4 * self.choice.exchange_words)  # the exchange comes first
        self._copies: dict[str, int] = {}  # of arrays in the workspace: their offsets
        for name in self._inputs + self._results:
            if name and (any_layout or (name == "weight_hh" and self.backward)):
                self._copies[name] = self.workspace_bytes
                self.workspace_bytes += aligned(ELEMENT_BYTES[dtype] * math.prod(self._shapes[name]))

    def _arrays(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all arrays that a pass may take, by their names."""
        batch, hidden, gates = self.problem.batch, self.problem.hidden, self.cell.gates
        state, sequence = (batch, hidden), (self.frames, batch, hidden)
        wide = (self.frames, batch, gates * hidden)
        shapes = {"weight_hh": (gates * hidden, hidden), "lengths": (batch,), "bias": (hidden,)}
        shapes |= {"saved": (self.frames, batch, self.cell.saved, hidden), "x": wide, "grad_x": wide}
        shapes |= dict.fromkeys(("y", "grad_y", "grad_last"), sequence)
        return shapes | dict.fromkeys(("h0", "h_n", "grad_h0", "grad_h_n", "c0", "c_n", "grad_c0", "grad_c_n"), state)

    def _run(self, arrays: Mapping[str, Any], workspace: Any, stream: Any, beta: float = 0.0) -> None:
        """Launch on arrays by their names."""
        optional = ("h0", "grad_h_n", *(("y",) if self.cell.gates > 1 else ()))
        for name in self._inputs:
            if name and name not in optional and arrays[name] is None:  # would be a null pointer
                raise TypeError(f"{name} is None, expected an array {self._shapes[name]}")
        handle = stream_handle(stream)
        with runtime.current(self.device):
            base = workspace_address(workspace, self.workspace_bytes, handle)
            addresses = [self._input(name, arrays.get(name), base, handle) for name in self._inputs]
            lengths = arrays["lengths"]
            addresses.append(0 if lengths is None else self._address("lengths", lengths, handle, "int32"))
            moved: list[tuple[Array, Array]] = []
            for name in self._results:
                target = self._check(name, arrays[name], handle)
                address = target.address
                if not target.plain or beta:
                    address = base + self._copy_offset(name)
                    moved.append((Array(address, target.shape, contiguous(target.shape)), target))
                addresses.append(address)
            if self.cell.gates > 1:
                addresses += [self._of_gates(name, arrays.get(name), handle) for name in self._gates]
            arguments = pass_arguments(self.choice, self.problem, self.frames, addresses, self.clip, base)
            launch_on(self.choice.launch, arguments, self._what, self.device, handle)
            for source, target in moved:
                self._move(source, target, beta, handle)

    def _input(self, name: str, array: Any, base: int, stream: int) -> int:
        """Return where the kernel finds an array: as it is, or a copy in the workspace."""
        if array is None:
            return 0
        source = self._check(name, array, stream)
        if name == "weight_hh" and self.backward:  # which takes the transpose
            source = replace(source, shape=source.shape[::-1], strides=source.strides[::-1])
        if source.plain:
            return source.address
        address = base + self._copy_offset(name)
        self._move(source, Array(address, source.shape, contiguous(source.shape)), 0.0, stream)
        return address

    def _of_gates(self, name: str, array: Any, stream: int) -> int:
        state = name in ("c0", "c_n", "grad_c0", "grad_c_n")
        used = self.cell.carries_c if state else self.cell.last_apart if name in ("bias", "grad_last") else bool(name)
        written = name in ("c_n", "grad_c0", "grad_last")
        if not used or (array is None and not written and not (self.backward and name == "saved")):
            return 0
        return self._address(name, array, stream, "float32" if state else self.problem.dtype)

    def _address(self, name: str, array: Any, stream: int, dtype: str) -> int:
        """Return where an array lies that must be as the kernels take it."""
        source = self._check(name, array, stream, dtype)
        if not source.plain:
            raise ValueError(f"{name} is not contiguous, or does not start at a multiple of 4 bytes: make a copy")
        return source.address

    def _copy_offset(self, name: str) -> int:
        if name not in self._copies:
            raise ValueError(
                f"{name} is not contiguous, or does not start at a multiple of 4 bytes, or beta is not 0: "
                "make the op with any_layout=True, whose workspace has space for copies"
            )
        return self._copies[name]

    def _check(self, name: str, array: Any, stream: int, dtype: str = "") -> Array:
        """As `on_gpu`; in the dtype of the op where none is named."""
        return on_gpu(name, array, self._shapes[name], dtype or self.problem.dtype, self.device, stream)

    def _move(self, source: Array, target: Array, beta: float, stream: int) -> None:
        launch_on(*move(source, target, beta, self.problem.dtype), self._what, self.device, stream)

    def _what(self) -> str:
        return f"{type(self).__name__} of {self.frames} frames of {self.problem}, {self.choice.explain()}"


class Forward(_Op):
    """h_t = f(x_t + W h_(t-1)) over all frames, or an LSTM's or a GRU's; see ``ds2_ops`` for the equations."""

    _inputs, _results = ("x", "", "weight_hh", "h0"), ("y", "h_n")
    _gates = ("saved", "bias", "c0", "c_n", "")

    def __call__(
        self,
        x: Any,
        weight_hh: Any,
        y: Any,
        h_n: Any,
        workspace: Any = None,
        *,
        stream: Any,
        h0: Any = None,
        lengths: Any = None,
        saved: Any = None,
        bias: Any = None,
        c0: Any = None,
        c_n: Any = None,
    ) -> None:
        """Queue the pass on a stream and return.

        Args:
            x: (T, B, G H) pre-activations, with the G gates of the cell in torch.nn's order.
            weight_hh: (G H, H).
            y: (T, B, H), written: 0 where t >= length.
            h_n: (B, H), written: the state after each utterance's last frame.
            workspace: bytes of the device, at least `workspace_bytes`, in use until the pass has ended; None if 0.
            stream: a handle, or what has ``__cuda_stream__`` or ``cuda_stream`` or ``ptr``. Arrays are used in its
                order: what made them must be ordered before.
            h0: (B, H) first state; zeros when None.
            lengths: (B,) int32, frames of each utterance, 0 to T: not read back, so the caller's promise.
            saved: (T, B, 5, H), written for `BackwardData`; of cells with gates, or None.
            bias: (H,) of the last gate's recurrent product, of a GRU, or None.
            c0: (B, H) float32 first c of an LSTM; zeros when None.
            c_n: (B, H) float32, written, of an LSTM.

        Raises:
            ValueError, TypeError: an array is not what is expected.
            RuntimeError: the compiler's or driver's error.
        """
        arrays = {"x": x, "weight_hh": weight_hh, "y": y, "h_n": h_n, "h0": h0, "lengths": lengths}
        self._run(arrays | {"saved": saved, "bias": bias, "c0": c0, "c_n": c_n}, workspace, stream)


class BackwardData(_Op):
    """Gradients of the pre-activations and of the first state, from those of y and h_n."""

    backward = True
    _inputs, _results = ("grad_y", "y", "weight_hh", "grad_h_n"), ("grad_x", "grad_h0")
    _gates = ("saved", "", "grad_c_n", "grad_c0", "grad_last")

    def __call__(
        self,
        grad_y: Any,
        y: Any,
        weight_hh: Any,
        grad_x: Any,
        grad_h0: Any,
        workspace: Any = None,
        *,
        stream: Any,
        grad_h_n: Any = None,
        lengths: Any = None,
        beta: float = 0.0,
        saved: Any = None,
        grad_c_n: Any = None,
        grad_c0: Any = None,
        grad_last: Any = None,
    ) -> None:
        """Queue the pass on a stream and return.

        Args:
            grad_y: (T, B, H); what it holds at padding does not matter.
            y: (T, B, H), output of `Forward`; None for cells with gates.
            weight_hh, workspace, stream, lengths: as of `Forward`.
            grad_x: (T, B, G H), written: gradient + beta grad_x; the gradient is 0 at padding.
            grad_h0: (B, H), written alike.
            grad_h_n: (B, H), or None for zeros.
            beta: 0 overwrites, 1 accumulates.
            saved: (T, B, 5, H) of `Forward`, of cells with gates.
            grad_c_n: (B, H) float32, of an LSTM; zeros when None.
            grad_c0: (B, H) float32, written, of an LSTM.
            grad_last: (T, B, H), written: gradient of the last gate's recurrent product, of a GRU.

        Raises:
            ValueError, TypeError, RuntimeError: as `Forward`.
        """
        arrays = {"grad_y": grad_y, "y": y, "weight_hh": weight_hh, "grad_x": grad_x, "grad_h0": grad_h0}
        arrays |= {"grad_h_n": grad_h_n, "lengths": lengths, "saved": saved}
        arrays |= {"grad_c_n": grad_c_n, "grad_c0": grad_c0, "grad_last": grad_last}
        self._run(arrays, workspace, stream, beta)
