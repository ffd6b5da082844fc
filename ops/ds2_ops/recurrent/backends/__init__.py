"""The implementations of the recurrence, which take the same arguments.

reference   the equations frame by frame under autograd, which the others are checked against
gemm        a loop of matrix products: the CPU path, the path for any GPU, and the baseline
persistent  the Hopper kernels, whose weights stay on chip
choose      which of these runs
"""
