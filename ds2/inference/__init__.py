"""The network in recognition, on blocks of streams.

network: runs a block of any streams from the description that `AcousticModel.folded` returns. slots: state and input
samples of the streams. runner: batches of fixed sizes, as CUDA graphs on a GPU; whole files.
"""
