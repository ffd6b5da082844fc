"""Primitives: what they refuse, how much room they ask for; on a GPU, the bits of the torch op from any framework."""

import subprocess
import sys

import pytest
import torch
from ds2_ops.recurrent import primitives
from ds2_ops.recurrent.backends import persistent
from ds2_ops.recurrent.cells import GATED, Options
from ds2_ops.recurrent.plan.choose import choose
from ds2_ops.recurrent.plan.devices import DEVICES
from ds2_ops.recurrent.plan.problem import DoesNotFit, Problem
from ds2_ops.recurrent.primitives import BackwardData, Forward
from support.op_cases import CUDA, draw, nan_filled_memory, ragged_lengths
from support.persistent_cases import CLIP, inputs, run
from torch import Tensor

SIZES = {"frames": 9, "batch": 3, "hidden": 130, "dtype": "bfloat16", "cell": "tanh", "clip": CLIP}


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan for an H200 that is not here."""

    def plan(problem: Problem, index: int, max_sms: int | None) -> object:
        return choose(problem, DEVICES["H200"], max_sms)

    monkeypatch.setattr(primitives, "choose_tile", plan)


@pytest.mark.usefixtures("without_gpu")
def test_the_workspace_has_room_for_what_may_be_copied() -> None:
    plain, any_layout = Forward(**SIZES), Forward(**SIZES, any_layout=True)
    assert plain.workspace_bytes == 0  # the cluster design has no exchange
    sequence, state, matrix = 9 * 3 * 130 * 2, 3 * 130 * 2, 130 * 130 * 2
    assert any_layout.workspace_bytes >= 2 * sequence + 2 * state + matrix
    assert BackwardData(**SIZES).workspace_bytes >= matrix  # of the transpose
    assert BackwardData(**SIZES, any_layout=True).workspace_bytes >= 3 * sequence + 2 * state + matrix
    large = Forward(**{**SIZES, "hidden": 1760})
    assert large.workspace_bytes >= 4 * large.choice.exchange_words > 0


@pytest.mark.usefixtures("without_gpu")
def test_what_cannot_run_is_refused_when_the_op_is_made() -> None:
    with pytest.raises(DoesNotFit, match=r"\(0, 3, 130\), allowed are sizes of 1 or more"):
        Forward(**{**SIZES, "frames": 0})
    with pytest.raises(DoesNotFit, match="float64 is not one of"):
        Forward(**{**SIZES, "dtype": "float64"})
    with pytest.raises(DoesNotFit, match=r"is 2\^31 rows or more"):
        Forward(**{**SIZES, "frames": 2**30})


@pytest.mark.usefixtures("without_gpu")
def test_arrays_that_a_pass_needs_are_asked_for() -> None:
    shape = {"frames": 4, "batch": 2, "hidden": 64, "dtype": "float16"}
    with pytest.raises(TypeError, match=r"weight_hh is None, expected an array \(64, 64\)"):
        Forward(**shape)(object(), None, None, None, stream=0)
    with pytest.raises(TypeError, match=r"y is None, expected an array \(4, 2, 64\)"):
        BackwardData(**shape)(object(), None, object(), None, None, stream=0)


def test_streams_of_all_frameworks() -> None:
    class Protocol:
        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, 7

    class CuPy:
        ptr = 8

    class Torch:
        cuda_stream = 9

    read = primitives.stream_handle
    assert [read(5), read(Protocol()), read(CuPy()), read(Torch())] == [5, 7, 8, 9]
    with pytest.raises(TypeError, match="stream is 'default', expected a handle"):
        read("default")


def test_arrays_that_the_kernels_take_as_they_are() -> None:
    plain = primitives.Array(64, (4, 1, 6), (6, 99, 1))
    assert plain.plain  # no second frame is reached by the stride of one
    assert not primitives.Array(66, (4, 1, 6), (6, 6, 1)).plain
    assert not primitives.Array(64, (4, 2, 6), (6, 24, 1)).plain


def test_arrays_on_the_cpu_are_refused() -> None:
    pytest.importorskip("cuda.core")
    with pytest.raises(ValueError, match="x is on the CPU"):
        primitives.view("x", torch.zeros(3), 0)
    with pytest.raises(TypeError, match="x is list, expected an array with __dlpack__"):
        primitives.view("x", [1.0], 0)


def both_passes(given: list[Tensor], lengths: Tensor | None, any_layout: bool, beta: float = 0.0) -> list[Tensor]:
    """Run the primitives on torch's tensors; results lie as the inputs do, and hold ones before."""
    x, weight_hh, h0, grad_y, grad_h_n = given
    frames, batch, hidden = x.shape
    stream = torch.cuda.current_stream()
    sizes = SIZES | {"frames": frames, "batch": batch, "hidden": hidden, "dtype": str(x.dtype).removeprefix("torch.")}
    forward, backward = (op(**sizes, any_layout=any_layout) for op in (Forward, BackwardData))
    y, grad_x = (torch.ones_like(x) for _ in range(2))  # keeps strides
    h_n, grad_h0 = (torch.ones_like(h0) for _ in range(2))
    room = [torch.empty(op.workspace_bytes, dtype=torch.uint8, device=CUDA) for op in (forward, backward)]
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    forward(x, weight_hh, y, h_n, room[0], stream=stream, h0=h0, lengths=lengths)
    backward(
        grad_y, y, weight_hh, grad_x, grad_h0, room[1], stream=stream, grad_h_n=grad_h_n, lengths=lengths, beta=beta
    )
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    return [y, h_n, grad_x, grad_h0]


def torch_op(given: list[Tensor], lengths: Tensor | None) -> list[Tensor]:
    x, weight_hh, h0, grad_y, grad_h_n = given
    return run((x, weight_hh, h0, grad_y, grad_h_n), lengths, "tanh")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(9, 3, 130), (7, 5, 77), (20, 11, 1760)], ids=str)
def test_the_bits_of_the_torch_op(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    given = list(inputs(shape, dtype))
    lengths = ragged_lengths(*shape[:2]).to(CUDA, torch.int32)
    for ends in (None, lengths):
        expected = torch_op(given, ends)
        with nan_filled_memory():
            assert all(map(torch.equal, both_passes(given, ends, any_layout=False), expected))
            assert all(map(torch.equal, both_passes(given, ends, any_layout=True), expected))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_any_strides_and_accumulated_gradients(dtype: torch.dtype) -> None:
    shape = (8, 5, 129)
    given = list(inputs(shape, dtype))
    expected = torch_op(given, None)
    x, weight_hh, h0, grad_y, grad_h_n = given

    def batch_major(tensor: Tensor) -> Tensor:
        return tensor.transpose(0, 1).contiguous().transpose(0, 1)

    odd = torch.empty(5 * 129 + 1, dtype=dtype, device=CUDA)[1:].view(5, 129).copy_(h0)  # begins within a word
    strided = [batch_major(x), weight_hh.t().contiguous().t(), odd, batch_major(grad_y), grad_h_n]
    ours = both_passes(strided, None, any_layout=True, beta=2.0)
    assert ours[0].stride() == strided[0].stride()
    for result, truth in zip(ours[:2], expected[:2], strict=True):
        assert torch.equal(result, truth)
    for result, truth in zip(ours[2:], expected[2:], strict=True):
        assert torch.equal(result, (truth.float() + 2.0).to(dtype))
    with pytest.raises(ValueError, match=r"x is not contiguous, .*any_layout=True"):
        both_passes(strided, None, any_layout=False)


@pytest.mark.gpu
@pytest.mark.parametrize("cell", ["lstm", "gru_after"])
def test_cells_with_gates(cell: str) -> None:
    (frames, batch, hidden), row, dtype = (9, 5, 130), GATED[cell], torch.bfloat16
    state, stream = (batch, hidden), torch.cuda.current_stream()

    def made(seed: int, *shape: int, scale: float = 1.0, dtype: torch.dtype = dtype) -> Tensor:
        return draw(seed, *shape, device=CUDA, dtype=dtype, scale=scale)

    x, weight_hh = made(1, frames, batch, row.gates * hidden), made(2, row.gates * hidden, hidden, scale=0.05)
    h0, grad_h_n, grad_y = made(3, *state), made(4, *state), made(5, frames, *state)
    bias = made(6, hidden) if row.last_apart else None
    c0, grad_c_n = (made(seed, *state, dtype=torch.float32) if row.carries_c else None for seed in (7, 8))
    lengths = ragged_lengths(frames, batch).to(CUDA, torch.int32)
    options = Options(cell)
    expected = [*persistent.forward((x, weight_hh, bias, h0, c0, lengths), options, save=True)]
    above = grad_y, grad_h_n, grad_c_n, expected[0], expected[3], weight_hh, lengths
    expected += persistent.backward_data(above, options)
    ours = [None if tensor is None else torch.full_like(tensor, torch.nan) for tensor in expected]
    y, h_n, c_n, saved, grad_x, grad_last, grad_h0, grad_c0 = ours
    sizes = SIZES | {"frames": frames, "batch": batch, "hidden": hidden, "cell": cell}
    forward, backward = Forward(**sizes), BackwardData(**sizes)
    room = torch.empty(max(forward.workspace_bytes, backward.workspace_bytes), dtype=torch.uint8, device=CUDA)
    common = {"stream": stream, "lengths": lengths}
    forward(x, weight_hh, y, h_n, room, h0=h0, saved=saved, bias=bias, c0=c0, c_n=c_n, **common)
    of_gates = {"saved": saved, "grad_c_n": grad_c_n, "grad_c0": grad_c0, "grad_last": grad_last}
    backward(grad_y, None, weight_hh, grad_x, grad_h0, room, grad_h_n=grad_h_n, **of_gates, **common)
    names = ("y", "h_n", "c_n", "saved", "grad_x", "grad_last", "grad_h0", "grad_c0")
    for name, one, other in zip(names, ours, expected, strict=True):
        if one is None:
            continue
        if name == "saved":  # of padding it is nobody's
            valid = (torch.arange(frames, device=CUDA)[:, None] < lengths)[:, :, None, None]
            one, other = one.where(valid, 0), other.where(valid, 0)  # noqa: PLW2901
        assert torch.equal(one, other), name


@pytest.mark.gpu
def test_wrong_arrays_are_refused() -> None:
    x, weight_hh, h0, *_ = inputs((9, 3, 130), torch.bfloat16)
    op, stream = Forward(**SIZES, any_layout=True), torch.cuda.current_stream()
    room = torch.empty(op.workspace_bytes, dtype=torch.uint8, device=CUDA)
    y, h_n = torch.empty_like(x), torch.empty_like(h0)
    with pytest.raises(ValueError, match=r"x has shape \(9, 3, 129\), expected \(9, 3, 130\)"):
        op(x[..., :-1], weight_hh, y, h_n, room, stream=stream)
    with pytest.raises(TypeError, match="h_n is float32, expected bfloat16"):
        op(x, weight_hh, y, h_n.float(), room, stream=stream)
    with pytest.raises(ValueError, match=r"workspace has 100 bytes .* expected workspace_bytes = \d+"):
        op(x, weight_hh, y, h_n, room[:100], stream=stream)


@pytest.mark.gpu
def test_a_pass_is_captured_and_replayed() -> None:
    given = list(inputs((20, 4, 1760), torch.bfloat16))
    expected = torch_op(given, None)
    both_passes(given, None, any_layout=False)  # builds the kernels
    x, weight_hh, h0, *_ = given
    op = Forward(**SIZES | {"frames": 20, "batch": 4, "hidden": 1760})
    room = torch.empty(op.workspace_bytes, dtype=torch.uint8, device=CUDA)
    y, h_n = torch.zeros_like(x), torch.zeros_like(h0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        op(x, weight_hh, y, h_n, room, stream=torch.cuda.current_stream(), h0=h0)
    graph.replay()
    assert torch.equal(y, expected[0])
    assert torch.equal(h_n, expected[1])


_OTHERS = """
import sys
import numpy as np
from ds2_ops.recurrent.primitives import BackwardData, Forward

def run(package, dtype, arrays, stream, empty, as_numpy):
    x, w, h0, grad_y, grad_h_n = arrays
    sizes = dict(frames=9, batch=3, hidden=130, dtype=dtype, cell="tanh", clip=1.0)
    forward, backward = Forward(**sizes), BackwardData(**sizes)
    y, grad_x, h_n, grad_h0 = empty(x), empty(x), empty(h0), empty(h0)
    forward(x, w, y, h_n, empty(forward.workspace_bytes), stream=stream, h0=h0)
    backward(grad_y, y, w, grad_x, grad_h0, empty(backward.workspace_bytes), stream=stream, grad_h_n=grad_h_n)
    assert "torch" not in sys.modules
    np.savez(sys.argv[2], *(as_numpy(a) for a in (y, h_n, grad_x, grad_h0)))

given = [value for _, value in sorted(np.load(sys.argv[1]).items())]
if sys.argv[3] == "cupy":
    import cupy
    def empty(like):
        return cupy.empty(max(like, 1), cupy.uint8) if isinstance(like, int) else cupy.empty_like(like)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy_arrays = [cupy.asarray(a) for a in given]
    cupy.cuda.Device().synchronize()
    run("cupy", "float16", cupy_arrays, stream, empty, lambda a: (stream.synchronize(), a.get())[1])
else:
    import jax, jax.numpy as jnp
    def empty(like):
        made = jnp.zeros(max(like, 1), jnp.uint8) if isinstance(like, int) else jnp.zeros_like(like)
        return made.block_until_ready()
    arrays = [jnp.asarray(a).block_until_ready() for a in given]
    from cuda.core import Device
    Device(0).set_current()
    stream = Device(0).create_stream()
    run("jax", "float16", arrays, stream, empty, lambda a: (stream.sync(), np.asarray(jnp.copy(a)))[1])
"""


@pytest.mark.gpu
@pytest.mark.parametrize("package", ["cupy", "jax"])
def test_other_frameworks_get_the_bits_of_the_torch_op(package: str, tmp_path: object) -> None:
    import numpy as np

    found = subprocess.run([sys.executable, "-c", f"import {package}"], capture_output=True, check=False)
    if found.returncode:
        pytest.skip(f"needs {package}")
    given = list(inputs((9, 3, 130), torch.float16))
    expected = torch_op(given, None)
    before, after = f"{tmp_path}/given.npz", f"{tmp_path}/results.npz"
    np.savez(before, *(tensor.cpu().numpy() for tensor in given))
    subprocess.run([sys.executable, "-c", _OTHERS, before, after, package], check=True)
    results = [value for _, value in sorted(np.load(after).items())]
    for result, truth in zip(results, expected, strict=True):
        assert np.array_equal(result, truth.cpu().numpy())
