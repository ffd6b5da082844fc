"""The recurrence h_t = f(x_t + W_hh h_(t-1)), bottom to top.

cells       one row a nonlinearity
options     what a recurrence is asked for beside its tensors
reference   the equations, one frame after the other: what the others are checked by
gemm        a loop of matrix products: the CPU path and the honest baseline
plan        which persistent kernel runs a problem, and with which tile
deferred    where gradients of weights go, and how their products wait for the next recurrence
device      what a GPU of this machine can hold
calibrate   the fastest of the planner's best, measured on this machine
planned     the choice that runs
arrays      where arrays of any framework lie
primitives  such arrays -> launch
persistent  tensors -> launch
backends    which of these runs
weights     the transpose and the gradient of a recurrent matrix
projection  the product before a recurrence of few frames, on a kernel that overlaps with it
rnn         the operator: checks, autograd, the public function and module
layer       projection and recurrence for inference
gated       LSTM and GRU: their own reference, gemm, persistent and op
bidirectional  all of these over whole utterances in both directions, in one launch where that pays
"""
