"""Calibration: off unless asked for; kept, adopted and forgotten; on a GPU, the same results by another tile."""

import itertools
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ds2_ops import recurrence
from ds2_ops.jit import runtime
from ds2_ops.jit.build import ENTRY
from ds2_ops.recurrent import calibrate
from ds2_ops.recurrent.plan.choose import rank
from ds2_ops.recurrent.plan.devices import DEVICES
from ds2_ops.recurrent.plan.model import Processor, step_us
from ds2_ops.recurrent.plan.problem import Choice, DoesNotFit, Problem
from support.op_cases import relative_error
from support.persistent_cases import inputs

PROBLEM = Problem(4, 1152, "bfloat16", "relu", False)
KEY = "relu bfloat16 H 1152 B 4 forward on 132 SMs"
H200 = replace(DEVICES["H200"], name="NVIDIA H200")  # as its driver says
RANKED = [choice.name for choice in rank(PROBLEM, H200)]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[list[str]]]:
    """An H200 that is not here, on which the last of the measured tiles is the fastest; what was measured."""
    seen: list[list[str]] = []

    def measure(choices: Sequence[Choice], problem: Problem, index: int) -> list[float]:
        seen.append([choice.name for choice in choices])
        return [2.0 - place / 10 for place in range(len(choices))]

    monkeypatch.setenv("DS2_OPS_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("DS2_OPS_CALIBRATE", raising=False)
    monkeypatch.setattr(calibrate, "measure", measure)
    monkeypatch.setattr(calibrate, "device_facts", lambda index: H200)
    monkeypatch.setattr(runtime, "device_name", lambda index: "NVIDIA H200")
    monkeypatch.setattr(runtime, "driver_version", lambda: "13.0")
    monkeypatch.setattr(calibrate, "sources_digest", lambda: "abc")
    calibrate.adopt(None)
    yield seen
    calibrate.adopt(None)


def test_nothing_is_measured_unless_asked_for(measured: list[list[str]]) -> None:
    assert calibrate.choose_tile(PROBLEM, 0, None).name == RANKED[0]
    assert not measured


def test_the_fastest_of_the_best_runs_and_is_remembered(
    measured: list[list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DS2_OPS_CALIBRATE", "3")
    assert calibrate.choose_tile(PROBLEM, 0, None).name == RANKED[2]
    calibrate.choose_tile.cache_clear()  # another process
    assert calibrate.choose_tile(PROBLEM, 0, None).name == RANKED[2]
    assert measured == [RANKED[:3]]
    ((path, record),) = calibrate.records()
    assert (record["gpu"], record["driver"], record["sources"]) == ("NVIDIA H200", "13.0", "abc")
    assert record["choices"][KEY]["name"] == RANKED[2]
    calibrate.choose_tile.cache_clear()
    monkeypatch.setenv("DS2_OPS_CALIBRATE", "4")  # more than were measured
    assert calibrate.choose_tile(PROBLEM, 0, None).name == RANKED[3]
    assert len(measured) == 2
    assert calibrate.forget() == 1
    assert not path.exists()
    assert [other.name for other in tmp_path.iterdir()] == []


def test_another_driver_or_version_of_the_sources_measures_anew(
    measured: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for change in (
        lambda: None,
        lambda: monkeypatch.setattr(calibrate, "sources_digest", lambda: "def"),
        lambda: monkeypatch.setattr(runtime, "driver_version", lambda: "13.1"),
        lambda: monkeypatch.setattr(runtime, "device_name", lambda index: "NVIDIA H100"),
    ):
        change()
        calibrate.calibrate([(PROBLEM, None)], 0, 2)
    assert len(measured) == 4
    assert len(calibrate.records()) == 4


def test_a_damaged_record_is_measured_anew(measured: list[list[str]]) -> None:
    calibrate.calibrate([(PROBLEM, None)], 0, 2)
    path = calibrate.record_path(0)
    path.write_text(path.read_text()[:40])
    with pytest.warns(RuntimeWarning, match="is damaged: its measurements are made anew"):
        assert calibrate.calibrate([(PROBLEM, None)], 0, 2) == {KEY: RANKED[1]}
    assert len(measured) == 2
    assert json.loads(path.read_text())["choices"][KEY]["most"] == 2


def test_an_adopted_tile_runs_whatever_was_measured_here(
    measured: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS2_OPS_CALIBRATE", "2")
    calibrate.adopt({KEY: RANKED[4]})
    assert calibrate.choose_tile(PROBLEM, 0, None).name == RANKED[4]
    other = PROBLEM._replace(batch=8)
    assert calibrate.choose_tile(other, 0, None).name == rank(other, H200)[0].name
    assert not measured
    calibrate.adopt({KEY: "of another version"})
    with pytest.warns(RuntimeWarning, match="'of another version' that was recorded .* model's choice runs instead"):
        assert calibrate.choose_tile(PROBLEM, 0, None).name == RANKED[0]


def test_two_different_gpus_in_one_job(measured: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS2_OPS_CALIBRATE", "0")
    gpus = [H200, DEVICES["A100"], replace(DEVICES["A100"], name="alike", sms=132)]
    monkeypatch.setattr(calibrate, "device_facts", gpus.__getitem__)
    own = [rank(PROBLEM, facts)[0].name for facts in gpus]
    assert [calibrate.choose_tile(PROBLEM, index, None).name for index in range(3)] == own
    calibrate.adopt({KEY: RANKED[4]})  # measured on the first one; the last one has as many multiprocessors
    assert [calibrate.choose_tile(PROBLEM, index, None).name for index in range(2)] == [RANKED[4], own[1]]
    with pytest.warns(RuntimeWarning, match=r"is not one of this version's: the model's choice runs instead"):
        assert calibrate.choose_tile(PROBLEM, 2, None).name == own[2]


def test_wrong_numbers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS2_OPS_CALIBRATE", "yes")
    with pytest.raises(ValueError, match="DS2_OPS_CALIBRATE is 'yes', allowed is a number"):
        calibrate.tiles_to_measure()


TRUE = {
    "portable": {"exchange": 1.9, "reads": 0.8, "products": 1.2},
    "units": {"exchange": 1980 / 1410, "reads": 1.1, "products": 1.6},  # one block exchanges nothing: by the clock
}


@pytest.fixture
def unknown(measured: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Problem]]:
    """A GPU without recorded times that is not here, whose links take `TRUE` as long as by the constants; the problems
    that were timed on it.
    """
    seen: list[Problem] = []
    kind_of_gpu = replace(DEVICES["A100"], name="NVIDIA A100 80GB PCIe")

    def time_tiles(choices: Sequence[Choice], problem: Problem, index: int) -> list[float]:
        seen.append(problem)
        return [step_us(choice.work, processor=Processor(factors=TRUE)) for choice in choices]

    monkeypatch.setattr(calibrate, "device_facts", lambda index: kind_of_gpu)
    monkeypatch.setattr(calibrate, "time_tiles", time_tiles)
    monkeypatch.setattr(calibrate, "_build_together", lambda texts, arch, limit_s=None: list(texts))
    monkeypatch.setattr(runtime, "arch", lambda index: "sm_80")
    calibrate.adopt_factors({})
    calibrate.adopt_factors(None)
    yield seen
    calibrate.adopt_factors({})
    calibrate.adopt_factors(None)


def in_another_process() -> None:
    calibrate.adopt_factors({})
    calibrate.adopt_factors(None)


def by_the_clock() -> str:
    return rank(PROBLEM, calibrate.device_facts(0))[0].name


def test_an_unknown_gpu_is_measured_once_by_few_kernels_and_its_constants_come_out(
    unknown: list[Problem], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="ds2_ops"):
        factors = calibrate.factors_of(0)
    # The prior, that of the clock, is 1.4 for each. Of one block's links two take too little to be known.
    assert factors["portable"] == pytest.approx(TRUE["portable"], rel=0.03)
    assert factors["units"]["products"] == pytest.approx(TRUE["units"]["products"], rel=0.03)
    kernels = calibrate.few_kernels(calibrate.device_facts(0))
    tiles = sum(map(len, kernels.values()))
    assert len(kernels) == calibrate.KERNELS and tiles < 60
    message = f"constants were fitted to {tiles} tiles of {len(kernels)} kernels on NVIDIA A100 80GB PCIe in "
    assert caplog.text.count(message) == 1 and "DS2_OPS_CALIBRATE=0 leaves that out" in caplog.text
    timed = len(unknown)
    in_another_process()
    assert calibrate.factors_of(0) == factors
    assert calibrate.choose_tile(PROBLEM, 0, None).name == calibrate.choose_tile(PROBLEM, 1, None).name
    assert len(unknown) == timed
    ((_, record),) = calibrate.records()
    assert record["factors"] == factors


def test_a_slow_gpu_is_measured_by_what_is_done_in_time(
    unknown: list[Problem], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate, "_LIMIT_S", 0.0)
    ((design, links),) = calibrate.factors_of(0).items()
    assert len(unknown) == 1 and set(links) == set(TRUE[design])


def test_fitted_factors_change_what_is_chosen(unknown: list[Problem]) -> None:
    changed = 0
    for batch, backward in itertools.product((1, 4, 16, 64), (False, True)):
        problem = Problem(batch, 640, "bfloat16", "lstm", backward)
        choices = rank(problem, calibrate.device_facts(0))
        times = {c.name: step_us(c.work, processor=Processor(factors=TRUE)) for c in choices}
        chosen = calibrate.choose_tile(problem, 0, None)
        assert chosen.step_us == pytest.approx(times[chosen.name], rel=0.03)
        assert times[chosen.name] <= 1.03 * min(times.values())
        changed += times[choices[0].name] > 1.03 * times[chosen.name]
    assert changed


@pytest.mark.parametrize("off", ["setting", "recorded", "captured", "adopted"])
def test_nothing_is_timed_where_it_must_not_be(
    unknown: list[Problem], monkeypatch: pytest.MonkeyPatch, off: str
) -> None:
    if off == "setting":
        monkeypatch.setenv("DS2_OPS_CALIBRATE", "0")
    elif off == "recorded":
        monkeypatch.setattr(calibrate, "device_facts", lambda index: H200)
    elif off == "captured":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    else:
        calibrate.adopt_factors({"another GPU": TRUE})
    assert calibrate.factors_of(0) == calibrate.measured_factors(0) == {}
    assert calibrate.choose_tile(PROBLEM, 0, None).name == by_the_clock()
    assert not unknown


def test_a_gpu_that_no_kernel_runs_on_is_not_measured(unknown: list[Problem], monkeypatch: pytest.MonkeyPatch) -> None:
    turing = replace(DEVICES["A10"], name="T4", capability=(7, 5))
    monkeypatch.setattr(calibrate, "device_facts", lambda index: turing)
    with pytest.raises(DoesNotFit, match=r"T4 has compute capability 7\.5"):
        calibrate.choose_tile(PROBLEM, 0, None)
    assert not unknown


def test_adopted_factors_hold_for_their_gpu_whatever_was_measured_here(unknown: list[Problem]) -> None:
    name = calibrate.device_facts(0).name
    assert calibrate.measured_factors(0)[name]["portable"]["exchange"] == pytest.approx(1.9, rel=0.03)
    other = {"portable": dict.fromkeys(("exchange", "reads", "products"), 2.0)}
    calibrate.adopt_factors({name: other})
    assert calibrate.factors_of(0) == other


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"constants": "older"}, "its factors are of other constants: they are measured anew"),
        ({"factors": {"portable": {"exchange": 1.0}}}, "for 'portable' .*, expected a number of 0 or more for each of"),
        ({"factors": {"units": {"exchange": -1.0, "reads": 1.0, "products": 1.0}}}, "for 'units'"),
        ({"factors": {"units": {"exchange": "1", "reads": 1.0, "products": 1.0}}}, "for 'units'"),
        ({"factors": [1.0]}, "is damaged: its measurements are made anew"),
    ],
)
def test_wrong_saved_factors_are_refused_and_measured_anew(
    unknown: list[Problem], wrong: dict[str, object], message: str
) -> None:
    factors, timed, path = calibrate.factors_of(0), len(unknown), calibrate.record_path(0)
    path.write_text(json.dumps(json.loads(path.read_text()) | wrong))
    in_another_process()
    with pytest.warns(RuntimeWarning, match=message):
        assert calibrate.factors_of(0) == factors
    assert len(unknown) == 2 * timed
    assert json.loads(path.read_text())["factors"] == factors


@pytest.mark.parametrize("failing", ["time_tiles", "_build_together", "nothing built"])
def test_a_driver_that_fails_leaves_the_constants_by_the_clock(
    unknown: list[Problem], monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    def fail(*arguments: object) -> list[float]:
        raise RuntimeError("cuMemAlloc failed: CUDA_ERROR_OUT_OF_MEMORY")

    if failing == "nothing built":
        monkeypatch.setattr(calibrate, "_build_together", lambda *arguments: [])
    else:
        monkeypatch.setattr(calibrate, failing, fail)
    reason = "none of 8 kernels was compiled in 8 s" if failing == "nothing built" else "cuMemAlloc failed"
    with pytest.warns(RuntimeWarning, match=f"constants follow the clock of NVIDIA A100 .*: {reason}") as warned:
        assert calibrate.choose_tile(PROBLEM, 0, None).name == by_the_clock()
        calibrate.choose_tile(PROBLEM._replace(batch=2), 0, None)
    assert len(warned) == 1
    assert not calibrate.records()


def test_compilers_that_take_too_long_are_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DS2_OPS_CACHE_DIR", str(tmp_path))
    source = f'extern "C" __global__ void {ENTRY}() {{}}'
    assert calibrate._build_together([source, "no kernel"], "sm_80") == [source]
    assert calibrate._build_together([f"{source}\n"], "sm_80", 0.01) == []


@pytest.mark.gpu
def test_this_gpu_is_measured_once_where_it_counts_as_unknown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DS2_OPS_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("DS2_OPS_CALIBRATE", raising=False)
    monkeypatch.setattr(calibrate, "recorded_gpus", list)
    index = torch.cuda.current_device()
    in_another_process()
    try:
        factors = calibrate.factors_of(index)
        monkeypatch.setattr(calibrate, "time_tiles", None)
        in_another_process()
        assert calibrate.factors_of(index) == factors != {}
    finally:
        in_another_process()


@pytest.mark.gpu
def test_calibrated_tiles_give_the_results_of_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DS2_OPS_CACHE_DIR", str(tmp_path))  # kernels are built for it, in parallel
    x, weight_hh, h0, *_ = inputs((9, 24, 512), torch.bfloat16)
    expected, _ = recurrence(x, weight_hh, h0, nonlinearity="relu", backend="persistent")
    problem = Problem(24, 512, "bfloat16", "relu", False)
    found = calibrate.calibrate([(problem, None)], torch.cuda.current_device(), 4)
    ((key, name),) = found.items()
    ((_, record),) = calibrate.records()
    times = record["choices"][key]["us"]
    assert len(times) == 4
    assert name == min(times, key=times.get)
    try:
        calibrate.adopt({key: max(times, key=times.get)})
        ours, _ = recurrence(x, weight_hh, h0, nonlinearity="relu", backend="persistent")
    finally:
        calibrate.adopt(None)
    assert relative_error(ours, expected) < 0.01


@pytest.mark.parametrize(("hidden", "max_sms"), [(512, None), (1152, None), (1152, 16), (1024, None)])
def test_what_starts_early_adds_up_in_one_order_whatever_the_batch(
    measured: list[list[str]], monkeypatch: pytest.MonkeyPatch, hidden: int, max_sms: int | None
) -> None:
    monkeypatch.setenv("DS2_OPS_CALIBRATE", "2")
    for batch in (1, 2, 7, 32, 64, 128, 256):
        found = calibrate.choose_tile(Problem(batch, hidden, "bfloat16", "relu", False), 0, max_sms, True)
        assert (found.design, found.launch.cluster) == ("cluster", 16)
