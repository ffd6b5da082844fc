"""Batch norm of ragged batches on a GPU.

rows  the launches, without a framework
op    the torch operator, with the clip that follows it and sums over ranks
"""
