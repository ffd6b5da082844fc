"""The recurrence against float64, torch.nn.RNN and itself split in time."""

import itertools
from collections.abc import Callable

import pytest
import torch
from ds2_ops import Recurrence, recurrence
from ds2_ops.recurrent.autograd import backward_data, forward
from ds2_ops.recurrent.backends.reference import recurrence_reference
from ds2_ops.recurrent.modules import NONLINEARITIES
from support.op_cases import (
    CPU,
    CUDA,
    assert_same_bits,
    away_from_kinks,
    draw,
    nan_filled_memory,
    on_cpu,
    on_gpu,
    outputs_and_gradients,
    poison_padding,
    ragged_lengths,
    relative_error,
)
from support.recurrence_cases import CLIP, problem
from support.rounding import Arithmetic, allowed_against_stock, relative_bound, variances, worst_share
from torch import Tensor
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

TARGETS = [on_cpu("cpu"), on_cpu("reference"), on_gpu("gemm"), on_gpu("persistent")]
SHAPES = [(1, 3, 16), (6, 1, 33), (9, 4, 64), (5, 5, 7), (4, 19, 40)]  # T = 1, B = 1, odd sizes, off every tile
FEW = [((9, 4, 64), torch.bfloat16), ((4, 19, 40), torch.float32), ((5, 5, 7), torch.float16)]
on_every_target = pytest.mark.parametrize(("device", "backend"), TARGETS)


def cases(device: torch.device, wide: bool = True) -> list[tuple[tuple[int, int, int], torch.dtype]]:
    """Shapes and dtypes to try: all of them on a CPU; on a GPU, where each pair builds kernels, fewer unless wide."""
    if device.type == "cpu":
        return list(itertools.product(SHAPES, (torch.float32, torch.bfloat16)))
    shapes = [*SHAPES, (12, 4, 1152), (7, 3, 515), (5, 70, 320)] if wide else []
    return FEW + [(shape, torch.bfloat16) for shape in shapes]


def bind(op: Callable[..., tuple[Tensor, Tensor]], lengths: Tensor | None, **options: object) -> Callable[..., object]:
    return lambda x, weight_hh, h0: op(x, weight_hh, h0, lengths, **options)


@on_every_target
@pytest.mark.parametrize("nonlinearity", NONLINEARITIES)
@pytest.mark.parametrize("ragged", [False, True])
def test_error_is_at_most_twice_that_of_stock_pytorch(
    device: torch.device, backend: str, nonlinearity: str, ragged: bool
) -> None:
    """On a CPU without luck: what rounding alone explains, frame by frame, bounds our error and stock PyTorch's.

    On a GPU the error of a whole result is at most twice stock PyTorch's, or what rounding explains where that is more.
    """
    for (shape, dtype), with_h0 in itertools.product(cases(device, wide=nonlinearity == "relu"), (False, True)):
        lengths = ragged_lengths(shape[0], shape[1]).to(device) if ragged else None
        options = {"cell": nonlinearity, "clip": CLIP}
        inputs, cotangents = problem(shape, device, dtype, with_h0, nonlinearity)
        ours = outputs_and_gradients(bind(recurrence, lengths, backend=backend, **options), inputs, cotangents)
        # The persistent kernels multiply float32 as TF32, which is then also what stock PyTorch is allowed.
        tf32 = backend == "persistent" and dtype == torch.float32
        torch.backends.cuda.matmul.allow_tf32 = tf32
        stock = outputs_and_gradients(bind(recurrence_reference, lengths, **options), inputs, cotangents)
        torch.backends.cuda.matmul.allow_tf32 = False
        truth = outputs_and_gradients(
            bind(recurrence_reference, lengths, **options),
            [None if t is None else t.double() for t in inputs],
            [t.double() for t in cotangents],
        )
        names = ["y", "h_n", "grad_x", "grad_weight_hh", "grad_h0"][: len(ours)]
        given = inputs, cotangents, lengths, nonlinearity, CLIP
        ours_may, stock_may = (
            variances(Arithmetic.of(dtype, tf32=tf32, stores_frames=by_autograd), *given)
            for by_autograd in (backend == "reference", True)
        )
        for name, our, their, true, may, they_may in zip(names, ours, stock, truth, ours_may, stock_may, strict=True):
            assert our.dtype == dtype and our.shape == true.shape
            what = f"{name} of {shape} {dtype}, h0 {with_h0}"
            if device.type == "cpu":
                assert worst_share([our], [true], [may]) <= 1, what
                assert worst_share([their], [true], [they_may]) <= 1, f"stock PyTorch's {what}"
            else:
                assert relative_error(our, true) <= allowed_against_stock(their, true, may), what


@on_every_target
@pytest.mark.parametrize("nonlinearity", ["relu", "clipped_relu"])
def test_whole_numbers_are_computed_exactly(device: torch.device, backend: str, nonlinearity: str) -> None:
    """No partial sum needs more bits than the dtype has, so no processor and no order of summation may round."""
    for (frames, batch, hidden), dtype in cases(device, wide=False):
        lengths = ragged_lengths(frames, batch)
        x, h0, grad_y, grad_h_n = (
            draw(seed, *shape, device=CPU, dtype=torch.float64).round().clamp(-2, 2)
            for seed, shape in enumerate([(frames, batch, hidden), (batch, hidden)] * 2)
        )
        weight_hh = draw(5, hidden, hidden, device=CPU, dtype=torch.float64)
        largest_two = weight_hh.abs() >= weight_hh.abs().topk(2, dim=1).values[:, 1:]
        weight_hh = weight_hh.sign() * largest_two
        x = away_from_kinks(x, weight_hh, h0, nonlinearity, clip=3.0, margin=0.5)
        inputs, cotangents = [x, weight_hh, h0], [grad_y, grad_h_n]
        options = {"cell": nonlinearity, "clip": 3.0}
        truth = outputs_and_gradients(bind(recurrence_reference, lengths, **options), inputs, cotangents)
        assert max(t.abs().max() for t in truth) <= 256, "bfloat16 holds every whole number up to here"
        ours = outputs_and_gradients(
            bind(recurrence, lengths.to(device), backend=backend, **options),
            [t.to(device, dtype) for t in inputs],
            [t.to(device, dtype) for t in cotangents],
        )
        assert_same_bits([t.double().cpu() for t in ours], truth)


@on_every_target
@pytest.mark.parametrize("nonlinearity", ["relu", "tanh"])
def test_agrees_with_torch_rnn(device: torch.device, backend: str, nonlinearity: str) -> None:
    frames, batch, hidden = 8, 3, 24
    shape = (frames, batch, hidden)
    (x, weight_hh, h0), cotangents = problem(shape, device, torch.float32, nonlinearity=nonlinearity)
    lengths = ragged_lengths(frames, batch).clamp_min(1)  # packed sequences cannot be empty
    peer = torch.nn.RNN(hidden, hidden, nonlinearity=nonlinearity, bias=False).to(device)

    def packed(x: Tensor, weight_hh: Tensor, h0: Tensor) -> tuple[Tensor, Tensor]:
        weights = {"weight_ih_l0": torch.eye(hidden, device=device), "weight_hh_l0": weight_hh}
        packed_x = pack_padded_sequence(x, lengths, enforce_sorted=False)
        y, h_n = torch.func.functional_call(peer, weights, (packed_x, h0[None]))
        return pad_packed_sequence(y, total_length=frames)[0], h_n[0]

    torch.backends.cudnn.allow_tf32 = backend == "persistent"
    tolerance = 5e-3 if backend == "persistent" else 1e-5
    ours = outputs_and_gradients(
        bind(recurrence, lengths, nonlinearity=nonlinearity, backend=backend), [x, weight_hh, h0], cotangents
    )
    theirs = outputs_and_gradients(packed, [x, weight_hh, h0], cotangents)
    for our, their in zip(ours, theirs, strict=True):
        assert relative_error(our, their) < tolerance


@on_every_target
def test_a_split_in_time_gives_the_same_bits(device: torch.device, backend: str) -> None:
    for shape, dtype in cases(device, wide=False):
        (x, weight_hh, h0), _ = problem(shape, device, dtype)
        whole = recurrence(x, weight_hh, h0, backend=backend)
        for cut in range(len(x) + 1):
            first, state = recurrence(x[:cut], weight_hh, h0, backend=backend)
            second, state = recurrence(x[cut:], weight_hh, state, backend=backend)
            assert_same_bits([torch.cat([first, second]), state], whole)


@on_every_target
def test_padding_and_batch_mates_never_matter(device: torch.device, backend: str) -> None:
    for shape, dtype in cases(device, wide=False):
        frames, batch, _ = shape
        lengths = ragged_lengths(frames, batch).to(device)
        op = bind(recurrence, lengths, backend=backend)
        (x, weight_hh, h0), (grad_y, grad_h_n) = problem(shape, device, dtype)
        clean = outputs_and_gradients(op, [x, weight_hh, h0], [grad_y, grad_h_n])
        tf32 = backend == "persistent" and dtype == torch.float32
        given = [x, weight_hh, h0], [grad_y, grad_h_n], lengths, "clipped_relu", 20.0
        variance = variances(Arithmetic.of(dtype, tf32=tf32), *given)[:2]
        padded = poison_padding(x, lengths), poison_padding(grad_y, lengths)
        poisoned = outputs_and_gradients(op, [padded[0], weight_hh, h0], [padded[1], grad_h_n])
        assert_same_bits(poisoned, clean)
        for row, length in enumerate(lengths.tolist()):
            assert not clean[0][length:, row].any() and not clean[2][length:, row].any()
            mates = x.clone()
            mates[:, torch.arange(batch) != row] *= -3
            among_others = outputs_and_gradients(op, [mates, weight_hh, h0], [grad_y, grad_h_n])
            for index in (0, 2):  # y and grad_x: (T, B, H)
                assert torch.equal(among_others[index][:, row], clean[index][:, row])
            alone = recurrence(x[:length, row, None], weight_hh, h0[row, None], backend=backend)
            for our, other, may in zip((clean[0][:length, row], clean[1][row]), alone, variance, strict=True):
                # A product of one row may add up in another order: two computations, each with its own roundings.
                allowed = relative_bound(other, 2 * (may[:length, row] if may.ndim == 3 else may[row]))
                assert relative_error(our, other.squeeze(-2)) <= allowed


@on_every_target
def test_every_element_is_written_and_two_runs_agree(device: torch.device, backend: str) -> None:
    for shape, dtype in cases(device, wide=False):
        inputs, cotangents = problem(shape, device, dtype)
        op = bind(recurrence, ragged_lengths(*shape[:2]), backend=backend)
        first = outputs_and_gradients(op, inputs, cotangents)
        with nan_filled_memory():
            second = outputs_and_gradients(op, inputs, cotangents)
        assert_same_bits(second, first)


@on_every_target
def test_nan_weights_give_nan_and_return(device: torch.device, backend: str) -> None:
    (x, weight_hh, h0), _ = problem((4, 2, 16), device, torch.float32)
    y, h_n = recurrence(x, torch.full_like(weight_hh, float("nan")), h0, backend=backend)
    assert y.isnan().all() and h_n.isnan().all()


@pytest.mark.parametrize(("device", "backend"), [on_cpu("cpu"), on_gpu("gemm"), on_gpu("persistent")])
def test_strides_do_not_matter(device: torch.device, backend: str) -> None:
    (x, weight_hh, h0), (grad_y, grad_h_n) = problem((5, 3, 16), device, torch.float32)
    op = bind(recurrence, None, backend=backend)
    plain = outputs_and_gradients(op, [x, weight_hh, h0], [grad_y, grad_h_n])
    strided = outputs_and_gradients(
        lambda x, weight_hh, h0: op(x.transpose(0, 1), weight_hh.t(), h0),
        [x.transpose(0, 1).contiguous(), weight_hh.t().contiguous(), h0],
        [grad_y.transpose(0, 1).contiguous().transpose(0, 1), grad_h_n],
    )
    strided[2], strided[3] = strided[2].transpose(0, 1), strided[3].t()
    assert_same_bits(strided, plain)


@on_every_target
def test_gradient_of_one_output_alone(device: torch.device, backend: str) -> None:
    inputs, (grad_y, grad_h_n) = problem((5, 3, 16), device, torch.float32)
    lengths = torch.tensor([5, 2, 0], device=device)
    for index, cotangent in ((0, grad_y), (1, grad_h_n)):
        zeros = [torch.zeros_like(grad_y), torch.zeros_like(grad_h_n)]
        zeros[index] = cotangent
        both = outputs_and_gradients(bind(recurrence, lengths, backend=backend), inputs, zeros)
        leaves = [t.clone().requires_grad_() for t in inputs if t is not None]
        alone = recurrence(*leaves, lengths, backend=backend)[index]
        assert_same_bits(torch.autograd.grad(alone, leaves, cotangent), both[2:])


def test_saturated_outputs_have_no_gradient_where_clip_is_rounded() -> None:
    x = torch.full((1, 1, 4), 5.0, dtype=torch.bfloat16, requires_grad=True)
    y, _ = recurrence(x, torch.zeros(4, 4, dtype=torch.bfloat16), clip=0.7)  # 0.7 rounds down in bfloat16
    y.sum().backward()
    assert x.grad is not None and not x.grad.any()


def test_no_frames_and_no_utterances() -> None:
    weight_hh, h0 = torch.randn(4, 4, requires_grad=True), torch.randn(2, 4, requires_grad=True)
    y, h_n = recurrence(torch.zeros(0, 2, 4), weight_hh, h0)
    assert y.shape == (0, 2, 4) and torch.equal(h_n, h0)
    h_n.sum().backward()
    assert torch.equal(h0.grad, torch.ones(2, 4)) and torch.equal(weight_hh.grad, torch.zeros(4, 4))
    assert recurrence(torch.zeros(3, 0, 4), weight_hh)[0].shape == (3, 0, 4)


def test_a_second_derivative_is_refused() -> None:
    x = torch.randn(3, 2, 4, requires_grad=True)
    y, _ = recurrence(x, torch.randn(4, 4, requires_grad=True), nonlinearity="tanh")
    with pytest.raises(RuntimeError, match=r"no second derivative.*backend='reference'"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


def test_shapes_alone_on_the_meta_device() -> None:
    with torch.device("meta"):
        y, h_n = Recurrence(8)(torch.zeros(5, 2, 8))
    assert y.shape == (5, 2, 8) and h_n.shape == (2, 8)


@pytest.mark.parametrize("backend", ["cpu", "gemm"])
def test_gradcheck_of_the_op(backend: str) -> None:
    inputs, _ = problem((4, 3, 5), CPU, torch.float64)
    leaves = [t.requires_grad_() for t in inputs if t is not None]
    op = bind(recurrence, torch.tensor([4, 2, 0]), nonlinearity="tanh", backend=backend)
    assert torch.autograd.gradcheck(op, leaves)


@pytest.mark.parametrize("device", [CPU, pytest.param(CUDA, marks=pytest.mark.gpu)])
def test_is_a_sound_torch_op(device: torch.device) -> None:
    (x, weight_hh, h0), (grad_y, grad_h_n) = problem((3, 2, 8), device, torch.float32)
    lengths = torch.tensor([3, 1], device=device)
    for h, n in ((h0, lengths), (None, None)):
        options = ("tanh", 20.0, "auto", None)
        leaves = [None if t is None else t.clone().requires_grad_() for t in (x, weight_hh, h)]
        torch.library.opcheck(forward, (*leaves[:2], None, leaves[2], None, n, *options, True))
        y = recurrence(x, weight_hh, h, n, cell="tanh")[0]
        torch.library.opcheck(
            backward_data,
            (grad_y, grad_h_n, None, y, y.new_empty(0), weight_hh, n, *options),
            test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
        )


@on_every_target
@pytest.mark.parametrize("autocast", [False, True])
def test_compiles_without_a_graph_break(device: torch.device, backend: str, autocast: bool) -> None:
    (x, weight_hh, h0), cotangents = problem((4, 2, 16), device, torch.float32)
    lengths = torch.tensor([4, 2], device=device, dtype=torch.int32)

    def layer(x: Tensor, weight_hh: Tensor, h0: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            y, h_n = recurrence(x * 2, weight_hh, h0, lengths, backend=backend)
        return y.float() + 1, h_n.float()

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    expected = outputs_and_gradients(layer, [x, weight_hh, h0], cotangents)
    assert_same_bits(outputs_and_gradients(compiled, [x, weight_hh, h0], cotangents), expected)


@on_every_target
def test_autocast_runs_in_low_precision_and_returns_full_gradients(device: torch.device, backend: str) -> None:
    (x, weight_hh, h0), _ = problem((4, 2, 16), device, torch.float32)
    weight_hh = weight_hh.requires_grad_()
    with torch.autocast(device.type, torch.bfloat16):
        y, h_n = recurrence(x, weight_hh, h0, backend=backend)
    assert y.dtype == h_n.dtype == torch.bfloat16
    y.sum().backward()
    assert weight_hh.grad is not None and weight_hh.grad.dtype == torch.float32


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["gemm", "persistent"])
def test_cuda_graph_replay_reads_the_new_input(backend: str) -> None:
    inputs, cotangents = problem((6, 4, 64), CUDA, torch.bfloat16)
    lengths = torch.tensor([6, 4, 1, 0], device=CUDA, dtype=torch.int32)
    leaves = [t.requires_grad_() for t in inputs if t is not None]

    def step() -> list[Tensor]:
        outputs = recurrence(*leaves, lengths, backend=backend)
        return [*outputs, *torch.autograd.grad(outputs, leaves, cotangents)]

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in (7, 8):
        with torch.no_grad():
            leaves[0].copy_(draw(seed, 6, 4, 64, device=CUDA, dtype=torch.bfloat16))
        graph.replay()
        assert_same_bits(captured, step())


@pytest.mark.gpu
def test_persistent_runs_the_largest_size_and_refuses_the_next() -> None:
    from ds2_ops.recurrent.calibrate import device_facts
    from ds2_ops.recurrent.plan.choose import largest_grid_hidden
    from ds2_ops.recurrent.plan.problem import Problem

    facts = device_facts(torch.cuda.current_device())
    largest = largest_grid_hidden(Problem(4, 1, "bfloat16", "relu", False), facts, facts.sms)
    op = bind(recurrence, None, nonlinearity="relu", backend="persistent")
    inputs, cotangents = problem((3, 4, largest), CUDA, torch.bfloat16, nonlinearity="relu")
    truth = outputs_and_gradients(
        bind(recurrence_reference, None, cell="relu"),
        [None if t is None else t.double() for t in inputs],
        [t.double() for t in cotangents],
    )
    for ours, true in zip(outputs_and_gradients(op, inputs, cotangents), truth, strict=True):
        assert relative_error(ours, true) < 0.01
    x = torch.zeros(3, 4, largest + 1, device=CUDA, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match=rf"{largest + 1}.*gemm"):
        recurrence(x, x.new_zeros(largest + 1, largest + 1), nonlinearity="relu", backend="persistent")
    recurrence(x, x.new_zeros(largest + 1, largest + 1), nonlinearity="relu", backend="auto")


@pytest.mark.gpu
@pytest.mark.parametrize("max_sms", [16, 64])
def test_persistent_on_fewer_multiprocessors_agrees(max_sms: int) -> None:
    inputs, cotangents = problem((6, 20, 512), CUDA, torch.bfloat16)
    few = outputs_and_gradients(bind(recurrence, None, backend="persistent", max_sms=max_sms), inputs, cotangents)
    every = outputs_and_gradients(bind(recurrence, None, backend="persistent"), inputs, cotangents)
    for one, other in zip(few, every, strict=True):
        assert relative_error(one, other) < 0.01


def test_module_takes_the_weights_of_torch_rnn() -> None:
    peer = torch.nn.RNN(16, 16, nonlinearity="relu", bias=False)
    layer = Recurrence(16, "relu")
    assert layer.weight_hh.abs().max() <= 16**-0.5
    layer.load_state_dict({"weight_hh": peer.weight_hh_l0})
    x = torch.randn(5, 2, 16)
    y, h_n = layer(x @ peer.weight_ih_l0.T)
    expected, last = peer(x)
    torch.testing.assert_close((y, h_n), (expected, last[0]))
    assert repr(layer) == "Recurrence(16, 'relu', backend='auto')"
