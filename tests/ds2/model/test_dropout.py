"""Dropout by utterance: masks that no batch, padding or device changes, and that look like independent draws."""

from __future__ import annotations

import math

import pytest
import torch

from ds2.model.dropout import UtteranceDropout

KEYS = torch.tensor([5, 2**62 - 1, 0, 77])


def layer(rate: float, number: int = 0) -> UtteranceDropout:
    made = UtteranceDropout(rate)
    made.layer = number
    return made


def test_off_it_leaves_the_input_alone() -> None:
    x = torch.randn(3, 4, 5)
    assert layer(0.0)(x, KEYS) is x
    assert layer(0.5).eval()(x, KEYS) is x


def test_what_stays_is_scaled_and_gradients_pass_where_it_stays() -> None:
    x = torch.randn(30, 4, 50, requires_grad=True)
    y = layer(0.25)(x, KEYS)
    kept = y != 0
    torch.testing.assert_close(y[kept], x[kept] / 0.75)
    y.sum().backward()
    assert x.grad is not None and torch.equal(x.grad != 0, kept)


def test_an_utterance_keeps_its_mask_in_any_batch_and_padding() -> None:
    whole = layer(0.3)(torch.ones(40, 4, 16), KEYS)
    other = layer(0.3)(torch.ones(25, 2, 16), KEYS[[3, 1]])
    assert torch.equal(other, whole[:25, [3, 1]])


def reference(key: int, number: int, t: int, d: int) -> int:
    """The hash in integers of Python, which do not overflow."""

    def mixed(value: int) -> int:
        for _ in range(2):
            value = (value + 1) * (2**64 - 7046029254386353131) % 2**64
            value ^= value >> 32
        return value

    def signed(value: int) -> int:
        return (value + 2**31) % 2**32 - 2**31

    rows, columns = (mixed(v) % 2**32 - 2**31 for v in (mixed(key + number * 2**20) + t, d))
    bits = signed(signed(rows + columns) * -2048144789)
    return signed((bits ^ (bits >> 15)) * -1028477387)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_every_device_computes_the_hash_modulo_its_size(device: str) -> None:
    mask = layer(0.4, 3)._keep_mask(KEYS.to(device), 0, torch.Size((9, len(KEYS), 21))).tolist()
    limit = round(0.4 * 2**32) - 2**31
    expected = [[[reference(key, 3, t, d) >= limit for d in range(21)] for key in KEYS.tolist()] for t in range(9)]
    assert mask == expected


@pytest.mark.parametrize("rate", [0.05, 0.2, 0.5])
def test_masks_look_like_independent_draws(rate: float) -> None:
    """Means and products of neighbours are those of independent draws, within 6 standard deviations of them."""
    keys = torch.arange(8)
    dropped = (
        torch.stack([~layer(rate, n)._keep_mask(keys, 0, torch.Size((200, 8, 96))) for n in range(3)]).double() - rate
    )
    variance = rate * (1 - rate)
    assert abs(float(dropped.mean())) < 6 * math.sqrt(variance / dropped.numel())
    for dim in range(4):  # layers, frames, utterances, units
        for shift in (1, 2):
            products = dropped.narrow(dim, shift, dropped.shape[dim] - shift) * dropped.narrow(
                dim, 0, dropped.shape[dim] - shift
            )
            assert abs(float(products.mean())) < 6 * variance / math.sqrt(products.numel()), (dim, shift)
    for dims in ((0, 1, 2), (0, 2, 3), (0, 1, 3)):
        means = dropped.mean(dims)
        assert float(means.abs().max()) < 6 * math.sqrt(variance * means.numel() / dropped.numel())


def test_without_keys_they_come_from_torchs_generator() -> None:
    x = torch.ones(20, 3, 8)
    torch.manual_seed(1)
    first = layer(0.5)(x, None)
    assert not torch.equal(first, layer(0.5)(x, None))
    torch.manual_seed(1)
    assert torch.equal(first, layer(0.5)(x, None))
