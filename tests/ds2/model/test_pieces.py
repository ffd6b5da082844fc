"""Modules on pieces of a batch give the outputs and gradients of the whole batch, to autograd and to sinks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.layer_cases import GATED_CELLS
from torch import Tensor

from ds2.config.schema import ConvConfig, ModelConfig
from ds2.distributed.communicator import Communicator
from ds2.distributed.gradients import GradientReducer
from ds2.model.acoustic import AcousticModel
from ds2.model.wavefront import LAYER_SMS, Wavefront, why_not

BINS, LABELS, FRAMES = 9, 5, 90
LENGTHS = torch.tensor([90, 71, 8, 33])
VARIANTS: dict[str, dict[str, Any]] = {
    "row convolutions": {},
    "no norm": {"batch_norm": False, "norm": "batch"},
    "no skips": {"skip": 0},
    "several row convolutions, projection": {"row_convs": 7, "row_conv_context": 1, "skip_first": "projection"},
    "no lookahead": {"row_convs": 0},
    "dropout": {"dropout": 0.3},
    **{cell: {"cell": cell, "backend": "gemm"} for cell in GATED_CELLS},
}


def make(**options: Any) -> AcousticModel:
    torch.manual_seed(3)
    settings: dict[str, Any] = {"hidden": 12, "depth": 5, "skip": 2, "row_convs": 4, "row_conv_context": 2}
    settings |= {"norm": "rms", "max_lookahead_ms": 0, "convs": [ConvConfig([5, 3], [2, 2], 3)]} | options
    model = AcousticModel(ModelConfig(**settings), BINS, LABELS).double().train()
    for name, parameter in model.named_parameters():
        if "row_convs" in name:
            torch.nn.init.normal_(parameter)
    return model


def pieces(count: int) -> Wavefront:
    return Wavefront(5, 144, 8, lambda batch: ((0.0, 0.0), (0.0, 0.0)), fixed=count)


def both_passes(model: AcousticModel, gradients: GradientReducer | None = None) -> tuple[Tensor, list[Tensor]]:
    """Logits, and the gradients of all parameters; through sinks where there is a reducer."""
    draw = torch.Generator().manual_seed(1)
    features = torch.randn(len(LENGTHS), BINS, FRAMES, generator=draw, dtype=torch.float64)
    keys = torch.arange(len(LENGTHS))
    for parameter in model.parameters():
        parameter.grad = None if gradients is None else parameter.grad
    if gradients is None:
        [logits] = model.all_logits(features, LENGTHS, keys)
    else:
        gradients.start_step()
        [logits] = model.all_logits(features, LENGTHS, keys, context=gradients.start_pass(last=True))
    (logits * torch.randn(logits.shape, generator=draw, dtype=torch.float64)).sum().backward()  # type: ignore[no-untyped-call]
    if gradients is not None:
        gradients.end_pass()
        gradients.finish_step()
    return logits.detach(), [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("sinks", [False, True])
def test_pieces_give_outputs_and_gradients_of_the_whole(variant: str, sinks: bool) -> None:
    model = make(**VARIANTS[variant])
    low = model.low_precision_parameters() if sinks else []
    reducer = GradientReducer(
        model.parameters(),
        Communicator(torch.device("cpu")),
        10_000,
        overlap=False,
        low_precision=low,
        dtype=torch.float64,
    )
    gradients = reducer if sinks else None
    whole, wanted = both_passes(model, gradients)
    for count in (2, 4):
        model.wavefront = pieces(count)
        logits, found = both_passes(model, gradients)
        # Sums over frames in another order: each rounds to 2^-53 of its largest term.
        torch.testing.assert_close(logits, whole, rtol=0, atol=1e-12 * float(whole.abs().max()))
        for mine, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-11 * max(1.0, float(theirs.abs().max())))


def test_in_evaluation_nothing_runs_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make().eval()
    model.wavefront = pieces(3)
    monkeypatch.setattr(Wavefront, "pieces", lambda *_: pytest.fail("pieces in evaluation"))
    model(torch.randn(1, BINS, FRAMES).double(), torch.tensor([FRAMES]))


def test_a_batch_too_short_for_pieces_runs_whole() -> None:
    model, features, lengths = make(), torch.randn(1, BINS, 10).double(), torch.tensor([10])
    [whole] = model.all_logits(features, lengths)
    model.wavefront = pieces(3)
    assert torch.equal(model.all_logits(features, lengths)[0], whole)


def test_pieces_have_frames_of_their_own_behind_the_lookahead() -> None:
    for frames in (1, 9, 10, 11, 30, 200):
        count = pieces(50).pieces(frames, 4)
        assert count <= 1 or frames // count - 8 >= 1


def estimated(narrow_us: float, wide_us: float, layers: int = 48, streams: int = 8) -> Wavefront:
    step = ((narrow_us, narrow_us), (wide_us, wide_us))
    return Wavefront(layers, 1152**2, 30, lambda batch: step, [None] * streams, LAYER_SMS)  # type: ignore[list-item]


def test_the_estimate_chooses_pieces_where_they_pay() -> None:
    assert estimated(1.1, 0.85).pieces(350, 4) == 8  # many layers that leave most of the GPU idle
    assert estimated(12.0, 0.9).pieces(350, 64) == 1  # batches that fill the GPU
    assert estimated(1.1, 0.85, layers=1).pieces(350, 4) == 1
    assert estimated(1.1, 0.85).pieces(20, 4) == 1  # shorter than the lookahead
    assert estimated(1.1, 0.85).pieces(0, 4) == estimated(1.1, 0.85).pieces(350, 0) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"norm": "batch"}, "model.norm=rms needs none"),
        ({"bidirectional": True, "row_convs": 0}, "last frame"),
        ({"intermediate": [1]}, "classifiers of inner modules"),
        ({}, "on a CUDA GPU"),
    ],
)
def test_reasons_are_named(options: dict[str, Any], message: str) -> None:
    reason = why_not(make(**options).config, torch.bfloat16, torch.device("cpu"))
    assert reason is not None and message in reason
