"""Forced alignment on a GPU against torchaudio's, and the words of a stream whose last labels have no frames."""

from __future__ import annotations

import pytest
import torch
from support.decoding_cases import CHARACTERS, random_log_probs
from support.oracles import torchaudio

from ds2.decoding.alignment import IncrementalAligner, add_stream_word_times, force_align
from ds2.decoding.hypothesis import Hypothesis

FRAMES, LABELS = 120, 29


@pytest.mark.gpu
@pytest.mark.parametrize("length", [1, 30, 80])
def test_equals_torchaudio(length: int) -> None:
    oracle = torchaudio(compiled=True).functional.forced_align
    generator = torch.Generator().manual_seed(length)
    logits = 3 * torch.randn(FRAMES, 4, LABELS, generator=generator)
    log_probs = logits.log_softmax(-1)
    # Some labels twice in a row: a blank must part them.
    targets = torch.randint(1, LABELS, (4, length), generator=generator)
    targets[:, 1::7] = targets[:, :-1:7]
    lengths = torch.tensor([FRAMES, FRAMES, FRAMES - 3, FRAMES - 19])
    found = force_align(log_probs.cuda(), lengths, targets.tolist())
    for row, alignment in enumerate(found):
        frames = int(lengths[row])
        path, scores = oracle(log_probs[:frames, row][None].contiguous(), targets[row : row + 1])
        score = float(scores.double().sum())
        assert alignment is not None
        # All terms are negative, so no partial sum exceeds the whole, and each addition rounds by half an eps of it.
        assert abs(alignment.log_prob - score) <= frames * torch.finfo(torch.float32).eps * abs(score)
        heard = torch.zeros(frames, dtype=path.dtype)
        for label, start, end in zip(alignment.labels, alignment.starts, alignment.ends, strict=True):
            heard[start:end] = label
        assert torch.equal(heard, path[0].cpu())


@pytest.mark.parametrize("text, words", [("ab ba", ["ab", "ba"]), ("ab b", ["ab", "b"]), ("ab", ["ab"]), ("a", ["a"]),
                                         ("ab ", ["ab"]), ("ab bbbb", ["ab"])])  # fmt: skip
def test_a_stream_has_times_of_whole_words(text: str, words: list[str]) -> None:
    aligner = IncrementalAligner(CHARACTERS, 0.02, -5.0)
    aligner.final_runs = [(label, at, at + 1, -0.1) for at, label in enumerate(CHARACTERS.encode("ab b"))]
    aligner.append(random_log_probs(1, 1, 4), 0, 0, 1)  # one frame, too few for the labels of "ab bbbb"
    hypothesis = Hypothesis(text, 0.0, tuple(CHARACTERS.symbols.index(symbol) for symbol in text), ())
    [[timed]] = add_stream_word_times([[hypothesis]], [aligner])
    assert [word.text for word in timed.words] == words
