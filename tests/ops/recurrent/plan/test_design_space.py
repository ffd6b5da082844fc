"""The model's estimates for other processors: those of a sweep with fewer multiprocessors, larger and quicker ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
from ds2_ops.recurrent.plan.choose import space
from ds2_ops.recurrent.plan.devices import DEVICES
from ds2_ops.recurrent.plan.model import Processor, step_us
from ds2_ops.recurrent.plan.problem import DeviceFacts, DoesNotFit, Problem
from support.paths import ROOT

from tools.planning.fit import read

H200 = DEVICES["H200"]


@pytest.mark.parametrize("sms", [96, 64, 32])
def test_estimates_hold_on_fewer_multiprocessors(sms: int) -> None:
    for _, times in read(ROOT / "ops" / "figures" / f"plans_h200_{sms}.json").problems:
        ratio = min(step_us(choice.work) for choice, _ in times) / min(us for _, us in times)
        assert 1 / 1.15 <= ratio <= 1.15


def test_a_larger_processor_holds_more_and_a_quicker_one_takes_less() -> None:
    def best_us(hidden: int, batch: int, facts: DeviceFacts = H200, processor: Processor | None = None) -> float:
        tiles = space(Problem(batch, hidden, "bfloat16", "relu", False), facts)
        return min(step_us(tile.work, processor=processor or Processor()) for tile in tiles)

    clusters = {size: 2 * count for size, count in H200.active_clusters.items()}
    twice = replace(H200, sms=2 * H200.sms, active_clusters=clusters)
    assert best_us(4224, 1) > 0
    with pytest.raises(DoesNotFit):
        best_us(4225, 1)
    assert best_us(4225, 1, twice) > 0
    assert best_us(1216, 4, replace(H200, registers=2 * H200.registers)) < best_us(1216, 4)  # one cluster holds it
    assert best_us(2560, 64, twice) < best_us(2560, 64)
    assert best_us(2560, 64, processor=Processor(clock=2.0)) < best_us(2560, 64)
