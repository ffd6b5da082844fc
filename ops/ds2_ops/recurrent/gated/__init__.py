"""LSTM and GRU, bottom to top: as the recurrence above, with gates.

reference   the equations, one frame after the other: what the others are checked by
gemm        a loop of matrix products, for any device
persistent  tensors -> launch
autograd    both passes as one operator, eager or compiled
op          the public functions: checks
"""
