"""The persistent recurrence for any framework, or none: arrays by DLPack, a stream, and nothing allocated in a call.

cuDNN's first paper (Chetlur et al. 2014), section 2: functions that no framework owns. Outputs and workspace are the
caller's, whose size is asked first; arrays may be time-major or batch-major or have any strides; gradients overwrite
what is there, or are added to it. This module and all below it import no torch.

    op = Forward(frames=512, batch=8, hidden=1152, dtype="float16", nonlinearity="relu")
    workspace = cupy.empty(op.workspace_bytes, cupy.uint8)
    op(x, weight_hh, y, h_n, workspace, stream=cupy.cuda.get_current_stream().ptr)

The gradient of the matrix is one product over all frames, sum_t grad_x_t h_(t-1)^T, which every framework has.
Shape letters: T frames, B batch, H hidden.
"""

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ds2_ops.jit import runtime
from ds2_ops.jit.launch import Launch, launch_on
from ds2_ops.jit.source import Argument, Source, names, parameters, translation_unit
from ds2_ops.recurrent.plan.entry import pass_arguments
from ds2_ops.recurrent.plan.problem import ELEMENT_BYTES, NUMBERS, DoesNotFit, Problem, check_rows
from ds2_ops.recurrent.planned import plan_for

_ALIGNMENT = 256  # bytes, of each part of a workspace
_MOVE = parameters(
    """const void* source, long long s0, long long s1, long long s2, void* target, long long t0, long long t1,
    long long t2, int count_0, int count_1, int count_2, float beta"""
)


@dataclass(frozen=True)
class _Array:
    """Where an array lies: address, and strides in elements."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def plain(self) -> bool:
        """True if the kernels can use it as it is."""
        expected, steps = 1, []
        for count in reversed(self.shape):
            steps.append(expected)
            expected *= count
        pairs = zip(self.shape, self.strides, reversed(steps), strict=True)
        return self.address % 4 == 0 and all(count == 1 or stride == step for count, stride, step in pairs)


class _Op:
    """One pass of one shape.

    Args:
        frames, batch, hidden: T, B, H.
        dtype: "bfloat16", "float16" or "float32", of all arrays but the lengths.
        nonlinearity: a name in ``cells.CELLS``.
        clip: of "clipped_relu", representable in the dtype.
        any_layout: arrays may have other strides than those of contiguous (T, B, H), results may be added to what is
            there: takes a larger workspace.
        device: number of the GPU.
        max_sms: the most multiprocessors to use, or None.

    Raises:
        DoesNotFit: no persistent kernel runs this; the message says why.
    """

    backward = False
    _sequences: tuple[str, ...]
    _states: tuple[str, ...]

    def __init__(
        self,
        *,
        frames: int,
        batch: int,
        hidden: int,
        dtype: str,
        nonlinearity: str = "clipped_relu",
        clip: float = 20.0,
        any_layout: bool = False,
        device: int = 0,
        max_sms: int | None = None,
    ) -> None:
        if min(frames, batch, hidden) < 1:
            raise DoesNotFit(f"(T, B, H) is {(frames, batch, hidden)}, allowed are sizes of 1 or more")
        check_rows(frames, batch)
        self.problem = Problem(batch, hidden, dtype, nonlinearity, self.backward)
        self.choice = plan_for(self.problem, device, max_sms)
        self.frames, self.clip, self.any_layout, self.device = frames, clip, any_layout, device
        counts = {"weight_hh": hidden * hidden} if any_layout or self.backward else {}
        if any_layout:
            counts |= dict.fromkeys(self._sequences, frames * batch * hidden)
            counts |= dict.fromkeys(self._states, batch * hidden)
        self.workspace_bytes = _aligned(4 * self.choice.exchange_words)  # the exchange comes first
        self._rooms: dict[str, int] = {}  # of arrays' copies: where they begin
        for name, count in counts.items():
            self._rooms[name] = self.workspace_bytes
            self.workspace_bytes += _aligned(ELEMENT_BYTES[dtype] * count)

    def _run(
        self,
        arrays: Sequence[tuple[str, Any, int]],
        lengths: Any,
        results: Sequence[tuple[str, Any, int]],
        workspace: Any,
        stream: Any,
        beta: float,
    ) -> None:
        """Launch; arrays and results are (name, array or None, dimensions), in the order of struct Pass."""
        handle = _stream(stream)
        with runtime.current(self.device):
            base = self._workspace(workspace)
            given: list[int] = []
            for name, array, dimensions in arrays:
                address = 0
                if array is not None:
                    found = self._check(name, array, dimensions)
                    if name == "weight_hh" and self.backward:  # which is given the transpose
                        found = replace(found, strides=found.strides[::-1])
                    address = found.address
                    if not found.plain:
                        address = base + self._room(name)
                        self._move(found, _Array(address, found.shape, _contiguous(found.shape)), 0.0, handle)
                given.append(address)
            length_address = 0 if lengths is None else self._check("lengths", lengths, 1, "int32").address
            targets, addresses = [], []
            for name, array, dimensions in results:
                target = self._check(name, array, dimensions)
                direct = target.plain and beta == 0.0
                addresses.append(target.address if direct else base + self._room(name))
                targets.append(None if direct else target)
            if self.choice.exchange_words:
                runtime.fill_words(base, 0xFFFFFFFF, self.choice.exchange_words, handle)
            given += [length_address, *addresses]
            arguments = pass_arguments(self.choice, self.problem, self.frames, given, self.clip, base)
            launch_on(self.choice.launch, arguments, self._what, self.device, handle)
            for address, moved in zip(addresses, targets, strict=True):
                if moved is not None:
                    self._move(_Array(address, moved.shape, _contiguous(moved.shape)), moved, beta, handle)

    def _room(self, name: str) -> int:
        if name not in self._rooms:
            raise ValueError(
                f"{name} is not contiguous, or does not start at a multiple of 4 bytes, or beta is not 0: "
                "make the op with any_layout=True, whose workspace has room for copies"
            )
        return self._rooms[name]

    def _check(self, name: str, array: Any, dimensions: int, dtype: str | None = None) -> _Array:
        """Read an array by DLPack, or by the CUDA array interface; raise unless it is what is expected."""
        problem, dtype = self.problem, dtype or self.problem.dtype
        expected = {
            1: (problem.batch,),
            2: (problem.batch, problem.hidden),
            3: (self.frames, problem.batch, problem.hidden),
        }[dimensions]
        if name == "weight_hh":
            expected = (problem.hidden, problem.hidden)
        view = _view(name, array)
        if tuple(view.shape) != expected:
            raise ValueError(f"{name} has shape {tuple(view.shape)}, expected {expected}")
        if str(view.dtype) != dtype:
            raise TypeError(f"{name} is {view.dtype}, expected {dtype}")
        if view.device_id != self.device:
            raise ValueError(f"{name} is on device {view.device_id}, the op is for device {self.device}")
        return _Array(int(view.ptr), expected, tuple(view.strides or _contiguous(expected)))

    def _workspace(self, workspace: Any) -> int:
        if self.workspace_bytes == 0:
            return 0
        view = _view("workspace", workspace)
        size = view.dtype.itemsize * functools.reduce(operator.mul, view.shape, 1)
        if size < self.workspace_bytes or int(view.ptr) % _ALIGNMENT:
            raise ValueError(
                f"workspace has {size} bytes from {int(view.ptr):#x} on, expected workspace_bytes = "
                f"{self.workspace_bytes} from a multiple of {_ALIGNMENT}"
            )
        return int(view.ptr)

    def _move(self, source: _Array, target: _Array, beta: float, stream: int) -> None:
        missing = 3 - len(source.shape)
        numbers: list[Argument] = []
        for array in (source, target):
            numbers += [array.address, *(0,) * missing, *array.strides]
        count = functools.reduce(operator.mul, source.shape)
        launch = replace(_move_launch(self.problem.dtype), grid=min(-(-count // 1024), 2048))
        launch_on(launch, [*numbers, *(1,) * missing, *source.shape, beta], self._what, self.device, stream)

    def _what(self) -> str:
        return f"{type(self).__name__} of {self.frames} frames of {self.problem}, {self.choice.explain()}"


class Forward(_Op):
    """h_t = f(x_t + W h_(t-1)) over all frames; see :func:`ds2_ops.recurrence` for the equation."""

    _sequences, _states = ("x", "y"), ("h0", "h_n")

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
    ) -> None:
        """Queue the pass on a stream and return.

        Args:
            x: (T, B, H) pre-activations.
            weight_hh: (H, H).
            y: (T, B, H), written: 0 where t >= length.
            h_n: (B, H), written: the state after each utterance's last frame.
            workspace: bytes of the device, at least `workspace_bytes`, in use until the pass has ended; None if 0.
            stream: a handle, or what has ``__cuda_stream__`` or ``cuda_stream`` or ``ptr``. Arrays are used in its
                order: what made them must be ordered before.
            h0: (B, H) first state; zeros when None.
            lengths: (B,) int32, frames of each utterance, 0 to T: not read back, so the caller's promise.

        Raises:
            ValueError, TypeError: an array is not what is expected.
            RuntimeError: the compiler's or driver's error.
        """
        self._run(
            [("x", x, 3), ("output_y", None, 3), ("weight_hh", weight_hh, 2), ("h0", h0, 2)],
            lengths,
            [("y", y, 3), ("h_n", h_n, 2)],
            workspace,
            stream,
            0.0,
        )


class BackwardData(_Op):
    """Gradients of the pre-activations and of the first state, from those of y and h_n."""

    backward = True
    _sequences, _states = ("grad_y", "y", "grad_x"), ("grad_h_n", "grad_h0")

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
    ) -> None:
        """Queue the pass on a stream and return.

        Args:
            grad_y: (T, B, H); what it holds at padding does not matter.
            y: (T, B, H), output of `Forward`.
            weight_hh, workspace, stream, lengths: as of `Forward`.
            grad_x: (T, B, H), written: gradient + beta grad_x; 0 at padding counts as its gradient.
            grad_h0: (B, H), written alike.
            grad_h_n: (B, H), or None for zeros.
            beta: 0 overwrites, 1 accumulates.

        Raises:
            ValueError, TypeError, RuntimeError: as `Forward`.
        """
        self._run(
            [("grad_y", grad_y, 3), ("y", y, 3), ("weight_hh", weight_hh, 2), ("grad_h_n", grad_h_n, 2)],
            lengths,
            [("grad_x", grad_x, 3), ("grad_h0", grad_h0, 2)],
            workspace,
            stream,
            beta,
        )


def _aligned(count: int) -> int:
    return -(-count // _ALIGNMENT) * _ALIGNMENT


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(functools.reduce(operator.mul, shape[i + 1 :], 1) for i in range(len(shape)))


def _view(name: str, array: Any) -> Any:
    from cuda.core.utils import StridedMemoryView

    try:
        view = StridedMemoryView.from_any_interface(array, stream_ptr=-1)  # no waits: the caller orders
    except (BufferError, TypeError, AttributeError) as error:
        raise TypeError(f"{name} is {type(array).__name__}, expected an array with __dlpack__: {error}") from error
    if not view.is_device_accessible:
        raise ValueError(f"{name} is on the CPU, expected an array on a CUDA device")
    return view


def _stream(stream: Any) -> int:
    if isinstance(stream, int):
        return stream
    if hasattr(stream, "__cuda_stream__"):
        return int(stream.__cuda_stream__()[1])
    for attribute in ("cuda_stream", "ptr"):
        if hasattr(stream, attribute):
            return int(getattr(stream, attribute))
    raise TypeError(f"stream is {stream!r}, expected a handle or what has __cuda_stream__, cuda_stream or ptr")


@functools.cache
def _move_launch(dtype: str) -> Launch:
    body = (
        f"    ds2::move_numbers<ds2::{NUMBERS[dtype][0]}>(source, {{s0, s1, s2}}, target, {{t0, t1, t2}}, "
        f"{names(_MOVE[8:])});\n"
    )
    source: Source = translation_unit("recurrent/layout.cuh", _MOVE, body)
    return Launch(source, threads=256)
