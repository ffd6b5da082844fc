"""Recurrent cells with the recurrent weights on chip, bottom to top.

cells       one row a cell: equations, gates, saved values
plan        which persistent kernel runs a problem, and with which tile
calibrate   the kernel that runs on a GPU of this machine: the planner's best, or the fastest measured
primitives  arrays of any framework -> launch
deferred    where gradients of weights go, and how their products wait for the next recurrence
backends    reference, gemm and persistent: tensors -> results; which of these runs
autograd    both passes as one operator, eager or compiled, in one direction or two
op          the public functions: recurrence, lstm, gru, bidirectional
modules     RNN, LSTM, GRU as in torch.nn
layer       projection and recurrence for inference, on kernels that overlap
"""
