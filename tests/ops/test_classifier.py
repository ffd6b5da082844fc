"""Logits of few labels: as near to float64 as a library's, and no row depends on another."""

from __future__ import annotations

import pytest
import torch
from ds2_ops import classifier
from ds2_ops.classifier import classify, why_not
from support.kernel_on_cpu import patch_run
from support.op_cases import CUDA, relative_error
from torch import Tensor


def inputs(shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    frames, batch, width, labels = shape
    draw = torch.Generator().manual_seed(width)
    x, weight, bias = (
        torch.randn(*size, generator=draw) for size in ((frames, batch, width), (labels, width), (labels,))
    )
    return x.to(device, dtype), weight.to(device), bias.to(device)


def test_it_is_the_product() -> None:
    x, weight, bias = inputs((3, 2, 8, 5), torch.bfloat16, torch.device("cpu"))
    torch.testing.assert_close(classify(x, weight, bias), x.float() @ weight.t() + bias, rtol=1e-6, atol=1e-6)
    with pytest.raises(ValueError, match="weight has shape"):
        classify(x, weight[:, :7], bias)
    with pytest.raises(TypeError, match="bias is"):
        classify(x, weight, bias.double())


@pytest.mark.parametrize("shape", [(3, 2, 36, 5), (1, 1, 128, 1), (2, 3, 260, 19)])
def test_the_kernel_on_a_cpu(shape: tuple[int, int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    patch_run(monkeypatch, classifier)
    monkeypatch.setattr(classifier, "why_not", lambda x, weight: None)
    check(shape, torch.bfloat16, torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.since_hopper
@pytest.mark.parametrize("shape", [(10, 1, 1152, 29), (10, 64, 1152, 29), (1, 1, 36, 1), (7, 3, 1536, 300)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_kernel_is_as_near_as_a_librarys(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    x, weight, _ = inputs(shape, dtype, CUDA)
    assert why_not(x, weight) is None
    check(shape, dtype, CUDA)


def check(shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> None:
    x, weight, bias = inputs(shape, dtype, device)
    true = x.double() @ weight.double().t() + bias.double()
    stock = torch.nn.functional.linear(x.float(), weight, bias)
    logits = classify(x, weight, bias)
    assert relative_error(logits, true) <= 2 * relative_error(stock, true)
    assert torch.equal(logits, torch.cat([classify(frame[None], weight, bias) for frame in x]))
