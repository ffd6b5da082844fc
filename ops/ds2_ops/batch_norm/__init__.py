"""Batch norm over the frames of ragged batches, with the clip behind it, bottom to top.

reference  the equation: what the kernels are checked by
kernels    the launches: sums over rows, then the transform, both ways
op         the operator: autograd, sums over ranks between the two launches
"""
