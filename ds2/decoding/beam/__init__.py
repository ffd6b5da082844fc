"""Our beam search: in PyTorch for a whole batch, as one kernel on a GPU, fused with a language model."""
