"""The whole-chip design: its planner without a GPU; on one, float64, poisoned memory, same bits twice and split."""

import ctypes
import time

import pytest
import torch
from ds2_ops.jit import runtime
from ds2_ops.jit.build import build
from ds2_ops.recurrent import persistent
from ds2_ops.recurrent.cells import CELLS
from ds2_ops.recurrent.plan.choose import choose, grid_launches, largest_grid_hidden
from ds2_ops.recurrent.plan.problem import DeviceFacts, DoesNotFit, Launch, Problem
from hypothesis import given
from hypothesis import strategies as st
from op_cases import CUDA, draw, nan_filled_memory, poison_padding, ragged_lengths, relative_error
from rounding import Arithmetic, allowed_beside_stock, variances
from test_persistent import CLIP, DTYPES, TF32_ERROR, backward_loop, forward_loop, inputs, run

H200 = DeviceFacts()
LARGEST = {"bfloat16": 4224, "float16": 4224, "float32": 3072}
# frames, batch, hidden: one group, two, five, two tiles; odd rows; weights in shared memory too; so many frames that
# the exchange comes round
SHAPES = [
    (40, 4, 1760),
    (5, 8, 2560),
    (6, 3, 1761),
    (4, 2, 3001),
    (21, 11, 1301),
    (20, 70, 1760),
    (6, 40, 2558),
    (3, 9, 4224),
    (1, 1, 1153),
]


def launches_of(
    hidden: int,
    batch: int,
    dtype: str = "bfloat16",
    sms: int = H200.sms,
    *,
    cell: str = "clipped_relu",
    backward: bool = False,
) -> list[Launch]:
    return grid_launches(Problem(batch, hidden, dtype, cell, backward), H200, sms)


@given(
    hidden=st.integers(1, 4300),
    batch=st.integers(1, 300),
    dtype=st.sampled_from(list(LARGEST)),
    sms=st.integers(1, 132),
)
def test_every_launch_fits_the_device_and_covers_the_problem(hidden: int, batch: int, dtype: str, sms: int) -> None:
    for launch in launches_of(hidden, batch, dtype, sms):
        assert launch.grid <= sms
        assert launch.grid % launch.cluster == 0
        assert launch.grid // launch.cluster <= H200.active_clusters[launch.cluster]
        assert launch.smem_bytes <= H200.smem_bytes_per_block
        assert launch.rows * launch.grid >= hidden
        assert launch.exchange_words * (2 if dtype != "float32" else 1) >= 16 * hidden * launch.samples * launch.groups
        tiles = -(-batch // (launch.samples * launch.groups))
        assert (tiles - 1) * launch.samples * launch.groups < batch


@pytest.mark.parametrize(("dtype", "largest"), LARGEST.items())
def test_largest_that_fits_and_one_past_it(dtype: str, largest: int) -> None:
    assert largest_grid_hidden(dtype, H200, H200.sms) == largest
    assert choose(Problem(4, largest, dtype, "relu", False), H200).design == "grid"
    with pytest.raises(DoesNotFit, match=rf"hidden size {largest + 1} .* {largest} x {largest}; .*backend='gemm'"):
        choose(Problem(4, largest + 1, dtype, "relu", True), H200)


def test_fewer_multiprocessors_hold_less() -> None:
    assert choose(Problem(4, 1760, "bfloat16", "relu", False), H200, 100).grid <= 100
    with pytest.raises(DoesNotFit, match=r"the 20 multiprocessors that may be used on NVIDIA H200 \(132 in all\)"):
        choose(Problem(4, 1760, "bfloat16", "relu", False), H200, 20)


def test_large_batches_take_turns_in_groups() -> None:
    sizes = {}
    for batch in (4, 9, 64, 70):
        launch = next(launch for launch in launches_of(2560, batch) if launch.cluster == 4)
        sizes[batch] = (launch.groups, launch.samples)
    assert sizes == {4: (1, 4), 9: (2, 5), 64: (8, 8), 70: (5, 8)}


def test_a_new_batch_size_needs_no_new_kernel() -> None:
    sources = {choose(Problem(batch, 1760, "bfloat16", "relu", False), H200).source for batch in range(1, 200)}
    assert len(sources) == 2


@pytest.mark.parametrize("dtype", LARGEST)
def test_largest_tile_compiles_without_spills(dtype: str) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    (launch,) = launches_of(LARGEST[dtype], 8, dtype, backward=True)
    assert build(launch.source).local_bytes == 0, launch.explain()


# The multiplying warps' weights fill their registers: every length of K on clusters of 5, then one on 6 and on 8.
@pytest.mark.parametrize("hidden", [2200, 2300, 2400, 2480, 2560, 2048, 1760])
def test_weights_of_the_wide_kernel_leave_registers_to_the_rest(hidden: int) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    for backward in (False, True):
        binary = build(launches_of(hidden, 64, backward=backward)[-1].source)
        assert (binary.local_bytes, binary.loss) == (0, "")


@pytest.mark.slow
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("dtype", LARGEST)
@pytest.mark.parametrize("hidden", [1160, 1760, 2048, 2560, 2816])
def test_tiles_compile_without_spills(hidden: int, dtype: str, cell: str) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    for backward in (False, True):
        for launch in launches_of(hidden, 64, dtype, cell=cell, backward=backward):
            assert build(launch.source).local_bytes == 0, launch.explain()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("nonlinearity", ["clipped_relu", "tanh"])
def test_every_tile_against_float64(
    shape: tuple[int, int, int], dtype: torch.dtype, nonlinearity: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames, batch, hidden = shape
    name = str(dtype).removeprefix("torch.")
    if hidden > LARGEST[name]:
        pytest.skip("does not fit; the planner's test holds the message")
    lengths = ragged_lengths(frames, batch).to(CUDA, torch.int32)
    x, weight_hh, h0, grad_y, grad_h_n = inputs(shape, dtype)
    poisoned = (poison_padding(x, lengths), weight_hh, h0, poison_padding(grad_y, lengths), grad_h_n)
    truth = forward_loop(x.double(), weight_hh.double(), h0.double(), lengths, nonlinearity)
    stock = forward_loop(x, weight_hh, h0, lengths, nonlinearity)
    may = variances(
        Arithmetic.of(dtype), (x, weight_hh, h0), (grad_y, grad_h_n), lengths, nonlinearity, CLIP, of_weight=False
    )
    for tile in range(len(launches_of(hidden, batch, name))):
        monkeypatch.setattr(
            persistent,
            "plan_for",
            lambda problem, *_, i=tile: launches_of(
                hidden, batch, name, cell=problem.nonlinearity, backward=problem.backward
            )[i],
        )
        with nan_filled_memory():
            ours = run(poisoned, lengths, nonlinearity)
            again = run(poisoned, lengths, nonlinearity)
        assert all(map(torch.equal, ours, again))
        backward = (grad_y, grad_h_n, ours[0], weight_hh)
        true = truth + backward_loop(*(tensor.double() for tensor in backward), lengths, nonlinearity)
        other = stock + backward_loop(*backward, lengths, nonlinearity)
        for what, o, t, s, v in zip(("y", "h_n", "grad_x", "grad_h0"), ours, true, other, may, strict=True):
            allowed = TF32_ERROR if dtype == torch.float32 else allowed_beside_stock(s, t, v)
            assert relative_error(o, t) <= allowed, (tile, what)


@pytest.mark.gpu
@pytest.mark.parametrize(("batch", "dtype"), [(4, torch.bfloat16), (40, torch.float16), (3, torch.float32)])
def test_split_in_time_gives_the_same_bits(batch: int, dtype: torch.dtype) -> None:
    x, weight_hh, h0, _, _ = inputs((37, batch, 1760), dtype)
    options = {"nonlinearity": "tanh", "clip": CLIP, "max_sms": None}
    whole, last = persistent.forward(x, weight_hh, h0, None, **options)
    for cut in (1, 9, 30):
        head, state = persistent.forward(x[:cut], weight_hh, h0, None, **options)
        tail, end = persistent.forward(x[cut:], weight_hh, state, None, **options)
        assert torch.equal(torch.cat([head, tail]), whole)
        assert torch.equal(end, last)


@pytest.mark.gpu
def test_few_multiprocessors_give_the_same_bits() -> None:
    x, weight_hh, h0, _, _ = inputs((6, 4, 1760), torch.bfloat16)
    options = {"nonlinearity": "relu", "clip": CLIP}
    everything = persistent.forward(x, weight_hh, h0, None, max_sms=None, **options)
    fewer = persistent.forward(x, weight_hh, h0, None, max_sms=100, **options)
    assert all(torch.equal(a, b) for a, b in zip(everything, fewer, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [4, 40])
def test_rows_off_16_bytes_change_no_bit(batch: int) -> None:
    given = inputs((5, batch, 1760), torch.bfloat16)
    shifted = tuple(torch.cat([t.new_zeros(2), t.flatten()])[2:].view_as(t) for t in given)
    assert all(t.data_ptr() % 16 == 4 for t in shifted)
    lengths = ragged_lengths(5, batch).to(CUDA, torch.int32)
    assert all(map(torch.equal, run(given, lengths, "tanh"), run(shifted, lengths, "tanh")))


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [5, 33])
def test_nan_weights_and_states_show_in_the_output_and_do_not_hang(batch: int) -> None:
    x, weight_hh, h0, _, _ = inputs((6, batch, 1300), torch.bfloat16)
    options = {"nonlinearity": "relu", "clip": CLIP, "max_sms": None}
    y, _ = persistent.forward(x, torch.full_like(weight_hh, torch.nan), h0, None, **options)
    assert y.isnan().all()
    # Every bit set is the exchange's own "empty".
    every_bit_set = torch.full(h0.shape, -1, dtype=torch.int16, device=CUDA).view(torch.bfloat16)
    y, _ = persistent.forward(x, weight_hh, every_bit_set, None, **options)
    assert y.isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [4, 40])
def test_graph_replay_reads_new_inputs(batch: int) -> None:
    tensors = inputs((8, batch, 1760), torch.bfloat16)
    run(tensors, None, "relu")  # builds the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(tensors, None, "relu")
    tensors[0].copy_(draw(9, 8, batch, 1760, device=CUDA, dtype=torch.bfloat16))
    for _ in range(2):
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(captured, run(tensors, None, "relu"), strict=True))


@pytest.mark.gpu
def test_two_at_once_on_a_chip_that_empties_slowly_finish() -> None:
    """Each would wait for ever if it held a part of the chip while the other held the rest."""
    tensors = inputs((60, 4, 1760), torch.bfloat16)
    x, weight_hh, h0, _, _ = tensors
    options = {"nonlinearity": "relu", "clip": CLIP, "max_sms": None}
    expected = persistent.forward(x, weight_hh, h0, None, **options)[0]
    busy = runtime.load(
        """extern "C" __global__ void ds2_kernel(int us) {
            unsigned long long start, now;
            asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
            do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
            while (now - start < 1000ull * us * (blockIdx.x * 37 % gridDim.x + 1));
        }""",
        0,
    )
    facts = persistent.device_facts(0)
    busy_stream, first, second = torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.Stream(priority=-1)
    torch.cuda.synchronize()
    for attempt in range(4):
        runtime.launch(
            busy,
            [ctypes.c_int(20)],
            grid=facts.sms,
            block=128,
            smem_bytes=facts.smem_bytes_per_block,
            stream=busy_stream.cuda_stream,
        )
        results = []
        for stream in (first, second):
            with torch.cuda.stream(stream):
                results.append(persistent.forward(x, weight_hh, h0, None, **options)[0])
            time.sleep(0.0005 * attempt)  # a part of the chip is free by now
        deadline = time.monotonic() + 20
        while not (first.query() and second.query()):
            assert time.monotonic() < deadline, "two whole-chip kernels wait for each other"
        assert all(torch.equal(result, expected) for result in results)
