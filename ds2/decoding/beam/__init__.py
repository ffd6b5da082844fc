"""Our CTC prefix beam search with shallow fusion of an n-gram model.

decoder: the decoder, for batches and streams; it chooses torch_search (PyTorch, frame by frame) or kernel_search (one
GPU kernel). fusion: the scores of words, also of a network of phones.
"""
