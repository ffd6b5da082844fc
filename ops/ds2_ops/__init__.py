"""Persistent recurrent GPU kernels and the row convolution as torch ops, usable without ds2.

recurrent        h_t = f(x_t + W_hh h_(t-1)), LSTM and GRU, their backends, and the planner of the persistent kernels
row_convolution  r_t = sum_j w_j h_(t+j), on any device
ctc              decoding kernels: prefix beam search and forced alignment
lengths, checks  what the ops say of frames per utterance, and of wrong arguments
jit              from a translation unit to a launch
csrc             the kernels
"""

from ds2_ops.recurrent.gated.op import gru, lstm
from ds2_ops.recurrent.rnn import Recurrence, recurrence
from ds2_ops.row_convolution.op import lookahead, lookahead_stream

__all__ = ["Recurrence", "gru", "lookahead", "lookahead_stream", "lstm", "recurrence"]
