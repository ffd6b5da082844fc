"""The exported network against the model it was made of, in float64: chunks, starts, ends, batch-mates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.exported import log_energies, of_energies, sound, streamed
from support.layer_cases import GATED_CELLS
from support.spectra import rounding
from torch import Tensor, nn

from ds2.config.schema import ConvConfig
from ds2.export.model import Exported, Network, SourcePosition, TorchModel
from ds2.export.operations import TorchOperations
from ds2.model.checkpoint import LoadedModel
from ds2.system import UserError

Make = Callable[..., LoadedModel]
CAUSAL = [ConvConfig([11, 7], [3, 2], 4, causal=True), ConvConfig([5, 5], [2, 2], 5, causal=True)]
SHAPES: list[dict[str, Any]] = [
    {},
    {"nonlinearity": "tanh", "batch_norm": False},
    {"nonlinearity": "relu", "skip": 0, "row_convs": 0},
    *({"cell": cell} for cell in GATED_CELLS),
    {"cell": "gru", "skip_first": "projection"},
    {"cell": "gru", "batch_norm": False, "skip": 1, "row_convs": 7, "row_conv_context": 1},
    {"norm": "rms"},
    {"norm": "rms", "cell": "lstm", "batch_norm": False},
    {"convs": []},
    {"convs": CAUSAL},
]
# In float64 what remains is rounding of 2^-53 a sum, through sums of hundreds of terms and tens of frames: 1e-12 or so.
EXACT = 1e-9


def in_float64(exported: Exported) -> Callable[..., Sequence[Tensor]]:
    return torch.inference_mode()(TorchModel(exported, torch.float64).eval().forward)


@pytest.mark.parametrize("settings", SHAPES, ids=str)
def test_chunks_give_the_log_probs_of_the_whole(random_model: Make, settings: dict[str, Any]) -> None:
    loaded = random_model(**settings)
    energies = log_energies(loaded, sound(13_000))
    wanted = of_energies(loaded, energies)
    for chunk_s in (0.04, 0.2):
        exported = Exported.of(loaded, from_samples=False, chunk_s=chunk_s)
        (found,) = streamed(in_float64(exported), exported, [energies])
        assert found.shape == wanted.shape and (found - wanted).abs().max() < EXACT


@pytest.mark.parametrize("kind", ["kaldi_fbank", "nemo_fbank", "log_spectrogram", "log_mel"])
def test_energies_are_those_of_the_features(random_model: Make, kind: str) -> None:
    loaded, samples = random_model(kind), sound(9000)
    exported = Exported.of(loaded, from_samples=True, chunk_s=0.04)
    network = Network(TorchOperations(nn.Module(), torch.float64), exported, None, None)
    found, at = network.energies(samples.double(), SourcePosition(torch.tensor([[0]]), torch.tensor([[9000]])))
    wanted = log_energies(loaded, samples)
    assert found.shape == (1, *wanted.shape) and int(at.known) == wanted.shape[2]
    assert ((found[0] - wanted).abs() <= rounding(loaded.features, samples[0].numpy(), wanted[0])).all()


@pytest.mark.parametrize("kind", ["kaldi_fbank", "log_spectrogram"])
def test_chunks_of_samples_give_the_log_probs_of_the_whole(random_model: Make, kind: str) -> None:
    exported = Exported.of(random_model(kind), from_samples=True, chunk_s=0.04)
    samples = sound(9000).double()
    wanted, frames = in_float64(replace(exported, chunk=0))(samples, torch.tensor([9000]))
    for chunk in (exported.chunk, 5 * exported.chunk):
        longer = replace(exported, chunk=chunk)
        (found,) = streamed(in_float64(longer), longer, [samples])
        assert len(found) == int(frames) == wanted.shape[1] and (found - wanted[0]).abs().max() < EXACT


def test_streams_that_end_at_other_times_share_a_batch(random_model: Make) -> None:
    loaded = random_model(cell="lstm")
    exported = Exported.of(loaded, from_samples=False, chunk_s=0.16)
    run = in_float64(exported)
    signals = [log_energies(loaded, sound(samples, samples)) for samples in (9000, 300, 12_440, 2600)]
    assert [signal.shape[2] for signal in signals] == [55, 1, 77, 15]
    alone = [streamed(run, exported, [signal])[0] for signal in signals]
    for one, together in zip(alone, streamed(run, exported, signals), strict=True):
        assert one.shape == together.shape and (one - together).abs().max() < EXACT


def test_samples_after_the_end_are_ignored(random_model: Make) -> None:
    exported = Exported.of(random_model(), from_samples=False, chunk_s=0.16)
    run, (_, _, *state) = in_float64(exported), exported.example(1, torch.float64).values()
    chunk = torch.randn(1, 80, 16, dtype=torch.float64)
    first = run(chunk, torch.tensor([7]), *state)
    again, over = (run(chunk, torch.tensor([length]), *first[2:]) for length in (16, 0))
    assert all(torch.equal(one, other) for one, other in zip(again, over, strict=True))
    assert int(first[1]) + int(over[1]) <= 2 == int(first[4] // 4) + 1


def test_a_stream_of_less_than_a_window_has_no_frames(random_model: Make) -> None:
    exported = Exported.of(random_model(), from_samples=True, chunk_s=0.08)
    frame_counts = [
        len(streamed(in_float64(exported), exported, [sound(samples).double()])[0]) for samples in (1, 279, 280)
    ]
    assert frame_counts == [0, 0, 1]


def test_chunks_that_cannot_be_are_refused(random_model: Make) -> None:
    with pytest.raises(UserError, match="30 ms is less than an output frame of 40 ms"):
        Exported.of(random_model(), from_samples=False, chunk_s=0.03)
    assert Exported.of(random_model(), from_samples=False, chunk_s=0.35).chunk == 32
