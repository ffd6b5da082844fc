"""Primitives of batch norm and CTC: NumPy's float64 against torch's, the kernels with their arguments against that."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from ds2_ops.batch_norm.op import batch_norm_reference
from ds2_ops.jit import runtime
from ds2_ops.primitives import arrays
from ds2_ops.primitives.batch_norm import BatchNorm
from ds2_ops.primitives.ctc import Ctc
from support.kernel_on_cpu import H200_SMEM_BYTES, patch_launch_on
from torch import Tensor

EPS, CLIP = 1e-5, 1.5
RAGGED, PLAIN = (3, 2, 7, 16), (5, 3, 24)
each_shape = pytest.mark.parametrize("shape", [RAGGED, PLAIN], ids=["ragged", "plain"])
each_clip = pytest.mark.parametrize("clip", [None, CLIP], ids=["linear", "clipped"])


@pytest.fixture(params=["numpy", "kernels", pytest.param("cuda", marks=pytest.mark.gpu)])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """By NumPy, by the kernels on NumPy's arrays with the addresses, workspace and arguments of a call, or on a GPU."""

    def address(name: str, array: Any, shape: tuple[int, ...], dtype: str, device: int, stream: int) -> int:
        values = np.asarray(array)
        assert values.shape == shape and str(values.dtype) == dtype and values.flags.c_contiguous, name
        return int(values.ctypes.data)

    if request.param == "kernels":
        patch_launch_on(monkeypatch, arrays)
        monkeypatch.setattr(arrays, "on_cpu", lambda array: False)
        monkeypatch.setattr(arrays, "contiguous_address", address)
        monkeypatch.setattr(arrays, "workspace_address", lambda room, size, stream: int(room.ctypes.data))
        monkeypatch.setattr(runtime, "current", lambda index: contextlib.nullcontext())
        monkeypatch.setattr(runtime, "smem_bytes_per_block", lambda index: H200_SMEM_BYTES)
    return str(request.param)


def placed(inputs: dict[str, Tensor], way: str) -> dict[str, Any]:
    return {name: tensor.cuda() if way == "cuda" else tensor.numpy() for name, tensor in inputs.items()}


def unwritten(answers: dict[str, Tensor], way: str) -> dict[str, Any]:
    """Results to be written, NaN."""
    if way == "cuda":
        return {name: torch.full(answer.shape, float("nan"), device="cuda") for name, answer in answers.items()}
    dtype = np.float64 if way == "numpy" else np.float32
    return {name: np.full(answer.shape, np.nan, dtype) for name, answer in answers.items()}


def space_and_stream(op: BatchNorm | Ctc, way: str) -> dict[str, Any]:
    if way == "cuda":
        workspace = torch.empty(op.workspace_bytes, dtype=torch.uint8, device="cuda")
        return {"workspace": workspace, "stream": torch.cuda.current_stream()}
    return {"workspace": np.full(op.workspace_bytes, 255, np.uint8), "stream": 0} if way == "kernels" else {}


def as_numpy(results: dict[str, Any]) -> dict[str, Any]:
    return {name: result.cpu().numpy() if isinstance(result, Tensor) else result for name, result in results.items()}


def test_no_torch_is_imported() -> None:
    modules = "primitives.batch_norm", "primitives.convolution", "primitives.ctc", "recurrent.primitives"
    code = f"import sys, {', '.join(f'ds2_ops.{name}' for name in modules)}; assert 'torch' not in sys.modules, 'torch'"
    subprocess.run([sys.executable, "-c", code], check=True)


def of_norm(shape: tuple[int, ...], clip: float | None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Inputs and float64 answers."""
    generator = torch.Generator().manual_seed(len(shape))
    draw = lambda *size: torch.randn(*size, generator=generator, dtype=torch.float64).float()  # noqa: E731
    channels = shape[-1]
    inputs = {"x": draw(*shape), "weight": 1 + draw(channels) / 4, "bias": draw(channels), "grad_y": draw(*shape)}
    valid = torch.ones(shape[:-1], dtype=torch.bool)
    if shape == RAGGED:
        inputs["lengths"] = torch.tensor([7, 0, 4], dtype=torch.int32)
        valid = (torch.arange(7) < inputs["lengths"][:, None])[:, None].expand(3, 2, 7)
        inputs["x"][~valid] = float("nan")  # what lies past a length is anything
    inputs["count"] = valid.sum().int().view(1)
    leaves = [inputs[name].double().requires_grad_() for name in ("x", "weight", "bias")]
    y, mean, var = batch_norm_reference(*leaves, valid, eps=EPS, clip=clip)
    grads = torch.autograd.grad(y, leaves, inputs["grad_y"].double())
    answers = {"y": y, "mean": mean, "inverse": (var + EPS) ** -0.5}
    answers |= dict(zip(("grad_x", "grad_weight", "grad_bias"), grads, strict=True))
    return inputs, {name: answer.detach() for name, answer in answers.items()}


def run_norm(op: BatchNorm, inputs: dict[str, Any], results: dict[str, Any], **how: Any) -> None:
    first = [inputs[name] for name in ("x", "weight", "bias", "count")]
    statistics = [results["mean"], results["inverse"]]
    gradients = [results[name] for name in ("grad_x", "grad_weight", "grad_bias")]
    op.forward(*first, results["y"], *statistics, lengths=inputs.get("lengths"), **how)
    op.backward(inputs["grad_y"], *first, *statistics, *gradients, lengths=inputs.get("lengths"), **how)


def close(results: dict[str, Any], answers: dict[str, Tensor], error: float) -> None:
    for name, answer in answers.items():
        np.testing.assert_allclose(
            results[name], answer.numpy(), rtol=0, atol=error * float(answer.abs().max()), err_msg=name
        )


@each_clip
@each_shape
def test_batch_norm(shape: tuple[int, ...], clip: float | None, way: str) -> None:
    inputs, answers = of_norm(shape, clip)
    op = BatchNorm(shape=shape, ragged=shape == RAGGED, eps=EPS, clip=clip)
    results = unwritten(answers, way)
    run_norm(op, placed(inputs, way), results, **space_and_stream(op, way))
    close(as_numpy(results), answers, 1e-11 if way == "numpy" else 2e-6)


def of_ctc() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Four utterances: repeated labels, no label, no frame and no label, and one that no alignment fits."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(9, 4, 6, generator=generator, dtype=torch.float64).float()
    frames, sizes = torch.tensor([9, 6, 0, 3]), torch.tensor([4, 0, 0, 4])
    labels = torch.tensor([[1, 1, 5, 2], [0, 0, 0, 0], [0, 0, 0, 0], [1, 2, 3, 4]])
    wide = logits.double().requires_grad_()
    losses = torch.nn.functional.ctc_loss(wide.log_softmax(-1), labels, frames, sizes, reduction="none")
    weights = torch.tensor([0.5, 2.0, 1.0, 0.0])
    grad = torch.autograd.grad(losses[:3], wide, weights[:3].double())[0]
    inputs = {"log_probs": logits.double().log_softmax(-1).float(), "frames": frames, "labels": labels, "sizes": sizes}
    return inputs | {"grad_losses": weights}, {"losses": losses.detach(), "grad_logits": grad}


def test_ctc(way: str) -> None:
    inputs, answers = of_ctc()
    op, inputs = Ctc(frames=9, batch=4, labels=6, longest=4), placed(inputs, way)
    results, how = unwritten(answers, way), space_and_stream(op, way)
    first = [inputs[name] for name in ("log_probs", "frames", "labels", "sizes")]
    op.forward(*first, results["losses"], **how)
    op.gradient(*first, results["losses"], inputs["grad_losses"], results["grad_logits"], **how)
    ours, error = as_numpy(results), 1e-6 if way == "numpy" else 1e-5  # log-probs are float32
    np.testing.assert_allclose(ours["losses"], answers["losses"].numpy(), rtol=error)
    assert np.isinf(ours["losses"][3])  # three frames cannot hold four labels
    true = answers["grad_logits"].numpy()
    np.testing.assert_allclose(ours["grad_logits"][:, :3], true[:, :3], rtol=0, atol=error)


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="20 channels, allowed in bfloat16 are multiples of 8"):
        BatchNorm(shape=(4, 20), dtype="bfloat16")
    with pytest.raises(ValueError, match=r"\(B, F, T, C\) with ragged=True"):
        BatchNorm(shape=(4, 16), ragged=True)
    with pytest.raises(ValueError, match=r"is \(0, 4, 6, 4\), allowed are sizes of 1 or more"):
        Ctc(frames=0, batch=4, labels=6, longest=4)
    op, rows = BatchNorm(shape=(4, 16)), np.zeros((4, 16))
    with pytest.raises(ValueError, match="lengths belong to ragged=True"):
        op.forward(rows, *rows[:2], rows, rows, *rows[:2], lengths=np.zeros(4))
    with pytest.raises(ValueError, match=r"weight has shape \(3,\), expected \(16,\)"):
        op.forward(rows, np.zeros(3), rows[0], np.array([4]), rows, *rows[:2])
