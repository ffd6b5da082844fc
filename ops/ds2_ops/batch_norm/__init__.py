"""Batch norm over the frames of ragged batches, fused with the clip that follows it, bottom to top.

reference  the equation
kernels    the launches: sums over rows, then the transform, in both passes
op         the operator: autograd, sums over ranks between the two launches
"""
