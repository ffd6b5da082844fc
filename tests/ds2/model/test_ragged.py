"""Ragged batches: reversing them."""

import torch
from support.layer_cases import padded, ragged

from ds2.model.ragged import reverse


def test_reverse_keeps_padding_in_place_and_undoes_itself() -> None:
    x = padded(2)
    flipped = reverse(x, ragged())
    assert torch.equal(flipped[:6, 0], x[:6, 0].flip(0))
    assert torch.equal(flipped[:3, 1], x[:3, 1].flip(0))
    assert not flipped[3:, 1].any()
    assert torch.equal(reverse(flipped, ragged()), x)
