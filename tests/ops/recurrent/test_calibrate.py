"""Calibration: off unless asked for; kept, adopted and forgotten; on a GPU, the same results by another tile."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ds2_ops import recurrence
from ds2_ops.jit import runtime
from ds2_ops.recurrent import calibrate
from ds2_ops.recurrent.plan.choose import rank
from ds2_ops.recurrent.plan.devices import DEVICES
from ds2_ops.recurrent.plan.problem import Choice, DeviceFacts, Problem
from support.op_cases import relative_error
from support.persistent_cases import inputs

PROBLEM = Problem(4, 1152, "bfloat16", "relu", False)
KEY = "relu bfloat16 H 1152 B 4 forward on 132 SMs"
RANKED = [choice.name for choice in rank(PROBLEM, DeviceFacts())]


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
    monkeypatch.setattr(calibrate, "device_facts", lambda index: DeviceFacts())
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
    assert calibrate.choose_tile(other, 0, None).name == rank(other, DeviceFacts())[0].name
    assert not measured
    calibrate.adopt({KEY: "of another version"})
    with pytest.warns(RuntimeWarning, match="'of another version' that was recorded .* model's choice runs instead"):
        assert calibrate.choose_tile(PROBLEM, 0, None).name == RANKED[0]


def test_two_different_gpus_in_one_job(measured: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [DeviceFacts(), DEVICES["A100"], replace(DEVICES["A100"], name="alike", sms=132)]
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
