"""What a recurrence is asked for beside its tensors, as every backend takes it."""

from typing import NamedTuple


class Options(NamedTuple):
    """How to compute a recurrence.

    Attributes:
        nonlinearity: a name in ``cells.CELLS``.
        clip: upper bound of "clipped_relu", representable in the dtype of ``x``.
        max_sms: the most streaming multiprocessors that persistent kernels may occupy, or None for all.
        early: start before the kernel ahead on the stream has ended, where that one lets it, to load the weights: they
            must not be what that kernel makes.
    """

    nonlinearity: str
    clip: float
    max_sms: int | None = None
    early: bool = False
