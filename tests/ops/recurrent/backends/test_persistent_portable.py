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
from support.gated_cases import assert_as_good_as_stock, problem, rounding_floor
from support.gated_cases import run as run_gated
from support.op_cases import CUDA, assert_same_bits, nan_filled_memory, poison_padding, ragged_lengths, relative_error
from support.paths import ROOT
from support.persistent_cases import CLIP, TF32_ERROR, backward_loop, forward_loop, inputs, run
from support.rounding import Arithmetic, allowed_against_stock, variances

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


def use_tile(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Run the tile of this number, or the last where a pass has fewer."""

    def plan_for(wanted: Problem, *_: object) -> Choice:
        found = tiles(wanted)
        return found[min(number, len(found) - 1)]

    monkeypatch.setattr(persistent, "choose_tile", plan_for)


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
    frames, batch, hidden = shape
    lengths = ragged_lengths(frames, batch).to(CUDA, torch.int32)
    x, weight_hh, h0, grad_y, grad_h_n = inputs(shape, dtype)
    poisoned = (poison_padding(x, lengths), weight_hh, h0, poison_padding(grad_y, lengths), grad_h_n)
    truth = forward_loop(x.double(), weight_hh.double(), h0.double(), lengths, "tanh")
    stock = forward_loop(x, weight_hh, h0, lengths, "tanh")
    given, cotangents = (x, weight_hh, h0), (grad_y, grad_h_n)
    may = variances(Arithmetic.of(dtype), given, cotangents, lengths, "tanh", CLIP, of_weight=False)
    name = str(dtype).removeprefix("torch.")
    for tile in range(max(len(tiles(Problem(batch, hidden, name, "tanh", backward))) for backward in (False, True))):
        use_tile(monkeypatch, tile)
        with nan_filled_memory():
            ours, again = run(poisoned, lengths, "tanh"), run(poisoned, lengths, "tanh")
        assert_same_bits(ours, again)
        backward = (grad_y, grad_h_n, ours[0], weight_hh)
        true = truth + backward_loop(*(tensor.double() for tensor in backward), lengths, "tanh")
        other = stock + backward_loop(*backward, lengths, "tanh")
        for what, o, t, s, v in zip(("y", "h_n", "grad_x", "grad_h0"), ours, true, other, may, strict=True):
            allowed = TF32_ERROR if dtype == torch.float32 else allowed_against_stock(s, t, v)
            assert relative_error(o, t) <= allowed, (tile, what)


@pytest.mark.gpu
@pytest.mark.parametrize("cell", [cell for cell, row in GATED.items() if row.phases == 1])
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
    frames, batch, hidden = shape
    lengths = ragged_lengths(frames, batch).to(CUDA)
    (x, *others), (grad_y, *last) = problem(cell, shape, CUDA, dtype)
    poisoned = [poison_padding(x, lengths), *others], [poison_padding(grad_y, lengths), *last]

    def ours() -> list[torch.Tensor]:
        with nan_filled_memory():
            return run_gated(cell, *poisoned, lengths, backend="persistent")

    name, floor = str(dtype).removeprefix("torch."), rounding_floor("persistent", dtype)
    for tile in range(max(len(tiles(Problem(batch, hidden, name, cell, backward))) for backward in (False, True))):
        use_tile(monkeypatch, tile)
        assert_as_good_as_stock(cell, ours, [x, *others], [grad_y, *last], lengths, floor)
        assert_same_bits(ours(), ours())


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["test_op", "test_op_gated", "test_modules"])  # side by side
def test_the_tests_of_the_operator_pass_on_it(name: str) -> None:
    file = f"tests/ops/recurrent/{name}.py"
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", file]
    # Its reset-before GRU has 256 units, for which only the Hopper design has a kernel.
    command += ["--deselect", f"{file}::test_a_cuda_graph_replays_the_same_bits[gru_before]"]
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
