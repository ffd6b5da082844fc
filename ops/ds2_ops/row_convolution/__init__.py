"""The row convolution r_t = sum_j w_j h_(t+j), bottom to top.

kernels    one pass over memory, on a GPU, in Triton
op         the operator: checks, autograd, choice of backend, shifted multiply-adds on any device, the equation; several
         row convolutions on a block of streams, one launch, for inference
"""
