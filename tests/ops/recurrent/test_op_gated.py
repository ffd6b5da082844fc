"""LSTM and GRU against float64, torch.nn and themselves split in time; and what they refuse."""

import itertools
from typing import Any

import pytest
import torch
from ds2_ops import gru, lstm, recurrence
from ds2_ops.recurrent.autograd import backward_data, forward
from ds2_ops.recurrent.cells import CELLS, GATED
from support.gated_cases import NAMES, assert_as_good_as_stock, gated, on_every_target, problem, rounding_floor, run
from support.op_cases import (
    CPU,
    CUDA,
    assert_replays,
    assert_same_bits,
    default_dtype,
    draw,
    nan_filled_memory,
    poison_padding,
    ragged_lengths,
)
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

SHAPES = [(1, 3, 16), (1, 1, 5), (6, 1, 33), (5, 4, 64), (4, 19, 7)]  # T = 1, B = 1, both, odd sizes
each_cell = pytest.mark.parametrize("cell", GATED)


@on_every_target
@each_cell
@pytest.mark.parametrize("ragged", [False, True])
def test_error_is_at_most_twice_that_of_stock_pytorch(
    device: torch.device, backend: str, cell: str, ragged: bool
) -> None:
    for shape, dtype in itertools.product(SHAPES, (torch.float32, torch.bfloat16)):
        lengths = ragged_lengths(shape[0], shape[1]).to(device) if ragged else None
        given = problem(cell, shape, device, dtype)
        floor = rounding_floor(backend, dtype)
        assert_as_good_as_stock(cell, lambda: run(cell, *given, lengths, backend=backend), *given, lengths, floor)  # noqa: B023


@pytest.mark.parametrize("cell", GATED)
def test_gradients_by_finite_differences(cell: str) -> None:
    inputs, _ = problem(cell, (3, 3, 2), CPU, torch.float64)
    leaves = [None if t is None else t.requires_grad_() for t in inputs]
    lengths = torch.tensor([3, 2, 0])
    used = slice(0, 3 if GATED[cell].carries_c else 2)
    assert torch.autograd.gradcheck(lambda *given: gated(cell, *given, lengths)[used], leaves)


@on_every_target
@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_agrees_with_torch_nn(device: torch.device, backend: str, cell: str) -> None:
    frames, batch, hidden = 8, 3, 24
    x = draw(1, frames, batch, hidden, device=device, dtype=torch.float32)
    lengths = ragged_lengths(frames, batch).clamp_min(1)  # packed sequences cannot be empty
    torch.manual_seed(0)
    peer = {"lstm": nn.LSTM, "gru": nn.GRU}[cell](hidden, hidden).to(device)

    def ours(
        x: Tensor, weight_ih: Tensor, weight_hh: Tensor, bias_ih: Tensor, bias_hh: Tensor
    ) -> tuple[Tensor, Tensor]:
        given = nn.functional.linear(x, weight_ih, bias_ih)
        if cell == "lstm":
            return lstm(given + bias_hh, weight_hh, lengths=lengths, backend=backend)[:2]
        given = torch.cat([given[..., : 2 * hidden] + bias_hh[: 2 * hidden], given[..., 2 * hidden :]], dim=2)
        return gru(given, weight_hh, bias_hh[2 * hidden :], lengths=lengths, backend=backend)

    def theirs(x: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor]:
        names = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
        packed = pack_padded_sequence(x, lengths, enforce_sorted=False)
        y, last = torch.func.functional_call(peer, dict(zip(names, weights, strict=True)), (packed,))
        return pad_packed_sequence(y, total_length=frames)[0], (last[0] if cell == "lstm" else last)[0]

    weights = [x, *(p.detach() for p in peer.parameters())]
    torch.backends.cudnn.allow_tf32 = backend == "persistent"
    results = []
    for op in (ours, theirs):
        leaves = [t.clone().requires_grad_() for t in weights]
        y, h_n = op(*leaves)
        results.append([y, h_n, *torch.autograd.grad((y.cos().sum() + h_n.sin().sum()), leaves)])
    tolerance = 5e-3 if backend == "persistent" else 1e-5
    for our, their in zip(*results, strict=True):
        torch.testing.assert_close(our, their, rtol=tolerance, atol=tolerance * float(their.abs().max()))


@on_every_target
@each_cell
def test_a_split_in_time_gives_the_same_bits(device: torch.device, backend: str, cell: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        (x, *others), _ = problem(cell, (5, 3, 40), device, dtype)
        weight_hh, bias, h0, c0 = others
        whole = gated(cell, x, weight_hh, bias, h0, c0, None, backend=backend)
        for cut in range(len(x) + 1):
            first, h, c = gated(cell, x[:cut], weight_hh, bias, h0, c0, None, backend=backend)
            second, h, c = gated(
                cell, x[cut:], weight_hh, bias, h, c if c0 is not None else None, None, backend=backend
            )
            assert_same_bits([torch.cat([first, second]), h, c], whole)


@on_every_target
@each_cell
def test_padding_and_batch_mates_never_matter(device: torch.device, backend: str, cell: str) -> None:
    frames, batch, hidden = 6, 5, 40
    lengths = ragged_lengths(frames, batch).to(device)
    (x, *others), (grad_y, *last) = problem(cell, (frames, batch, hidden), device, torch.bfloat16)
    clean = run(cell, [x, *others], [grad_y, *last], lengths, backend=backend)
    padded = [poison_padding(x, lengths), *others], [poison_padding(grad_y, lengths), *last]
    with nan_filled_memory():
        assert_same_bits(run(cell, *padded, lengths, backend=backend), clean)
    for row, length in enumerate(lengths.tolist()):
        mates = x.clone()
        mates[:, torch.arange(batch) != row] *= -3
        among_others = run(cell, [mates, *others], [grad_y, *last], lengths, backend=backend)
        for name, ours, theirs in zip(NAMES[cell], among_others, clean, strict=True):
            if name in ("y", "grad_x"):
                assert not theirs[length:, row].any()
                assert torch.equal(ours[:, row], theirs[:, row]), name


@on_every_target
@each_cell
@pytest.mark.parametrize("ragged", [False, True])
def test_default_tensors_of_torch_do_not_matter(device: torch.device, backend: str, cell: str, ragged: bool) -> None:
    lengths = ragged_lengths(6, 3).to(device) if ragged else None
    inputs, cotangents = problem(cell, (6, 3, 8), device, torch.float32)
    plain = run(cell, inputs, cotangents, lengths, backend=backend)
    with default_dtype(torch.float64), torch.device("meta"):
        assert_same_bits(run(cell, inputs, cotangents, lengths, backend=backend), plain)


@on_every_target
@each_cell
def test_without_gradients_the_same_bits(device: torch.device, backend: str, cell: str) -> None:
    inputs, cotangents = problem(cell, (4, 3, 24), device, torch.bfloat16)
    with torch.no_grad():
        alone = gated(cell, *inputs, None, backend=backend)
    assert_same_bits(alone[:2], run(cell, inputs, cotangents, None, backend=backend)[:2])


@on_every_target
@each_cell
def test_nothing_to_run(device: torch.device, backend: str, cell: str) -> None:
    backend = "auto" if backend == "persistent" else backend
    for shape in ((0, 3, 8), (4, 0, 8)):
        inputs, cotangents = problem(cell, shape, device, torch.float32)
        results = dict(zip(NAMES[cell], run(cell, inputs, cotangents, None, backend=backend), strict=True))
        assert results["y"].shape == shape
        assert not results["grad_weight_hh"].any()
        if shape[0] == 0:
            assert torch.equal(results["h_n"], inputs[3]) and torch.equal(results["grad_h0"], cotangents[1])


@each_cell
def test_registered_ops_pass_opcheck(cell: str) -> None:
    inputs, cotangents = problem(cell, (3, 2, 4), CPU, torch.float32)
    leaves = [None if t is None else t.requires_grad_() for t in inputs]
    lengths = torch.tensor([3, 1], dtype=torch.int32)
    options = (cell, 20.0, "cpu", None)
    torch.library.opcheck(forward, (*leaves, lengths, *options, True))
    y, _, _, saved = (t.detach() for t in forward(*leaves, lengths, *options, True))
    grads = (cotangents[0], cotangents[1], cotangents[2] if GATED[cell].carries_c else None)
    torch.library.opcheck(backward_data, (*grads, y, saved, leaves[1].detach(), lengths, *options))


@each_cell
@pytest.mark.parametrize("frames", [0, 3])
def test_compiled_is_eager(cell: str, frames: int) -> None:
    inputs, cotangents = problem(cell, (frames, 2, 4), CPU, torch.float32)
    eager = run(cell, inputs, cotangents, None, backend="cpu")
    compiled = torch.compile(
        lambda *given: gated(cell, *given, None, backend="cpu"), fullgraph=True, backend="aot_eager"
    )
    leaves = [None if t is None else t.clone().requires_grad_() for t in inputs]
    outputs = compiled(*leaves)[: len(cotangents)]
    gradients = torch.autograd.grad(outputs, [t for t in leaves if t is not None], cotangents)
    assert_same_bits([*outputs, *gradients], eager)


@pytest.mark.parametrize("cell", [*GATED, "relu"])
def test_sizes_may_be_symbols(cell: str) -> None:
    rows = 8 * CELLS[cell].gates
    x, weight_hh = (
        draw(i, *shape, device=CPU, dtype=torch.float32) for i, shape in enumerate(((5, 2, rows), (rows, 8)))
    )

    def op(x: Tensor, weight_hh: Tensor) -> Tensor:
        if cell == "relu":
            return recurrence(x, weight_hh, nonlinearity=cell)[0]
        return gated(cell, x, weight_hh, None, None, None, None)[0]

    traced = make_fx(op, tracing_mode="symbolic")(x, weight_hh)
    assert_same_bits([traced(x, weight_hh)], [op(x, weight_hh)])


def test_autocast_casts_all_but_c() -> None:
    (x, weight_hh, _, h0, c0), _ = problem("lstm", (3, 2, 8), CPU, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y, h_n, c_n = lstm(x, weight_hh, h0, c0)
    assert (y.dtype, h_n.dtype, c_n.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)


X, W, H0 = torch.zeros(3, 2, 32), torch.zeros(32, 8), torch.zeros(2, 8)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (
            {"x": torch.zeros(3, 2, 40)},
            ValueError,
            r"must be pre-activations \(T, B, 32\), .* ds2_ops.RNN, LSTM and GRU",
        ),
        ({"x": torch.zeros(3, 2, 30)}, ValueError, r"expected \(T, B, 4 H\): 4 gates"),
        ({"x": X.long()}, TypeError, "x is torch.int64, allowed are"),
        (
            {"weight_hh": torch.zeros(8, 8)},
            ValueError,
            r"weight_hh has shape \(8, 8\), expected \(4 H, H\) = \(32, 8\)",
        ),
        ({"weight_hh": W.double()}, TypeError, "weight_hh is torch.float64 but x is torch.float32"),
        ({"h0": torch.zeros(3, 8)}, ValueError, r"h0 has shape \(3, 8\), expected \(B, H\) = \(2, 8\)"),
        ({"c0": torch.zeros(2, 7)}, ValueError, r"c0 has shape \(2, 7\)"),
        ({"c0": H0.bfloat16()}, TypeError, "c0 is torch.bfloat16, expected torch.float32: the cell state is never"),
        ({"lengths": torch.tensor([3])}, ValueError, r"lengths has shape \(1,\)"),
        ({"lengths": torch.tensor([3, 4])}, ValueError, r"lengths\[1\] is 4, allowed are 0 to T = 3"),
        ({"backend": "persistant"}, ValueError, "did you mean 'persistent'"),
        ({"backend": "persistent"}, RuntimeError, "need a CUDA GPU"),
        ({"max_sms": 0}, ValueError, "max_sms is 0, allowed are 1 or more"),
    ],
)
def test_wrong_arguments_say_what_is_allowed(given: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        lstm(**{"x": X, "weight_hh": W, **given})


def test_a_wrong_bias_of_the_gru_is_refused() -> None:
    with pytest.raises(ValueError, match=r"bias_hn has shape \(24,\), expected \(H,\) = \(8,\)"):
        gru(torch.zeros(3, 2, 24), torch.zeros(24, 8), torch.zeros(24))


def test_a_second_derivative_is_refused() -> None:
    inputs, _ = problem("lstm", (2, 1, 4), CPU, torch.float64)
    x = inputs[0].requires_grad_()  # type: ignore[union-attr]
    y, _, _ = lstm(x, inputs[1])  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


@pytest.mark.gpu
@each_cell
def test_a_cuda_graph_replays_the_same_bits(cell: str) -> None:
    shape = (8, 9, 512)
    inputs, cotangents = problem(cell, shape, CUDA, torch.bfloat16)
    lengths = ragged_lengths(8, 9).to(CUDA).int()
    assert_replays(lambda: run(cell, inputs, cotangents, lengths, backend="persistent"))
