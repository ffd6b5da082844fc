"""The row convolution against float64, grouped convolution, itself in chunks, and what it must refuse."""

import functools
import itertools
import logging
from collections.abc import Callable
from dataclasses import replace

import ds2_ops.row_convolution as op
import pytest
import torch
from ds2_ops import lookahead
from ds2_ops.row_convolution import _backward, _forward, lookahead_reference
from support.op_cases import (
    CPU,
    CUDA,
    assert_same_bits,
    draw,
    nan_filled_memory,
    on_cpu,
    on_gpu,
    outputs_and_gradients,
    poison_padding,
    ragged_lengths,
    relative_error,
)
from support.rounding import Arithmetic, allowed_against_stock, lookahead_variances, relative_bound, worst_share
from torch import Tensor

TARGETS = [on_cpu("shift"), on_cpu("reference"), on_gpu("triton"), on_gpu("shift")]
SHAPES = [(1, 3, 16, 3), (9, 1, 33, 1), (50, 4, 64, 6), (13, 5, 7, 20), (4, 2, 24, 6), (140, 3, 40, 20)]  # T, B, H, K
FEW = [((50, 4, 64, 6), torch.float16), ((140, 3, 40, 20), torch.float32), ((50, 4, 64, 6), torch.bfloat16)]
NAMES = ("y", "grad_x", "grad_weight")
on_every_target = pytest.mark.parametrize(("device", "backend"), TARGETS)


def cases(device: torch.device, wide: bool = True) -> list[tuple[tuple[int, int, int, int], torch.dtype]]:
    """Shapes and dtypes to try: all of them on a CPU; on a GPU, where each pair builds kernels, fewer unless wide."""
    if device.type == "cpu":
        return list(itertools.product(SHAPES, (torch.float32, torch.bfloat16)))
    shapes = [*SHAPES, (350, 8, 1152, 6), (700, 3, 515, 20), (100, 2, 256, 32)] if wide else []
    return FEW + [(shape, torch.bfloat16) for shape in shapes]


def problem(
    shape: tuple[int, int, int, int], device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    frames, batch, hidden, taps = shape
    x, grad_y = (draw(seed, frames, batch, hidden, device=device, dtype=dtype) for seed in (1, 2))
    return x, draw(3, hidden, taps, device=device, dtype=dtype), grad_y


def bind(lengths: Tensor | None, backend: str) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, weight: lookahead(x, weight, lengths, backend=backend)


def arithmetic(dtype: torch.dtype, backend: str) -> Arithmetic:
    """What a backend rounds; the reference sums in the dtype that it is given, the others in float32."""
    by_type = Arithmetic.of(dtype)
    return replace(by_type, inner=by_type.stored) if backend == "reference" else by_type


def stock(x: Tensor, weight: Tensor) -> Tensor:
    """The same sum as PyTorch's own grouped convolution."""
    padded = torch.nn.functional.pad(x.permute(1, 2, 0), (0, weight.shape[1] - 1))
    return torch.nn.functional.conv1d(padded, weight[:, None], groups=len(weight)).permute(2, 0, 1)


@on_every_target
def test_error_is_at_most_twice_that_of_stock_pytorch(device: torch.device, backend: str) -> None:
    """On a GPU, unless rounding explains more; on a CPU, what rounding alone explains, frame by frame."""
    for shape, dtype in cases(device):
        x, weight, grad_y = problem(shape, device, dtype)
        ours = outputs_and_gradients(bind(None, backend), [x, weight], [grad_y])
        theirs = outputs_and_gradients(stock, [x, weight], [grad_y])
        truth = outputs_and_gradients(lookahead_reference, [x.double(), weight.double()], [grad_y.double()])
        may = lookahead_variances(arithmetic(dtype, backend), [x, weight], [grad_y], truth)
        for name, our, their, true, variance in zip(NAMES, ours, theirs, truth, may, strict=True):
            assert our.dtype == dtype and our.shape == true.shape
            what = f"{name} of {shape} {dtype}"
            if device.type == "cpu":
                assert worst_share([our], [true], [variance]) <= 1, what
            else:
                assert relative_error(our, true) <= allowed_against_stock(their, true, variance), what


@on_every_target
def test_padding_and_batch_mates_never_matter(device: torch.device, backend: str) -> None:
    for shape, dtype in cases(device, wide=False):
        lengths = ragged_lengths(*shape[:2]).to(device)
        x, weight, grad_y = problem(shape, device, dtype)
        clean = outputs_and_gradients(bind(lengths, backend), [x, weight], [grad_y])
        doubles = [x.double(), weight.double()], [grad_y.double()]
        masked = outputs_and_gradients(functools.partial(lookahead_reference, lengths=lengths), *doubles)
        variance = lookahead_variances(arithmetic(dtype, backend), [x, weight], [grad_y], masked)
        poisoned = outputs_and_gradients(
            bind(lengths, backend),
            [poison_padding(x, lengths), weight],
            [poison_padding(grad_y, lengths)],
        )
        assert_same_bits(poisoned, clean)
        for row, length in enumerate(lengths.tolist()):
            assert not clean[0][length:, row].any() and not clean[1][length:, row].any()
            alone = outputs_and_gradients(
                bind(None, backend),
                [x[:length, row, None], weight],
                [grad_y[:length, row, None]],
            )
            for ours, alone_too, may in zip(clean[:2], alone, variance, strict=False):
                # Ends of vectors may be computed otherwise than their middles: each computation has its own roundings.
                allowed = relative_bound(alone_too, 2 * may[:length, row])
                assert relative_error(ours[:length, row], alone_too[:, 0]) <= allowed


@on_every_target
def test_every_element_is_written_and_two_runs_agree(device: torch.device, backend: str) -> None:
    for shape, dtype in cases(device, wide=False):
        x, weight, grad_y = problem(shape, device, dtype)
        lengths = ragged_lengths(*shape[:2])
        first = outputs_and_gradients(bind(lengths, backend), [x, weight], [grad_y])
        with nan_filled_memory():
            second = outputs_and_gradients(bind(lengths, backend), [x, weight], [grad_y])
        assert_same_bits(second, first)


@pytest.mark.parametrize("block_frames", [1, 4, 12])
def test_blocks_of_time_do_not_show(block_frames: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for taps in (1, 6, 20):
        x, weight, grad_y = problem((30, 2, 8, taps), CPU, torch.float32)
        whole = outputs_and_gradients(bind(None, "shift"), [x, weight], [grad_y])
        with monkeypatch.context() as patch:
            patch.setattr(op, "_BLOCK_ELEMENTS", {"cpu": block_frames * 2 * 8})
            cut = outputs_and_gradients(bind(None, "shift"), [x, weight], [grad_y])
        assert_same_bits(cut[:2], whole[:2])
        assert relative_error(cut[2], whole[2]) < 1e-6


@pytest.mark.parametrize(("device", "backend"), [on_cpu("shift"), on_gpu("triton"), on_gpu("shift")])
def test_a_sink_receives_the_function_that_makes_the_weights_gradient(device: torch.device, backend: str) -> None:
    x, weight, grad_y = problem((50, 4, 64, 6), device, torch.bfloat16)
    y, grad_x, grad_weight = outputs_and_gradients(bind(None, backend), (x, weight), (grad_y,))
    made: list[Callable[[], Tensor]] = []
    inputs = [t.clone().requires_grad_() for t in (x, weight)]
    again = lookahead(*inputs, backend=backend, sink=made.append)
    again.backward(grad_y)
    assert inputs[0].grad is not None and inputs[1].grad is None
    assert torch.equal(again, y) and torch.equal(inputs[0].grad, grad_x)
    assert len(made) == 1 and torch.equal(made[0]().to(torch.bfloat16), grad_weight)


def test_gradcheck_of_the_op() -> None:
    x, weight, _ = problem((6, 3, 5, 3), CPU, torch.float64)
    lengths = torch.tensor([6, 4, 0])
    leaves = (x.requires_grad_(), weight.requires_grad_())
    assert torch.autograd.gradcheck(lambda x, weight: lookahead(x, weight, lengths), leaves)


@pytest.mark.parametrize("device", [CPU, pytest.param(CUDA, marks=pytest.mark.gpu)])
def test_is_a_sound_torch_op_and_compiles_without_a_graph_break(device: torch.device) -> None:
    x, weight, grad_y = problem((6, 3, 16, 4), device, torch.float32)
    lengths = torch.tensor([6, 4, 0], device=device, dtype=torch.int32)
    torch.library.opcheck(_forward, (x.clone().requires_grad_(), weight.clone().requires_grad_(), lengths, "auto"))
    torch.library.opcheck(
        _backward,
        (grad_y, x, weight, lengths, "auto"),
        test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
    )

    def layer(x: Tensor, weight: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            return lookahead(x * 2, weight, lengths).float() + 1

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    expected = outputs_and_gradients(layer, [x, weight], [grad_y])
    assert_same_bits(outputs_and_gradients(compiled, [x, weight], [grad_y]), expected)


def test_no_frames_and_no_utterances() -> None:
    weight = torch.randn(4, 3, requires_grad=True)
    for shape in ((0, 2, 4), (3, 0, 4)):
        y = lookahead(torch.zeros(shape), weight)
        assert y.shape == shape
        assert torch.equal(torch.autograd.grad(y.sum(), weight)[0], torch.zeros(4, 3))


@pytest.mark.parametrize(
    ("x", "weight", "options", "error", "message"),
    [
        (torch.zeros(3, 4), torch.zeros(4, 2), {}, ValueError, r"x has shape \(3, 4\), expected \(T, B, H\)"),
        (torch.zeros(3, 2, 4), torch.zeros(5, 2), {}, ValueError, r"weight has shape \(5, 2\), .* with H = 4"),
        (torch.zeros(3, 2, 4), torch.zeros(4, 0), {}, ValueError, r"weight has shape \(4, 0\)"),
        (torch.zeros(3, 2, 4), torch.zeros(4, 2).half(), {}, TypeError, "weight is torch.float16 but x is"),
        (torch.zeros(3, 2, 4), torch.zeros(4, 2), {"lengths": torch.tensor([1, 9])}, ValueError, r"lengths\[1\] is 9"),
        (torch.zeros(3, 2, 4), torch.zeros(4, 2), {"backend": "tritn"}, ValueError, "did you mean 'triton'"),
        (torch.zeros(3, 2, 4), torch.zeros(4, 2), {"backend": "triton"}, RuntimeError, "x is on cpu.*'shift'"),
    ],
)
def test_bad_input_is_refused_with_the_way_out(
    x: Tensor, weight: Tensor, options: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        lookahead(x, weight, **options)


@pytest.mark.gpu
def test_more_taps_than_the_kernel_holds_fall_back_and_say_so(caplog: pytest.LogCaptureFixture) -> None:
    x, weight, grad_y = problem((60, 2, 16, 40), CUDA, torch.float32)
    with pytest.raises(RuntimeError, match="40 taps, the Triton kernels hold at most 32"):
        lookahead(x, weight, backend="triton")
    with caplog.at_level(logging.INFO, logger="ds2_ops"):
        ours = outputs_and_gradients(lookahead, [x, weight], [grad_y])
    assert "40 taps" in caplog.text
    truth = outputs_and_gradients(lookahead_reference, [x.double(), weight.double()], [grad_y.double()])
    for our, true in zip(ours, truth, strict=True):
        assert relative_error(our, true) < 1e-6
