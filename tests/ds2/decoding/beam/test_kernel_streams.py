"""The kernel chunk by chunk: the labels of the search in PyTorch, whoever joins and leaves; also without a GPU."""

from __future__ import annotations

import gc
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support import kernel_on_cpu
from support.decoding_cases import CHARACTERS, PIECES, language_model, speechlike
from torch import Tensor

from ds2.config.schema import DecodeConfig
from ds2.decoding.beam.decoder import BeamDecoder, BeamStream
from ds2.decoding.beam.kernel_search import KernelSearch, KernelStreams
from ds2.decoding.hypothesis import DecodeError, Hypothesis

CPU = torch.device("cpu")
WHERE = [pytest.param("cpu", id="host"), pytest.param("cuda", marks=pytest.mark.gpu)]
OPEN = DecodeConfig(method="beam", beam=16, nbest=4, alpha=0.7, beta=0.4, unknown_score=-3.0)
HOT = {"ab": 3.0, "ba ab": 5.0}
CASES = {
    "no model": (OPEN, CHARACTERS, ""),
    "words": (OPEN, CHARACTERS, "word"),
    "lexicon": (replace(OPEN, lexicon=True, hot_words=["bab"], hot_word_bonus=4.0), CHARACTERS, "word"),
    "characters": (OPEN, CHARACTERS, "character"),
    "pieces": (OPEN, PIECES, "piece"),
}


def by_kernel(case: str, folder: Path, where: str, monkeypatch: pytest.MonkeyPatch) -> tuple[BeamDecoder, BeamDecoder]:
    """A decoder that searches by the kernel, and one in PyTorch on the CPU."""
    options, alphabet, unit = CASES[case]
    lm = language_model(folder, unit) if unit else None
    wanted = BeamDecoder(alphabet, options, lm, 0.02, CPU)
    if where == "cpu":
        kernel_on_cpu.patch(monkeypatch)
    found = BeamDecoder(alphabet, options, lm, 0.02, torch.device(where))
    found.search.kernel = KernelSearch(found.search.fusion, options)
    found.search.streams = KernelStreams(found.search.kernel, options)
    return found, wanted


def assert_same(found: list[Hypothesis], wanted: list[Hypothesis]) -> None:
    assert [(h.text, h.labels) for h in found] == [(h.text, h.labels) for h in wanted]
    assert [(w.start_s, w.end_s) for h in found for w in h.words] == [
        (w.start_s, w.end_s) for h in wanted for w in h.words
    ]
    assert [h.score for h in found] == pytest.approx([h.score for h in wanted], abs=1e-5)


def assert_same_partial(found: list[Hypothesis], wanted: list[Hypothesis]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert (one.text, one.labels, one.fixed_words) == (other.text, other.labels, other.fixed_words)
        assert one.score == pytest.approx(other.score, abs=1e-9)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("case", CASES)
def test_utterances_that_join_and_leave_have_the_words_of_the_whole(
    case: str, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ds2.decoding.beam.kernel_search._FIRST_SLOTS", 1)
    monkeypatch.setattr("ds2.decoding.beam.kernel_search._FIRST_CAPACITY", 2)
    monkeypatch.setattr("ds2.decoding.beam.kernel_search.MAX_REMOVED", 3)
    found, wanted = by_kernel(case, tmp_path, where, monkeypatch)
    draw, log_probs, count = random.Random(5), speechlike(60, 5, len(found.alphabet)), 5
    log_probs[10:19, :, 1:] -= 12.0  # a run of blanks, that chunks end in
    log_probs = log_probs.log_softmax(2)
    hot = [None, HOT, None, {"b": 1.0}, HOT]
    here: dict[int, BeamStream] = {}
    at, ends = [0] * count, [60, 23, 41, 60, 1]
    waiting = list(range(count))
    while waiting or here:
        if waiting and draw.random() < 0.6:
            row = waiting.pop(0)
            here[row] = found.start(hot[row])
        chosen = [row for row in here if draw.random() < 0.7]
        sizes = [min(draw.randrange(9), ends[row] - at[row]) for row in chosen]
        chunk = torch.zeros(max(sizes, default=0), len(chosen), log_probs.shape[2])
        for column, (row, size) in enumerate(zip(chosen, sizes, strict=True)):
            chunk[:size, column] = log_probs[at[row] : at[row] + size, row]
            at[row] += size
        if chosen and len(chunk):
            lengths, streams = torch.tensor(sizes), [here[row] for row in chosen]
            some = [index for index in range(len(chosen)) if draw.random() < 0.5]
            with torch.inference_mode(draw.random() < 0.5):  # as live sources are heard, whose ends are read outside
                partial = found.step_and_best(streams, _filled(chunk, lengths).to(where), lengths, some)
            assert (partial is not None) == bool(some)
            assert_same_partial(partial or [], found.best([streams[index] for index in some]))
        done = [row for row in here if at[row] == ends[row]]
        if not done:
            continue
        leaving = [here.pop(row) for row in done]
        for row, best, hypotheses in zip(done, found.best(leaving), found.finish(leaving), strict=True):
            alone = wanted.start(hot[row])
            wanted.step([alone], log_probs[: ends[row], row : row + 1], torch.tensor([ends[row]]))
            [first] = wanted.best([alone])
            assert (best.text, best.labels) == (first.text, first.labels)
            assert_same(hypotheses, wanted.finish([alone])[0])
    del leaving, streams
    placed = found.search.streams
    assert isinstance(placed, KernelStreams)
    gc.collect()
    assert len(set(placed.free)) == placed.used


def _filled(chunk: Tensor, lengths: Tensor) -> Tensor:
    """What lies past a length is no distribution but finite."""
    past = torch.arange(len(chunk))[:, None] >= lengths
    return torch.where(past[..., None], -1.0, chunk)


@pytest.mark.parametrize("where", WHERE)
def test_wrong_values_change_no_stream(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = by_kernel("words", tmp_path, where, monkeypatch)
    log_probs, lengths = speechlike(30, 3, len(found.alphabet)).log_softmax(2).to(where), torch.tensor([10, 10, 7])
    (told, unspoiled) = ([found.start() for _ in range(3)] for _ in range(2))
    wrong = log_probs[10:20].clone()
    wrong[3, 1, 2] = torch.nan
    for streams in (told, unspoiled):
        found.step_and_best(streams, log_probs[:10], lengths, [0, 1, 2])
    before = found.best(told)
    with pytest.raises(DecodeError, match="NaN") as error:
        found.step_and_best(told, wrong, lengths, [0, 2])
    assert error.value.rows == [1]
    assert found.best(told) == before
    wrong[9, 2] = torch.nan  # past its length
    wrong[:, 1] = log_probs[10:20, 1]
    for streams in (told, unspoiled):
        found.step_and_best(streams, wrong, lengths, [1])
    for first, second in zip(found.finish(told), found.finish(unspoiled), strict=True):
        assert_same(first, second)


@pytest.mark.parametrize("where", WHERE)
def test_without_memory_frames_are_searched_once_or_not_at_all(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, _ = by_kernel("words", tmp_path, where, monkeypatch)
    log_probs, lengths = speechlike(20, 2, len(found.alphabet)), torch.tensor([20, 13])
    log_probs[9:, :, 1:] -= 12.0  # a run of blanks that is open at the end
    log_probs = log_probs.log_softmax(2).to(where)
    short, enough = ([found.start() for _ in range(2)] for _ in range(2))
    found.step_and_best(enough, log_probs, lengths, [0, 1])

    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patched:
        patched.setattr(KernelStreams, "_launch", fail)
        with pytest.raises(torch.OutOfMemoryError):
            found.step(short, log_probs, lengths)
    with monkeypatch.context() as patched:
        patched.setattr(KernelStreams, "beams", fail)
        assert found.step_and_best(short, log_probs, lengths, [0, 1]) is None
    assert found.finish(short) == found.finish(enough)


@pytest.mark.parametrize("where", WHERE)
def test_times_that_become_final_cost_a_wait_of_their_own(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, _ = by_kernel("no model", tmp_path, where, monkeypatch)
    found.frame_s = 1.0
    stream, log_probs = found.start(), speechlike(22, 1, len(found.alphabet)).log_softmax(2).to(where)
    stream.aligner.frame_s = 1.0
    due = stream.aligner.due_at
    made = []
    for first in range(0, due + 2):
        made.append(found.step_and_best([stream], log_probs[first % 22][None], torch.tensor([1]), [0]) is not None)
    assert made == [True] * (due - 1) + [False] + [True] * 2


@pytest.mark.parametrize("where", WHERE)
def test_prefixes_that_never_agree_are_bounded(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ds2.decoding.beam.kernel_search._FIRST_CAPACITY", 4)
    found, _ = by_kernel("no model", tmp_path, where, monkeypatch)
    found.frame_s = 1.0
    decoding = found.start()
    frames = torch.tensor([0.02, 0.04, 0.47, 0.47]).log().expand(1, 1, 4)  # a or b, each second
    blank = torch.tensor([0.97, 0.01, 0.01, 0.01]).log().expand(1, 1, 4)
    for _ in range(150):
        found.step([decoding], torch.cat([frames, blank]).to(where), torch.tensor([2]))
    placed = found.search.streams
    assert isinstance(placed, KernelStreams)
    assert placed.tables.labels.shape[2] <= 128
    assert len(found.finish([decoding])[0][0].labels) == 150
