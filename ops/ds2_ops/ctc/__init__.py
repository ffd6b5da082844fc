"""CTC on the GPU, one block for each utterance.

beam    prefix beam search with an n-gram model, and the labels of its prefixes
align   the best path through a known label sequence
paths   launches of the loss, without a framework
loss    the sum over all paths through it, and its gradient
denominator  the sum over all paths through all label sequences, weighted by a graph, and its gradient
"""
