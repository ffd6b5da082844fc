"""Kernels as PTX, which the driver compiles: on a GPU that stands for one of compute capability 8.0, and of 9.0.

Portable kernels of one block and of teams of each size; of 9.0 also one of each Hopper design.
"""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from ds2_ops.jit import runtime
from ds2_ops.recurrent import calibrate, op
from ds2_ops.recurrent.backends import choose, persistent
from ds2_ops.recurrent.cells import GATED
from ds2_ops.recurrent.plan.choose import grid_choices, rank
from ds2_ops.recurrent.plan.narrow import portable_choices
from ds2_ops.recurrent.plan.problem import Choice, Design, Problem
from support import gated_cases
from support.paths import ROOT
from support.persistent_cases import check_each_tile, one_a_layout

EARLIER = {"DS2_OPS_CAPABILITY": "8.0"}


@pytest.fixture
def earlier_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Choose and build kernels as for compute capability 8.0."""
    yield from stands_for(monkeypatch, "8.0")


@pytest.fixture
def same_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Choose kernels as for compute capability 9.0, and build them as PTX of it."""
    yield from stands_for(monkeypatch, "9.0")


def stands_for(monkeypatch: pytest.MonkeyPatch, capability: str) -> Iterator[None]:
    def forget() -> None:
        for kept in (runtime.arch, runtime.load, calibrate.device_facts, calibrate.choose_tile, persistent.why_not):
            kept.cache_clear()
        choose._resolve.cache_clear()
        op._pays.cache_clear()

    monkeypatch.setenv("DS2_OPS_CAPABILITY", capability)
    forget()
    yield
    monkeypatch.undo()
    forget()


def tiles(wanted: Problem) -> list[Choice]:
    """Of one block and of each size of a team, the tile that the model likes best; the fuzzer runs the others."""
    facts = calibrate.device_facts(0)
    return one_a_layout(grid_choices(wanted, facts, facts.sms))


@pytest.mark.gpu
def test_the_planner_chooses_it_and_the_driver_compiles_it(earlier_gpu: None) -> None:
    assert runtime.arch(0) == "compute_80"
    for cell in ("relu", "lstm", "gru_after"):
        chosen = calibrate.choose_tile(Problem(8, 512, "bfloat16", cell, True), 0, None)
        assert chosen.design is Design.PORTABLE and chosen.launch.cluster == 1


# Odd rows, several groups, two tiles of utterances, an exchange that comes round, warps without a part of K.
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((20, 70, 640), torch.bfloat16),
        ((40, 4, 1152), torch.bfloat16),
        ((21, 11, 1301), torch.float16),
        ((5, 9, 100), torch.float32),
        ((19, 35, 777), torch.float32),
        ((1, 1, 33), torch.bfloat16),
    ],
    ids=str,
)
def test_against_float64(
    shape: tuple[int, int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, earlier_gpu: None
) -> None:
    check_each_tile(monkeypatch, tiles, shape, dtype, "tanh")


@pytest.mark.gpu
@pytest.mark.parametrize("cell", GATED)
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((20, 35, 512), torch.bfloat16),
        ((6, 70, 640), torch.bfloat16),
        ((40, 9, 513), torch.float16),
        ((5, 3, 100), torch.float32),
    ],
    ids=str,
)
def test_gates_against_float64(
    shape: tuple[int, int, int], dtype: torch.dtype, cell: str, monkeypatch: pytest.MonkeyPatch, earlier_gpu: None
) -> None:
    floor = gated_cases.rounding_floor("persistent", dtype)
    gated_cases.check_each_tile(monkeypatch, tiles, shape, dtype, cell, floor)


@pytest.mark.gpu
@pytest.mark.hopper
@pytest.mark.parametrize("cell", ["relu", "lstm", "gru_before"])
@pytest.mark.parametrize("arch", ["compute_90", "compute_90a"])
def test_ptx_of_9_0_against_float64(cell: str, arch: str, monkeypatch: pytest.MonkeyPatch, same_gpu: None) -> None:
    """Hopper designs need what only `compute_90a` has."""
    assert runtime.arch(0) == "compute_90a"
    monkeypatch.setattr(runtime, "arch", lambda index: arch)

    def of_each_design(wanted: Problem) -> list[Choice]:
        facts = calibrate.device_facts(0)
        if arch == "compute_90":
            return one_a_layout(portable_choices(wanted, facts, facts.sms))
        ranked = rank(wanted, facts)
        return list({choice.design: choice for choice in reversed(ranked)}.values())

    shape, dtype = (20, 35, 512), torch.bfloat16
    if cell == "relu":
        check_each_tile(monkeypatch, of_each_design, shape, dtype, cell)
    else:
        floor = gated_cases.rounding_floor("persistent", dtype)
        gated_cases.check_each_tile(monkeypatch, of_each_design, shape, dtype, cell, floor)


@pytest.mark.gpu
@pytest.mark.skipif("DS2_OPS_CAPABILITY" in os.environ, reason="all tests of this run stand for another GPU already")
@pytest.mark.parametrize("name", ["test_op", "test_op_gated", "test_modules"])  # side by side
def test_the_tests_of_the_operator_pass_on_it(name: str) -> None:
    file = f"tests/ops/recurrent/{name}.py"
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", file]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | EARLIER, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]


def test_a_later_capability_or_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "attribute", lambda index, name: {"MAJOR": 9, "MINOR": 0}[name.rpartition("_")[2]])
    monkeypatch.setenv("DS2_OPS_CAPABILITY", "8.6")
    assert runtime.capability(0) == (8, 6)
    for tried, arch in (("8.6", "compute_86"), ("9.0", "compute_90a"), ("", "sm_90a")):
        monkeypatch.setenv("DS2_OPS_CAPABILITY", tried)
        assert runtime.arch.__wrapped__(0) == arch
    for wrong in ("10.0", "9", "sm_80"):
        monkeypatch.setenv("DS2_OPS_CAPABILITY", wrong)
        with pytest.raises(ValueError, match=rf"DS2_OPS_CAPABILITY is '{wrong}', allowed is .* 9.0, such as 8.0"):
            runtime.capability(0)
