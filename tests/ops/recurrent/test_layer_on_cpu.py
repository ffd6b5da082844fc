"""Kernels of a layer that start before the kernel ahead has ended, from their own source on a CPU (chip_on_cpu.h).

All arrays but weights hold NaN, and are not to be written, until every thread has waited.
"""

import pytest
import torch
from ds2_ops.recurrent import layer
from ds2_ops.recurrent.backends import gemm, persistent
from ds2_ops.recurrent.cells import GATED, Options
from ds2_ops.recurrent.plan.cluster import cluster_choices
from ds2_ops.recurrent.plan.problem import Problem
from support.chip import Chip, Fault, Faults, slow, small_chip
from support.gated_cases import in_float64, problem
from support.op_cases import CPU, ragged_lengths, relative_error
from support.persistent_cases import CLIP, inputs

CLUSTER, PROJECTION = (f"recurrent/{name}.cuh" for name in ("cluster", "projection"))


def recur(chip: Chip, cell: str, shape: tuple[int, int, int], groups: int = 1, faults: Faults = ()) -> None:
    """Run the cluster design early; an assertion fails where it is wrong."""
    frames, batch, hidden = shape
    facts = small_chip({8: 1})
    choices = cluster_choices(Problem(batch, hidden, "bfloat16", cell, False), facts, facts.sms)
    chip(next(choice for choice in choices if choice.groups == groups), 1, faults)
    if cell in GATED:
        tensors, _ = problem(cell, shape, CPU, torch.bfloat16)
    else:
        x, weight_hh, h0, _, _ = inputs(shape, torch.bfloat16, CPU)
        tensors = [x, weight_hh, None, h0, None]
    lengths = ragged_lengths(frames, batch).to(torch.int32)
    results = persistent.forward((*tensors, lengths), Options(cell, CLIP, early=True))[:3]
    truth = gemm.forward((*in_float64(tensors), lengths), Options(cell, CLIP))[:3]
    stock = gemm.forward((*tensors, lengths), Options(cell, CLIP))[:3]
    for ours, true, other in zip(results, truth, stock, strict=True):
        assert ours is None or relative_error(ours, true) <= 2 * relative_error(other, true)


def projected(chip: Chip, shape: tuple[int, int, int, int], faults: Faults = ()) -> None:
    """Run the projection early; an assertion fails where it is wrong."""
    frames, batch, width, hidden = shape
    facts = small_chip({8: 1})
    chip(cluster_choices(Problem(1, 32, "bfloat16", "tanh", False), facts, facts.sms)[0], 1, faults)
    draw = torch.Generator().manual_seed(width)
    x, weight, bias = (
        torch.randn(*size, generator=draw).bfloat16() for size in ((frames, batch, width), (hidden, width), (hidden,))
    )
    begin = torch.arange(batch, dtype=torch.int32) % (frames + 1)
    begun = (torch.arange(frames)[:, None] >= begin)[:, :, None]
    true = torch.nn.functional.linear(x.double(), weight.double(), bias.double()) * begun
    stock = torch.nn.functional.linear(x, weight, bias) * begun
    found = layer.launch_projection(x, weight, bias, begin)
    assert relative_error(found, true) <= 2 * relative_error(stock, true)
    alone = [layer.launch_projection(frame[None], weight, bias, (begin - t).clamp_min(0)) for t, frame in enumerate(x)]
    assert torch.equal(found, torch.cat(alone))  # of many rows a block has two tiles, of few one


@pytest.mark.parametrize(
    ("cell", "shape", "groups"),
    [
        pytest.param("tanh", (5, 2, 40), 1, id="one group"),
        pytest.param("tanh", (4, 11, 40), 2, id="two groups, two tiles"),
        slow("tanh", (3, 2, 33), 1, id="rows that start between words"),
        pytest.param("tanh", (3, 2, 44), 1, id="rows on 8 bytes"),
        pytest.param("lstm", (5, 2, 40), 1, id="lstm"),
        pytest.param("gru_after", (4, 11, 33), 1, id="gru, rows that start between words"),
        slow("lstm", (4, 11, 33), 1, id="lstm, rows that start between words"),
        slow("gru_after", (5, 2, 40), 1, id="gru"),
    ],
)
def test_a_recurrence_that_starts_early_waits(chip: Chip, cell: str, shape: tuple[int, int, int], groups: int) -> None:
    recur(chip, cell, shape, groups)


@pytest.mark.parametrize(
    "shape",
    [
        (10, 2, 264, 33),
        (1, 1, 8, 16),
        (10, 17, 16, 17),
        slow((5, 2, 40, 40)),
        slow((2, 150, 264, 81)),
    ],
)
def test_a_projection_that_starts_early_waits(chip: Chip, shape: tuple[int, int, int, int]) -> None:
    projected(chip, shape)


WAIT = "        await_kernel_before();\n"
LOADED = "        cluster_barrier();  // all blocks are there, and their mbarriers\n"
MADE = "finisher(pass, smem);\n        cluster_barrier();\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [
        pytest.param((CLUSTER, LOADED + WAIT, LOADED), id="multiplying warps do not wait"),
        pytest.param((CLUSTER, MADE + WAIT, MADE), id="finishing warps do not wait"),
        pytest.param(
            (CLUSTER, LOADED + WAIT, LOADED + "        static_cast<unsigned*>(pass.result)[0] = 1;\n" + WAIT),
            id="a store before the wait",
        ),
    ],
)
def test_a_recurrence_that_does_not_wait_is_found(chip: Chip, fault: Fault) -> None:
    for cell in ("tanh", "lstm"):
        with pytest.raises(AssertionError):
            recur(chip, cell, (3, 2, 40), faults=(fault,))


def test_a_projection_that_reads_before_it_waits_is_found(chip: Chip) -> None:
    loop = "    const auto* x = static_cast<const Element*>(given.x);\n"
    late = "    if (given.rows > 0) await_kernel_before();\n"
    faults = (
        (PROJECTION, "    await_kernel_before();\n" + loop, loop),
        (PROJECTION, "        // Sums of a warp.\n", late),
    )
    with pytest.raises(AssertionError):
        projected(chip, (3, 2, 40, 33), faults)
