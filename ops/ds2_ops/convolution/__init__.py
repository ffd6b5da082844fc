"""Convolution over bins and frames of a spectrogram, 32 channels to 32, stride 2 over bins; on Hopper's matrix unit.

op       the launches: correlation over windows (forward, backward_data), sums of weights' gradients (backward_weights);
         the operator: autograd, the layouts of the weights, and where it can run
streams  the same on blocks of streams, for inference
"""
