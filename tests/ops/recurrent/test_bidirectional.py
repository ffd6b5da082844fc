"""Both directions of a layer against float64, torch.nn and one direction after the other; and what is refused."""

import itertools
from typing import Any

import pytest
import torch
from ds2_ops import bidirectional, recurrence
from ds2_ops.checks import reverse_time
from ds2_ops.recurrent import op
from ds2_ops.recurrent.backends import gemm, persistent
from ds2_ops.recurrent.cells import CELLS
from support.gated_cases import on_every_target, rounding_floor
from support.op_cases import (
    CPU,
    CUDA,
    assert_replays,
    assert_same_bits,
    draw,
    nan_filled_memory,
    outputs_and_gradients,
    ragged_lengths,
    relative_error,
)
from support.sinks import like
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

SHAPES = [(1, 3, 16), (6, 1, 33), (5, 4, 64), (4, 19, 8)]  # T = 1, B = 1, odd sizes
CLIP = 1.0
each_cell = pytest.mark.parametrize("cell", ["tanh", "lstm", "gru_after"])


def problem(
    cell: str, shape: tuple[int, int, int], device: torch.device, dtype: torch.dtype
) -> tuple[list[Tensor | None], list[Tensor]]:
    """x, weight_hh and bias_hn, and the gradient of y."""
    (frames, batch, hidden), gates = shape, CELLS[cell].gates
    x = draw(1, frames, batch, 2, gates * hidden, device=device, dtype=dtype)
    weight = draw(2, 2, gates * hidden, hidden, device=device, dtype=dtype, scale=0.9 * hidden**-0.5)
    bias = draw(3, 2, hidden, device=device, dtype=dtype) if cell.startswith("gru") else None
    return [x, weight, bias], [draw(4, frames, batch, 2, hidden, device=device, dtype=dtype)]


def run(cell: str, given: Any, above: Any, lengths: Tensor | None, backend: str) -> list[Tensor]:
    """y, and every gradient."""
    return outputs_and_gradients(
        lambda *inputs: bidirectional(cell, *inputs, lengths, clip=CLIP, backend=backend), given, above
    )


@on_every_target
@each_cell
@pytest.mark.parametrize("ragged", [False, True])
def test_error_is_at_most_twice_that_of_stock_pytorch(
    device: torch.device, backend: str, cell: str, ragged: bool
) -> None:
    for shape, dtype in itertools.product(SHAPES, (torch.float32, torch.bfloat16)):
        lengths = ragged_lengths(shape[0], shape[1]).to(device) if ragged else None
        given, above = problem(cell, shape, device, dtype)
        wide = [None if t is None else t.double() for t in given], [t.double() for t in above]
        floor = rounding_floor(backend, dtype)
        with nan_filled_memory():
            ours = run(cell, given, above, lengths, backend)
        stock, truth = run(cell, given, above, lengths, "reference"), run(cell, *wide, lengths, "reference")
        for name, our, other, true in zip(
            ("y", "grad_x", "grad_weight", "grad_bias"), ours, stock, truth, strict=False
        ):
            allowed = max(2 * relative_error(other, true), floor)
            assert relative_error(our, true) <= allowed, f"{name} of {cell} {shape} {dtype}"


def test_gradients_by_finite_differences() -> None:
    given, _ = problem("gru_after", (3, 3, 2), CPU, torch.float64)
    leaves = [None if t is None else t.requires_grad_() for t in given]
    assert torch.autograd.gradcheck(
        lambda *inputs: bidirectional("gru_after", *inputs, torch.tensor([3, 2, 0])), leaves
    )


@on_every_target
def test_agrees_with_torch_nn(device: torch.device, backend: str) -> None:
    frames, batch, hidden = 8, 3, 24
    x = draw(1, frames, batch, hidden, device=device, dtype=torch.float32)
    lengths = ragged_lengths(frames, batch).clamp_min(1)  # packed sequences cannot be empty
    torch.manual_seed(0)
    peer = nn.LSTM(hidden, hidden, bidirectional=True).to(device)
    ways = [[peer.get_parameter(f"{name}_l0{way}") for way in ("", "_reverse")] for name in ("weight_ih", "weight_hh")]
    biases = [peer.get_parameter(f"bias_{a}_l0{way}") for a in ("ih", "hh") for way in ("", "_reverse")]
    z = nn.functional.linear(x, torch.cat(ways[0]), torch.cat(biases[:2]) + torch.cat(biases[2:]))
    torch.backends.cudnn.allow_tf32 = backend == "persistent"
    ours = bidirectional("lstm", z.unflatten(2, (2, -1)), torch.stack(ways[1]), lengths=lengths, backend=backend)
    packed = pack_padded_sequence(x, lengths, enforce_sorted=False)
    theirs = pad_packed_sequence(peer(packed)[0], total_length=frames)[0]
    tolerance = 5e-3 if backend == "persistent" else 1e-5
    torch.testing.assert_close(ours.flatten(2), theirs, rtol=tolerance, atol=tolerance)


@on_every_target
@each_cell
def test_padding_and_batch_mates_never_matter(device: torch.device, backend: str, cell: str) -> None:
    frames, batch, hidden = 6, 5, 40
    lengths = ragged_lengths(frames, batch).to(device)
    (x, *others), (grad_y,) = problem(cell, (frames, batch, hidden), device, torch.bfloat16)
    assert x is not None
    clean = run(cell, [x, *others], [grad_y], lengths, backend)
    padding = (torch.arange(frames)[:, None] >= lengths.cpu()).to(device)[:, :, None, None]
    bad = [t.masked_fill(padding, float("nan")) for t in (x, grad_y)]
    with nan_filled_memory():
        assert_same_bits(run(cell, [bad[0], *others], [bad[1]], lengths, backend), clean)
    for row, length in enumerate(lengths.tolist()):
        mates = x.clone()
        mates[:, torch.arange(batch) != row] *= -3
        for ours, theirs in zip(run(cell, [mates, *others], [grad_y], lengths, backend)[:2], clean[:2], strict=True):
            assert not theirs[length:, row].any()
            assert torch.equal(ours[:, row], theirs[:, row])


class OneLaunch:
    """Stands for the persistent kernels of two directions: both passes through matrix products, one way at a time."""

    @staticmethod
    def forward(inputs: Any, *options: Any) -> Any:
        (x, weight, bias, h0, c0, lengths), ways = inputs, []
        for way in range(2):
            z = reverse_time(x[:, :, way], lengths) if way else x[:, :, way].contiguous()
            own = (None if bias is None else bias[way], *(None if t is None else t[:, way] for t in (h0, c0)))
            y, h_n, c_n, saved = gemm.forward((z, weight[way], *own, lengths), *options)
            frames = [reverse_time(t, lengths) if way and t is not None else t for t in (y, saved)]
            ways.append([frames[0], h_n, c_n, frames[1]])
        y, h_n, c_n, saved = zip(*ways, strict=True)
        return tuple(_stacked(*pair) for pair in ((y, 2), (h_n, 1), (c_n, 1), (saved, 2)))

    @staticmethod
    def backward_data(inputs: Any, options: Any, *_: Any) -> Any:
        (grad_y, grad_h_n, grad_c_n, y, saved, weight, lengths), ways = inputs, []
        for way in range(2):
            frames = [None if t is None else t[:, :, way].contiguous() for t in (grad_y, y, saved)]
            frames = [reverse_time(t, lengths) if way and t is not None else t for t in frames]
            above = [None if t is None else t[:, way] for t in (grad_h_n, grad_c_n)]
            grad_x, last, *before = gemm.backward_data((frames[0], *above, *frames[1:], weight[way], lengths), options)
            ways.append([reverse_time(t, lengths) if way and t is not None else t for t in (grad_x, last)] + before)
        grad_x, last, grad_h0, grad_c0 = zip(*ways, strict=True)
        return tuple(_stacked(*pair) for pair in ((grad_x, 2), (last, 2), (grad_h0, 1), (grad_c0, 1)))


def _stacked(ways: Any, dim: int) -> Any:
    return None if ways[0] is None else torch.stack(ways, dim)


@pytest.mark.parametrize("cell", [name for name in CELLS if name != "gru_before"])
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("with_states", [False, True])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_gradients_of_one_launch_are_those_of_two(
    cell: str, ragged: bool, with_states: bool, with_sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    (x, weight, bias), _ = problem(cell, (5, 3, 4), CPU, torch.float64)
    lengths = ragged_lengths(5, 3) if ragged else None
    h0 = draw(7, 2, 3, 4, device=CPU, dtype=torch.float64) if with_states else None
    c0 = draw(8, 2, 3, 4, device=CPU, dtype=torch.float64) if with_states and cell == "lstm" else None
    monkeypatch.setattr(persistent, "forward", OneLaunch.forward)
    monkeypatch.setattr(persistent, "backward_data", OneLaunch.backward_data)
    results = []
    for together in (False, True):
        monkeypatch.setattr(op, "in_one_launch", lambda *_, answer=together: answer)
        leaves = {"x": x, "weight": weight, "bias": bias, "h0": h0, "c0": c0}
        leaves = {n: t.detach().clone().requires_grad_() for n, t in leaves.items() if t is not None}
        sinks = {"weight": [like(way) for way in weight], "bias": None if bias is None else [like(way) for way in bias]}
        outputs = recurrence(
            leaves["x"], leaves["weight"], leaves.get("h0"), lengths, cell=cell, bias_hn=leaves.get("bias"),
            c0=leaves.get("c0"), clip=CLIP, weight_sink=sinks["weight"] if with_sinks else None,
            bias_sink=sinks["bias"] if with_sinks else None,
        )  # fmt: skip
        torch.stack([t.sin().sum() for t in outputs]).sum().backward()
        made = {n: torch.stack([sink.value for sink in pair]) for n, pair in sinks.items() if pair and with_sinks}
        results.append([*outputs, *(made.get(name, leaf.grad) for name, leaf in leaves.items())])
    for one, other in zip(*results, strict=True):
        assert relative_error(one, other) <= 1e-13  # sums over frames in another order


@each_cell
def test_compiled_is_eager(cell: str) -> None:
    given, above = problem(cell, (3, 2, 4), CPU, torch.float32)
    eager = run(cell, given, above, None, "cpu")
    compiled = torch.compile(
        lambda *inputs: bidirectional(cell, *inputs, clip=CLIP, backend="cpu"), fullgraph=True, backend="aot_eager"
    )
    assert_same_bits(outputs_and_gradients(compiled, given, above), eager)


X, W = torch.zeros(3, 2, 2, 32), torch.zeros(2, 32, 8)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"x": torch.zeros(3, 2, 64)}, ValueError, r"expected \(T, B, 2, 4 H\): a row a frame and direction"),
        ({"x": torch.zeros(3, 2, 2, 30)}, ValueError, r"expected \(T, B, 2, 4 H\)"),
        ({"weight_hh": torch.zeros(32, 8)}, ValueError, r"expected \(2, 4 H, H\) = \(2, 32, 8\)"),
        ({"weight_hh": W.double()}, TypeError, "weight_hh is torch.float64 but x is torch.float32"),
        ({"lengths": torch.tensor([3])}, ValueError, r"lengths has shape \(1,\)"),
        ({"cell": "lstn"}, ValueError, "did you mean 'lstm'"),
        ({"backend": "persistent"}, RuntimeError, "need a CUDA GPU"),
    ],
)
def test_wrong_arguments_say_what_is_allowed(given: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        bidirectional(**{"cell": "lstm", "x": X, "weight_hh": W, **given})


@pytest.mark.gpu
@pytest.mark.hopper
@pytest.mark.parametrize("cell", ["clipped_relu", "lstm", "gru_after"])
@pytest.mark.parametrize("batch", [2, 9, 40, 130])  # both at once; one cluster's groups; several tiles a direction
def test_one_launch_is_as_good_as_stock(cell: str, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    given, above = problem(cell, (7, batch, 512), CUDA, torch.bfloat16)
    lengths = ragged_lengths(7, batch).to(CUDA).int()
    # also where the planner would launch twice
    monkeypatch.setattr(op, "in_one_launch", lambda cell, x, hidden, backend, max_sms: backend == "persistent")
    together = run(cell, given, above, lengths, "persistent")
    assert_same_bits(run(cell, given, above, lengths, "persistent"), together)
    wide = [None if t is None else t.double() for t in given], [t.double() for t in above]
    stock, truth = run(cell, given, above, lengths, "reference"), run(cell, *wide, lengths, "reference")
    for ours, theirs, true in zip(together, stock, truth, strict=True):
        assert relative_error(ours, true) <= 2 * relative_error(theirs, true)


@pytest.mark.gpu
def test_what_does_not_fit_together_runs_one_after_the_other() -> None:
    given, above = problem("lstm", (4, 3, 700), CUDA, torch.bfloat16)
    assert_same_bits(
        run("lstm", given, above, None, "persistent")[:1],
        [torch.stack([_alone(given, 0), _alone(given, 1).flip(0)], dim=2)],
    )


def _alone(given: list[Tensor | None], way: int) -> Tensor:
    from ds2_ops import lstm

    x, weight, _ = given
    assert x is not None and weight is not None
    z = x[:, :, way] if way == 0 else x[:, :, way].flip(0)
    return lstm(z.contiguous(), weight[way], backend="persistent")[0]


@pytest.mark.gpu
def test_a_cuda_graph_replays_the_same_bits() -> None:
    given, above = problem("lstm", (8, 9, 512), CUDA, torch.bfloat16)
    lengths = ragged_lengths(8, 9).to(CUDA).int()
    assert_replays(lambda: run("lstm", given, above, lengths, "persistent"))
