"""Our own beam search: batched in PyTorch, one kernel on a GPU, fused with a language model."""
