"""Waveform to normalised log spectrogram on the model's device; every frame is the same offline and in a stream.

Mel filters are computed in float64: those of log_mel, and those of Kaldi and NeMo as in kaldi-native-fbank, which
computes the features for sherpa-onnx. Samples are in [-1, 1]; there is no dither, and no energy beside the filters.

Shapes: B batch, N samples, T frames, F bins, W samples of a window.
"""

import math
from collections.abc import Callable, Iterable
from typing import TypeVar

import numpy as np
import torch
from ds2_ops import spectrum
from torch import Tensor, nn

from ds2.config.schema import ConfigError, FeaturesConfig

MIN_ENERGY = torch.finfo(torch.float32).eps  # of a filter of Kaldi and NeMo, before the logarithm
_PREEMPHASIS = 0.97
_LINEAR_HZ_PER_MEL = 200.0 / 3.0
_LOG_START_HZ = 1000.0
_LOG_START_MEL = _LOG_START_HZ / _LINEAR_HZ_PER_MEL
_MEL_PER_LOG_HZ = 27.0 / math.log(6.4)
# Mean-square power added before the logarithm, full scale = 1. It is 10 dB above the rounding noise of 16-bit samples
# (2^-30 / 12 = 7.8e-11): digital silence stays finite, and audio cached as 16-bit samples has the original's features.
POWER_FLOOR = 1e-9
# Smallest deviation (natural log of power) that a bin is divided by. Some bins are empty in the whole training set, as
# the upper ones of upsampled telephone speech, and the last three of resampled 44.1 kHz: they must not be amplified
# when later audio has content in them. Bins with speech have deviations above 2.
MIN_STD = 1.0
_MAX_FILTER_WEIGHTS = 50_000_000  # of all mel filters together, zeros included
Size = TypeVar("Size", int, Tensor)


def mel_filters(mels: int, window_samples: int, sample_rate_hz: int) -> Tensor:
    """Return triangular mel filters (bins, mels) float64 from 0 Hz to half the rate, each summing to 1.

    The mel scale is Slaney's (linear up to 1 kHz, logarithmic above). It suits spectra that are not zero-padded: the
    lowest filters on HTK's scale are closer together than the bins of a 20 ms window.

    Raises:
        ConfigError: a filter would cover no bin.
    """
    weights, _ = _slaney(mels, window_samples, sample_rate_hz)
    return weights / weights.sum(0)


def nemo_filters(mels: int, points: int, sample_rate_hz: int) -> Tensor:
    """Return the filters of `mel_filters`, each scaled to area 1 over Hz, as in librosa and NeMo; the same errors."""
    weights, widths_hz = _slaney(mels, points, sample_rate_hz)
    return weights * (2.0 / widths_hz)


def kaldi_filters(mels: int, points: int, sample_rate_hz: int) -> Tensor:
    """Return Kaldi's filters (bins, mels): triangles over HTK's mel scale with peaks of 1.

    They cover 20 Hz to 400 Hz below half the rate.

    Raises:
        ConfigError: a filter would cover no bin, or the rate is too low for any filter.
    """
    low_hz, high_hz = 20.0, sample_rate_hz / 2 - 400.0
    if high_hz <= low_hz:
        raise ConfigError(
            f"features.kind=kaldi_fbank at data.sample_rate_hz={sample_rate_hz}: its filters cover {low_hz:g} Hz "
            "to 400 Hz below half the rate; choose a higher rate"
        )
    low, high = (1127.0 * math.log1p(hz / 700.0) for hz in (low_hz, high_hz))
    corners = torch.linspace(low, high, mels + 2, dtype=torch.float64)
    bin_hz = torch.arange(points // 2 + 1, dtype=torch.float64) * (sample_rate_hz / points)
    weights = _triangles(1127.0 * torch.log1p(bin_hz / 700.0), corners)
    weights[-1] = 0.0  # half the rate itself is left out
    return _check_bins(weights, points, sample_rate_hz)


def _slaney(mels: int, points: int, sample_rate_hz: int) -> tuple[Tensor, Tensor]:
    """Return triangles (bins, mels) over Hz with peaks of 1, and their widths in Hz."""
    corner_hz = _hz_from_mel(torch.linspace(0.0, _mel_from_hz(sample_rate_hz / 2), mels + 2, dtype=torch.float64))
    bin_hz = torch.arange(points // 2 + 1, dtype=torch.float64) * (sample_rate_hz / points)
    return _check_bins(_triangles(bin_hz, corner_hz), points, sample_rate_hz), corner_hz[2:] - corner_hz[:-2]


def _triangles(bins: Tensor, corners: Tensor) -> Tensor:
    low, centre, high, at = corners[:-2], corners[1:-1], corners[2:], bins[:, None]
    return torch.minimum((at - low) / (centre - low), (high - at) / (high - centre)).clamp(min=0.0)


def _check_bins(weights: Tensor, points: int, sample_rate_hz: int) -> Tensor:
    """Return the filters (bins, mels) if each covers a bin; meta tensors are not checked."""
    empty = 0 if weights.is_meta else int((weights.sum(0) <= 0).sum())
    if empty:
        raise ConfigError(
            f"features.mels={weights.shape[1]}: {empty} filters lie between the bins of a {points}-sample window at "
            f"{sample_rate_hz} Hz; set fewer mels or a longer features.window_s"
        )
    return weights


def _mel_from_hz(hz: float) -> float:
    if hz < _LOG_START_HZ:
        return hz / _LINEAR_HZ_PER_MEL
    return _LOG_START_MEL + math.log(hz / _LOG_START_HZ) * _MEL_PER_LOG_HZ


def _hz_from_mel(mel: Tensor) -> Tensor:
    logarithmic = _LOG_START_HZ * torch.exp((mel - _LOG_START_MEL) / _MEL_PER_LOG_HZ)
    return torch.where(mel < _LOG_START_MEL, mel * _LINEAR_HZ_PER_MEL, logarithmic)


_FILTERS: dict[str, Callable[[int, int, int], Tensor] | None] = {
    "log_spectrogram": None, "log_mel": mel_filters, "kaldi_fbank": kaldi_filters, "nemo_fbank": nemo_filters
}  # fmt: skip
"""Filters by `features.kind`: mels, points of the transform, rate in Hz -> (bins, mels) float64.

Those of kaldi_fbank are Kaldi's own, which icefall trains with and most models of sherpa-onnx use.
"""


def preemphasise(windows: Tensor, remove_mean: bool) -> Tensor:
    """Return windows (..., W), if asked for less their mean, then x[t] - 0.97 x[t - 1], x[-1] being x[0]."""
    x = windows - windows.mean(-1, keepdim=True) if remove_mean else windows
    return x - _PREEMPHASIS * torch.cat([x[..., :1], x[..., :-1]], -1)


class Features(nn.Module):
    """Log power spectrogram or log-mel energies, normalised by statistics of the training set that live in its buffers.

    Frame t covers samples [t * step - lead, t * step - lead + window). Only whole windows are frames, and no statistics
    of the utterance are used, so a frame depends on its own samples alone, not on batch, padding or chunks.
    The spectrogram has window / 2 + 1 bins (161 at 16 kHz, 20 ms), as in Deep Speech 2 (section 4 of the persistent RNN
    paper: 20 ms windows, 10 ms steps); the window is a periodic Hann window and power is divided by its energy.
    `lead` is 0 except for kaldi_fbank and nemo_fbank: their first windows begin before the first sample, where the
    waveform is mirrored. Kaldi also computes one or two last frames whose windows end after the last sample; these are
    left out.

    Raises:
        ConfigError: window or step is not a whole number of samples, or a mel filter would cover no bin.
    """

    mean: Tensor
    std: Tensor
    window: Tensor
    mel_weights: Tensor | None

    def __init__(self, config: FeaturesConfig, sample_rate_hz: int) -> None:
        super().__init__()
        self.window_samples = _whole_samples("features.window_s", config.window_s, sample_rate_hz)
        self.step_samples = _whole_samples("features.step_s", config.step_s, sample_rate_hz)
        self.sample_rate_hz = sample_rate_hz
        self.step_s, self.kind = config.step_s, config.kind
        self.preemphasis, self.remove_mean = config.kind in ("kaldi_fbank", "nemo_fbank"), config.kind == "kaldi_fbank"
        self.lead_samples, self.fft_samples = 0, self.window_samples
        window = torch.hann_window(self.window_samples, periodic=True, dtype=torch.float64)
        self.bins = self.window_samples // 2 + 1
        if config.kind not in _FILTERS:
            raise ConfigError(f"features.kind={config.kind!r} is none of {', '.join(_FILTERS)}")
        make_filters, mel_weights = _FILTERS[config.kind], None
        if make_filters and config.mels * self.bins > _MAX_FILTER_WEIGHTS:
            raise ConfigError(
                f"features.mels={config.mels} filters of {self.bins} bins are over {_MAX_FILTER_WEIGHTS:,} weights: "
                "set fewer mels or a shorter features.window_s"
            )
        if not self.preemphasis:
            window /= window.square().sum().sqrt()
        else:
            self.lead_samples = self.window_samples // 2 - self.step_samples // 2  # frames are centred on steps
            self.fft_samples = 1 << (self.window_samples - 1).bit_length()  # windows are padded to a power of two
            if self.remove_mean:  # Povey's window
                window = torch.hann_window(self.window_samples, periodic=False, dtype=torch.float64) ** 0.85
        if make_filters:
            mel_weights, self.bins = make_filters(config.mels, self.fft_samples, sample_rate_hz).float(), config.mels
        self.register_buffer("window", window.float(), persistent=False)
        self.register_buffer("mel_weights", mel_weights, persistent=False)
        self.register_buffer("mean", torch.zeros(self.bins))
        self.register_buffer("std", torch.ones(self.bins))

    def frames(self, samples: Size) -> Size:
        """Return the number of whole frames in `samples` samples, an int or an int64 tensor of any shape."""
        frames = (samples + self.lead_samples - self.window_samples) // self.step_samples + 1
        return frames.clamp(min=0) if isinstance(frames, Tensor) else max(0, frames)

    def samples(self, frames: int) -> int:
        """Return the least number of samples with `frames` frames; `frames` is at least 1."""
        return self.span(frames) - self.lead_samples

    def span(self, frames: int) -> int:
        """Return the number of samples that `frames` consecutive windows cover."""
        return (frames - 1) * self.step_samples + self.window_samples

    def forward(self, waveforms: Tensor, sample_lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Return normalised features and their lengths.

        Computed in float32, even inside autocast.

        Args:
            waveforms: (B, N) floating point in [-1, 1], on this module's device; samples after a length are ignored.
            sample_lengths: (B,) int64 on the CPU, each at most N.
        Returns:
            features (B, F, T) float32 contiguous on the same device, 0 (the corpus mean) after each length;
            lengths (B,) int64 on the CPU, in frames. T is their maximum.
        Raises:
            ValueError: shapes do not match, or a length exceeds N.
        """
        if waveforms.dim() != 2 or sample_lengths.shape != waveforms.shape[:1]:
            raise ValueError(
                f"waveforms {tuple(waveforms.shape)} and sample_lengths {tuple(sample_lengths.shape)} must "
                "have shapes (B, N) and (B,)"
            )
        batch, samples = waveforms.shape
        if batch and int(sample_lengths.max()) > samples:
            raise ValueError(f"a sample length is {int(sample_lengths.max())}, the waveforms have {samples} samples")
        lengths = self.frames(sample_lengths)
        frames = int(lengths.max()) if batch else 0
        if frames == 0:
            return waveforms.new_zeros((batch, self.bins, 0), dtype=torch.float32), lengths
        cut = waveforms[:, : self.samples(frames)]
        return self.padded(cut, lengths.to(waveforms.device, non_blocking=True)), lengths

    def padded(self, waveforms: Tensor, lengths: Tensor) -> Tensor:
        """Return normalised features of all frames in the waveforms; no value is read back to the host.

        Args:
            waveforms: (B, N) as in `forward`, with at least one frame.
            lengths: (B,) integers on the same device, valid frames; not checked.
        Returns:
            features as in `forward`, with T = `frames(N)`.
        """
        return self.of_windows(self.add_lead(waveforms), lengths)

    def add_lead(self, waveforms: Tensor) -> Tensor:
        """Return (B, lead + N) of waveforms (B, N), N at least the lead, which mirrors the first samples."""
        return torch.cat([waveforms[:, : self.lead_samples].flip(1), waveforms], 1) if self.lead_samples else waveforms

    def of_windows(self, waveforms: Tensor, lengths: Tensor) -> Tensor:
        """Return features (B, F, T) of the windows at samples 0, step, 2 step, ... of (B, N), 0 after lengths (B,).

        `padded` without the lead: for samples that have it already, and for blocks in the middle of a stream.
        """
        features = ((self._log_power(waveforms) - self.mean) / self.std).transpose(1, 2)
        valid = torch.arange(features.shape[2], device=waveforms.device) < lengths[:, None]
        return torch.where(valid[:, None, :], features, 0.0).contiguous()

    def of_rows(self, samples: Tensor, rows: Tensor, lengths: Tensor, dtype: torch.dtype) -> Tensor:
        """Return `of_windows` of rows (B,) int64 of samples (R, N), for a model that rounds features to `dtype`.

        For bfloat16 on a GPU a kernel reads the rows in place; its float32 results differ from others in the last bits.
        """
        use_kernel = (
            dtype == torch.bfloat16 and self.kind == "log_spectrogram" and spectrum.why_not(self.window) is None
        )
        if not use_kernel:
            return self.of_windows(samples.index_select(0, rows), lengths)
        mean, std = self.mean, self.std
        return spectrum.log_power(samples, rows, lengths, self.window, self.step_samples, mean, std, POWER_FLOOR)

    def windows(self, samples: int) -> int:
        """Return the number of whole windows in `samples` samples that include the lead."""
        return max(0, (samples - self.window_samples) // self.step_samples + 1)

    @torch.no_grad()
    def estimate(self, waveforms: Iterable[Tensor | np.ndarray]) -> int:
        """Set mean and deviation of every bin from a sample of the training set, accumulated in float64.

        Args:
            waveforms: each (N,) floating point in [-1, 1], on any device; read one at a time.
        Returns:
            the number of frames.
        Raises:
            ValueError: a waveform holds NaN or infinity, or there are fewer than two frames in total.
        """
        count = 0
        total = torch.zeros(self.bins, dtype=torch.float64, device=self.mean.device)
        total_square = torch.zeros_like(total)
        for position, waveform in enumerate(waveforms):
            samples = torch.as_tensor(waveform).to(self.mean.device)
            if self.frames(samples.numel()) == 0:
                continue
            log_power = self._log_power(self.add_lead(samples[None]))[0].double()
            frame_sum = log_power.sum(0)
            if not bool(torch.isfinite(frame_sum).all()):
                raise ValueError(f"waveform {position} of the feature statistics holds NaN or infinite samples")
            count += log_power.shape[0]
            total += frame_sum
            total_square += log_power.square().sum(0)
        if count < 2:
            raise ValueError(f"feature statistics need two frames ({self.window_samples} samples each), got {count}")
        mean = total / count
        self.mean.copy_(mean)
        self.std.copy_((total_square / count - mean.square()).clamp(min=MIN_STD**2).sqrt())
        return count

    @property
    def centres_hz(self) -> Tensor:
        """Centre frequencies (F,) float32 on the CPU: of the bins, or the weighted mean of each filter."""
        bin_hz = torch.arange(self.fft_samples // 2 + 1) * (self.sample_rate_hz / self.fft_samples)
        if self.mel_weights is None:
            return bin_hz
        filters = self.mel_weights.cpu()
        return bin_hz @ filters / filters.sum(0)

    def _log_power(self, waveforms: Tensor) -> Tensor:
        """Return log power (B, T, F) float32, T >= 1, of waveforms (B, N)."""
        with torch.autocast(waveforms.device.type, enabled=False):
            windows = waveforms.float().unfold(1, self.window_samples, self.step_samples)
            if self.preemphasis:
                windows = preemphasise(windows, self.remove_mean)
            squares = torch.view_as_real(torch.fft.rfft(windows * self.window, self.fft_samples)).square()
            power = squares[..., 0] + squares[..., 1]  # torch's sum over two neighbours takes six times as long
            if self.mel_weights is not None:
                # The order in which cuBLAS adds depends on the batch. Sums in float64 round to the same float32.
                wide = torch.float64 if power.is_cuda else torch.float32
                power = (power.to(wide) @ self.mel_weights.to(wide)).float()
            if self.preemphasis:
                return power.clamp(min=MIN_ENERGY).log()
            return (power + POWER_FLOOR).log()


def _whole_samples(key: str, seconds: float, sample_rate_hz: int) -> int:
    samples = round(seconds * sample_rate_hz)
    if samples < 1 or abs(samples - seconds * sample_rate_hz) > 1e-6 * samples:
        raise ConfigError(
            f"{key}={seconds} is {seconds * sample_rate_hz:g} samples at {sample_rate_hz} Hz; choose a whole number of "
            f"at least 1, such as {max(1, samples) / sample_rate_hz:.9g}, or another data.sample_rate_hz"
        )
    return samples
