"""Persistent recurrent GPU kernels and the row convolution as torch ops, usable without ds2."""

from ds2_ops.lookahead import lookahead, lookahead_stream
from ds2_ops.recurrence import Recurrence, recurrence

__all__ = ["Recurrence", "lookahead", "lookahead_stream", "recurrence"]
