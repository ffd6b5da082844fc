"""The convolution primitive: NumPy's float64 against torch's, the kernels from their own source against that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from ds2_ops import lookahead
from ds2_ops.primitives import convolution
from ds2_ops.primitives.convolution import Convolution
from ds2_ops.recurrent.primitives import Array
from support.compiled import report
from support.kernel_on_cpu import patch_launch_on
from torch import Tensor
from torch.nn import functional

CASES: dict[str, dict[str, Any]] = {
    "plain": {"images": 2, "channels": 3, "outputs": 9, "size": (6, 7), "taps": (3, 2)},
    "strides, other padding on each side": {
        "images": 2, "channels": 5, "outputs": 40, "size": (9, 8), "taps": (3, 3), "stride": (2, 3),
        "padding": (2, 0, 1, 3),
    },
    "groups, flipped": {
        "images": 1, "channels": 4, "outputs": 20, "size": (5, 5), "taps": (2, 3), "groups": 2,
        "padding": (0, 1, 2, 0), "flip": True,
    },
    "row convolution": {
        "images": 2, "channels": 6, "outputs": 6, "size": (11, 1), "taps": (4, 1), "groups": 6, "padding": (0, 3, 0, 0),
    },
    "split sums": {"images": 3, "channels": 2, "outputs": 8, "size": (20, 20), "taps": (2, 2), "padding": (1, 0, 0, 1)},
}  # fmt: skip
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}
KINDS = ("forward", "data_gradient", "weight_gradient")
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def drawn(op: Convolution, dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {n: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for n, shape in op.shapes.items()}


def of_torch(op: Convolution, arrays: dict[str, Tensor]) -> dict[str, Tensor]:
    """Each pass in float64 by torch, which pads by itself and never turns taps around."""
    x, weight, y = (arrays[name].double() for name in ("x", "weight", "y"))
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    top, bottom, left, right = op.padding
    taps = weight.flip(2, 3) if op.flip else weight
    out = functional.conv2d(functional.pad(x, (left, right, top, bottom)), taps, stride=op.stride, groups=op.groups)
    grad_x, grad_weight = torch.autograd.grad(out, [x, weight], y)
    return {"forward": out.detach(), "data_gradient": grad_x, "weight_gradient": grad_weight}


def run(op: Convolution, kind: str, arrays: dict[str, Any], result: Any, workspace: Any, **how: Any) -> None:
    x, weight, y = (arrays[name] for name in ("x", "weight", "y"))
    if kind == "forward":
        op.forward(x, weight, result, **how)
    elif kind == "data_gradient":
        op.data_gradient(y, weight, result, **how)
    else:
        op.weight_gradient(x, y, result, workspace, **how)


def result_name(kind: str) -> str:
    return {"forward": "y", "data_gradient": "x", "weight_gradient": "weight"}[kind]


@each_case
def test_arrays_of_the_cpu_are_computed_in_float64(case: dict[str, Any]) -> None:
    op = Convolution(**case)
    arrays = drawn(op, torch.float64)
    for kind, wanted in of_torch(op, arrays).items():
        given = {name: tensor.numpy() for name, tensor in arrays.items()}
        result = np.ones(op.shapes[result_name(kind)])
        run(op, kind, given, result, None, beta=2.0)
        np.testing.assert_allclose(result, wanted.numpy() + 2, rtol=1e-12, atol=1e-12)


def on_the_cpu(op: Convolution, kind: str, arrays: dict[str, Tensor], result: Tensor, beta: float) -> None:
    """Run the kernels of a pass from their own source, on torch's tensors of the CPU."""
    tensors = arrays | {result_name(kind): result}
    lie = {name: Array(t.data_ptr(), tuple(t.shape), t.stride()) for name, t in tensors.items()}
    sums = torch.full((max(1, op._splits(kind)), *result.shape), float("nan"), dtype=torch.float64)
    arguments = [*(tensors[name] for name in ("x", "weight", "y")), result, sums, op.images, op._splits(kind), beta]
    for launch in op.launches(kind, lie):
        convolution.launch_on(launch, launch.source.numbers(arguments), lambda: kind, 0, 0)


@pytest.fixture
def kernels_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    patch_launch_on(monkeypatch, convolution)


def allowed(wanted: Tensor, dtype: torch.dtype) -> float:
    """Rounding of the result, and of sums of up to a thousand products in float32."""
    sums = 2e-5 if dtype != torch.float64 else 1e-12
    return float(wanted.abs().max()) * (torch.finfo(dtype).eps + sums)


@pytest.mark.usefixtures("kernels_on_the_cpu")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@each_case
def test_the_kernels_on_the_cpu(case: dict[str, Any], dtype: str) -> None:
    op = Convolution(**case, dtype=dtype, sms=132)
    arrays = drawn(op, DTYPES[dtype])
    for kind, wanted in of_torch(op, arrays).items():
        result = torch.ones(op.shapes[result_name(kind)], dtype=DTYPES[dtype])
        on_the_cpu(op, kind, arrays, result, 2.0)
        torch.testing.assert_close(result.double(), wanted + 2, rtol=0, atol=allowed(wanted + 2, DTYPES[dtype]))


def test_the_sum_over_positions_is_split_where_there_are_few_tiles() -> None:
    op = Convolution(**CASES["split sums"], sms=132)
    assert op._splits("weight_gradient") == 2 and op.workspace_bytes == 2 * 8 * 2 * 4 * 4
    assert op._splits("forward") == 1


@pytest.mark.parametrize(("sms", "splits"), [(1, 2), (24, 48), (128, 256), (170, 340), (1000, 390)])
def test_a_long_sum_fills_the_multiprocessors_that_the_gpu_has(
    sms: int, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to parts of 512 positions: of 200,000 there are 390."""
    monkeypatch.setattr(convolution.runtime, "attribute", lambda device, name: sms if device == 3 else 0)
    op = Convolution(images=5, channels=1, outputs=8, size=(200, 200), taps=(1, 1), device=3)
    assert op._splits("weight_gradient") == splits
    assert (
        Convolution(images=5, channels=1, outputs=8, size=(200, 200), taps=(1, 1), sms=7)._splits("weight_gradient")
        == 14
    )


def test_without_a_gpu_nothing_is_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_driver(device: int, name: str) -> int:
        raise RuntimeError("no CUDA driver")

    monkeypatch.setattr(convolution.runtime, "attribute", no_driver)
    assert Convolution(**CASES["plain"]).workspace_bytes == 0


def test_small_tiles_fill_the_gpu_where_there_are_few() -> None:
    assert [convolution._tile_rows(128, others, 132) for others in (13, 100, 3136)] == [32, 128, 128]
    assert convolution._tile_rows(96, 13924, 132) == 96 and convolution._tile_rows(384, 121, 132) == 128
    assert [convolution._tile_rows(128, 13, sms) for sms in (13, 26, 52)] == [128, 64, 32]
    assert convolution._tile_rows(40) == 64


@pytest.mark.usefixtures("kernels_on_the_cpu")
def test_any_order_of_axes_and_parts_of_larger_arrays() -> None:
    op = Convolution(**CASES["plain"])
    arrays = drawn(op, torch.float32)
    wanted = of_torch(op, arrays)["forward"]
    arrays["x"] = arrays["x"].contiguous(memory_format=torch.channels_last)
    whole = torch.zeros(2, 12, *op.out)
    result = whole[:, 2:11]
    on_the_cpu(op, "forward", arrays, result, 0.0)
    torch.testing.assert_close(result.double(), wanted, rtol=0, atol=allowed(wanted, torch.float32))
    assert not whole[:, :2].any() and not whole[:, 11:].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_kernels_build_for_a_gpu(kind: str, dtype: str) -> None:
    pytest.importorskip("cuda.core")
    op = Convolution(**CASES["strides, other padding on each side"], dtype=dtype)
    contiguous: Callable[[str], Array] = lambda n: Array(0, op.shapes[n], torch.empty(op.shapes[n]).stride())  # noqa: E731
    for launch in op.launches(kind, {name: contiguous(name) for name in op.shapes}):
        assert report(launch.source.text).local_bytes == 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@each_case
def test_the_kernels_on_a_gpu(case: dict[str, Any], dtype: str) -> None:
    op = Convolution(**case, dtype=dtype)
    arrays = drawn(op, DTYPES[dtype])
    there = {name: tensor.cuda() for name, tensor in arrays.items()}
    workspace = torch.empty(op.workspace_bytes, dtype=torch.uint8, device="cuda")
    for kind, wanted in of_torch(op, arrays).items():
        result = torch.ones(op.shapes[result_name(kind)], dtype=DTYPES[dtype], device="cuda")
        run(op, kind, there, result, workspace, stream=torch.cuda.current_stream(), beta=2.0)
        torch.testing.assert_close(result.cpu().double(), wanted + 2, rtol=0, atol=allowed(wanted + 2, DTYPES[dtype]))


def test_a_row_convolution_is_one_of_as_many_groups_as_channels() -> None:
    frames, batch, hidden, taps = 11, 3, 6, 4
    generator = torch.Generator().manual_seed(2)
    x, weight, grad_y = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((frames, batch, hidden), (hidden, taps), (frames, batch, hidden))
    )
    leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    wanted = lookahead(*leaves)
    grad_x, grad_weight = torch.autograd.grad(wanted, leaves, grad_y)
    op = Convolution(
        images=batch, channels=hidden, outputs=hidden, size=(frames, 1), taps=(taps, 1), groups=hidden,
        padding=(0, taps - 1, 0, 0),
    )  # fmt: skip
    as_images = lambda rows: rows.numpy().transpose(1, 2, 0)[..., None]  # noqa: E731  a view: (T, B, H) stays as it is
    as_taps = lambda rows: rows.numpy()[:, None, :, None]  # noqa: E731
    y, of_x, of_weight = torch.zeros_like(x), torch.zeros_like(x), torch.zeros_like(weight)
    op.forward(as_images(x), as_taps(weight), as_images(y))
    op.data_gradient(as_images(grad_y), as_taps(weight), as_images(of_x))
    op.weight_gradient(as_images(x), as_images(grad_y), as_taps(of_weight))
    for ours, theirs in ((y, wanted.detach()), (of_x, grad_x), (of_weight, grad_weight)):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="dtype is 'int8', allowed are float32"):
        Convolution(**CASES["plain"], dtype="int8")
    with pytest.raises(ValueError, match="3 channels and 9 outputs are not multiples of 2 groups"):
        Convolution(**CASES["plain"], groups=2)
    with pytest.raises(ValueError, match=r"\(3, 2\) taps do not fit into data of \(2, 7\)"):
        Convolution(**CASES["plain"] | {"size": (2, 7)})
    op = Convolution(**CASES["plain"])
    arrays = {name: np.zeros(shape) for name, shape in op.shapes.items()}
    with pytest.raises(ValueError, match=r"weight has shape \(9, 3, 3, 3\), expected \(9, 3, 3, 2\)"):
        op.forward(arrays["x"], np.zeros((9, 3, 3, 3)), arrays["y"])
    huge = Array(0, op.shapes["x"], (2**31, 42, 7, 1))
    with pytest.raises(ValueError, match="allowed are those from 0 on within 2"):
        op.launches("forward", {"x": huge, "weight": huge, "y": huge})
