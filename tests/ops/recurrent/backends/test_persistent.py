"""The persistent kernels on a GPU: every tile against float64, poisoned memory, same bits twice and split in time."""

import itertools
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ds2_ops.jit import runtime
from ds2_ops.jit.build import build
from ds2_ops.recurrent.backends import persistent
from ds2_ops.recurrent.backends.choose import resolve
from ds2_ops.recurrent.calibrate import device_facts
from ds2_ops.recurrent.cells import PLAIN, Options
from ds2_ops.recurrent.plan.choose import grid_choices, hopper, largest_grid_hidden, space
from ds2_ops.recurrent.plan.cluster import cluster_choices, largest_cluster_hidden
from ds2_ops.recurrent.plan.problem import Choice, Problem
from ds2_ops.recurrent.plan.units import units_choices
from support.op_cases import CUDA, assert_replays, assert_same_bits, draw
from support.persistent_cases import (
    CLIP,
    DTYPES,
    check_each_tile,
    forward,
    inputs,
    one_a_kernel,
    one_a_layout,
    run,
)
from torch._subclasses import FakeTensorMode

# frames, batch, hidden: one of each tile; odd rows; one utterance; two groups; more tiles than clusters
SMALL = [(9, 4, 1152), (7, 40, 1152), (6, 130, 1151), (5, 3, 1), (8, 33, 512), (3, 1, 640), (6, 19, 77), (1, 9, 130)]
# The whole-chip designs: one group, two, five, two tiles; odd rows; weights in shared memory too; so many frames that
# the exchange comes round; groups of 32 and 31.
LARGE = [(20, 63, 1760), (40, 4, 1760), (5, 8, 2560), (6, 3, 1761), (4, 2, 3001), (21, 11, 1301), (20, 70, 1760)]
LARGE += [(6, 40, 2558), (3, 9, 4224), (1, 1, 1153)]
CASES = [*itertools.product(SMALL, PLAIN), *itertools.product(LARGE, ("clipped_relu", "tanh"))]


def tiles(problem: Problem) -> list[Choice]:
    """Of the designs with clusters, or of the whole-chip ones where a layer is too large for these.

    Portable tiles only of each layout: the fuzzer runs the others.
    """
    facts = device_facts(torch.cuda.current_device())
    if not hopper(facts):
        return one_a_layout(space(problem, facts))
    choices = cluster_choices(problem, facts, facts.sms) + units_choices(problem, facts, facts.sms)
    return one_a_kernel(choices or grid_choices(problem, facts, facts.sms))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "nonlinearity"), CASES, ids=str)
def test_every_tile_against_float64(
    shape: tuple[int, int, int], nonlinearity: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames, batch, hidden = shape
    name, facts = str(dtype).removeprefix("torch."), device_facts(torch.cuda.current_device())
    if shape in SMALL:
        hidden = min(hidden, largest_cluster_hidden(name))
    elif hidden > largest_grid_hidden(Problem(batch, hidden, name, nonlinearity, False), facts, facts.sms):
        pytest.skip("does not fit; the planner's test holds the message")
    check_each_tile(monkeypatch, tiles, (frames, batch, hidden), dtype, nonlinearity)


SPLITS = [((11, 20, 700), dtype, (1, 4, 10)) for dtype in DTYPES]
SPLITS += [((37, batch, 1760), dtype, (1, 9, 30)) for batch, dtype in zip((4, 40, 3), DTYPES, strict=True)]


@pytest.mark.gpu
@pytest.mark.parametrize(("shape", "dtype", "cuts"), SPLITS, ids=str)
def test_split_in_time_gives_the_same_bits(
    shape: tuple[int, int, int], dtype: torch.dtype, cuts: tuple[int, ...]
) -> None:
    x, weight_hh, h0, _, _ = inputs(shape, dtype)
    options = Options("tanh", CLIP)
    whole, last = forward(x, weight_hh, h0, None, options)
    for cut in cuts:
        head, state = forward(x[:cut], weight_hh, h0, None, options)
        tail, end = forward(x[cut:], weight_hh, state, None, options)
        assert_same_bits([torch.cat([head, tail]), end], [whole, last])


@pytest.mark.gpu
@pytest.mark.hopper
@pytest.mark.parametrize(("shape", "max_sms"), [((6, 30, 1152), 16), ((6, 4, 1760), 100)], ids=str)  # one cluster, some
def test_few_multiprocessors_give_the_same_bits(shape: tuple[int, int, int], max_sms: int) -> None:
    x, weight_hh, h0, _, _ = inputs(shape, torch.bfloat16)
    options = Options("relu", CLIP)
    every = forward(x, weight_hh, h0, None, options)
    assert_same_bits(forward(x, weight_hh, h0, None, options._replace(max_sms=max_sms)), every)


@pytest.mark.gpu
def test_views_that_start_inside_a_word_are_read_right() -> None:
    x, weight_hh, h0, _, _ = inputs((6, 5, 256), torch.bfloat16)
    options = Options("relu", CLIP)
    shifted = torch.cat([x.new_zeros(1), x.flatten()])[1:].view_as(x)
    assert shifted.data_ptr() % 4
    y, h_n = forward(shifted, weight_hh, h0, None, options)
    assert all(map(torch.equal, (y, h_n), forward(x, weight_hh, h0, None, options)))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(6, 5, 256), (6, 5, 1300), (6, 33, 1300)], ids=str)
def test_nan_weights_and_states_show_in_the_output_and_do_not_hang(shape: tuple[int, int, int]) -> None:
    x, weight_hh, h0, _, _ = inputs(shape, torch.bfloat16)
    options = Options("relu", CLIP)
    y, _ = forward(x, torch.full_like(weight_hh, torch.nan), h0, None, options)
    assert y.isnan().all()
    # Every bit set is the exchange's own "empty".
    every_bit_set = torch.full(h0.shape, -1, dtype=torch.int16, device=CUDA).view(torch.bfloat16)
    y, _ = forward(x, weight_hh, every_bit_set, None, options)
    assert y.isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(8, 9, 1152), (8, 4, 1760), (8, 40, 1760)], ids=str)
def test_graph_replay_reads_new_inputs(shape: tuple[int, int, int]) -> None:
    tensors = inputs(shape, torch.bfloat16)
    others = draw(9, *shape, device=CUDA, dtype=torch.bfloat16)
    assert_replays(lambda: run(tensors, None, "relu"), lambda: tensors[0].copy_(others))


@pytest.mark.gpu
def test_refused_launch_names_op_shape_dtype_tile_and_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight_hh, h0, _, _ = inputs((4, 3, 128), torch.bfloat16)
    choice = tiles(Problem(3, 128, "bfloat16", "relu", False))[0]
    too_much = replace(choice, launch=replace(choice.launch, smem_bytes=10**6))
    monkeypatch.setattr(persistent, "choose_tile", lambda *_: too_much)
    op = rf"forward of \(T, B, H\) = \(4, 3, 128\), torch.bfloat16, {choice.design} design: "
    with pytest.raises(RuntimeError, match=rf"{op}.* failed on {re.escape(runtime.device_name(0))}: "):
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
