"""Convolutions: lengths, and where row convolutions start."""

import pytest
import torch
from support.layer_cases import config, padded, ragged
from torch.nn import functional

from ds2.config.schema import ConvConfig
from ds2.model.convolution import FewChannels, MaskedConv, RowConvolution, few_channels


@pytest.mark.parametrize(("kernel", "stride"), [(11, 2), (11, 1), (1, 1), (5, 4)])
def test_convolution_lengths(kernel: int, stride: int) -> None:
    conv = MaskedConv(2, ConvConfig([3, kernel], [2, stride], 5), config()).double()
    for frames in (1, 2, 9, 10):
        x = torch.randn(1, 2, 7, frames, dtype=torch.float64)
        whole, after = conv(x, ragged(frames, [frames]))
        assert whole.shape == (1, 5, 4, -(-frames // stride))
        assert after.lengths.tolist() == [-(-frames // stride)]


def test_batch_norm_in_training_is_that_of_torch_over_all_bins_of_valid_frames() -> None:
    conv = MaskedConv(2, ConvConfig([3, 5], [2, 2], 4), config(batch_norm=True)).double()
    batch = ragged(12, [12, 7, 2])
    x = (torch.randn(3, 2, 9, 12, dtype=torch.float64) * batch.valid[:, None, None]).requires_grad_()
    y, after = conv(x, batch)
    y = y.permute(0, 3, 2, 1)  # (B, T', F', C')
    z = functional.conv2d(x, conv.weight, None, (2, 2), (1, 2)).permute(0, 3, 2, 1)[after.valid]
    normalised = torch.nn.BatchNorm1d(4).double()(z.flatten(0, 1)).view_as(z)
    expected = torch.zeros_like(y)
    expected[after.valid] = functional.hardtanh(normalised, 0.0, conv.clip)
    torch.testing.assert_close(y, expected)
    grad = torch.randn_like(y)
    for ours, theirs in zip(*(torch.autograd.grad(out, (x, conv.weight), grad) for out in (y, expected)), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("channels", [(1, 2), (1, 8), (1, 16), (2, 8)])
@pytest.mark.parametrize("stride", [2, 3])
@pytest.mark.parametrize("frames", [1, 2, 3, 4, 5, 6])
def test_few_frames(frames: int, stride: int, channels: tuple[int, int]) -> None:
    x = torch.randn(3, channels[0], 5, frames).to(memory_format=torch.channels_last)
    conv = MaskedConv(channels[0], ConvConfig([3, 5], [1, stride], channels[1]), config())
    narrow, wide = (
        conv.to(dtype)(x.to(dtype), ragged(frames, [frames] * 3))[0] for dtype in (torch.float32, torch.float64)
    )
    torch.testing.assert_close(narrow.double(), wide, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("channels", [4, 16])
@pytest.mark.parametrize(
    ("bins", "kernel", "stride"), [(20, 41, 2), (22, 41, 2), (31, 41, 3), (41, 41, 3), (26, 31, 2)]
)
def test_kernels_may_be_higher_than_their_input(bins: int, kernel: int, stride: int, channels: int) -> None:
    x = torch.randn(8, 1, bins, 60)
    conv = MaskedConv(1, ConvConfig([kernel, 11], [stride, 2], channels), config())
    z, _ = conv(x, ragged(60, [60] * 8))
    weight = conv.weight.double()
    expected = functional.conv2d(x.double(), weight, None, (stride, 2), (kernel // 2, 5)).clamp(0.0, conv.clip)
    assert z.shape == expected.shape and (z - expected).norm() <= 1e-5 * expected.norm()
    ours, theirs = (torch.autograd.grad(out.sum(), conv.weight)[0] for out in (z, expected))
    assert (ours - theirs).norm() <= 1e-5 * theirs.norm()


@pytest.mark.parametrize("frames", [1, 9, 24])
@pytest.mark.parametrize("stride", [(2, 2), (2, 1), (1, 3)])
@pytest.mark.parametrize("channels", [(1, 8), (8, 16), (16, 12)])
def test_a_causal_convolution_has_all_its_zeros_before_the_start(
    channels: tuple[int, int], stride: tuple[int, int], frames: int
) -> None:
    conv = MaskedConv(channels[0], ConvConfig([5, 7], list(stride), channels[1], causal=True), config()).double()
    torch.nn.init.normal_(conv.bias)
    x = torch.randn(2, channels[0], 9, frames, dtype=torch.float64, requires_grad=True)
    lengths = [frames, frames // 2]
    valid = ragged(frames, lengths).valid[:, None, None]
    found, _ = conv(x * valid, ragged(frames, lengths))
    plain = functional.conv2d(functional.pad(x * valid, (6, 0)), conv.weight, conv.bias, stride, (2, 0))
    plain = (
        functional.hardtanh(plain, 0.0, conv.clip)
        * ragged(found.shape[3], [-(-n // stride[1]) for n in lengths]).valid[:, None, None]
    )
    torch.testing.assert_close(found, plain)
    grad = torch.randn_like(plain)
    for ours, theirs in zip(*(torch.autograd.grad(z, (x, conv.weight), grad) for z in (found, plain)), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("frames", [4, 37, 38, 40])
@pytest.mark.parametrize("stride", [(2, 2), (2, 1), (1, 4), (2, 3)])
@pytest.mark.parametrize("kernel", [(5, 11), (3, 5), (3, 1)])
@pytest.mark.parametrize("channels", [(1, 8), (8, 16), (3, 4)])
def test_few_channels(channels: tuple[int, int], kernel: tuple[int, int], stride: tuple[int, int], frames: int) -> None:
    x = torch.randn(2, channels[0], 9, frames, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(channels[1], channels[0], *kernel, dtype=torch.float64, requires_grad=True)
    assert few_channels(x, weight)
    paired = FewChannels.apply(x, weight, stride)  # type: ignore[no-untyped-call]
    plain = functional.conv2d(x, weight, None, stride, (kernel[0] // 2, kernel[1] // 2))
    torch.testing.assert_close(paired, plain)
    grad = torch.randn_like(plain)
    for ours, theirs in zip(*(torch.autograd.grad(z, (x, weight), grad) for z in (paired, plain)), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("channels", [(1, 32), (16, 16)])
def test_many_channels_have_kernels_of_their_own(channels: tuple[int, int]) -> None:
    x = torch.randn(2, channels[0], 9, 8)
    assert not few_channels(x, torch.randn(channels[1], channels[0], 3, 3))


def test_row_convolution_starts_as_the_identity() -> None:
    x = padded(6)
    row_conv = RowConvolution(6, 3).double()
    torch.testing.assert_close(row_conv(x, ragged()), x)
