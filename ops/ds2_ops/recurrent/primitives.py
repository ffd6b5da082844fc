"""The persistent recurrence for any framework, or none: arrays by DLPack, a stream, and nothing allocated in a call.

cuDNN's first paper (Chetlur et al. 2014), section 2: functions that no framework owns. Outputs and workspace are the
caller's, whose size is asked first; arrays may be time-major or batch-major or have any strides; gradients overwrite
what is there, or are added to it. This module and all below it import no torch.

    op = Forward(frames=512, batch=8, hidden=1152, dtype="float16", cell="relu")
    workspace = cupy.empty(op.workspace_bytes, cupy.uint8)
    op(x, weight_hh, y, h_n, workspace, stream=cupy.cuda.get_current_stream().ptr)

The gradient of the matrix is one product over all frames, sum_t grad_x_t h_(t-1)^T, which every framework has.
Shape letters: T frames, B batch, H hidden.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ds2_ops.jit import runtime
from ds2_ops.jit.launch import launch_on
from ds2_ops.recurrent.arrays import ALIGNMENT, Array, aligned, contiguous, move, product, stream_handle, view
from ds2_ops.recurrent.calibrate import choose_tile
from ds2_ops.recurrent.cells import CELLS
from ds2_ops.recurrent.plan.entry import pass_arguments
from ds2_ops.recurrent.plan.problem import ELEMENT_BYTES, DoesNotFit, Problem, check_rows


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
        self._rooms: dict[str, int] = {}  # of arrays' copies: where they begin
        for name in self._inputs + self._results:
            if name and (any_layout or (name == "weight_hh" and self.backward)):
                self._rooms[name] = self.workspace_bytes
                self.workspace_bytes += aligned(ELEMENT_BYTES[dtype] * product(self._shapes[name]))

    def _arrays(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all arrays that a pass may be given."""
        batch, hidden, gates = self.problem.batch, self.problem.hidden, self.cell.gates
        state, sequence = (batch, hidden), (self.frames, batch, hidden)
        wide = (self.frames, batch, gates * hidden)
        shapes = {"weight_hh": (gates * hidden, hidden), "lengths": (batch,), "bias": (hidden,)}
        shapes |= {"saved": (self.frames, batch, self.cell.saved, hidden), "x": wide, "grad_x": wide}
        shapes |= dict.fromkeys(("y", "grad_y", "grad_last"), sequence)
        return shapes | dict.fromkeys(("h0", "h_n", "grad_h0", "grad_h_n", "c0", "c_n", "grad_c0", "grad_c_n"), state)

    def _run(self, given: Mapping[str, Any], workspace: Any, stream: Any, beta: float = 0.0) -> None:
        """Launch on arrays by their names."""
        handle = stream_handle(stream)
        with runtime.current(self.device):
            base = self._workspace(workspace, handle)
            addresses = [self._input(name, given.get(name), base, handle) for name in self._inputs]
            addresses.append(self._address("lengths", given.get("lengths"), handle, "int32"))
            moved: list[tuple[Array, Array]] = []
            for name in self._results:
                target = self._check(name, given[name], handle)
                address = target.address
                if not target.plain or beta:
                    address = base + self._room(name)
                    moved.append((Array(address, target.shape, contiguous(target.shape)), target))
                addresses.append(address)
            if self.cell.gates > 1:
                addresses += [self._of_gates(name, given.get(name), handle) for name in self._gates]
            arguments = pass_arguments(self.choice, self.problem, self.frames, addresses, self.clip, base)
            launch_on(self.choice.launch, arguments, self._what, self.device, handle)
            for source, target in moved:
                self._move(source, target, beta, handle)

    def _input(self, name: str, array: Any, base: int, stream: int) -> int:
        """Return where the kernel finds an array: as it is, or a copy in the workspace."""
        if array is None:
            return 0
        found = self._check(name, array, stream)
        if name == "weight_hh" and self.backward:  # which is given the transpose
            found = replace(found, shape=found.shape[::-1], strides=found.strides[::-1])
        if found.plain:
            return found.address
        address = base + self._room(name)
        self._move(found, Array(address, found.shape, contiguous(found.shape)), 0.0, stream)
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
        if array is None and name == "lengths":
            return 0
        found = self._check(name, array, stream, dtype)
        if not found.plain:
            raise ValueError(f"{name} is not contiguous, or does not start at a multiple of 4 bytes: make a copy")
        return found.address

    def _room(self, name: str) -> int:
        if name not in self._rooms:
            raise ValueError(
                f"{name} is not contiguous, or does not start at a multiple of 4 bytes, or beta is not 0: "
                "make the op with any_layout=True, whose workspace has room for copies"
            )
        return self._rooms[name]

    def _check(self, name: str, array: Any, stream: int, dtype: str = "") -> Array:
        """Read an array by DLPack, or by the CUDA array interface; raise unless it is what is expected."""
        expected, dtype = self._shapes[name], dtype or self.problem.dtype
        found = view(name, array, stream)
        if tuple(found.shape) != expected:
            raise ValueError(f"{name} has shape {tuple(found.shape)}, expected {expected}")
        if str(found.dtype) != dtype:
            raise TypeError(f"{name} is {found.dtype}, expected {dtype}")
        if found.device_id != self.device:
            raise ValueError(f"{name} is on device {found.device_id}, the op is for device {self.device}")
        return Array(int(found.ptr), expected, tuple(found.strides or contiguous(expected)))

    def _workspace(self, workspace: Any, stream: int) -> int:
        if self.workspace_bytes == 0:
            return 0
        found = view("workspace", workspace, stream)
        size = found.dtype.itemsize * product(found.shape)
        if size < self.workspace_bytes or int(found.ptr) % ALIGNMENT:
            raise ValueError(
                f"workspace has {size} bytes from {int(found.ptr):#x} on, expected workspace_bytes = "
                f"{self.workspace_bytes} from a multiple of {ALIGNMENT}"
            )
        return int(found.ptr)

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
        given = {"x": x, "weight_hh": weight_hh, "y": y, "h_n": h_n, "h0": h0, "lengths": lengths}
        self._run(given | {"saved": saved, "bias": bias, "c0": c0, "c_n": c_n}, workspace, stream)


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
        given = {"grad_y": grad_y, "y": y, "weight_hh": weight_hh, "grad_x": grad_x, "grad_h0": grad_h0}
        given |= {"grad_h_n": grad_h_n, "lengths": lengths, "saved": saved}
        given |= {"grad_c_n": grad_c_n, "grad_c0": grad_c0, "grad_last": grad_last}
        self._run(given, workspace, stream, beta)
