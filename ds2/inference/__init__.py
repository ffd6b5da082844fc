"""The network in recognition, on blocks of streams.

network: runs a block of any streams from the description that `AcousticModel.folded` returns. runner: slots of streams,
batches of fixed sizes, as CUDA graphs on a GPU; whole files.
"""
