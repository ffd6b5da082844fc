"""Word errors: hand-worked alignments, properties, jiwer as the oracle, and resampling statistics."""

from __future__ import annotations

import json
import math
import tracemalloc

import jiwer
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rapidfuzz.distance import Levenshtein

from ds2.scoring import wer
from ds2.scoring.report import format_report, report_record
from ds2.scoring.statistics import bootstrap_interval, paired_test
from ds2.scoring.wer import ErrorCounts, align, character_errors, corpus_report, count_edits, word_errors
from ds2.system import UserError

WORDS = st.lists(st.sampled_from(["a", "b", "c", "dd"]), max_size=12)


@pytest.mark.parametrize(
    ("reference", "hypothesis", "edits"),
    [
        ("", "", ""),
        ("a b", "", "DD"),
        ("", "a b", "II"),
        ("a b c", "a b c", "CCC"),
        ("a b c", "a x c", "CSC"),
        ("a b c", "a c", "CDC"),
        ("a c", "a b c", "CIC"),
        ("a b", "b c", "SS"),
        ("the cat sat on the mat", "a cat sat the mat", "SCCDCC"),
    ],
)
def test_alignment_by_hand(reference: str, hypothesis: str, edits: str) -> None:
    assert align(reference.split(), hypothesis.split()) == edits


def _distance(reference: list[str], hypothesis: list[str]) -> int:
    row = list(range(len(hypothesis) + 1))
    for i, word in enumerate(reference, 1):
        previous, row = row, [i]
        for j, other in enumerate(hypothesis, 1):
            row.append(min(previous[j] + 1, row[j - 1] + 1, previous[j - 1] + (word != other)))
    return row[-1]


@given(WORDS, WORDS)
def test_alignment_spells_both_texts_with_the_fewest_edits(reference: list[str], hypothesis: list[str]) -> None:
    report = corpus_report([" ".join(reference)], [" ".join(hypothesis)])
    pairs = report.utterances[0].pairs()
    assert [r for edit, r, _ in pairs if edit != "I"] == reference
    assert [h for edit, _, h in pairs if edit != "D"] == hypothesis
    assert all((r == h) == (edit == "C") for edit, r, h in pairs)
    assert report.words.errors == _distance(reference, hypothesis)


@given(WORDS, WORDS)
def test_a_large_table_with_few_kept_columns_gives_the_same_alignment(
    reference: list[str], hypothesis: list[str]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wer, "STORED_CELLS", 0)
        in_parts = align(reference, hypothesis)
    assert in_parts == align(reference, hypothesis)


def test_a_large_table_keeps_few_columns() -> None:
    rng = np.random.default_rng(4)
    texts = [rng.integers(2000, size=14_000).tolist() for _ in range(2)]  # 50 MB, were every column kept
    tracemalloc.start()
    try:
        edits = align(*texts)
        assert tracemalloc.get_traced_memory()[1] < 30e6
    finally:
        tracemalloc.stop()
    assert len(edits) - edits.count("I") == len(edits) - edits.count("D") == 14_000


def test_memory_is_linear_in_the_words_of_a_reference() -> None:
    words = [str(number) for number in range(30_000)]
    tracemalloc.start()
    try:
        assert align(words, ["x"]) == "S" + "D" * 29_999
        assert tracemalloc.get_traced_memory()[1] < 300 * len(words)  # a list of one position a word; no mask each
    finally:
        tracemalloc.stop()


def test_a_word_of_millions_of_letters_takes_time_linear_in_them() -> None:
    letters = 1_000_000  # minutes, where each letter costs a pass over the whole word
    report = corpus_report(["a" * letters + "b" * letters], ["abba"])
    assert report.characters == ErrorCounts(correct=3, substitutions=1, deletions=2 * letters - 4, insertions=0)
    assert corpus_report(["x y"], ["a" * letters]).characters == ErrorCounts(0, 3, 0, letters - 3)


def test_an_utterance_that_would_take_hours_is_refused_unless_its_ends_are_equal() -> None:
    words = [str(number) for number in range(400_000)]
    other = ["x", *words[1:-1], "x"]
    with pytest.raises(UserError, match=r"talk: 400000 and 400000 words .* 1e\+11 at most; split it"):
        corpus_report([" ".join(words)], [" ".join(other)], names=["talk"])
    assert corpus_report([" ".join(words)], [" ".join(words[:500] + words[501:])]).words.deletions == 1


def test_texts_that_have_little_in_common_are_aligned_at_once_or_refused_with_the_reason() -> None:
    reference, hypothesis = ([f"{letter}{n}" for n in range(300_000)] for letter in "ab")
    assert align(reference, hypothesis) == "S" * 300_000
    with pytest.raises(UserError, match=r"talk: 300000 and 300002 .*, of which 1 are common, .* 1e\+10 at most"):
        align(["x", "y", *reference[2:]], ["z", *hypothesis[:-1], "y", "z"], "talk")
    report = corpus_report([" ".join(reference)], [" ".join(hypothesis)], names=["talk"])
    with pytest.raises(UserError, match=r"talk: \d+ and \d+ words or characters take too long"):
        report.characters  # noqa: B018 (it is computed when it is read)


@given(st.lists(st.integers(0, 2), max_size=8), st.lists(st.integers(3, 5), max_size=8))
def test_texts_without_a_common_word_are_aligned_as_rapidfuzz_does(reference: list[int], hypothesis: list[int]) -> None:
    letters = {"replace": "S", "delete": "D", "insert": "I"}
    expected = "".join(letters[op.tag] for op in Levenshtein.editops(reference, hypothesis))
    assert align(reference, hypothesis) == expected


@given(st.lists(st.tuples(WORDS.filter(bool), WORDS), min_size=1, max_size=5))
def test_counts_equal_those_of_jiwer(corpus: list[tuple[list[str], list[str]]]) -> None:
    references, hypotheses = ([" ".join(pair[side]) for pair in corpus] for side in (0, 1))
    report = corpus_report(references, hypotheses)
    words = jiwer.process_words(references, hypotheses)
    assert report.words == ErrorCounts(words.hits, words.substitutions, words.deletions, words.insertions)
    assert report.wer == pytest.approx(words.wer)
    characters = jiwer.process_characters(references, hypotheses)
    expected = ErrorCounts(characters.hits, characters.substitutions, characters.deletions, characters.insertions)
    assert report.characters == expected
    assert report.cer == pytest.approx(characters.cer)


def test_alignment_longer_than_a_machine_word() -> None:
    rng = np.random.default_rng(3)
    reference = [str(w) for w in rng.integers(20, size=300)]
    hypothesis = [w for w in reference if rng.random() > 0.1] + ["new"] * 7
    counts = count_edits(align(reference, hypothesis))
    words = jiwer.process_words(" ".join(reference), " ".join(hypothesis))
    assert counts == ErrorCounts(words.hits, words.substitutions, words.deletions, words.insertions)


def test_the_rate_of_a_corpus_is_that_of_the_sums() -> None:
    report = corpus_report(["a", "a b c d e f g h i"], ["x", "a b c d e f g h i"])
    assert report.wer == pytest.approx(0.1)
    assert report.wrong_utterances == 1


def test_empty_references() -> None:
    assert word_errors("", "").rate == 0.0
    assert math.isinf(word_errors("", "a").rate)
    report = corpus_report(["", "a b"], ["noise", "a b"])
    assert (report.words.insertions, report.wer) == (1, 0.5)
    assert corpus_report([], []).wer == 0.0


def test_character_errors_count_joined_words_and_ignore_spacing() -> None:
    assert character_errors(" a  b ", "a b") == ErrorCounts(correct=3)
    assert character_errors("a b", "ab") == ErrorCounts(correct=2, deletions=1)


def test_tables() -> None:
    report = corpus_report(
        ["a b", "a b", "one two three four five six", ""],
        ["a c", "d a c", "one two three four five six", "x"],
        speakers=["s1", "s2", "s2", "s1"],
        names=["u1", "u2", "u3", "u4"],
    )
    assert list(report.by_speaker) == ["s1", "s2"]
    assert report.by_speaker["s2"] == ErrorCounts(correct=7, substitutions=1, insertions=1)
    assert {label: counts.errors for label, counts in report.by_length.items()} == {"0": 1, "1-5": 3, "6-10": 0}
    assert report.confusions.most_common(1) == [(("S", "b", "c"), 2)]
    assert sum(report.confusions.values()) == report.words.errors


def test_sequences_must_match() -> None:
    with pytest.raises(ValueError, match="2 references, 1 hypotheses"):
        corpus_report(["a", "b"], ["a"])


def test_interval_covers_the_rate_and_repeats() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(5, 15, size=400)
    errors = rng.binomial(lengths, 0.2)
    interval = bootstrap_interval(errors, lengths)
    rate = errors.sum() / lengths.sum()
    assert interval.low < rate < interval.high
    # Independent errors: the interval is that of a binomial, 2 x 1.96 deviations wide.
    expected = 2 * 1.96 * math.sqrt(rate * (1 - rate) / lengths.sum())
    assert interval.high - interval.low == pytest.approx(expected, rel=0.15)
    assert interval == bootstrap_interval(errors, lengths)


def test_interval_over_speakers_is_wider_when_speakers_differ() -> None:
    lengths = np.full(200, 10)
    speakers = [str(i // 20) for i in range(200)]
    errors = np.array([1 + 4 * (i // 20 % 2) for i in range(200)])
    utterances = bootstrap_interval(errors, lengths)
    by_speaker = bootstrap_interval(errors, lengths, speakers)
    assert (utterances.units, by_speaker.units) == (200, 10)
    assert by_speaker.high - by_speaker.low > 3 * (utterances.high - utterances.low)


def test_a_report_without_reference_words_has_no_nan() -> None:
    report = corpus_report(["", ""], ["a b", ""], speakers=["x", "y"])
    assert "nan" not in format_report(report)
    assert "no interval of the WER over utterances: the references have no words" in format_report(report)
    assert json.loads(json.dumps(report_record(report), allow_nan=False))["interval"]["low"] is None


def test_interval_of_a_corpus_without_words_is_nan() -> None:
    assert math.isnan(bootstrap_interval(np.array([1, 0]), np.array([0, 0])).low)


def test_paired_test_finds_a_small_steady_gain_and_no_gain_in_noise() -> None:
    rng = np.random.default_rng(1)
    lengths = np.full(500, 10)
    errors_a = rng.binomial(10, 0.3, size=500)
    better = np.maximum(errors_a - (rng.random(500) < 0.1), 0)
    gain = paired_test(errors_a, better, lengths)
    assert gain.difference == pytest.approx((better - errors_a).sum() / 5000)
    assert gain.interval.high < 0
    assert gain.p_value < 0.01
    shuffled = paired_test(errors_a, rng.permutation(errors_a), lengths)
    assert shuffled.interval.low < 0 < shuffled.interval.high
    assert shuffled.p_value > 0.05
    assert paired_test(errors_a, errors_a, lengths).p_value == 1.0


def test_paired_p_value_by_hand() -> None:
    # Three speakers, each one error better with B: of the 8 sign patterns 2 are as extreme.
    test = paired_test(np.array([1, 1, 1]), np.array([0, 0, 0]), np.array([5, 5, 5]))
    assert test.p_value == pytest.approx(0.25, abs=0.02)
