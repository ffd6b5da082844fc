"""A trained model in one file for other programs.

model: the layers of `ds2.model.folded`, written once, with inputs and outputs. operations: what in, and its form in
torch; onnx_operations: in ONNX. sherpa: what sherpa-onnx needs. files: what is written.
"""
