"""The portable kernels on a GPU that stands for one of compute capability 8.0: one block and teams of each size."""

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
from ds2_ops.recurrent.plan.choose import grid_choices
from ds2_ops.recurrent.plan.problem import Choice, Design, Problem
from support import gated_cases
from support.paths import ROOT
from support.persistent_cases import check_each_tile

EARLIER = {"DS2_OPS_CAPABILITY": "8.0"}


@pytest.fixture
def earlier_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Choose and build kernels as for compute capability 8.0."""

    def forget() -> None:
        for kept in (runtime.arch, runtime.load, calibrate.device_facts, calibrate.choose_tile, persistent.why_not):
            kept.cache_clear()
        choose._checked.cache_clear()
        op._pays.cache_clear()

    monkeypatch.setenv(*next(iter(EARLIER.items())))
    forget()
    yield
    monkeypatch.undo()
    forget()


def tiles(wanted: Problem) -> list[Choice]:
    """Of one block and of each size of a team, the tile that the model likes best; the fuzzer runs the others."""
    facts = calibrate.device_facts(0)
    choices = sorted(grid_choices(wanted, facts, facts.sms), key=lambda choice: choice.step_us)
    return list({choice.work.layout: choice for choice in reversed(choices)}.values())


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
    for wrong in ("10.0", "9", "sm_80"):
        monkeypatch.setenv("DS2_OPS_CAPABILITY", wrong)
        with pytest.raises(ValueError, match=rf"DS2_OPS_CAPABILITY is '{wrong}', allowed is .* 9.0, such as 8.0"):
            runtime.capability(0)
