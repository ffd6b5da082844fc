"""Recurrent layers as modules: drop-in replacements of torch.nn's RNN, LSTM and GRU, and the recurrence alone.

Shape letters: T frames, B batch, K width of the input, H hidden, G gates, L layers, D directions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from ds2_ops.checks import check_choice, check_lengths, check_shape, lengths_on, valid_frames
from ds2_ops.recurrent.backends.choose import BACKENDS, why_not_unasked
from ds2_ops.recurrent.backends.gemm import wide_dtype
from ds2_ops.recurrent.backends.persistent import why_not
from ds2_ops.recurrent.cells import CELLS, PLAIN
from ds2_ops.recurrent.op import recurrence

State = Tensor | tuple[Tensor, Tensor]
NONLINEARITIES = tuple(PLAIN)


class _DropIn(nn.RNNBase):
    """A recurrent module of torch.nn whose layers run on :func:`ds2_ops.recurrence`.

    Constructor, parameters and state dict are those of the module of the same name in torch.nn: weights move both ways.

    Args:
        args, options: as torch.nn's: input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional,
            device, dtype, and of RNN nonlinearity ("tanh" or "relu").
        backend: "auto" runs the persistent kernels where they can run, and torch's own elsewhere (oneDNN and ATen on a
            CPU, cuDNN on a GPU). "torch" is torch's own; the others are those of :func:`ds2_ops.recurrence`.
    """

    def __init__(self, *args: Any, backend: str = "auto", **options: Any) -> None:
        check_choice("backend", backend, (*BACKENDS, "torch"))
        super().__init__(*args, **options)
        self.backend = backend
        if self.proj_size and backend not in ("auto", "torch"):
            raise ValueError(f"proj_size is {self.proj_size}, backend {backend!r} has no projections: use 'torch'")

    @property
    def cell(self) -> str:
        """Its name in ``cells.CELLS``."""
        return {"LSTM": "lstm", "GRU": "gru_after", "RNN_TANH": "tanh", "RNN_RELU": "relu"}[self.mode]

    def forward(
        self, input: Tensor | PackedSequence, hx: State | None = None, lengths: Tensor | None = None
    ) -> tuple[Tensor | PackedSequence, State]:
        """Run all layers over whole utterances.

        Args:
            input: (T, B, K), (B, T, K) if `batch_first`, (T, K) of one utterance, or a packed sequence.
            hx: (L D, B, H) first states, of an LSTM the pair of h and c; zeros when None. (L D, H) of one utterance.
            lengths: (B,) int32 or int64, valid frames per utterance, 0 to T; all T when None. Not for packed sequences,
                which know theirs.

        Returns:
            output, (T, B, D H) and laid out as the input, 0 where t >= length; and the states after each utterance's
            last frame, shaped as `hx`. The states have the dtype of the output.

        Raises:
            ValueError, TypeError, RuntimeError: as :func:`ds2_ops.recurrence`.
        """
        hx = tuple(hx) if isinstance(hx, list) else hx
        if isinstance(input, PackedSequence):
            if lengths is not None:
                raise ValueError(
                    "lengths and a packed sequence were passed: leave lengths out, the packed sequence has its own"
                )
            return self._packed(input, hx)
        if input.dim() == 2:
            y, last = self.forward(input.unsqueeze(int(not self.batch_first)), _each(hx, lambda t: t[:, None]), lengths)
            assert isinstance(y, Tensor)
            return y.squeeze(int(not self.batch_first)), _each(last, lambda t: t[:, 0])
        frames, batch = (input.shape[1], input.shape[0]) if self.batch_first else input.shape[:2]
        if lengths is not None:
            check_lengths(lengths, batch)
            lengths = lengths_on(lengths, frames, input.device)
        if not self._runs_on_ops(input, frames, batch):
            return super().forward(input, hx) if lengths is None else self._padded_by_torch(input, hx, lengths)
        x = input.transpose(0, 1) if self.batch_first else input
        y, last = self._layers(x, hx, lengths)
        return y.transpose(0, 1) if self.batch_first else y, last

    def _runs_on_ops(self, x: Tensor, frames: int, batch: int) -> bool:
        """Whether this package's operators run an input of any layout, and not torch's module."""
        if self.backend != "auto":
            return self.backend != "torch"
        if not x.is_cuda or x.numel() == 0 or self.proj_size:
            return False
        dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype
        if why_not_unasked(dtype, torch.get_float32_matmul_precision()):
            return False
        return why_not(frames, batch, self.hidden_size, dtype, x.device, self.cell, None) is None

    def _layers(self, x: Tensor, hx: State | None, lengths: Tensor | None) -> tuple[Tensor, State]:
        """Run on x (T, B, K)."""
        directions = 2 if self.bidirectional else 1
        self._check_states(hx, (self.num_layers * directions, x.shape[1], self.hidden_size))
        states: list[tuple[Tensor, ...]] = []
        for layer in range(self.num_layers):
            own = slice(directions * layer, directions * (layer + 1))
            y, *last = self._layer(x, layer, _each(hx, lambda t, own=own: t[own]), lengths)
            states.append(tuple(last))
            x = functional.dropout(y, self.dropout, self.training) if layer + 1 < self.num_layers else y
        last = [torch.cat(kind) for kind in zip(*states, strict=True)]
        return x, (last[0], last[1].to(x.dtype)) if len(last) > 1 else last[0]

    def _check_states(self, hx: State | None, shape: tuple[int, int, int]) -> None:
        """Raise unless the states of all layers are right: a layer takes its own slice, and would not miss the rest."""
        if hx is None:
            return
        pair = CELLS[self.cell].carries_c
        if isinstance(hx, tuple) != pair or (pair and len(hx) != 2):
            expected = "the pair of h and c" if pair else "one tensor"
            raise TypeError(f"hx is a {type(hx).__name__}, expected for {type(self).__name__} is {expected}")
        _each(hx, lambda states: check_shape("hx", states, shape, "(L D, B, H)"))

    def _layer(self, x: Tensor, layer: int, hx: State | None, lengths: Tensor | None) -> tuple[Tensor, ...]:
        """Run a layer: y (T, B, D H), and its states (D, B, H)."""
        h0, c0 = hx if isinstance(hx, tuple) else (hx, None)
        suffixes = [f"_l{layer}", f"_l{layer}_reverse"][: 2 if self.bidirectional else 1]

        def parameters(name: str) -> list[Tensor]:
            return [getattr(self, name + suffix) for suffix in suffixes]

        weight_ih, weight_hh = parameters("weight_ih"), parameters("weight_hh")
        bias, bias_hn = self._biases(parameters("bias_ih"), parameters("bias_hh")) if self.bias else (None, None)
        z = functional.linear(x, torch.cat(weight_ih) if self.bidirectional else weight_ih[0], bias)
        options: dict[str, Any] = {"cell": self.cell, "backend": self.backend}
        c0 = None if c0 is None else c0.to(wide_dtype(z))
        if self.bidirectional:
            hn = None if bias_hn is None else torch.stack(bias_hn)
            options |= {"bias_hn": hn, "c0": c0}
            y, *last = recurrence(
                z.view(*z.shape[:2], 2, z.shape[2] // 2), torch.stack(weight_hh), h0, lengths, **options
            )
            return y.flatten(2), *last
        options |= {"bias_hn": None if bias_hn is None else bias_hn[0], "c0": None if c0 is None else c0[0]}
        y, *last = recurrence(z, weight_hh[0], None if h0 is None else h0[0], lengths, **options)
        return y, *(state[None] for state in last)

    def _biases(self, bias_ih: list[Tensor], bias_hh: list[Tensor]) -> tuple[Tensor, list[Tensor] | None]:
        """The bias of all directions' projections (D G H,), and of a GRU each direction's bias_hn (H,)."""
        if self.mode != "GRU":
            return torch.cat([one + other for one, other in zip(bias_ih, bias_hh, strict=True)]), None
        hidden = self.hidden_size
        pairs = zip(bias_ih, bias_hh, strict=True)
        bias = torch.cat([one + functional.pad(other[: 2 * hidden], (0, hidden)) for one, other in pairs])
        return bias, [other[2 * hidden :] for other in bias_hh]

    def _packed(self, packed: PackedSequence, hx: State | None) -> tuple[PackedSequence, State]:
        sizes = packed.batch_sizes
        if not self._runs_on_ops(packed.data, len(sizes), int(sizes[0])):
            output: tuple[PackedSequence, State] = super().forward(packed, hx)
            return output
        x, lengths = pad_packed_sequence(packed)
        y, last = self._layers(x, hx, lengths)
        if packed.sorted_indices is not None:
            y, lengths = y[:, packed.sorted_indices], lengths[packed.sorted_indices.to(lengths.device)]
        data, batch_sizes, _, _ = pack_padded_sequence(y, lengths)
        return PackedSequence(data, batch_sizes, packed.sorted_indices, packed.unsorted_indices), last

    def _padded_by_torch(self, x: Tensor, hx: State | None, lengths: Tensor) -> tuple[Tensor, State]:
        """Run a ragged batch on torch's own module. It refuses empty sequences: these run a frame, which is dropped."""
        if x.numel() == 0:
            return super().forward(x, hx)  # type: ignore[no-any-return]
        frames = x.shape[int(self.batch_first)]
        valid = valid_frames(lengths, frames)
        valid = valid.transpose(0, 1) if self.batch_first else valid
        filled = torch.where(valid, x, 0.0)
        packed = pack_padded_sequence(filled, lengths.clamp_min(1).cpu(), self.batch_first, enforce_sorted=False)
        y, last = super().forward(packed, hx)
        y, _ = pad_packed_sequence(y, self.batch_first, total_length=frames)
        empty = (lengths == 0)[:, None]
        before = hx if isinstance(hx, tuple) else (hx, hx)
        after = last if isinstance(last, tuple) else (last,)
        states = [torch.where(empty, 0.0 if b is None else b.to(a), a) for b, a in zip(before, after, strict=False)]
        return torch.where(valid, y, 0.0), (states[0], states[1]) if len(states) > 1 else states[0]


def _each(state: State | None, change: Any) -> Any:
    """Change the tensor, or both of a pair; None stays."""
    if isinstance(state, tuple):
        return tuple(change(t) for t in state)
    return None if state is None else change(state)


class RNN(_DropIn, nn.RNN):  # type: ignore[misc]
    """torch.nn.RNN, h_t = f(W_ih x_t + b + W_hh h_(t-1)) with tanh or relu, on the persistent kernels."""

    __doc__ = f"{__doc__}\n{_DropIn.__doc__}"


class LSTM(_DropIn, nn.LSTM):  # type: ignore[misc]
    """torch.nn.LSTM on the persistent kernels; see :func:`ds2_ops.lstm` for the equations."""

    __doc__ = f"{__doc__}\n{_DropIn.__doc__}"


class GRU(_DropIn, nn.GRU):  # type: ignore[misc]
    """torch.nn.GRU on the persistent kernels; see :func:`ds2_ops.gru` for the equations."""

    __doc__ = f"{__doc__}\n{_DropIn.__doc__}"


class Recurrence(nn.Module):
    """The recurrent half of a simple layer: holds weight_hh and calls :func:`ds2_ops.recurrence`.

    Args:
        hidden_size: H.
        nonlinearity, clip, backend, max_sms: as there.
        device, dtype: of the weight.
    """

    def __init__(
        self,
        hidden_size: int,
        nonlinearity: str = "clipped_relu",
        *,
        clip: float = 20.0,
        backend: str = "auto",
        max_sms: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_choice("nonlinearity", nonlinearity, NONLINEARITIES)
        check_choice("backend", backend, BACKENDS)
        self.nonlinearity, self.clip, self.backend, self.max_sms = nonlinearity, clip, backend, max_sms
        self.weight_hh = nn.Parameter(torch.empty(hidden_size, hidden_size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weight_hh as torch.nn.RNN does: uniform within 1 / sqrt(H)."""
        bound = self.weight_hh.shape[0] ** -0.5
        nn.init.uniform_(self.weight_hh, -bound, bound)

    def forward(self, x: Tensor, h0: Tensor | None = None, lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Call :func:`ds2_ops.recurrence` with the module's weight; same shapes and returns."""
        options: dict[str, Any] = {"clip": self.clip, "backend": self.backend, "max_sms": self.max_sms}
        y, h_n = recurrence(x, self.weight_hh, h0, lengths, cell=self.nonlinearity, **options)
        return y, h_n

    def extra_repr(self) -> str:
        """Show the arguments of the constructor."""
        bound = f", clip={self.clip}" if CELLS[self.nonlinearity].takes_clip else ""
        return f"{self.weight_hh.shape[0]}, {self.nonlinearity!r}{bound}, backend={self.backend!r}"
