"""Our beam search: in PyTorch for a whole batch, as one kernel on a GPU, fused with a language model.

torch_search: in PyTorch, frame by frame. kernel_search: one kernel on a GPU, places: chunk by chunk. search: which of
them runs. decoder: it steps. fusion: what words are worth beside their acoustics.
hot: hot words of single sessions.
"""
