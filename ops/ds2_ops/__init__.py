"""Persistent recurrent GPU kernels and the row convolution as torch ops, usable without ds2."""
