"""What the tests of the persistent kernels share: inputs, both passes through them, and their equations as loops."""

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from ds2_ops.jit.launch import Source
from ds2_ops.recurrent.backends import persistent
from ds2_ops.recurrent.cells import Options
from ds2_ops.recurrent.plan.choose import grid_choices
from ds2_ops.recurrent.plan.devices import DEVICES
from ds2_ops.recurrent.plan.problem import Choice, Problem
from torch import Tensor

from support.op_cases import (
    CUDA,
    assert_same_bits,
    draw,
    nan_filled_memory,
    poison_padding,
    ragged_lengths,
    relative_error,
)
from support.rounding import Arithmetic, allowed_against_stock, variances

Tensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # x, weight_hh, h0, grad_y, grad_h_n
CLIP = 1.0
H200 = DEVICES["H200"]
LARGEST_GRID_HIDDEN = {"bfloat16": 4224, "float16": 4224, "float32": 3072}  # of the whole-chip designs on it
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
TF32_ERROR = 1e-3  # the bound for fp32, whose products go through TF32


def grid_choices_of(
    hidden: int,
    batch: int,
    dtype: str = "bfloat16",
    sms: int = H200.sms,
    *,
    cell: str = "clipped_relu",
    backward: bool = False,
) -> list[Choice]:
    """Tiles of the whole-chip designs on an H200, for a problem given by its parts."""
    return grid_choices(Problem(batch, hidden, dtype, cell, backward), H200, sms)


def one_a_kernel(choices: list[Choice]) -> list[Choice]:
    """Of the choices that differ only in how they cut the batch, the first."""
    kernels: dict[Source, Choice] = {}
    for choice in choices:
        kernels.setdefault(choice.launch.source, choice)
    return list(kernels.values())


def one_a_layout(choices: list[Choice]) -> list[Choice]:
    """Of each layout, as portable tiles of one block and of each size of a team, the one that the model likes best."""
    best = sorted(choices, key=lambda choice: choice.step_us, reverse=True)
    return list({choice.work.layout: choice for choice in best}.values())


def slope(y: Tensor, nonlinearity: str) -> Tensor:
    if nonlinearity == "tanh":
        return 1 - y * y
    return ((y > 0) & (y < (CLIP if nonlinearity == "clipped_relu" else torch.inf))).to(y.dtype)


def forward_loop(x: Tensor, weight_hh: Tensor, h0: Tensor, lengths: Tensor, nonlinearity: str) -> tuple[Tensor, Tensor]:
    """The forward equation in the dtype of x; padding of x must be finite."""
    h, outputs, last = h0, [], h0
    for t, frame in enumerate(x):
        pre = frame + h @ weight_hh.t()
        h = {"relu": pre.relu(), "clipped_relu": pre.clamp(0, CLIP), "tanh": pre.tanh()}[nonlinearity]
        outputs.append(h * (lengths > t)[:, None])
        last = torch.where((lengths == t + 1)[:, None], h, last)
    return torch.stack(outputs), last


def backward_loop(
    grad_y: Tensor, grad_h_n: Tensor, y: Tensor, weight_hh: Tensor, lengths: Tensor, nonlinearity: str
) -> tuple[Tensor, Tensor]:
    """The backward equation in the dtype of grad_y, with the slopes of the given y: no kink can differ."""
    grad_h, grads = torch.zeros_like(grad_h_n), []
    for t in reversed(range(len(y))):
        last = (lengths == t + 1)[:, None] * grad_h_n
        grad_h = (grad_y[t] + last + grad_h @ weight_hh) * slope(y[t], nonlinearity) * (lengths > t)[:, None]
        grads.append(grad_h)
    return torch.stack(grads[::-1]), torch.where((lengths == 0)[:, None], grad_h_n, grad_h @ weight_hh)


def inputs(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device = CUDA) -> Tensors:
    """Inputs whose states neither die nor explode, and gradients of y and h_n."""
    _, batch, hidden = shape
    x, grad_y = (draw(seed, *shape, device=device, dtype=dtype) for seed in (1, 4))
    h0, grad_h_n = (draw(seed, batch, hidden, device=device, dtype=dtype) for seed in (3, 5))
    return x, draw(2, hidden, hidden, device=device, dtype=dtype, scale=0.9 * hidden**-0.5), h0, grad_y, grad_h_n


def forward(
    x: Tensor, weight_hh: Tensor, h0: Tensor | None, lengths: Tensor | None, options: Options
) -> tuple[Tensor, Tensor]:
    """y and h_n of a cell of one gate on the persistent kernels."""
    return persistent.forward((x, weight_hh, None, h0, None, lengths), options)[:2]


def backward_data(
    grad_y: Tensor, grad_h_n: Tensor | None, y: Tensor, weight_hh: Tensor, lengths: Tensor | None, options: Options
) -> tuple[Tensor, Tensor]:
    """Gradients of x and h0 of a cell of one gate on the persistent kernels."""
    grad_x, _, grad_h0, _ = persistent.backward_data((grad_y, grad_h_n, None, y, None, weight_hh, lengths), options)
    return grad_x, grad_h0


def run(tensors: Tensors, lengths: Tensor | None, nonlinearity: str) -> list[Tensor]:
    """y, h_n, and the gradients of x and h0 of a cell of one gate on the persistent kernels."""
    x, weight_hh, h0, grad_y, grad_h_n = tensors
    options = Options(nonlinearity, CLIP)
    y, h_n = forward(x, weight_hh, h0, lengths, options)
    return [y, h_n, *backward_data(grad_y, grad_h_n, y, weight_hh, lengths, options)]


def each_tile(
    monkeypatch: pytest.MonkeyPatch,
    tiles: Callable[[Problem], list[Choice]],
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    cell: str,
) -> Iterator[int]:
    """Let the persistent backend run each tile in turn, the last where a pass has fewer; yields their numbers."""
    problem = Problem(*shape[1:], str(dtype).removeprefix("torch."), cell, False)
    count = max(len(tiles(problem)), len(tiles(problem._replace(backward=True))))
    assert count > 0
    for number in range(count):

        def choose(problem: Problem, *_: object, number: int = number) -> Choice:
            choices = tiles(problem)
            return choices[min(number, len(choices) - 1)]

        monkeypatch.setattr(persistent, "choose_tile", choose)
        yield number


def assert_near_float64(tensors: Tensors, lengths: Tensor, cell: str) -> Callable[[Sequence[Tensor]], None]:
    """Return the check of results of `run`: their error is at most twice that of stock products, or rounding's."""
    x, weight_hh, h0, grad_y, grad_h_n = tensors
    truth = forward_loop(x.double(), weight_hh.double(), h0.double(), lengths, cell)
    stock = forward_loop(x, weight_hh, h0, lengths, cell)
    problem = (x, weight_hh, h0), (grad_y, grad_h_n), lengths, cell, CLIP
    may = variances(Arithmetic.of(x.dtype), *problem, of_weight=False)

    def check(ours: Sequence[Tensor]) -> None:
        backward = (grad_y, grad_h_n, ours[0], weight_hh)
        true = truth + backward_loop(*(tensor.double() for tensor in backward), lengths, cell)
        other = stock + backward_loop(*backward, lengths, cell)
        for name, our, t, s, v in zip(("y", "h_n", "grad_x", "grad_h0"), ours, true, other, may, strict=True):
            allowed = TF32_ERROR if x.dtype == torch.float32 else allowed_against_stock(s, t, v)
            assert relative_error(our, t) <= allowed, name

    return check


def check_each_tile(
    monkeypatch: pytest.MonkeyPatch,
    tiles: Callable[[Problem], list[Choice]],
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    cell: str,
) -> None:
    """Run each tile twice in memory of NaN, on arrays with NaN at padding: the same bits, near those of float64."""
    lengths = ragged_lengths(*shape[:2]).to(CUDA, torch.int32)
    x, weight_hh, h0, grad_y, grad_h_n = tensors = inputs(shape, dtype)
    poisoned = (poison_padding(x, lengths), weight_hh, h0, poison_padding(grad_y, lengths), grad_h_n)
    check = assert_near_float64(tensors, lengths, cell)
    for _ in each_tile(monkeypatch, tiles, shape, dtype, cell):
        with nan_filled_memory():
            ours, again = run(poisoned, lengths, cell), run(poisoned, lengths, cell)
        assert_same_bits(ours, again)
        check(ours)
