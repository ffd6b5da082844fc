"""What the tests of the persistent kernels share: inputs, both passes through them, and their equations as loops."""

from collections.abc import Sequence

import torch
from ds2_ops.jit.launch import Source
from ds2_ops.recurrent.backends import persistent
from ds2_ops.recurrent.cells import Options
from ds2_ops.recurrent.plan.choose import grid_choices
from ds2_ops.recurrent.plan.problem import Choice, DeviceFacts, Problem
from torch import Tensor

from support.op_cases import CUDA, draw

CLIP = 1.0
H200 = DeviceFacts()
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


def inputs(
    shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device = CUDA
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x, weight_hh, h0, grad_y, grad_h_n."""
    _, batch, hidden = shape
    x, grad_y = (draw(seed, *shape, device=device, dtype=dtype) for seed in (1, 4))
    h0, grad_h_n = (draw(seed, batch, hidden, device=device, dtype=dtype) for seed in (3, 5))
    return x, draw(2, hidden, hidden, device=device, dtype=dtype, scale=0.9 * hidden**-0.5), h0, grad_y, grad_h_n


def forward(
    x: Tensor, weight_hh: Tensor, h0: Tensor | None, lengths: Tensor | None, options: Options
) -> tuple[Tensor, Tensor]:
    """y and h_n of a cell of one gate on the persistent kernels."""
    return persistent.forward(x, weight_hh, None, h0, None, lengths, options)[:2]


def backward_data(
    grad_y: Tensor, grad_h_n: Tensor | None, y: Tensor, weight_hh: Tensor, lengths: Tensor | None, options: Options
) -> tuple[Tensor, Tensor]:
    """Gradients of x and h0 of a cell of one gate on the persistent kernels."""
    grad_x, _, grad_h0, _ = persistent.backward_data(grad_y, grad_h_n, None, y, None, weight_hh, lengths, options)
    return grad_x, grad_h0


def run(
    tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor], lengths: Tensor | None, nonlinearity: str
) -> list[Tensor]:
    x, weight_hh, h0, grad_y, grad_h_n = tensors
    options = Options(nonlinearity, CLIP)
    y, h_n = forward(x, weight_hh, h0, lengths, options)
    return [y, h_n, *backward_data(grad_y, grad_h_n, y, weight_hh, lengths, options)]


def assert_split_in_time_gives_the_same_bits(
    shape: tuple[int, int, int], dtype: torch.dtype, cuts: Sequence[int]
) -> None:
    x, weight_hh, h0, _, _ = inputs(shape, dtype)
    options = Options("tanh", CLIP)
    whole, last = forward(x, weight_hh, h0, None, options)
    for cut in cuts:
        head, state = forward(x[:cut], weight_hh, h0, None, options)
        tail, end = forward(x[cut:], weight_hh, state, None, options)
        assert torch.equal(torch.cat([head, tail]), whole)
        assert torch.equal(end, last)


def assert_few_multiprocessors_give_the_same_bits(shape: tuple[int, int, int], max_sms: int) -> None:
    x, weight_hh, h0, _, _ = inputs(shape, torch.bfloat16)
    options = Options("relu", CLIP)
    everything = forward(x, weight_hh, h0, None, options)
    fewer = forward(x, weight_hh, h0, None, options._replace(max_sms=max_sms))
    assert all(torch.equal(a, b) for a, b in zip(everything, fewer, strict=True))
