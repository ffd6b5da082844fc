"""Greedy decoding: hand-worked paths, times, confidences, and logits that cannot be decoded."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ds2.decoding import greedy
from ds2.decoding.greedy import GreedyDecoder
from ds2.decoding.hypothesis import DecodeError, Hypothesis, Word
from ds2.text.alphabet import Alphabet

ALPHABET = Alphabet(("", " ", "a", "b"))
BLANK, SPACE, A, B = range(4)
FRAME_S = 0.02


def logits_of(path: list[int], probability: float = 0.7) -> Tensor:
    """(T', 1, V) log-probs whose best path is `path`, each label with `probability`."""
    rest = (1 - probability) / 3
    rows = [[math.log(probability if label == best else rest) for label in range(4)] for best in path]
    return torch.tensor(rows)[:, None, :] if rows else torch.empty(0, 1, 4)


def greedy_decode(logits: Tensor, lengths: Tensor) -> list[Hypothesis]:
    decoder = GreedyDecoder(ALPHABET, FRAME_S)
    streams = [decoder.start() for _ in lengths]
    decoder.step(streams, logits.log_softmax(2), lengths)
    return decoder.best(streams)


def decode(path: list[int]) -> str:
    [hypothesis] = greedy_decode(logits_of(path), torch.tensor([len(path)]))
    return hypothesis.text


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ([], ""),
        ([BLANK, BLANK], ""),
        ([A, A, B], "ab"),
        ([A, BLANK, A], "aa"),
        ([SPACE, A, SPACE, BLANK, SPACE, B, SPACE], "a b"),
        ([A, SPACE, SPACE, A], "a a"),
        ([SPACE], ""),
    ],
)
def test_collapse_by_hand(path: list[int], text: str) -> None:
    assert decode(path) == text


def test_words_carry_times_and_confidence() -> None:
    path = [BLANK, A, A, BLANK, B, SPACE, BLANK, B]
    logits = logits_of(path)
    logits[2] = logits_of([A], 0.9)[0]
    [hypothesis] = greedy_decode(logits, torch.tensor([8]))
    first, second = hypothesis.words
    assert hypothesis.labels == (A, B, SPACE, B)
    assert first == Word("ab", pytest.approx(0.02), pytest.approx(0.1), pytest.approx(0.9 * 0.7))
    assert second == Word("b", pytest.approx(0.14), pytest.approx(0.16), pytest.approx(0.7))
    assert hypothesis.score == pytest.approx(7 * math.log(0.7) + math.log(0.9), rel=1e-6)


def test_batch_mates_padding_and_the_scale_of_logits_do_not_matter() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(30, 4, 4, generator=generator)
    lengths = torch.tensor([30, 7, 0, 19])
    together = greedy_decode(logits, lengths)
    for row, length in enumerate(lengths.tolist()):
        alone = greedy_decode(logits[:length, row : row + 1] + 3.0, lengths[row : row + 1])[0]
        assert alone.text == together[row].text
        assert alone.score == pytest.approx(together[row].score, abs=1e-4)


def test_what_lies_past_the_length_is_ignored() -> None:
    logits = logits_of([A, B, A])
    logits[2] = float("nan")
    [hypothesis] = greedy_decode(logits, torch.tensor([2]))
    assert hypothesis.text == "ab"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_name_their_rows(value: float) -> None:
    logits = torch.zeros(4, 3, 4)
    logits[1, 2, 3] = value
    with pytest.raises(DecodeError, match=r"\[2\]") as caught:
        greedy_decode(logits, torch.tensor([4, 4, 4]))
    assert caught.value.rows == [2]


def test_a_masked_label_is_allowed() -> None:
    logits = logits_of([A, B])
    logits[:, :, SPACE] = -math.inf
    assert greedy_decode(logits, torch.tensor([2]))[0].text == "ab"


def test_shapes_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="alphabet's 4 labels"):
        greedy_decode(torch.zeros(2, 1, 5), torch.tensor([2]))
    with pytest.raises(ValueError, match="between 0 and the 2 frames"):
        greedy_decode(torch.zeros(2, 1, 4), torch.tensor([3]))


def test_the_path_is_copied_while_the_check_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that share a GPU wait for their turn: a copy that begins after the check's wait waits once more."""
    events: list[str] = []

    def noted(name: str, begin: Callable[..., Any]) -> Callable[..., Any]:
        def start(*args: Any, **settings: Any) -> Any:
            events.append(f"{name} begins")
            result = begin(*args, **settings)
            *others, wait = result if isinstance(result, tuple) else (result,)

            def waiting() -> Any:
                events.append(f"{name} waits")
                return wait()

            return (*others, waiting) if others else waiting

        return start

    monkeypatch.setattr(greedy, "start_check", noted("check", greedy.start_check))
    monkeypatch.setattr(greedy, "start_copy", noted("copy", greedy.start_copy))
    [best] = greedy_decode(logits_of([A, BLANK, B]), torch.tensor([3]))
    assert best.text == "ab"
    assert events == ["check begins", "copy begins", "check waits", "copy waits"]
