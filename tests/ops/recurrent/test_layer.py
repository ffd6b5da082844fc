"""A layer of inference: the recurrence of its projection, whether or not its kernels overlap with those before them."""

from collections.abc import Callable

import pytest
import torch
from ds2_ops import lstm, recurrence
from ds2_ops.jit.build import build
from ds2_ops.recurrent import layer
from ds2_ops.recurrent.autograd import options_of
from ds2_ops.recurrent.backends import persistent
from ds2_ops.recurrent.layer import (
    MAX_ROWS,
    launch_projection,
    projection_launch,
    recurrent_layer,
    why_no_projection,
)
from support.op_cases import CUDA, assert_same_bits, relative_error
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode


def weights(
    hidden: int, width: int, dtype: torch.dtype, device: torch.device, gates: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    draw, rows = torch.Generator().manual_seed(hidden + width), gates * hidden
    ih, bias, hh = (torch.randn(*shape, generator=draw) for shape in ((rows, width), (rows,), (rows, hidden)))
    return tuple(t.to(device, dtype) for t in (ih * width**-0.5, 0.1 * bias, 0.5 * hh * hidden**-0.5))  # type: ignore[return-value]


def test_it_is_the_recurrence_of_the_projection() -> None:
    ih, bias, hh = weights(24, 16, torch.float64, torch.device("cpu"))
    x, h0 = torch.randn(7, 3, 16, dtype=torch.float64), torch.randn(3, 24, dtype=torch.float64)
    lengths, begin = torch.tensor([7, 0, 4]), torch.tensor([0, 7, 2], dtype=torch.int32)
    z = x @ ih.t() + bias
    z[:2, 2], z[:, 1] = 0, 0
    wanted = recurrence(z, hh, h0, lengths, nonlinearity="tanh")
    result = recurrent_layer(x, ih, bias, hh, h0, None, lengths, begin, cell="tanh")
    for ours, true in zip(result, wanted, strict=True):
        torch.testing.assert_close(ours, true, rtol=0, atol=1e-12)


def test_it_is_the_lstm_of_the_projection() -> None:
    ih, bias, hh = weights(24, 16, torch.float64, torch.device("cpu"), gates=4)
    x, states = torch.randn(7, 3, 16, dtype=torch.float64), torch.randn(2, 3, 24, dtype=torch.float64)
    lengths, begin = torch.tensor([7, 0, 4]), torch.tensor([0, 7, 2], dtype=torch.int32)
    z = x @ ih.t() + bias
    z[:2, 2], z[:, 1] = 0, 0
    wanted = lstm(z, hh, *states, lengths)
    result = recurrent_layer(x, ih, bias, hh, *states, lengths, begin, cell="lstm")
    for ours, true in zip(result, wanted, strict=True):
        torch.testing.assert_close(ours, true, rtol=0, atol=1e-12)


@pytest.mark.parametrize("ragged", [False, True])
def test_in_float32_the_library_is_as_exact_as_the_lstm_of_the_projection(ragged: bool) -> None:
    cpu = torch.device("cpu")
    true_weights = weights(24, 16, torch.float64, cpu, gates=4)
    x, states = torch.randn(40, 4, 16, dtype=torch.float64), torch.randn(2, 4, 24, dtype=torch.float64)
    lengths, begin = (torch.tensor([40, 0, 17, 17]), torch.tensor([0, 5, 9, 0], dtype=torch.int32))
    states[:, 1:3] = 0  # of the utterances that have not begun
    edges = (lengths, begin) if ragged else (None, None)
    truth = recurrent_layer(x, *true_weights, *states, *edges, cell="lstm")
    ih, bias, hh = (t.float() for t in true_weights)
    ours = recurrent_layer(x.float(), ih, bias, hh, *states.float(), *edges, cell="lstm")
    z = x.float() @ ih.t() + bias
    if ragged:
        z *= (torch.arange(40)[:, None] >= begin)[:, :, None]
    loop = lstm(z, hh, *states.float(), lengths if ragged else None)
    for our, other, true in zip(ours, loop, truth, strict=True):
        assert our.dtype == other.dtype and our.shape == true.shape
        assert relative_error(our, true) <= max(2 * relative_error(other, true), 2e-7)


def test_a_state_before_the_utterance_begins_is_not_dropped() -> None:
    """Pre-activations of 0 change a state that is not 0: torch's own LSTM does not run these."""
    ih, bias, hh = weights(24, 16, torch.float32, torch.device("cpu"), gates=4)
    x, states = torch.randn(40, 2, 16), torch.randn(2, 2, 24)
    begin = torch.tensor([0, 7], dtype=torch.int32)
    z = (x @ ih.t() + bias) * (torch.arange(40)[:, None] >= begin)[:, :, None]
    for our, true in zip(
        recurrent_layer(x, ih, bias, hh, *states, None, begin, cell="lstm"), lstm(z, hh, *states), strict=True
    ):
        assert relative_error(our, true) < 1e-5


def test_wrong_arguments_are_refused() -> None:
    ih, bias, hh = weights(24, 16, torch.float32, torch.device("cpu"))
    x = torch.zeros(2, 1, 16)
    with pytest.raises(ValueError, match=r"weight_ih has shape \(24, 16\), expected \(H, K\) = \(24, 15\)"):
        recurrent_layer(x[..., :15], ih, bias, hh)
    with pytest.raises(TypeError, match=r"bias is torch\.float64"):
        recurrent_layer(x, ih, bias.double(), hh)
    with pytest.raises(ValueError, match="weight_hh has shape"):
        recurrent_layer(x, ih, bias, hh[:, :3])
    with pytest.raises(TypeError, match=r"weight_hh is torch\.float64"):
        recurrent_layer(x, ih, bias, hh.double())


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_the_projection_takes_weights_only_as_they_lie_in_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "needs a Hopper GPU" in str(why_no_projection(*(torch.zeros(16, 16, 16),) * 3))
    monkeypatch.setattr(layer, "capability", lambda index: (9, 0))
    monkeypatch.setattr(layer, "why_no_kernel", lambda index: None)
    with FakeTensorMode():  # of a GPU that is not there
        x, ih, bias, across, apart = (
            torch.empty_strided(size, strides, dtype=torch.bfloat16, device="cuda:0")
            for size, strides in (
                *(((4, 2, 16), (32, 16, 1)), ((32, 16), (16, 1)), ((32,), (1,))),
                *(((32, 16), (1, 32)), ((32,), (2,))),
            )
        )
        assert why_no_projection(x, ih, bias) is None
        for wrong in ((across, bias), (ih, apart)):
            assert why_no_projection(x, *wrong) == "weight or bias is not contiguous"


@pytest.mark.parametrize(
    ("width", "dtype"), [(1152, "bfloat16"), (1312, "float16"), (1536, "bfloat16"), (8, "bfloat16"), (2560, "bfloat16")]
)
@pytest.mark.parametrize("rows", [10, 640])
def test_the_projection_compiles_without_spills(width: int, dtype: str, rows: int) -> None:
    binary = build(projection_launch(width, 1152, dtype, 132, rows=rows)[0].source.text)
    assert binary.local_bytes == 0 and not binary.loss


@pytest.mark.gpu
@pytest.mark.hopper
@pytest.mark.parametrize(
    ("frames", "batch", "width", "hidden"),
    [
        (10, 1, 1152, 1152),
        (4, 16, 1312, 200),
        (1, 3, 8, 33),
        (10, 64, 1152, 1152),
        (50, 16, 1312, 1152),
        (10, 64, 512, 2048),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_projection_is_as_near_as_a_librarys(
    frames: int, batch: int, width: int, hidden: int, dtype: torch.dtype
) -> None:
    ih, bias, _ = weights(hidden, width, dtype, CUDA)
    x = torch.randn(frames, batch, width, device=CUDA, dtype=dtype)
    begin = torch.arange(batch, device=CUDA, dtype=torch.int32).clamp_max(frames)
    begun = (torch.arange(frames, device=CUDA)[:, None] >= begin)[:, :, None]
    true = torch.nn.functional.linear(x.double(), ih.double(), bias.double()) * begun
    stock = torch.nn.functional.linear(x, ih, bias) * begun
    found = launch_projection(x, ih, bias, begin)
    assert relative_error(found, true) <= 2 * relative_error(stock, true)
    alone = torch.cat([launch_projection(frame[None], ih, bias, (begin - t).clamp_min(0)) for t, frame in enumerate(x)])
    assert torch.equal(found, alone)  # no row depends on how frames are cut


def chain(
    layers: list[tuple[Tensor, Tensor, Tensor]], x: Tensor, aside: torch.cuda.Stream | None = None, **given: Tensor
) -> Tensor:
    for ih, bias, hh in layers:
        if aside is not None:
            aside.wait_stream(torch.cuda.current_stream())
        if len(ih) == len(hh.t()):
            x, _ = recurrent_layer(x, ih, bias, hh, cell="relu", projection_stream=aside, **given)
        else:
            x, *_ = recurrent_layer(x, ih, bias, hh, projection_stream=aside, **given, cell="lstm")
    return x


@pytest.mark.gpu
@pytest.mark.hopper
@pytest.mark.parametrize(
    ("frames", "batch", "hidden", "gates"),
    [
        (10, 1, 1152, 1),
        (10, 3, 1152, 1),
        (4, 16, 1152, 1),
        (1, 1, 512, 1),
        (20, 2, 264, 1),
        (10, 64, 1152, 1),
        (10, 1, 512, 4),
        (10, 3, 512, 4),
        (20, 2, 392, 4),
        (4, 64, 512, 4),
    ],
)
def test_kernels_that_overlap_give_the_same_bits(frames: int, batch: int, hidden: int, gates: int) -> None:
    layers = [weights(hidden, hidden, torch.bfloat16, CUDA, gates) for _ in range(3)] * 4
    draw = torch.Generator(CUDA).manual_seed(3)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, device=CUDA, dtype=torch.bfloat16)

    lengths = torch.randint(0, frames + 1, (batch,), generator=draw, device=CUDA).int()
    lengths[0] = frames
    given, x = {"h0": drawn(batch, hidden).relu(), "lengths": lengths}, drawn(frames, batch, hidden)
    assert frames * batch <= MAX_ROWS
    stock, aside = one_by_one(layers, x, given), torch.cuda.Stream()
    for turn in range(20):
        assert_same_bits([chain(layers, x, aside if turn % 2 else None, **given)], [stock])
    for way in (None, aside):
        replay, found = recorded(lambda way=way: chain(layers, x, way, **given))
        for _ in range(20):
            x.copy_(drawn(frames, batch, hidden))
            wanted = one_by_one(layers, x, given)
            replay()
            assert_same_bits([found], [wanted])


def one_by_one(layers: list[tuple[Tensor, Tensor, Tensor]], x: Tensor, given: dict[str, Tensor]) -> Tensor:
    """The same kernels, each after the host has seen the one before end.

    `recurrence` may choose another design or size of cluster than what starts early, which adds up in another order.
    """
    for ih, bias, hh in layers:
        z = launch_projection(x, ih, bias, None)
        torch.cuda.synchronize()
        cell = "relu" if len(ih) == len(hh.t()) else "lstm"
        options = options_of(cell, 20.0, None, x.dtype, early=True)
        x = persistent.forward((z, hh, None, given["h0"], None, given["lengths"]), options)[0]
        torch.cuda.synchronize()
    return x


@pytest.mark.gpu
@pytest.mark.hopper
def test_an_lstm_layer_has_the_same_bits_in_any_batch() -> None:
    ih, bias, hh = weights(512, 512, torch.bfloat16, CUDA, gates=4)
    x = torch.randn(12, 130, 512, device=CUDA, generator=torch.Generator(CUDA).manual_seed(1)).bfloat16()
    whole = recurrent_layer(x, ih, bias, hh, cell="lstm")
    for first, last in ((0, 1), (3, 6), (7, 23), (20, 84), (129, 130)):
        for max_sms in (None, 16):
            part = recurrent_layer(x[:, first:last], ih, bias, hh, max_sms=max_sms, cell="lstm")
            assert_same_bits(part, [whole[0][:, first:last], *(state[first:last] for state in whole[1:])])


def recorded(call: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(side):
        call()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        found = call()
    return graph.replay, found
