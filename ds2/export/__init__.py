"""A trained model in one file for others to run.

weights: what is exported, batch norm folded away. network: the layers, written once; operations: what in,
torch_operations and onnx_operations: for which targets. model: its inputs and outputs. sherpa: what sherpa-onnx asks.
files: what is written.
"""
