"""Operations on arrays of any framework: DLPack, a stream, no torch, no allocation on the device in a call.

As in cuDNN's first paper (Chetlur et al. 2014). Arrays of the CPU are computed in float64 by NumPy.

batch_norm   over rows of channels, with the clip that follows it, forward and backward
convolution  over two axes: any channels, strides, padding, groups (a row convolution among them), and gradients
ctc          the loss and its gradient
arrays       where arrays lie, and how results of the CPU are written

The recurrence's primitives are ``ds2_ops.recurrent.primitives``.
"""
