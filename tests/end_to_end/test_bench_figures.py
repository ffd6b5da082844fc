"""What the benchmarks compute from their measurements: efficiencies, the fit of a link, and predicted steps."""

from __future__ import annotations

from typing import Any

import pytest
from support.paths import ROOT


@pytest.fixture(autouse=True)
def tools_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))


def test_efficiency_is_relative_to_the_fewest_ranks_of_the_same_batch() -> None:
    from benchmarks.scaling import add_efficiency

    shared: dict[str, Any] = {"backend": "auto", "overlap": True}
    rows = [
        shared | {"fixed": "per_rank", "ranks": 1, "batch": 4, "audio_s_per_s": 100.0},
        shared | {"fixed": "per_rank", "ranks": 1, "batch": 8, "audio_s_per_s": 150.0},
        shared | {"fixed": "per_rank", "ranks": 2, "batch": 8, "audio_s_per_s": 180.0},
        shared | {"fixed": "global", "ranks": 1, "batch": 8, "audio_s_per_s": 200.0},
        shared | {"fixed": "global", "ranks": 4, "batch": 8, "audio_s_per_s": 400.0},
    ]
    add_efficiency(rows)
    assert [row["efficiency"] for row in rows] == pytest.approx([1.0, 1.0, 0.9, 1.0, 0.5])


def test_the_fit_of_a_link_recovers_latency_and_bandwidth() -> None:
    pytest.importorskip("mpi4py")
    from benchmarks.collectives import fit

    latency_s, bandwidth, ranks = 20e-6, 5e9, 4
    rows = []
    for kib in (4, 64, 1024):
        load = 2 * (ranks - 1) / ranks * kib * 1024
        seconds = latency_s + load / bandwidth
        rows.append({"us": 1e6 * seconds, "bus_gb_per_s": load / seconds / 1e9})
    assert fit(rows) == pytest.approx((latency_s, bandwidth), rel=1e-6)


def test_a_predicted_step_is_computed_and_summed_in_turn_or_overlapped() -> None:
    from benchmarks.predict import Link, Machine, step_s

    link = Link(latency_s=1e-3, bandwidth=1e9)
    machine = Machine([1.0, 2.0], [0.1, 0.2], [0.2, 0.4], [0.01, 0.01], 4e6, 3, link, link, ranks_per_host=2)
    alone = step_s(machine, 1, 2, bucket_bytes=1e6, overlap=True, shared=False)
    assert alone == pytest.approx((0.2 + 0.4 + 0.01, 0.0))
    one_sum = 1e-3 + 1e6 / 1e9  # of a bucket over two ranks
    in_turn = step_s(machine, 2, 2, bucket_bytes=1e6, overlap=False, shared=False)
    assert in_turn == pytest.approx((alone[0] + 4 * one_sum, 4 * one_sum))
    overlapped = step_s(machine, 2, 2, bucket_bytes=1e6, overlap=True, shared=False)
    assert overlapped == pytest.approx((alone[0] + one_sum, one_sum))  # only the last bucket is waited for
    shared = step_s(machine, 2, 2, bucket_bytes=1e6, overlap=True, shared=True)
    assert shared[0] == pytest.approx(overlapped[0] + 2 * 3 * 1e-3)  # a sum a norm, forward and backward
