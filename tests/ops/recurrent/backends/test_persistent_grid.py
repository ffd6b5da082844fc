"""The whole-chip designs on a GPU: rows off 16 bytes, and launches at the same time, which share the chip."""

import time

import pytest
import torch
from ds2_ops.jit.launch import Launch, Source, launch_on
from ds2_ops.recurrent.calibrate import device_facts
from ds2_ops.recurrent.cells import Options
from support.op_cases import CUDA, draw, nan_filled_memory, ragged_lengths
from support.persistent_cases import CLIP, forward, inputs, run
from torch import Tensor


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [4, 40])
def test_rows_off_16_bytes_change_no_bit(batch: int) -> None:
    given = inputs((5, batch, 1760), torch.bfloat16)
    shifted = tuple(torch.cat([t.new_zeros(2), t.flatten()])[2:].view_as(t) for t in given)
    assert all(t.data_ptr() % 16 == 4 for t in shifted)
    lengths = ragged_lengths(5, batch).to(CUDA, torch.int32)
    assert all(map(torch.equal, run(given, lengths, "tanh"), run(shifted, lengths, "tanh")))


@pytest.mark.gpu
def test_two_at_once_on_a_chip_that_empties_slowly_finish() -> None:
    """Each would wait for ever if it held a part of the chip while the other held the rest."""
    tensors = inputs((60, 4, 1760), torch.bfloat16)
    x, weight_hh, h0, _, _ = tensors
    options = Options("relu", CLIP)
    expected = forward(x, weight_hh, h0, None, options)[0]
    facts = device_facts(0)
    busy = Source(
        """extern "C" __global__ void ds2_kernel(int us) {
            unsigned long long start, now;
            asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
            do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
            while (now - start < 1000ull * us * (blockIdx.x * 37 % gridDim.x + 1));
        }""",
        (("int", "us"),),
    )
    launch = Launch(busy, threads=128, grid=facts.sms, smem_bytes=facts.smem_bytes_per_block)
    busy_stream, first, second = torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.Stream(priority=-1)
    torch.cuda.synchronize()
    for attempt in range(4):
        launch_on(launch, [20], lambda: "a chip that empties slowly", 0, busy_stream.cuda_stream)
        results = []
        for stream in (first, second):
            with torch.cuda.stream(stream):
                results.append(forward(x, weight_hh, h0, None, options)[0])
            time.sleep(0.0005 * attempt)  # a part of the chip is free by now
        deadline = time.monotonic() + 20
        while not (first.query() and second.query()):
            assert time.monotonic() < deadline, "two whole-chip kernels wait for each other"
        assert all(torch.equal(result, expected) for result in results)


@pytest.mark.gpu
@pytest.mark.parametrize("batches", [(4, 12), (4, 40)], ids=str)
def test_calls_that_overlap_in_memory_used_again_change_no_bit(batches: tuple[int, int]) -> None:
    """Two streams, half the chip each; an exchange comes with states of other inputs, of launches and of two graphs.

    The graphs of a stream are of two lengths and share their memory; the second stream's are captured while the first
    runs. Nothing waits for a result before all are there.
    """
    options = Options("relu", CLIP, 60)
    weight_hh, lengths, variants, rounds = inputs((1, 1, 1300), torch.bfloat16)[1], (12, 5), 3, 40
    given = [
        [draw(n, 12, batch, 1300, device=CUDA, dtype=torch.bfloat16) for n in range(variants)] for batch in batches
    ]

    def run(x: Tensor) -> Tensor:
        return forward(x, weight_hh, x[0], None, options)[0]

    with nan_filled_memory():
        expected = [[run(x) for x in of_stream] for of_stream in given]
    streams, found = [torch.cuda.Stream() for _ in batches], [list[Tensor]() for _ in batches]
    fixed, kept = [torch.empty_like(of_stream[0]) for of_stream in given], [list[Tensor]() for _ in batches]
    graphs = [[torch.cuda.CUDAGraph() for _ in lengths] for _ in batches]
    for index, stream in enumerate(streams):
        for graph, length in zip(graphs[index], lengths, strict=True):
            pool = None if graph is graphs[index][0] else graphs[index][0].pool()
            with torch.cuda.graph(graph, pool, stream, capture_error_mode="relaxed"):
                with torch.cuda.stream(streams[0]):
                    for _ in range(rounds * index):
                        run(given[0][0])
                kept[index].append(run(fixed[index][:length]))
    for turn in range(rounds):
        for index, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                found[index].append(run(given[index][turn % variants]))
                fixed[index].copy_(given[index][(turn + 1) % variants])
                for graph, result in zip(graphs[index], kept[index], strict=True):
                    graph.replay()
                    found[index].append(result.clone())
    torch.cuda.synchronize()
    for index, of_stream in enumerate(found):
        for turn in range(rounds):
            called, *replayed = of_stream[turn * 3 : turn * 3 + 3]
            assert torch.equal(called, expected[index][turn % variants])
            truth = expected[index][(turn + 1) % variants]
            assert all(torch.equal(y, truth[:length]) for y, length in zip(replayed, lengths, strict=True))
