"""A trained model in one file for other programs.

network: the layers of `ds2.model.folded`, written once. operations: what in, and its form in torch;
onnx_operations: in ONNX. model: inputs and outputs. sherpa: what sherpa-onnx needs. files: what is written.
"""
