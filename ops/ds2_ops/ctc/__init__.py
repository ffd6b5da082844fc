"""CTC on the GPU: decoding a block an utterance, and the loss.

device  which GPUs these kernels run on
beam    prefix beam search with an n-gram model
labels  what its prefixes spell, at the end or from chunk to chunk
align   the best path through a known label sequence
loss    the sum over all paths through it, and its gradient
"""
