"""The row convolution r_t = sum_j w_j h_(t+j), bottom to top.

reference       the equation: what the others are checked by
shift           shifted multiply-adds, any device
triton_kernels  one pass over memory, on a GPU
chain           several on a block of streams, one launch
op              the operator: checks, autograd, choice of backend, the public functions
"""
