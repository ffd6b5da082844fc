"""Decoding on the GPU, a block an utterance.

device  which GPUs these kernels run on
beam    CTC prefix beam search with an n-gram model
align   the best path through a known label sequence
"""
