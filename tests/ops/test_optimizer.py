"""The update's kernels against torch's optimizers: from their own source on the CPU, and on a GPU."""

from __future__ import annotations

import copy

import pytest
import torch
from ds2_ops import optimizer as kernels
from ds2_ops.optimizer import FusedNorm, FusedUpdate, why_not
from support.kernel_on_cpu import patch_run
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

SIZES = [(3, 7), (8192,), (5,), (100, 300), (1,)]  # off and on the boundaries of vectors and of pieces


def parameters(device: str) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(size, generator=generator).to(device)) for size in SIZES]


def optimizer(name: str, params: list[nn.Parameter]) -> torch.optim.Optimizer:
    device = params[0].device
    groups = [
        {"params": params[:2], "weight_decay": 0.1, "lr": torch.tensor(0.01, device=device)},
        {"params": params[2:], "weight_decay": 0.0, "lr": torch.tensor(0.1, device=device)},
    ]
    if name == "sgd":
        return torch.optim.SGD(groups, lr=0.1, momentum=0.99, nesterov=True, foreach=False)
    return torch.optim.AdamW(groups, lr=0.1, betas=(0.9, 0.98), foreach=False, capturable=device.type == "cuda")


def give_gradients(params: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in params:
        grad = torch.randn(parameter.shape, generator=generator).to(parameter.device)
        if parameter.grad is None:
            parameter.grad = grad
        else:
            parameter.grad.copy_(grad)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where the kernels run; on a CPU from their own source."""
    if request.param == "cpu":
        patch_run(monkeypatch, kernels)
    return str(request.param)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
@pytest.mark.parametrize("most", [0.0, 1.0, 1e6])
def test_steps_are_those_of_torch(name: str, most: float, device: str) -> None:
    mine, theirs = parameters(device), parameters(device)
    ours, reference = optimizer(name, mine), optimizer(name, theirs)
    fused = None
    rounded = {mine[3]: torch.zeros(SIZES[3], dtype=torch.bfloat16, device=device)}
    for step in range(4):
        give_gradients(mine, step)
        give_gradients(theirs, step)
        norm = nn.utils.get_total_norm([p.grad for p in theirs if p.grad is not None])
        if most:
            for parameter in theirs:
                assert parameter.grad is not None
                parameter.grad.mul_((most / (norm + 1e-6)).clamp(max=1.0))
        reference.step()
        if fused is None:
            for one, other in zip(mine, theirs, strict=True):
                one.data.copy_(other.data)
            ours.load_state_dict(copy.deepcopy(reference.state_dict()))
            ours.param_groups[0]["lr"], ours.param_groups[1]["lr"] = (g["lr"].clone() for g in reference.param_groups)
            fused = FusedUpdate(ours, rounded)
        else:
            fused(norm.detach(), most)
        for group in (*ours.param_groups, *reference.param_groups):
            group["lr"].mul_(0.9)
    for one, other in zip(mine, theirs, strict=True):
        # three steps of some four roundings each of numbers up to the step's own size
        apart = float((one - other).detach().abs().max())
        assert apart <= 16 * 2.0**-24 * float(other.detach().abs().max() + 1)
        for key, value in reference.state[other].items():
            moved = float((ours.state[one][key] - value).abs().max())
            assert moved <= 16 * 2.0**-24 * float(value.abs().max() + 1)
    assert torch.equal(rounded[mine[3]], mine[3].detach().bfloat16())


@pytest.mark.parametrize("name", ["sgd", "adamw"])
@pytest.mark.parametrize("norm", [float("nan"), float("inf")])
@pytest.mark.parametrize("most", [0.0, 1.0])
def test_a_norm_that_is_not_finite_changes_nothing(name: str, norm: float, most: float, device: str) -> None:
    params = parameters(device)
    stepped = optimizer(name, params)
    give_gradients(params, 0)
    stepped.step()
    give_gradients(params, 1)
    before = [tensor.detach().clone() for p in params for tensor in (p, *stepped.state[p].values())]
    rounded = {params[3]: torch.full(SIZES[3], 7.0, dtype=torch.bfloat16, device=device)}
    FusedUpdate(stepped, rounded)(torch.tensor(norm, device=device), most)
    after = [tensor.detach() for p in params for tensor in (p, *stepped.state[p].values())]
    assert all(map(torch.equal, before, after)) and bool((rounded[params[3]] == 7.0).all())


def test_the_norm_is_that_of_all_tensors(device: str) -> None:
    tensors = [p.detach() for p in parameters(device)]
    expected = torch.cat([t.double().view(-1) for t in tensors]).norm()
    assert abs(float(FusedNorm(tensors)()) / float(expected) - 1) <= 4 * 2.0**-24
    tensors[3][7, 5] = torch.inf
    assert torch.isinf(FusedNorm(tensors)())


def test_what_the_kernels_cannot_do_is_named() -> None:
    params = parameters("cpu")
    assert "float32 on a CUDA GPU" in str(why_not(optimizer("sgd", params)))
    plain = torch.optim.SGD(params, lr=torch.tensor(0.1), foreach=False)
    assert "Nesterov" in str(why_not(plain))
    assert "host" in str(why_not(torch.optim.AdamW(params, lr=0.1)))
    assert "amsgrad" in str(why_not(torch.optim.AdamW(params, lr=0.1, amsgrad=True)))
    assert "support SGD and AdamW" in str(why_not(torch.optim.Adagrad(params)))


def test_tensors_off_a_boundary_are_refused() -> None:
    with pytest.raises(ValueError, match="no multiple of 16 bytes"):
        FusedNorm([torch.zeros(9)[1:]])


class HostReads(TorchDispatchMode):
    """Fails where a value of a tensor is read on the host: a CUDA graph that is being recorded refuses that."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        assert func is not torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_a_step_reads_nothing_on_the_host(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    params = parameters("cpu")
    give_gradients(params, 1)
    ours = optimizer(name, params)
    ours.step()
    fused = FusedUpdate(ours, {})
    monkeypatch.setattr(kernels, "run", lambda *arguments: None)
    with HostReads():
        fused(torch.tensor(1.0), 1.0)
