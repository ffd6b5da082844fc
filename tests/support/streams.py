"""Sources that come in pieces."""

from __future__ import annotations

import random

import numpy as np
from numpy.typing import NDArray

from ds2.decoding.hypothesis import Hypothesis
from ds2.recognition.session import Session


def recognise_in_chunks(session: Session, samples: NDArray[np.float32], draw: random.Random) -> Hypothesis:
    """Recognise samples in chunks of 10 ms to 3 s, drawn by `draw`."""
    start = 0
    while start < len(samples):
        end = start + round(draw.uniform(0.01, 3.0) * session.sample_rate_hz)
        session.accept_waveform(samples[start:end])
        start = end
        while session.is_ready():
            session.decode()
    return session.finish()
