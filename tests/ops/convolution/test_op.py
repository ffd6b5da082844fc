"""The convolution's kernels against float64: from their own source on the CPU, and on a GPU."""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ds2_ops.convolution as op
import pytest
import torch
from ds2_ops.convolution import (
    ConvInput,
    StreamConvolution,
    _weight_gradient,
    convolve,
    correlate,
    frames_of_group,
    pack,
    why_not,
)
from ds2_ops.jit.launch import Launch, Source
from support.compiled import report
from support.kernel_on_cpu import SUPPORT, compile_kernel, host_arguments
from torch import Tensor
from torch.nn import functional

U, HALF = 2.0**-24, 2.0**-8  # units of roundoff of float32 and bfloat16


@functools.cache
def _library(source: Source) -> Path:
    headers = {
        "ptx/number.cuh": "#pragma once\n",
        "ptx/product.cuh": (SUPPORT / "product_on_cpu.h").read_text(),
    }
    memory = "unsigned char* const shared = reinterpret_cast<unsigned char*>(chip::shared_memory());"
    source = replace(source, text=re.sub(r"extern __shared__ .*;", memory, source.text))
    launch = "chip::launch(blocks, threads, 1, bytes, seed, KERNEL)"
    parameters = "int blocks, int threads, int bytes, unsigned seed"
    return compile_kernel(source, "chip_on_cpu", headers, "const char*", parameters, launch)


@pytest.fixture
def emulated(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches run on CPU tensors, block after block: blocks do not know each other. Not in cases on a GPU."""
    if request.node.callspec.params.get("device") == "cuda":
        return

    def run(launch: Launch, arguments: Sequence[Any], what: Callable[[], str], device: torch.device) -> None:
        kernel = ctypes.CDLL(str(_library(launch.source))).run
        kernel.restype = ctypes.c_char_p
        given = host_arguments(launch.source, arguments)
        error = kernel(launch.grid, launch.threads, launch.smem_bytes, 1, *given)
        assert not error, error.decode()

    monkeypatch.setattr(op, "run", run)
    monkeypatch.setattr(op, "multiprocessors", lambda device: 132)


def draw(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def answers(x: Tensor, weight: Tensor, grad_y: Tensor) -> list[Tensor]:
    """Output and both gradients in float64."""
    inputs = [t.double().requires_grad_() for t in (x, weight)]
    y = functional.conv2d(*inputs, None, (2, 1), (weight.shape[2] // 2, weight.shape[3] // 2))
    return [y.detach(), *torch.autograd.grad(y, inputs, grad_y.double())]


def check(got: Tensor, expected: Tensor, terms: int) -> None:
    """Sums of `terms` products, exact in float32, of numbers of unit variance, added up in float32 and rounded once."""
    size = terms**0.5
    bound = HALF * expected.abs() + 12 * U * terms**0.5 * size
    assert got.shape == expected.shape
    assert ((got.cpu().double() - expected).abs() <= bound).all()


@pytest.mark.parametrize(("bins", "frames", "taps"), [(9, 40, (5, 3)), (6, 33, (9, 11)), (1, 1, (5, 1))])
def test_passes_on_a_cpu(emulated: None, bins: int, frames: int, taps: tuple[int, int]) -> None:
    x, weight = draw(2, 32, bins, frames), draw(32, 32, *taps, seed=2)
    grad_y = draw(2, 32, -(-bins // 2), frames, seed=3)
    y, grad_x, grad_weight = answers(x, weight, grad_y)
    rows = [t.permute(0, 2, 3, 1).contiguous() for t in (x, grad_y)]
    out = [torch.full_like(t, torch.nan) for t in reversed(rows)]
    correlate(rows[0], pack(weight, 2, backward=False), out[0], step=4, first=-(taps[0] // 2), group=16)
    check(out[0].permute(0, 3, 1, 2), y, 32 * taps[0] * taps[1])
    correlate(rows[1], pack(weight, 2, backward=True), out[1], step=1, first=-(taps[0] // 4), group=16)
    check(out[1].permute(0, 3, 1, 2), grad_x, 16 * taps[0] * taps[1])
    check(_weight_gradient(*rows, weight, 2, tile=32), grad_weight, grad_y[:, 0].numel())


@pytest.mark.parametrize(
    ("device", "shape", "taps", "stride"),
    [
        ("cpu", (2, 1, 7, 41), (9, 11), 2),
        ("cpu", (1, 1, 8, 70), (5, 3), 1),
        pytest.param("cuda", (4, 1, 161, 700), (41, 11), 2, marks=[pytest.mark.gpu, pytest.mark.hopper]),
        pytest.param("cuda", (3, 1, 80, 351), (41, 11), 2, marks=[pytest.mark.gpu, pytest.mark.hopper]),
    ],
)
def test_one_channel_is_folded_into_many(
    emulated: None,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    shape: tuple[int, ...],
    taps: tuple[int, int],
    stride: int,
) -> None:
    if device == "cpu":
        monkeypatch.setattr(op, "frames_of_group", lambda frames: 16)
    x, weight = draw(*shape), draw(32, 1, *taps, seed=2)
    inputs = [x.double(), weight.double().requires_grad_()]
    expected = functional.conv2d(*inputs, None, (2, stride), (taps[0] // 2, taps[1] // 2))
    grad_y = draw(*expected.shape, seed=3)
    (expected_grad,) = torch.autograd.grad(expected, inputs[1], grad_y.double())
    given = weight.to(device).requires_grad_()
    y = convolve(x.to(device), given, (2, stride))
    (grad,) = torch.autograd.grad(y, given, grad_y.to(device))
    check(y.detach(), expected.detach(), taps[0] * taps[1])
    check(grad, expected_grad, grad_y[:, 0].numel())


def convolve_stream(conv: StreamConvolution, x: Tensor) -> Tensor:
    """Convolve streams (B, F, T, C) that begin here: no frames of theirs are stored."""
    table, places = x.new_empty(len(x), x.shape[1], 0, x.shape[3]), torch.arange(len(x), device=x.device)
    return conv(ConvInput(x, torch.bfloat16), table, places, x.shape[2])


@pytest.mark.parametrize(
    ("device", "batch", "bins", "frames", "channels", "taps", "stride"),
    [
        ("cpu", 3, 9, 13, 32, (5, 3), (2, 1)),
        ("cpu", 3, 9, 14, 32, (7, 3), (2, 2)),
        ("cpu", 3, 7, 29, 1, (9, 11), (2, 2)),
        ("cpu", 3, 7, 29, 1, (11, 11), (2, 2)),
        ("cpu", 2, 8, 13, 1, (5, 5), (2, 1)),
        pytest.param("cuda", 64, 81, 20, 32, (21, 11), (2, 1), marks=[pytest.mark.gpu, pytest.mark.hopper]),
        pytest.param("cuda", 64, 81, 19, 32, (11, 11), (2, 2), marks=[pytest.mark.gpu, pytest.mark.hopper]),
        pytest.param("cuda", 64, 161, 29, 1, (41, 11), (2, 2), marks=[pytest.mark.gpu, pytest.mark.hopper]),
    ],
)
def test_streams_share_a_batch_without_a_change(
    emulated: None,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    batch: int,
    bins: int,
    frames: int,
    channels: int,
    taps: tuple[int, int],
    stride: tuple[int, int],
) -> None:
    x, weight = draw(batch, bins, frames, channels).to(device), draw(32, channels, *taps, seed=2).to(device)
    conv, images = StreamConvolution(weight, stride), x.permute(0, 3, 1, 2)
    output = convolve_stream(conv, x)
    expected = functional.conv2d(images.double().cpu(), weight.double().cpu(), None, stride, (taps[0] // 2, 0))
    check(output.permute(0, 3, 1, 2), expected, channels * taps[0] * taps[1])
    for group in (16, 32, 64, 112, 176) if device == "cuda" else (16,):
        monkeypatch.setattr(op, "_group", lambda *_, group=group: group)
        assert torch.equal(convolve_stream(conv, x), output)
    for row in range(batch):
        assert torch.equal(convolve_stream(conv, x[row : row + 1])[0], output[row])
    longer = torch.cat([x[:1], x[1:2]], 2)  # what lies before and behind has no part in it
    assert torch.equal(convolve_stream(conv, longer)[0, :, : output.shape[2]], output[0])


@pytest.mark.parametrize(("pairs", "frames", "group"), [(21, 20, 16), (21, 1280, 112), (41, 640, 112), (21, 5000, 176)])
def test_blocks_of_streams_run_at_once(pairs: int, frames: int, group: int) -> None:
    assert op._group(pairs, frames, 132) == group


@pytest.mark.gpu
@pytest.mark.hopper
@pytest.mark.parametrize(
    ("batch", "bins", "frames", "taps"),
    [(4, 81, 350, (21, 11)), (3, 80, 353, (21, 11)), (2, 7, 1000, (9, 5)), (1, 1, 1, (21, 11)), (5, 161, 33, (5, 1))],
)
def test_passes_on_a_gpu(batch: int, bins: int, frames: int, taps: tuple[int, int]) -> None:
    x, weight = draw(batch, 32, bins, frames), draw(32, 32, *taps, seed=2)
    grad_y = draw(batch, 32, -(-bins // 2), frames, seed=3)
    on_gpu = [t.cuda().requires_grad_() for t in (x, weight)]
    assert why_not(*on_gpu, (2, 1)) is None
    runs = []
    for _ in range(2):
        y = convolve(*on_gpu, (2, 1))
        runs.append([y, *torch.autograd.grad(y, on_gpu, grad_y.cuda())])
    for one, other in zip(*runs, strict=True):
        assert torch.equal(one, other)
    terms = (32 * taps[0] * taps[1], 16 * taps[0] * taps[1], grad_y[:, 0].numel())
    for got, expected, count in zip(runs[0], answers(x, weight, grad_y), terms, strict=True):
        check(got.detach(), expected, count)


@pytest.mark.parametrize("group", [16, 32])
def test_kernels_of_streams_compile_without_spills_or_waits(group: int) -> None:
    for launch in (op.correlation_launch(21, 1, 20, 11, group), op.correlation_launch(41, 1, 10, 1, group)):
        compiled = report(launch.source.text)
        assert compiled.local_bytes == 0 and not compiled.loss


@pytest.mark.parametrize("group", [64, 112, 176])
def test_kernels_compile_without_spills_or_waits(group: int) -> None:
    launches = op.correlation_launch(21, 4, 350, 11, group), op.weight_sums_launch(11, 12, 11, 2 * group)
    for launch in (*launches, op.correlation_launch(41, 4, 350, 1, group), op.bin_sums_launch(11, 132)):
        compiled = report(launch.source.text)
        assert compiled.local_bytes == 0 and not compiled.loss
        assert launch.smem_bytes <= 232448


@pytest.mark.parametrize(("frames", "group"), [(350, 176), (1, 64), (128, 64), (700, 176), (360, 96)])
def test_tiles_leave_little_empty(frames: int, group: int) -> None:
    assert frames_of_group(frames) == group


def test_what_the_kernels_cannot_do_is_named() -> None:
    x, weight = draw(1, 32, 4, 4), draw(32, 32, 5, 3)
    assert "need a CUDA GPU" in str(why_not(x, weight, (2, 1)))


def test_weights_are_packed_with_gradients_after_inference_mode() -> None:
    weight = draw(32, 32, 5, 3).requires_grad_()
    op._index.cache_clear()
    with torch.inference_mode():
        wanted = pack(weight, 2, backward=False)
    found = pack(weight, 2, backward=False)
    assert torch.equal(found, wanted)
    found.float().sum().backward()
    assert weight.grad is not None and (weight.grad == 2).all()  # each lies in both bins of a pair
