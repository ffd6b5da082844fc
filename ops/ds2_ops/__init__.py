"""Operators of speech recognition as torch ops with GPU kernels, usable without ds2.

recurrent        h_t = f(x_t + W_hh h_(t-1)), LSTM and GRU, their backends, and the planner of the persistent kernels
row_convolution  r_t = sum_j w_j h_(t+j), on any device
ctc              prefix beam search, forced alignment, the loss
batch_norm       batch norm of ragged batches, with the clip that follows it
convolution      the convolutions of the front end, on Hopper's matrix unit
classifier       logits of few labels
spectrum         normalised log power spectra of samples
optimizer        the norm of all gradients, clipping and update
peers            sums over the GPUs of a host
primitives       convolution, batch norm and CTC on arrays of any framework, without torch
checks           errors about arguments, choice of a backend, lengths of utterances
install          the command that installs an extra from where this copy came
jit              from a translation unit to a launch
csrc             the kernels
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ds2_ops.recurrent.modules import GRU, LSTM, RNN, Recurrence
    from ds2_ops.recurrent.op import bidirectional, gru, lstm, recurrence
    from ds2_ops.row_convolution import lookahead

__all__ = [
    "GRU",
    "LSTM",
    "RNN",
    "Recurrence",
    "bidirectional",
    "gru",
    "lookahead",
    "lstm",
    "recurrence",
]

_MODULES = dict.fromkeys(("GRU", "LSTM", "RNN", "Recurrence"), "recurrent.modules")
_MODULES |= dict.fromkeys(("bidirectional", "gru", "lstm", "recurrence"), "recurrent.op")
_MODULES["lookahead"] = "row_convolution"


def __getattr__(name: str) -> Any:
    """Import the torch ops on first use: `recurrent.primitives` runs in processes without torch."""
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the public names, imported or not."""
    return sorted({*globals(), *__all__})
