"""The network for recognition and export: one description of it, and what runs it on blocks of streams.

weights: the description, with batch norm folded and the delay of every layer. network: runs blocks of any streams with
it. slots: state and input of the streams. runner: batches of fixed sizes, as CUDA graphs on a GPU.
"""
