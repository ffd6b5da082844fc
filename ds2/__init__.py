"""ds2: deep unidirectional residual speech recognition on persistent recurrent kernels."""

__version__ = "0.1.0"
