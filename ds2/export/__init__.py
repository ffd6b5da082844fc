"""A trained model in one file for other programs.

model: the layers of `ds2.model.acoustic.NetworkWeights`, written once, with inputs and outputs. operations: what in,
and its form in torch; onnx_operations: in ONNX. files: what is written, and what sherpa-onnx needs.
"""
