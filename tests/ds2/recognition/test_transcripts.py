"""Forced alignment beside brute force, and wrong transcripts found among right ones."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from ds2.decoding.alignment import force_align
from ds2.recognition.transcripts import align_batch, suspicious
from ds2.text.alphabet import Alphabet
from ds2.text.pronunciations import parse_pronunciations

ALPHABET = Alphabet(("", " ", "a", "b"))


@pytest.mark.parametrize("target", [(), (2,), (2, 2), (2, 1, 3), (3, 2, 3)])
def test_the_path_is_the_best_of_all_that_spell_the_target(target: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(len(target))
    log_probs = torch.randn(6, 2, 4, generator=generator).log_softmax(2)
    lengths = torch.tensor([6, 4])
    for row, alignment in enumerate(force_align(log_probs, lengths, [target, target])):
        paths = [
            (sum(float(log_probs[t, row, label]) for t, label in enumerate(path)), path)
            for path in itertools.product(range(4), repeat=int(lengths[row]))
            if tuple(label for label, _ in itertools.groupby(path) if label) == target
        ]
        best, path = max(paths)
        assert alignment is not None
        assert alignment.log_prob == pytest.approx(best, abs=1e-5)
        runs, at = [], 0
        for label, frames in itertools.groupby(path):
            count = len(list(frames))
            if label:
                runs.append((at, at + count, max(float(log_probs[t, row, label]) for t in range(at, at + count))))
            at += count
        assert alignment.starts.tolist() == [start for start, _, _ in runs]
        assert alignment.ends.tolist() == [end for _, end, _ in runs]
        assert alignment.peaks.tolist() == pytest.approx([peak for _, _, peak in runs], abs=1e-6)


def test_targets_of_different_lengths_share_a_batch_and_one_that_cannot_fit_has_none() -> None:
    log_probs = torch.randn(5, 3, 4, generator=torch.Generator().manual_seed(0)).log_softmax(2)
    lengths, targets = torch.tensor([5, 2, 3]), [(2, 3, 2), (2, 2), (3,)]
    together = force_align(log_probs, lengths, targets)
    assert together[1] is None
    for row in (0, 2):
        [alone] = force_align(log_probs[: lengths[row], row : row + 1], lengths[row : row + 1], [targets[row]])
        alignment = together[row]
        assert alignment is not None
        assert alone is not None
        assert alignment.starts.tolist() == alone.starts.tolist()
        assert alignment.log_prob == pytest.approx(alone.log_prob, abs=1e-6)


def test_wrong_transcripts_stand_out() -> None:
    generator = torch.Generator().manual_seed(1)
    texts = [[2, 3, 1, 2], [3, 1, 3, 2], [2, 1, 2, 3], [3, 2, 1, 3]] * 5
    log_probs = torch.randn(12, 20, 4, generator=generator)
    for row, text in enumerate(texts):
        for place, label in enumerate(text):
            log_probs[3 * place, row, label] += 8
            log_probs[3 * place + 1 : 3 * place + 3, row, 0] += 8
    spoken = [list(text) for text in texts]
    spoken[3], spoken[11] = [2, 2, 2, 2], [2] * 20
    aligned = align_batch(log_probs.log_softmax(2), torch.full((20,), 12), spoken, ALPHABET, 0.02)
    assert suspicious(a.surprise for a in aligned) == [11, 3]
    assert aligned[11].surprise == math.inf
    assert [w.text for w in aligned[0].words] == ["ab", "a"]
    assert [w.start_s for w in aligned[0].words] == pytest.approx([0.0, 0.18])


def test_the_limit_is_what_nearly_all_transcripts_of_other_utterances_exceed() -> None:
    right = [0.1 * value for value in range(60)]  # so spread that six deviations above the median list nothing
    swapped = [8.0 + 0.1 * value for value in range(40)]
    wrong = [8.5, 9.5, math.inf]
    assert suspicious(right + wrong) == [62]
    assert suspicious(right + wrong, swapped) == [62, 61, 60]
    assert suspicious(right + wrong, swapped[:9]) == [62]  # too few to say
    assert suspicious([1.0, 1.5], [0.1] * 40) == []  # never below two nats


def test_nothing_is_suspicious_without_utterances_or_differences() -> None:
    assert suspicious([]) == []
    assert suspicious([0.5] * 9) == []


def test_phones_are_aligned_as_the_words_of_the_transcript() -> None:
    lexicon = parse_pronunciations(["a AH", "cat K AE T", "sat S AE T"], "test")
    alphabet = Alphabet(("", *lexicon.phones), pronunciations=lexicon, unknown="drop")
    spoken = ["", "AH", "", "K", "AE", "AE", "T", "", "S", "AE", "T", ""]
    log_probs = torch.full((len(spoken), 1, len(alphabet)), -9.0)
    for at, phone in enumerate(spoken):
        log_probs[at, 0, alphabet.symbols.index(phone)] = 0.0
    text = alphabet.written("A dog cat, sat")
    assert text == "a cat sat"
    log_probs = log_probs.log_softmax(2)
    (aligned,) = align_batch(log_probs, torch.tensor([len(spoken)]), [alphabet.spell(text)], alphabet, 0.1, [text])
    assert [(w.text, round(w.start_s, 1), round(w.end_s, 1)) for w in aligned.words] == [
        ("a", 0.1, 0.2), ("cat", 0.3, 0.7), ("sat", 0.8, 1.1),
    ]  # fmt: skip
    assert [label.text for label in aligned.labels] == ["AH", "K", "AE", "T", "S", "AE", "T"]
    assert all(0.9 < word.confidence <= 1 for word in aligned.words)
