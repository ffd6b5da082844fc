"""Forced alignment on a GPU against torchaudio's, and the words of a stream whose last labels have no frames."""

from __future__ import annotations

import math

import pytest
import torch
from support.decoding_cases import CHARACTERS, random_log_probs
from support.oracles import torchaudio

from ds2.decoding.alignment import IncrementalAligner, add_stream_word_times, add_word_times, finalise, force_align
from ds2.decoding.hypothesis import Hypothesis, Word

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


def test_words_whose_labels_need_more_frames_than_there_are_share_the_time() -> None:
    hypothesis = Hypothesis("ab b", 0.0, tuple(CHARACTERS.encode("ab b")), (), acoustic=math.log(0.5))
    rows = [[hypothesis], [hypothesis]]
    [[short], [timed]] = add_word_times(rows, random_log_probs(5, 2, 4), torch.tensor([2, 5]), CHARACTERS, 0.02)
    assert short.words == (Word("ab", 0.0, 0.02, 0.5), Word("b", 0.02, 0.04, 0.5))
    assert [word.text for word in timed.words] == ["ab", "b"]


def test_streams_are_fixed_together_as_each_alone() -> None:
    """Lengths, silences and labels differ; one stream has more labels than frames, so that nothing of it is fixed."""

    def streams() -> list[IncrementalAligner]:
        aligners = [IncrementalAligner(CHARACTERS, 0.02, -5.0) for _ in range(4)]
        for seed, (aligner, frames) in enumerate(zip(aligners, (1000, 1100, 700, 5), strict=True)):
            log_probs = random_log_probs(frames, 1, 4, seed=seed)
            log_probs[200:500, :, 1:] -= 1e3 * (seed == 1)
            aligner.append(log_probs, 0, 0, frames)
        return aligners

    labels = [[1, 2, 3] * 20, [2, 1] * 30, [3, 1, 2] * 15, [1, 2] * 10]
    shared = [60, 40, 20, 20]
    together, alone = streams(), streams()
    counts = finalise(together, labels, shared)
    assert counts == [finalise([a], [own], [n])[0] for a, own, n in zip(alone, labels, shared, strict=True)]
    assert counts[0] > 0 and counts[3] == 0
    assert together[1].total_frames - together[1].pending_frames >= 250  # of a silence of 6 s one second is left
    for one, other in zip(together, alone, strict=True):
        assert one.final_runs == other.final_runs
        assert (one.pending_frames, one.due_at) == (other.pending_frames, other.due_at)
        for own, others in zip(one.window(), other.window(), strict=True):
            assert torch.equal(own, others)
