"""Sums of a few numbers over the GPUs of one host, which write into one another's memory.

memory  a mailbox on a GPU, and those of other processes mapped into this one
sum     the launch
"""
