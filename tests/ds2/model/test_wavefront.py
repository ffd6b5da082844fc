"""Layers side by side: no task before what it needs, whatever the streams' speed; the same result as one by one."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ds2_ops.recurrent.plan.devices import DEVICES
from torch import Tensor

from ds2.config.schema import ModelConfig
from ds2.inference import network
from ds2.model import wavefront

SHAPES = [(1, 1, 1), (4, 7, 7), (48, 7, 7), (5, 1, 3), (1, 9, 2), (9, 4, 1), (6, 5, 2)]


def missing(tasks: list[tuple[int, int]], streams: int, seed: int, waits: bool = True) -> list[tuple[int, int]]:
    """Run streams side by side at random speeds, projections too; return tasks that started too early."""
    draw, queues = random.Random(seed), defaultdict[tuple[int, bool], list[tuple[int, int]]](list)
    queued, ended = set[tuple[int, int]](), {False: set[tuple[int, int]](), True: set[tuple[int, int]]()}
    wrong = []
    for stage, piece in tasks:
        # An event that is not recorded yet is not waited for.
        assert stage == 0 or (stage - 1, piece) in queued
        queued.add((stage, piece))
        for projection in (False, True):
            queues[stage % streams, projection].append((stage, piece))
    while any(queues.values()):
        stream, projection = draw.choice([stream for stream, queue in queues.items() if queue])
        own = stage, piece = queues[stream, projection][0]
        before, ahead = (stage - 1, piece), (stage, piece - 1)
        if (projection and waits and stage > 0 and before not in ended[False]) or (
            not projection and own not in ended[True]
        ):
            continue
        needs = [before] if projection else [own, ahead]
        if any(min(need) >= 0 and need not in ended[need == own] for need in needs):
            wrong.append(own)
        ended[projection].add(own)
        queues[stream, projection].pop(0)
    return wrong


@pytest.mark.parametrize(("stages", "pieces", "streams"), SHAPES)
def test_no_task_begins_before_what_it_needs(stages: int, pieces: int, streams: int) -> None:
    tasks = wavefront.tasks(stages, pieces)
    assert sorted(tasks) == [(s, p) for s in range(stages) for p in range(pieces)]
    for seed in range(5):
        assert not missing(tasks, streams, seed)


def test_a_wait_that_is_forgotten_is_found() -> None:
    assert any(missing(wavefront.tasks(4, 7), 3, seed, waits=False) for seed in range(5))


def stages_of(count: int) -> list[wavefront.Stage]:
    """Stages that carry a sum from piece to piece, as a recurrence carries its state."""
    carried = [torch.zeros(()) for _ in range(count)]

    def stage(number: int) -> wavefront.Stage:
        def run(piece: int, x: Tensor, projection: torch.cuda.Stream | None) -> Tensor:
            assert projection is None
            carried[number] = 0.5 * carried[number] + x + number + piece
            return carried[number]

        return run

    return [stage(number) for number in range(count)]


def test_pieces_come_out_as_layer_by_layer() -> None:
    pieces = list(torch.randn(6, generator=torch.Generator().manual_seed(0)))
    wanted = list(pieces)
    for stage in stages_of(5):
        wanted = [stage(number, piece, None) for number, piece in enumerate(wanted)]
    assert [float(x) for x in wavefront.run_stages(stages_of(5), pieces, [])] == [float(x) for x in wanted]


@pytest.mark.parametrize(("name", "clusters"), [("H200", {}), ("A100", None), ("H200", {16: 0, 8: 1})])
def test_a_gpu_without_large_clusters_runs_layers_one_by_one(
    name: str, clusters: dict[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = torch.device("cuda", 0)
    facts = DEVICES[name] if clusters is None else replace(DEVICES[name], active_clusters=clusters)
    for module in (wavefront, network):
        monkeypatch.setattr(module, "device_facts", lambda index: facts)
    monkeypatch.setattr(wavefront.persistent, "why_not", lambda *arguments: None)
    reason = wavefront.why_not(ModelConfig(norm="rms"), torch.bfloat16, device)
    assert reason == "the GPU runs no clusters of 16 multiprocessors"
    monkeypatch.setattr(network, "why_not_concurrent", lambda *arguments: None)
    classifier = SimpleNamespace(weight=SimpleNamespace(device=device))
    model: Any = SimpleNamespace(config=ModelConfig(), classifier=classifier)
    assert network.parallel_layers(model, torch.bfloat16) == 1
