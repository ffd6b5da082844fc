"""The persistent kernels on a GPU: every tile against float64, poisoned memory, same bits twice and split in time."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ds2_ops.jit.build import build
from ds2_ops.recurrent.backends import persistent
from ds2_ops.recurrent.backends.choose import resolve
from ds2_ops.recurrent.calibrate import device_facts
from ds2_ops.recurrent.cells import Options
from ds2_ops.recurrent.plan.cluster import cluster_choices, largest_cluster_hidden
from ds2_ops.recurrent.plan.problem import Choice, Problem
from ds2_ops.recurrent.plan.units import units_choices
from support.op_cases import CUDA, draw, nan_filled_memory, poison_padding, ragged_lengths, relative_error
from support.persistent_cases import (
    CLIP,
    DTYPES,
    TF32_ERROR,
    assert_few_multiprocessors_give_the_same_bits,
    assert_split_in_time_gives_the_same_bits,
    backward_loop,
    forward,
    forward_loop,
    inputs,
    one_a_kernel,
    run,
)
from support.rounding import Arithmetic, allowed_against_stock, variances
from torch._subclasses import FakeTensorMode

# frames, batch, hidden: one of each tile; odd rows; one utterance; two groups; more tiles than clusters
SHAPES = [(9, 4, 1152), (7, 40, 1152), (6, 130, 1151), (5, 3, 1), (8, 33, 512), (3, 1, 640), (6, 19, 77), (1, 9, 130)]
NONLINEARITIES = ["relu", "clipped_relu", "tanh"]


def choices_of(batch: int, hidden: int, dtype: torch.dtype, nonlinearity: str, backward: bool) -> list[Choice]:
    problem = Problem(batch, hidden, str(dtype).removeprefix("torch."), nonlinearity, backward)
    facts = device_facts(torch.cuda.current_device())
    return one_a_kernel(cluster_choices(problem, facts, facts.sms) + units_choices(problem, facts, facts.sms))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_tile_against_float64(
    shape: tuple[int, int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames, batch, hidden = shape
    hidden = min(hidden, largest_cluster_hidden(str(dtype).removeprefix("torch.")))
    lengths = ragged_lengths(frames, batch).to(CUDA, torch.int32)
    x, weight_hh, h0, grad_y, grad_h_n = inputs((frames, batch, hidden), dtype)
    poisoned = (poison_padding(x, lengths), weight_hh, h0, poison_padding(grad_y, lengths), grad_h_n)
    tiles = len(choices_of(batch, hidden, dtype, "relu", False))
    assert tiles >= 2
    for index, nonlinearity in itertools.product(range(tiles), NONLINEARITIES):
        monkeypatch.setattr(
            persistent,
            "choose_tile",
            lambda problem, *_, i=index: choices_of(
                problem.batch, problem.hidden, dtype, problem.nonlinearity, problem.backward
            )[i],
        )
        with nan_filled_memory():
            ours = run(poisoned, lengths, nonlinearity)
            again = run(poisoned, lengths, nonlinearity)
        assert all(map(torch.equal, ours, again))
        y = ours[0]
        truth = [
            *forward_loop(x.double(), weight_hh.double(), h0.double(), lengths, nonlinearity),
            *backward_loop(grad_y.double(), grad_h_n.double(), y.double(), weight_hh.double(), lengths, nonlinearity),
        ]
        stock = [
            *forward_loop(x, weight_hh, h0, lengths, nonlinearity),
            *backward_loop(grad_y, grad_h_n, y, weight_hh, lengths, nonlinearity),
        ]
        may = variances(
            Arithmetic.of(dtype), (x, weight_hh, h0), (grad_y, grad_h_n), lengths, nonlinearity, CLIP, of_weight=False
        )
        names = ("y", "h_n", "grad_x", "grad_h0")
        for name, our, true, other, variance in zip(names, ours, truth, stock, may, strict=True):
            allowed = TF32_ERROR if dtype == torch.float32 else allowed_against_stock(other, true, variance)
            assert relative_error(our, true) <= allowed, (name, nonlinearity, index)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_split_in_time_gives_the_same_bits(dtype: torch.dtype) -> None:
    assert_split_in_time_gives_the_same_bits((11, 20, 700), dtype, cuts=(1, 4, 10))


@pytest.mark.gpu
def test_few_multiprocessors_give_the_same_bits() -> None:
    assert_few_multiprocessors_give_the_same_bits((6, 30, 1152), max_sms=16)  # one cluster


@pytest.mark.gpu
def test_views_that_start_inside_a_word_are_read_right() -> None:
    x, weight_hh, h0, _, _ = inputs((6, 5, 256), torch.bfloat16)
    options = Options("relu", CLIP)
    shifted = torch.cat([x.new_zeros(1), x.flatten()])[1:].view_as(x)
    assert shifted.data_ptr() % 4
    y, h_n = forward(shifted, weight_hh, h0, None, options)
    assert all(map(torch.equal, (y, h_n), forward(x, weight_hh, h0, None, options)))


@pytest.mark.gpu
def test_nan_weights_show_in_the_output_and_do_not_hang() -> None:
    x, weight_hh, h0, _, _ = inputs((6, 5, 256), torch.bfloat16)
    y, _ = forward(x, torch.full_like(weight_hh, torch.nan), h0, None, Options("relu", CLIP))
    assert y.isnan().all()


@pytest.mark.gpu
def test_graph_replay_reads_new_inputs() -> None:
    tensors = inputs((8, 9, 1152), torch.bfloat16)
    run(tensors, None, "relu")  # builds the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(tensors, None, "relu")
    tensors[0].copy_(draw(9, 8, 9, 1152, device=CUDA, dtype=torch.bfloat16))
    for _ in range(2):
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(captured, run(tensors, None, "relu"), strict=True))


@pytest.mark.gpu
def test_refused_launch_names_op_shape_dtype_tile_and_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight_hh, h0, _, _ = inputs((4, 3, 128), torch.bfloat16)
    choice = choices_of(3, 128, torch.bfloat16, "relu", False)[0]
    too_much = replace(choice, launch=replace(choice.launch, smem_bytes=10**6))
    monkeypatch.setattr(persistent, "choose_tile", lambda *_: too_much)
    with pytest.raises(
        RuntimeError, match=r"forward of \(T, B, H\) = \(4, 3, 128\), torch.bfloat16, cluster.* failed on .*H\d00"
    ):
        forward(x, weight_hh, h0, None, Options("relu", CLIP))


def test_without_a_gpu_the_reason_is_named() -> None:
    reason = persistent.why_not(5, 3, 64, torch.bfloat16, torch.device("cpu"), "relu", None)
    assert reason is not None
    assert "need a CUDA GPU" in reason


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((0, 3, 64), "nothing to launch"),
        ((5, 0, 64), "nothing to launch"),
        ((5, 3, 0), "nothing to launch"),
        ((2**20, 2**11, 1), "2^31 rows or more"),
    ],
)
def test_shapes_that_cannot_be_launched_are_named(shape: tuple[int, int, int], message: str) -> None:
    reason = persistent.why_not(*shape, torch.bfloat16, torch.device("cuda"), "relu", None)
    assert reason is not None
    assert message in reason


def test_auto_takes_another_backend_where_rows_are_too_many_to_count() -> None:
    with FakeTensorMode():
        x = torch.empty(2**21, 2**10, 1, device="cuda", dtype=torch.bfloat16)
    assert resolve("auto", x, "relu", None) == "gemm"
    with pytest.raises(RuntimeError, match=r"2\^31 rows or more.*backend='gemm'"):
        resolve("persistent", x, "relu", None)


def test_wait_in_a_debug_build_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    monkeypatch.setenv("DS2_OPS_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("DS2_OPS_DEBUG", "1")
    waits = '#include "ptx/sync.cuh"\nextern "C" __global__ void ds2_kernel() { ds2::barrier_wait(0, 0, "nobody", 7); }'
    assert b"waits for %s at step %d" in build(waits).code
    monkeypatch.setenv("DS2_OPS_DEBUG", "0")
    assert b"waits for" not in build(waits).code
