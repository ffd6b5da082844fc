"""Convolutions: lengths, and where row convolutions start."""

import pytest
import torch
from support.layer_cases import config, padded, ragged

from ds2.config.schema import ConvConfig
from ds2.model.convolution import MaskedConv, RowConvolution


@pytest.mark.parametrize(("kernel", "stride"), [(11, 2), (11, 1), (1, 1), (5, 4)])
def test_convolution_lengths(kernel: int, stride: int) -> None:
    conv = MaskedConv(2, ConvConfig([3, kernel], [2, stride], 5), config()).double()
    for frames in (1, 2, 9, 10):
        x = torch.randn(1, 2, 7, frames, dtype=torch.float64)
        whole, after = conv(x, ragged(frames, [frames]))
        assert whole.shape == (1, 5, conv.output_bins(7), after.frames)
        assert after.lengths.tolist() == [-(-frames // stride)]


def test_row_convolution_starts_as_the_identity() -> None:
    x = padded(6)
    row_conv = RowConvolution(6, 3).double()
    torch.testing.assert_close(row_conv(x, ragged()), x)
