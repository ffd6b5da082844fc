"""The design-space tool: what was measured with fewer multiprocessors, and what a described processor would do."""

import argparse
import sys

import pytest
from support.paths import ROOT

from tools import design_space


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    monkeypatch.setattr(sys, "argv", ["design_space.py"])
    return design_space.parse()


@pytest.mark.parametrize("sms", [96, 64, 32])
def test_estimates_hold_on_fewer_multiprocessors(sms: int) -> None:
    assert design_space.check(ROOT / "ops" / "figures" / f"plans_h200_{sms}.json") <= 1.15


def test_a_larger_processor_holds_more_and_a_quicker_one_takes_less(h200: argparse.Namespace) -> None:
    def best(hidden: int, batch: int, **changes: float) -> float:
        return design_space.tiles(hidden, batch, argparse.Namespace(**vars(h200) | changes))[0].us

    assert design_space.tiles(4224, 1, h200)
    assert not design_space.tiles(4225, 1, h200)
    assert best(4225, 1, sms=2 * h200.sms) > 0
    assert best(1216, 4, registers=2 * h200.registers) < best(1216, 4)  # one cluster holds it
    for quicker in ({"exchange": 0.5}, {"clock": 2 * h200.clock}, {"sms": 2 * h200.sms}):
        assert best(2560, 64, **quicker) < best(2560, 64)


def test_cliffs() -> None:
    points = [design_space.Point(64 * n, 4, f"tile {n}", us) for n, us in ((1, 1.0), (2, 1.05), (3, 1.4))]
    assert design_space.cliffs(points) == ["H 128 -> 192: 1.05 -> 1.40 us (tile 2 -> tile 3)"]
    assert points[0].tflops == pytest.approx(2 * 64 * 64 * 4 * 1e-6)
