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


@pytest.fixture
def kernels_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the way to a GPU run on NumPy's arrays: addresses, workspace and arguments are those of a call."""

    def address(name: str, array: Any, shape: tuple[int, ...], dtype: str, device: int, stream: int) -> int:
        values = np.asarray(array)
        assert values.shape == shape and str(values.dtype) == dtype and values.flags.c_contiguous, name
        return int(values.ctypes.data)

    patch_launch_on(monkeypatch, arrays)
    monkeypatch.setattr(arrays, "on_cpu", lambda array: False)
    monkeypatch.setattr(arrays, "contiguous_address", address)
    monkeypatch.setattr(arrays, "workspace_address", lambda room, size, stream: int(room.ctypes.data))
    monkeypatch.setattr(runtime, "current", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(runtime, "smem_bytes_per_block", lambda index: H200_SMEM_BYTES)


def test_no_torch_is_imported() -> None:
    modules = "primitives.batch_norm", "primitives.convolution", "primitives.ctc", "recurrent.primitives"
    code = f"import sys, {', '.join(f'ds2_ops.{name}' for name in modules)}; assert 'torch' not in sys.modules, 'torch'"
    subprocess.run([sys.executable, "-c", code], check=True)


def of_norm(shape: tuple[int, ...], clip: float | None) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
    """Inputs, float64 answers, and which rows count."""
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
    return inputs, {name: answer.detach() for name, answer in answers.items()}, valid


def run_norm(op: BatchNorm, inputs: dict[str, Any], results: dict[str, Any], room: Any, **how: Any) -> None:
    first = [inputs[name] for name in ("x", "weight", "bias", "count")]
    statistics = [results["mean"], results["inverse"]]
    gradients = [results[name] for name in ("grad_x", "grad_weight", "grad_bias")]
    op.forward(*first, results["y"], *statistics, room, lengths=inputs.get("lengths"), **how)
    op.backward(inputs["grad_y"], *first, *statistics, *gradients, room, lengths=inputs.get("lengths"), **how)


def close(results: dict[str, Any], answers: dict[str, Tensor], error: float) -> None:
    for name, answer in answers.items():
        np.testing.assert_allclose(
            results[name], answer.numpy(), rtol=0, atol=error * float(answer.abs().max()), err_msg=name
        )


@each_clip
@each_shape
def test_batch_norm_of_the_cpu_is_float64(shape: tuple[int, ...], clip: float | None) -> None:
    inputs, answers, _ = of_norm(shape, clip)
    op = BatchNorm(shape=shape, ragged=shape == RAGGED, eps=EPS, clip=clip)
    results = {name: np.full(answer.shape, np.nan) for name, answer in answers.items()}
    run_norm(op, {name: tensor.numpy() for name, tensor in inputs.items()}, results, None)
    close(results, answers, 1e-11)


@pytest.mark.usefixtures("kernels_on_the_cpu")
@each_clip
@each_shape
def test_the_kernels_of_batch_norm(shape: tuple[int, ...], clip: float | None) -> None:
    inputs, answers, _ = of_norm(shape, clip)
    op = BatchNorm(shape=shape, ragged=shape == RAGGED, eps=EPS, clip=clip)
    results = {name: np.full(answer.shape, np.nan, np.float32) for name, answer in answers.items()}
    room = np.full(op.workspace_bytes, 255, np.uint8)
    run_norm(op, {name: tensor.numpy() for name, tensor in inputs.items()}, results, room, stream=0)
    close(results, answers, 2e-6)


@pytest.mark.gpu
@each_clip
@each_shape
def test_batch_norm_on_a_gpu(shape: tuple[int, ...], clip: float | None) -> None:
    inputs, answers, _ = of_norm(shape, clip)
    op = BatchNorm(shape=shape, ragged=shape == RAGGED, eps=EPS, clip=clip)
    results = {name: torch.full(answer.shape, float("nan"), device="cuda") for name, answer in answers.items()}
    room = torch.empty(op.workspace_bytes, dtype=torch.uint8, device="cuda")
    there = {name: tensor.cuda() for name, tensor in inputs.items()}
    run_norm(op, there, results, room, stream=torch.cuda.current_stream())
    close({name: tensor.cpu().numpy() for name, tensor in results.items()}, answers, 2e-6)


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


def run_ctc(op: Ctc, inputs: dict[str, Any], losses: Any, grad: Any, room: Any, **how: Any) -> None:
    first = [inputs[name] for name in ("log_probs", "frames", "labels", "sizes")]
    op.forward(*first, losses, room, **how)
    op.gradient(*first, losses, inputs["grad_losses"], grad, room, **how)


def check_ctc(losses: Any, grad: Any, answers: dict[str, Tensor], error: float) -> None:
    np.testing.assert_allclose(losses, answers["losses"].numpy(), rtol=error)
    assert np.isinf(losses[3])  # three frames cannot hold four labels
    np.testing.assert_allclose(grad[:, :3], answers["grad_logits"].numpy()[:, :3], rtol=0, atol=error)


def test_ctc_of_the_cpu_is_float64() -> None:
    inputs, answers = of_ctc()
    losses, grad = np.zeros(4), np.full((9, 4, 6), np.nan)
    arrays = {name: tensor.numpy() for name, tensor in inputs.items()}
    run_ctc(Ctc(frames=9, batch=4, labels=6, longest=4), arrays, losses, grad, None)
    check_ctc(losses, grad, answers, 1e-6)  # log-probs are float32


@pytest.mark.usefixtures("kernels_on_the_cpu")
def test_the_kernels_of_ctc() -> None:
    inputs, answers = of_ctc()
    op = Ctc(frames=9, batch=4, labels=6, longest=4)
    losses, grad = np.zeros(4, np.float32), np.full((9, 4, 6), np.nan, np.float32)
    room = np.full(op.workspace_bytes, 255, np.uint8)
    run_ctc(op, {name: tensor.numpy() for name, tensor in inputs.items()}, losses, grad, room, stream=0)
    check_ctc(losses, grad, answers, 1e-5)


@pytest.mark.gpu
def test_ctc_on_a_gpu() -> None:
    inputs, answers = of_ctc()
    op = Ctc(frames=9, batch=4, labels=6, longest=4)
    losses, grad = torch.zeros(4, device="cuda"), torch.full((9, 4, 6), float("nan"), device="cuda")
    room = torch.empty(op.workspace_bytes, dtype=torch.uint8, device="cuda")
    there = {name: tensor.cuda() for name, tensor in inputs.items()}
    run_ctc(op, there, losses, grad, room, stream=torch.cuda.current_stream())
    check_ctc(losses.cpu().numpy(), grad.cpu().numpy(), answers, 1e-5)


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
