"""Log power spectra from samples where they lie: as near to float64 as a fast transform's, alike in any batch."""

from __future__ import annotations

import pytest
import torch
from ds2_ops import spectrum
from ds2_ops.spectrum import log_power, why_not
from support.kernel_on_cpu import patch_run
from support.op_cases import CUDA, relative_error
from torch import Tensor

FLOOR = 1e-9
SHAPES = [(3, 320, 160, 20), (1, 320, 160, 1), (2, 160, 80, 11), (2, 64, 24, 10)]  # B, W, step, T


def plain(samples: Tensor, lengths: Tensor, window: Tensor, step: int, mean: Tensor, std: Tensor) -> Tensor:
    complex_spectra = torch.fft.rfft(samples.unfold(1, len(window), step) * window)
    power = torch.view_as_real(complex_spectra).square().sum(-1)
    spectra = (((power + FLOOR).log() - mean) / std).transpose(1, 2)
    return torch.where(
        (torch.arange(spectra.shape[2], device=samples.device) < lengths[:, None])[:, None], spectra, 0.0
    )


def check(shape: tuple[int, int, int, int], device: torch.device) -> None:
    batch, size, step, frames = shape
    draw = torch.Generator().manual_seed(size)
    count = (frames - 1) * step + size
    loud = 10.0 ** torch.linspace(-4, 0, count)  # from near silence to full scale, a tone in it
    samples = loud * (0.1 * torch.randn(2 * batch, count, generator=draw) + 0.5 * torch.sin(0.3 * torch.arange(count)))
    rows = torch.randperm(2 * batch, generator=draw)[:batch]
    lengths = torch.tensor([frames, frames - 1, frames // 2])[:batch]
    window = torch.hann_window(size, periodic=True, dtype=torch.float64)
    window /= window.square().sum().sqrt()
    bins = size // 2 + 1
    mean, std = torch.randn(bins, generator=draw) - 8, 1 + torch.rand(bins, generator=draw)
    samples, rows, lengths, window, mean, std = (t.to(device) for t in (samples, rows, lengths, window, mean, std))
    options = (window.float(), step, mean, std, FLOOR)
    spectra = log_power(samples, rows, lengths, *options)
    chosen = samples[rows]
    true = plain(chosen.double(), lengths, window.float().double(), step, mean.double(), std.double())
    stock = plain(chosen, lengths, window.float(), step, mean, std)
    assert spectra.shape == true.shape
    assert relative_error(spectra, true) <= 2 * relative_error(stock, true)
    for at in range(batch):
        assert torch.equal(log_power(samples, rows[at : at + 1], lengths[at : at + 1], *options)[0], spectra[at])
    longest = log_power(samples, rows, torch.full_like(lengths, frames), *options)
    assert torch.equal(log_power(samples[:, : size + step].contiguous(), rows, lengths + 2, *options), longest[..., :2])


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape[3] > 1])
def test_the_kernel_on_a_cpu(shape: tuple[int, int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    patch_run(monkeypatch, spectrum)
    check(shape, torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.since_hopper
@pytest.mark.parametrize("shape", [*SHAPES[::2], (3, 320, 160, 700)])
def test_the_kernel_on_a_gpu(shape: tuple[int, int, int, int]) -> None:
    assert why_not(torch.ones(shape[1], device=CUDA)) is None
    check(shape, CUDA)
