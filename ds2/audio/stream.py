"""Samples of a stream: resampled, decoded from bytes, cut into blocks of feature frames."""

import io
from collections.abc import Callable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import soundfile
import soxr
from numpy.typing import ArrayLike, NDArray

from ds2.audio.read import MAX_PEAK, AudioError, check_rate, to_16_bits
from ds2.system.plain import short_repr

if TYPE_CHECKING:  # a worker of a server has no use for torch, which takes a second and 130 MiB
    from torch import Tensor

    from ds2.audio.features import Features


def as_samples(audio: "ArrayLike | Tensor") -> NDArray[np.float32]:
    """Check an array of samples (N,), floats in [-1, 1] or integers of 16 or 32 bits; return it as float32.

    Raises:
        AudioError: another shape, type or scale, or NaN.
    """
    if hasattr(audio, "is_floating_point"):
        tensor: Tensor = cast(Any, audio)
        tensor = tensor.detach().cpu()
        audio = tensor.float() if tensor.is_floating_point() else tensor  # NumPy has no bfloat16
    array = np.asarray(audio)
    if not array.ndim:
        raise AudioError(f"{short_repr(audio)} is no audio: give the path of a file, or samples (N,)")
    if array.ndim != 1 or not array.size:
        raise AudioError(
            f"samples have the shape {array.shape}: give (N,) of one channel, N above 0; of several channels their mean"
        )
    if array.dtype.kind == "i" and array.itemsize in (2, 4):  # of either byte order
        return array.astype(np.float32) * 2.0 ** (1 - 8 * array.itemsize)
    if array.dtype.kind != "f":
        raise AudioError(f"samples are {array.dtype}: give floats in [-1, 1], or integers of 16 or 32 bits")
    peak = float(np.abs(array).max())
    if not peak <= MAX_PEAK:  # true for NaN too
        raise AudioError(f"samples reach {peak:g}: give floats in [-1, 1]; 16-bit values are divided by 32768")
    return array.astype(np.float32)


def is_in_range(samples: NDArray[np.float32]) -> bool:
    """Whether all samples (N,) are in [-1, 1], so that none is NaN."""
    return not len(samples) or bool(samples.min() >= -1.0 and samples.max() <= 1.0)


class Resampler:
    """Resamples one stream; how the samples are cut into pieces does not change the result.

    Raises:
        AudioError: the rate is out of range, or no whole number.
    """

    def __init__(self, from_hz: int, to_hz: int) -> None:
        check_rate(from_hz)
        self.samples = 0  # taken so far, before resampling
        self._stream = None if from_hz == to_hz else soxr.ResampleStream(from_hz, to_hz, 1, dtype="float32")

    def accept(self, samples: NDArray[np.float32], *, has_16_bits: bool = False) -> NDArray[np.float32]:
        """Take the next samples (N,); return the resampled ones (M,) that are complete, as `to_16_bits` does.

        Args:
            samples: any finite ones.
            has_16_bits: they are known to be what `to_16_bits` returns.

        Raises:
            AudioError: NaN or infinite samples.
        """
        samples = np.asarray(samples, np.float32)
        if not has_16_bits and not np.isfinite(samples).all():
            raise AudioError("samples hold NaN or infinity: send finite floats in [-1, 1]")
        self.samples += len(samples)
        return samples if self._stream is None and has_16_bits else self._resample(samples, last=False)

    def finish(self) -> NDArray[np.float32]:
        """Return the remaining samples (N,), as `accept`."""
        return self._resample(np.empty(0, np.float32), last=True)

    def _resample(self, samples: NDArray[np.float32], *, last: bool) -> NDArray[np.float32]:
        return to_16_bits(samples if self._stream is None else self._stream.resample_chunk(samples, last=last))


class Pcm:
    """Decodes headerless mono audio in pieces of any number of bytes.

    Args:
        kind: of a sample, as NumPy names it; or the law of ITU-T G.711, whose samples of 8 bits telephones send: ULAW
            in North America and Japan, ALAW in the rest of the world.
    """

    def __init__(self, kind: str = "<i2") -> None:
        self._values = _values_of_bytes(kind) if kind in ("ULAW", "ALAW") else None
        self._kind, self._incomplete = np.dtype(kind if self._values is None else np.uint8), b""  # bytes of a sample

    def accept(self, data: bytes) -> NDArray[np.float32]:
        """Take the next bytes; return the complete samples (N,) of 16 bits; raises AudioError as `as_samples`."""
        data = self._incomplete + data
        count = len(data) // self._kind.itemsize
        self._incomplete = data[count * self._kind.itemsize :]
        if self._values is not None:
            samples: NDArray[np.float32] = self._values[np.frombuffer(data, np.uint8)]
            return samples
        if not count:
            return np.empty(0, np.float32)
        samples = as_samples(np.frombuffer(data, self._kind, count))
        return samples if self._kind.itemsize == 2 else to_16_bits(samples)


@cache
def _values_of_bytes(subtype: str) -> NDArray[np.float32]:
    all_bytes = io.BytesIO(bytes(range(256)))
    values: NDArray[np.float32]
    values, _ = soundfile.read(all_bytes, dtype="float32", samplerate=8000, channels=1, format="RAW", subtype=subtype)
    return values


class SampleBlocks:
    """Cuts the samples of one stream into blocks of feature frames; each frame is in exactly one block.

    Args:
        block_frames: frames T of every block but the last.
        input_buffer: block number -> buffer (N,) that the samples of this block are written into; None allocates.
    """

    def __init__(
        self, features: "Features", block_frames: int, input_buffer: Callable[[int], NDArray[np.float32]] | None = None
    ) -> None:
        self.samples = 0  # accepted so far
        self._missing_lead = features.lead_samples  # samples that the first window still lacks
        self._block_samples = features.span(block_frames)
        self._step = block_frames * features.step_samples  # from the start of a block to that of the next
        self._input_buffer = input_buffer or (lambda number: np.empty(self._block_samples, np.float32))
        self._block, self._count, self._number = np.empty(0, np.float32), 0, -1  # the current block, samples in it

    def accept(self, samples: NDArray[np.float32]) -> Iterator[NDArray[np.float32]]:
        """Take the next samples (N,) in [-1, 1] at the features' rate; yield the samples of each complete block."""
        self.samples += len(samples)
        if self._missing_lead:
            samples = self._block = np.concatenate([self._block, samples])
            if len(samples) < self._missing_lead:
                return
            samples = np.concatenate([samples[: self._missing_lead][::-1], samples])
            self._missing_lead = 0
        if self._number < 0:
            self._block, self._number = self._input_buffer(0), 0
        while len(samples):
            block, piece = self._block, samples[: self._block_samples - self._count]
            block[self._count : self._count + len(piece)] = piece
            self._count, samples = self._count + len(piece), samples[len(piece) :]
            if self._count == self._block_samples:
                self._number += 1
                self._block, self._count = self._input_buffer(self._number), self._block_samples - self._step
                self._block[: self._count] = block[self._step :]
                yield block

    def finish(self) -> NDArray[np.float32]:
        """Return the remaining samples (N,) float32, which may be too few for a frame."""
        remaining = self._block[: self._count].copy()
        self._count = 0
        return remaining
