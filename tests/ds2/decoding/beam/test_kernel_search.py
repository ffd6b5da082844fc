"""The beam search kernel beside the search in PyTorch on the CPU: the same labels, the same scores to rounding.

Without a GPU the kernel's own source runs through a host compiler; with one the same cases run there too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support import kernel_on_cpu
from support.decoding_cases import CHARACTERS, PIECES, language_model, random_log_probs, speechlike
from support.op_cases import default_dtype
from torch import Tensor

from ds2.config.schema import DecodeConfig
from ds2.decoding.alignment import align_on_gpu, force_align
from ds2.decoding.beam.decoder import BatchedBeamSearch, NBest
from ds2.decoding.beam.fusion import Fusion
from ds2.decoding.beam.kernel_search import KernelSearch
from ds2.decoding.lexicon import ROOT
from ds2.lm.ngram import NGram
from ds2.text.alphabet import Alphabet

CPU = torch.device("cpu")
WHERE = [pytest.param("cpu", id="host"), pytest.param("cuda", marks=pytest.mark.gpu)]
OPEN = DecodeConfig(method="beam", beam=16, nbest=5, alpha=0.7, beta=0.4, unknown_score=-3.0)
WIDE = replace(OPEN, beam=300, prune=1e9, label_min_log_prob=-1e9)
MANY = Alphabet(("", *(f"{mark}{a}{b}" for a in "abcdefghij" for b in "abcdefghij" for mark in ("\u2581", ""))))


def nearly_tied(frames: int, batch: int, labels: int) -> Tensor:
    """Log-probs whose sums differ in their last digits only."""
    noise = torch.randn(frames, batch, labels, generator=torch.Generator().manual_seed(2))
    return (torch.tensor([0.0, -1.0, -2.0, -2.0]) + 1e-5 * noise).log_softmax(2)


@dataclass(frozen=True)
class Case:
    """A search: its settings, and log-probs of `frames` for utterances of `lengths`."""

    name: str
    options: DecodeConfig
    alphabet: Alphabet = CHARACTERS
    unit: str = "word"
    lengths: list[int] = field(default_factory=lambda: [40, 29, 1, 11])
    make: Callable[[int, int, int], Tensor] = speechlike


CASES = [
    Case("no model", OPEN, unit="none"),
    Case("words", OPEN),
    Case("words far unknown", replace(OPEN, unknown_score=-23.0)),
    Case("lexicon", replace(OPEN, lexicon=True)),
    Case("hot words in the lexicon", replace(OPEN, lexicon=True, hot_words=["bab", "ab"], hot_word_bonus=4.0)),
    Case("hot words", replace(OPEN, hot_words=["bab", "ab"], hot_word_bonus=4.0)),
    Case("hot phrases", replace(OPEN, hot_words=["bab", "a b", "ab"], hot_word_bonus=4.0)),
    Case("hot words without model", replace(OPEN, hot_words=["bab"]), unit="none"),
    Case("characters", OPEN, unit="character"),
    Case("pieces of words", OPEN, PIECES),
    Case("pieces", OPEN, PIECES, "piece"),
    Case("one hypothesis", replace(OPEN, beam=1)),
    Case("beam off the shapes", replace(OPEN, beam=77, label_min_log_prob=-20.0, prune=30.0)),
    Case("more beam than there is", WIDE, lengths=[5, 3, 1], make=random_log_probs),
    Case("more beam than there is, lexicon", replace(WIDE, lexicon=True), lengths=[5, 3, 1], make=random_log_probs),
    Case("near ties", replace(OPEN, beam=24, prune=4.0, nbest=24), unit="none", make=nearly_tied),
    Case("more near ties", replace(OPEN, beam=40, prune=8.0, nbest=40), unit="none", make=nearly_tied),
    Case("many labels", replace(OPEN, beam=40, label_min_log_prob=-30.0), MANY, lengths=[12, 5]),
    Case("first frames", OPEN, lengths=[1, 1, 2, 3]),
]


def log_probs_of(case: Case) -> tuple[Tensor, Tensor]:
    lengths = torch.tensor(case.lengths)
    log_probs = case.make(int(lengths.max()), len(lengths), len(case.alphabet))
    for row, length in enumerate(case.lengths):
        log_probs[length:, row] = math.nan
    return log_probs, lengths


def search(case: Case, lm: NGram | None, device: torch.device, by_kernel: bool) -> NBest:
    """Search on a device, by the kernel or in PyTorch."""
    log_probs, lengths = log_probs_of(case)
    fusion = Fusion(case.alphabet, case.options, lm, device)
    batched = BatchedBeamSearch(fusion, case.options)
    batched.kernel = KernelSearch(fusion, case.options) if by_kernel else None
    hot_words = dict.fromkeys(case.options.hot_words)
    root = fusion.trie.add_phrases(hot_words) if hot_words else ROOT
    return batched.search(log_probs.to(device), lengths, root)


def assert_same(found: NBest, wanted: NBest) -> None:
    alive = wanted.scores[..., 0] > -math.inf
    assert ((found.scores[..., 0] > -math.inf) == alive).all()
    for ours, theirs, live in zip(found.labels, wanted.labels, alive, strict=True):
        assert [h for h, a in zip(ours, live, strict=True) if a] == [h for h, a in zip(theirs, live, strict=True) if a]
    np.testing.assert_allclose(found.scores[alive], wanted.scores[alive], rtol=0, atol=1e-5)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_kernel_and_pytorch_agree(case: Case, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = None if case.unit == "none" else language_model(tmp_path, case.unit)
    wanted = search(case, lm, CPU, by_kernel=False)
    if where == "cpu":
        kernel_on_cpu.patch(monkeypatch)
    found = search(case, lm, torch.device(where), by_kernel=True)
    assert_same(found, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES[:3], ids=lambda case: case.name)
def test_pytorch_agrees_with_itself_on_a_gpu(case: Case, tmp_path: Path) -> None:
    lm = None if case.unit == "none" else language_model(tmp_path, case.unit)
    assert_same(search(case, lm, torch.device("cuda"), by_kernel=False), search(case, lm, CPU, by_kernel=False))


@pytest.mark.parametrize("where", WHERE)
def test_scores_outside_shared_memory_give_the_same_bits(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case("beam 512", replace(OPEN, beam=512, label_min_log_prob=-20.0, prune=40.0), lengths=[12, 7])
    lm = language_model(tmp_path, "word")
    if where == "cpu":
        kernel_on_cpu.patch(monkeypatch)
    inside = search(case, lm, torch.device(where), by_kernel=True)
    monkeypatch.setattr("ds2_ops.jit.runtime.smem_bytes_per_block", lambda index: 170_000)
    outside = search(case, lm, torch.device(where), by_kernel=True)
    assert inside.labels == outside.labels
    assert (inside.scores == outside.scores).all()


@pytest.mark.parametrize("where", WHERE)
def test_two_runs_give_the_same_bits_where_scores_tie(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fusion = Fusion(PIECES, OPEN, None, torch.device(where))
    log_probs = torch.full((9, 2, 4), math.log(0.25), device=where)
    runs = []
    for backwards in (False, True):
        if where == "cpu":
            kernel_on_cpu.patch(monkeypatch, backwards)
        batched = BatchedBeamSearch(fusion, OPEN)
        batched.kernel = KernelSearch(fusion, OPEN)
        runs.append(batched.search(log_probs, torch.tensor([9, 4])))
    assert runs[0].labels == runs[1].labels
    assert (runs[0].scores == runs[1].scores).all()


@pytest.mark.parametrize("where", WHERE)
def test_alignments_agree(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    log_probs, lengths = speechlike(40, 5, 6), torch.tensor([40, 33, 1, 17, 5])
    generator = torch.Generator().manual_seed(1)
    targets = [torch.randint(1, 6, (size,), generator=generator).tolist() for size in (9, 20, 0, 3, 9)]
    wanted = force_align(log_probs, lengths, targets)
    if where == "cpu":
        kernel_on_cpu.patch(monkeypatch)
    with default_dtype(torch.float64):
        alignments = align_on_gpu(log_probs.to(where), lengths, targets)
    for ours, theirs in zip(alignments, wanted, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is None or theirs is None:
            continue
        assert ours.labels == theirs.labels
        assert ours.log_prob == pytest.approx(theirs.log_prob, abs=1e-4)
        for key in ("starts", "ends", "peaks"):
            np.testing.assert_array_equal(getattr(ours, key), getattr(theirs, key))


@pytest.mark.parametrize("where", WHERE)
def test_a_search_that_does_not_fit_runs_in_pytorch_and_says_so_once(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if where == "cpu":
        kernel_on_cpu.patch(monkeypatch)
    case = Case("beam 600", replace(OPEN, beam=600), lengths=[5, 3])
    device = torch.device(where)
    fusion = Fusion(case.alphabet, case.options, None, device)
    batched = BatchedBeamSearch(fusion, case.options)
    batched.kernel = batched.kernel or KernelSearch(fusion, case.options)
    log_probs, lengths = log_probs_of(case)
    for _ in range(2):
        found = batched.search(log_probs.to(device), lengths)
    assert_same(found, search(case, None, CPU, by_kernel=False))
    assert [record.getMessage() for record in caplog.records if "beam 600" in record.getMessage()] == [
        "the beam search runs in PyTorch, which is many times slower: beam 600 is not within 1 .. 512, the beams that "
        "fit on chip"
    ]
