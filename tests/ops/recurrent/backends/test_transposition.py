"""What a backward pass makes of a recurrent matrix."""

from __future__ import annotations

import pytest
import torch
from ds2_ops.recurrent.backends import persistent
from ds2_ops.recurrent.backends.persistent import transposed
from support.kernel_on_cpu import patch_run

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (64, 64), (65, 63), (3, 130), (200, 72)], ids=str)
def test_the_transpose_has_every_number_in_its_place(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int], dtype: torch.dtype, device: str
) -> None:
    if device == "cpu":
        patch_run(monkeypatch, persistent)
    matrix = torch.arange(shape[0] * shape[1]).view(shape).to(dtype).to(device)
    result = transposed(matrix)
    assert result.is_contiguous() and torch.equal(result, matrix.t())
