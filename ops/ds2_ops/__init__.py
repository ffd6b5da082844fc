"""Persistent recurrent GPU kernels and the row convolution as torch ops, usable without ds2.

recurrent        h_t = f(x_t + W_hh h_(t-1)), LSTM and GRU, their backends, and the planner of the persistent kernels
row_convolution  r_t = sum_j w_j h_(t+j), on any device
ctc              decoding kernels: prefix beam search and forced alignment; the loss
batch_norm       batch norm of ragged batches, with the clip behind it
convolution      the front end's second convolution on Hopper's matrix unit
optimizer        clipping and update of all parameters in one launch
peers            sums of a few numbers over the GPUs of a host
lengths, checks  what the ops say of frames per utterance, and of wrong arguments
jit              from a translation unit to a launch
csrc             the kernels
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ds2_ops.recurrent.modules import GRU, LSTM, RNN, Recurrence
    from ds2_ops.recurrent.op import bidirectional, gru, lstm, recurrence
    from ds2_ops.row_convolution.op import lookahead

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

_HOMES = dict.fromkeys(("GRU", "LSTM", "RNN", "Recurrence"), "recurrent.modules")
_HOMES |= dict.fromkeys(("bidirectional", "gru", "lstm", "recurrence"), "recurrent.op")
_HOMES["lookahead"] = "row_convolution.op"


def __getattr__(name: str) -> Any:
    """Import the torch ops when they are used: primitives serve processes that have no torch."""
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the public names too, imported or not."""
    return sorted({*globals(), *__all__})
