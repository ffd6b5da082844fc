"""Sums over the GPUs of one host, which write into one another's memory.

memory    a mailbox on a GPU, and those of other processes mapped into this one
sum       of a few numbers, in one launch
exchange  of something large over two GPUs: copies, then an addition
"""
