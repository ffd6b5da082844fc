"""Faster or slower speech at its own pitch: waveform similarity overlap-add (Verhelst and Roelands, 1993)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

HOP_S, SEARCH_S = 0.02, 0.01  # half a frame; how far a frame may be moved: a period of 50 Hz both ways
_COARSE = 8  # samples a step of the first search
_SILENCE = 1e-9  # energy of a frame in which nothing is like anything


def stretched(waveform: NDArray[np.float32], factor: float, sample_rate_hz: int) -> NDArray[np.float32]:
    """Return the waveform `factor` times as fast, every sound at its pitch.

    Frames of 40 ms are taken from the input `factor` times as far apart as they are laid down, each moved by at most
    10 ms to where it is most like what followed the frame before it, and cross-faded.

    Args:
        waveform: (N,) float32; shorter than two frames, it is returned as it is.
        factor: positive; 1 changes nothing.
        sample_rate_hz: of the waveform.
    Returns:
        (round(N / factor),) float32.
    """
    hop, search = round(HOP_S * sample_rate_hz), _COARSE * max(1, round(SEARCH_S * sample_rate_hz / _COARSE))
    if factor == 1.0 or len(waveform) < 4 * hop:
        return waveform
    samples = round(len(waveform) / factor)
    frames = -(-samples // hop) + 1
    before, reach = hop + 2 * search, round(frames * hop * max(1.0, factor)) + 4 * (hop + search)
    padded = np.pad(waveform, (before, max(0, reach - len(waveform)) + reach % _COARSE))
    fine, coarse = _Likeness(padded), _Likeness(padded[: len(padded) // _COARSE * _COARSE].reshape(-1, _COARSE).mean(1))
    fade = np.float32(0.5) - np.float32(0.5) * np.cos(np.pi * np.arange(2 * hop) / hop).astype(np.float32)
    laid = np.zeros((frames + 1) * hop, np.float32)
    start = before - hop  # of the frame in `padded`; its middle is a multiple of hop in what is laid down
    for frame in range(frames):
        follows, wanted = start + hop, before - hop + round(frame * hop * factor)
        if frame == 0:
            start = wanted
        else:
            first = (wanted - search) // _COARSE
            near = coarse.best(follows // _COARSE, first, 2 * search // _COARSE, 2 * hop // _COARSE)
            start = fine.best(follows, (near - 1) * _COARSE, 2 * _COARSE, 2 * hop)
        laid[frame * hop : (frame + 2) * hop] += fade * padded[start : start + 2 * hop]
    return laid[hop : hop + samples]


class _Likeness:
    """Where a signal is most like another part of itself."""

    def __init__(self, signal: NDArray[np.float32]) -> None:
        self._signal = signal
        self._energy = np.concatenate([[0.0], np.cumsum(np.square(signal, dtype=np.float64))])

    def best(self, like: int, first: int, more: int, length: int) -> int:
        """Of the starts from `first` to `first + more`, that whose `length` samples are most like those at `like`."""
        last = first + more + length
        products = np.correlate(self._signal[first:last], self._signal[like : like + length], "valid")
        energies = self._energy[first + length : last + 1] - self._energy[first : first + more + 1]
        return first + int((products / np.sqrt(energies + _SILENCE)).argmax())
