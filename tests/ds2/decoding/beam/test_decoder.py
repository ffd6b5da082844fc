"""The beam search chunk by chunk: to the bit what `decode` finds in the whole, in memory that stays bounded."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.decoding_cases import CHARACTERS, CPU, PIECES, language_model, speechlike
from torch import Tensor

from ds2.config.schema import DecodeConfig
from ds2.decoding.alignment import GUARD_S, MAX_PENDING_S, PERIOD_S, SINGLE_ALIGNMENT_S, add_word_times
from ds2.decoding.beam.decoder import BeamDecoder, BeamStream
from ds2.decoding.hypothesis import EMPTY
from ds2.text.alphabet import Alphabet

OPEN = DecodeConfig(method="beam", beam=16, nbest=4, alpha=0.7, beta=0.4, unknown_score=-3.0)
SURE = replace(OPEN, nbest=1)
SLOW_S = 0.25  # a frame that makes a minute out of 240 frames
CASES = {
    "no model": (OPEN, CHARACTERS, ""),
    "words": (OPEN, CHARACTERS, "word"),
    "lexicon": (replace(OPEN, lexicon=True, hot_words=["bab"], hot_word_bonus=4.0), CHARACTERS, "word"),
    "characters": (OPEN, CHARACTERS, "character"),
    "pieces of words": (OPEN, PIECES, "word"),
    "pieces": (OPEN, PIECES, "piece"),
}


def make(options: DecodeConfig, alphabet: Alphabet, unit: str, folder: Path, frame_s: float = 0.02) -> BeamDecoder:
    lm = language_model(folder, unit) if unit else None
    return BeamDecoder(alphabet, options, lm, frame_s, CPU)


def cuts(frames: int, longest: int, seed: int) -> Iterator[tuple[int, int]]:
    """Ends of random chunks of 0 to `longest` frames."""
    generator, start = torch.Generator().manual_seed(seed), 0
    while start < frames:
        end = min(frames, start + int(torch.randint(0, longest + 1, (1,), generator=generator)))
        yield start, end
        start = end


def in_chunks(decoder: BeamDecoder, log_probs: Tensor, lengths: Tensor, longest: int, seed: int) -> list[BeamStream]:
    streams = [decoder.start() for _ in lengths]
    for start, end in cuts(len(log_probs), longest, seed):
        decoder.step(streams, log_probs[start:end], (lengths - start).clamp(0, end - start))
    return streams


@pytest.mark.parametrize(("longest", "seed"), [(1, 0), (7, 1), (40, 2)])
@pytest.mark.parametrize("case", CASES)
def test_any_chunks_give_the_bits_of_the_whole(case: str, longest: int, seed: int, tmp_path: Path) -> None:
    decoder = make(*CASES[case], tmp_path)
    log_probs, lengths = speechlike(60, 3, 4), torch.tensor([60, 23, 41])
    log_probs[10:19, :, 1:] -= 12.0  # another run of blanks, that chunks end in
    whole = decoder.decode(log_probs.log_softmax(2), lengths)
    assert any(hypothesis.words for hypothesis in whole[0])
    streams = in_chunks(decoder, log_probs.log_softmax(2), lengths, longest, seed)
    assert decoder.finish(streams) == whole  # texts, labels, scores, words, times, confidences
    assert decoder.finish(streams) == whole  # asking changes nothing


def test_utterances_that_join_and_leave_a_batch_are_decoded_as_alone(tmp_path: Path) -> None:
    decoder = make(*CASES["words"], tmp_path)
    log_probs, begins = speechlike(50, 6, 4), [0, 3, 3, 10, 31, 17]
    alone = [
        decoder.decode(log_probs[: 50 - begin, row : row + 1], torch.tensor([50 - begin]))
        for row, begin in enumerate(begins)
    ]
    decodings = [decoder.start() for _ in begins]
    for start, end in cuts(50, 9, 5):
        here = [row for row, begin in enumerate(begins) if end > begin]
        spans = [(max(0, start - begins[row]), end - begins[row]) for row in here]
        chunk = torch.full((end - start, len(here), 4), math.nan)
        for column, (row, (first, last)) in enumerate(zip(here, spans, strict=True)):
            chunk[: last - first, column] = log_probs[first:last, row]
        decoder.step([decodings[row] for row in here], chunk, torch.tensor([b - a for a, b in spans]))
    for decoding, [wanted] in zip(decodings, alone, strict=True):
        [found] = decoder.finish([decoding])
        assert [(h.text, h.labels, h.words) for h in found] == [(h.text, h.labels, h.words) for h in wanted]
        scores = torch.tensor([[[h.score, h.acoustic, h.lm] for h in row] for row in (found, wanted)])
        torch.testing.assert_close(scores[0], scores[1], rtol=1e-12, atol=0)  # float64 sums, vectors of other lengths


def test_the_best_so_far_is_that_of_the_frames_so_far(tmp_path: Path) -> None:
    decoder = make(*CASES["words"], tmp_path)
    log_probs, decoding = speechlike(60, 1, 4), decoder.start()
    assert decoder.best([decoding]) == [EMPTY] and decoder.finish([decoding]) == [[EMPTY]]
    for start, end in cuts(60, 7, 3):
        decoder.step([decoding], log_probs[start:end], torch.tensor([end - start]))
        if end:
            [[wanted, *_]] = decoder.decode(log_probs[:end], torch.tensor([end]))
            [found], [with_words] = decoder.best([decoding]), decoder.best([decoding], words=True)
            assert (found.text, found.labels, found.words) == (wanted.text, wanted.labels, ())
            assert (with_words.text, with_words.words) == (wanted.text, wanted.words)
    assert decoder.finish([decoding])[0][0].words == wanted.words != ()


def spoken(words: int, seed: int = 0, margin: float = 12.0) -> Tensor:
    """(T, 1, 4) log-probs of random words of a and b, 12 frames each, with a silence now and then."""
    generator, path = torch.Generator().manual_seed(seed), []
    for word in torch.randint(2, 4, (words, 4), generator=generator).tolist():
        path += [word[0], 0, word[1], word[1], 0, word[2], 0, word[3], 0, 1, 1, 0]
        path += [0] * 30 if len(path) % 5 == 0 else []
    log_probs = torch.randn(len(path), 1, 4, generator=generator)
    log_probs[range(len(path)), 0, path] += margin
    return log_probs.log_softmax(2)


@pytest.mark.parametrize(
    ("margin", "kept_s"), [(12.0, SINGLE_ALIGNMENT_S + PERIOD_S + GUARD_S), (6.0, MAX_PENDING_S + PERIOD_S)]
)
def test_a_long_source_keeps_little_and_has_the_words_and_times_of_the_whole(
    margin: float, kept_s: float, tmp_path: Path
) -> None:
    decoder = make(SURE, CHARACTERS, "word", tmp_path, SLOW_S)
    log_probs = spoken(45, margin=margin)
    seconds = len(log_probs) * SLOW_S
    assert seconds > 2 * MAX_PENDING_S
    decoding, pending, room = decoder.start(), 0, 0
    for start, end in cuts(len(log_probs), 30, 1):
        decoder.step([decoding], log_probs[start:end], torch.tensor([end - start]))
        pending = max(pending, decoding.aligner.pending_frames)
        room = max(room, decoding.state.beams.labels.shape[2])
    [[found]] = decoder.finish([decoding])
    assert [[found]] == decoder.decode(log_probs, torch.tensor([len(log_probs)]))
    assert pending * SLOW_S <= kept_s
    assert room * SLOW_S <= kept_s
    in_one_piece = add_word_times([[found]], log_probs, torch.tensor([len(log_probs)]), CHARACTERS, SLOW_S)[0][0]
    assert len(found.words) > 40
    assert found.words == in_one_piece.words


def test_a_chunk_is_one_search_until_words_are_to_be_settled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, searches, size = make(SURE, CHARACTERS, "", tmp_path, SLOW_S), 0, 7
    step = decoder.search.streams.step

    def counted(*given: Any) -> Any:
        nonlocal searches
        searches += 1
        return step(*given)

    monkeypatch.setattr(decoder.search.streams, "step", counted)
    log_probs, decoding = spoken(12), decoder.start()
    longest = round(SINGLE_ALIGNMENT_S / SLOW_S)
    for start in range(0, longest - size, size):
        decoder.step([decoding], log_probs[start : start + size], torch.tensor([size]))
    assert searches == len(range(0, longest - size, size))
    searches, period = 0, round(PERIOD_S / SLOW_S)
    rest = log_probs[start + size : longest + period + 1]
    decoder.step([decoding], rest, torch.tensor([len(rest)]))
    assert searches == 2  # the words are settled where a period ends, wherever the chunk does


def test_endless_silence_is_not_kept(tmp_path: Path) -> None:
    decoder = make(SURE, CHARACTERS, "word", tmp_path, SLOW_S)
    silence = torch.tensor([0.0, -9.0, -9.0, -9.0]).expand(600, 1, 4).log_softmax(2)
    log_probs = torch.cat([spoken(2), silence, spoken(2, seed=1)])
    decoding = decoder.start()
    for start, end in cuts(len(log_probs), 20, 1):
        decoder.step([decoding], log_probs[start:end], torch.tensor([end - start]))
        assert decoding.aligner.pending_frames * SLOW_S <= SINGLE_ALIGNMENT_S + PERIOD_S + GUARD_S
    [[found]] = decoder.finish([decoding])
    assert [[found]] == decoder.decode(log_probs, torch.tensor([len(log_probs)]))
    assert len(found.words) == 4
    assert found.words[2].start_s > 150


def undecided(frames: int) -> Tensor:
    """Log-probs whose first label is a or b, equally likely, and whose others are certain."""
    log_probs = torch.full((frames, 1, 4), math.log(1e-4 / 3))
    path = [0, *[0, 2, 0, 3, 0, 1] * (frames // 6 + 1)][:frames]
    log_probs[range(frames), 0, path] = math.log(1 - 1e-4)
    log_probs[0, 0] = torch.tensor([1e-4, 1e-4, 0.4999, 0.4999]).log()
    return log_probs


def test_hypotheses_that_never_agree_are_settled_for_the_best_after_a_minute(tmp_path: Path) -> None:
    decoder = make(SURE, CHARACTERS, "", tmp_path, SLOW_S)
    log_probs = undecided(400)
    decoding = decoder.start()
    for start, end in cuts(len(log_probs), 30, 1):
        decoder.step([decoding], log_probs[start:end], torch.tensor([end - start]))
        assert decoding.aligner.pending_frames * SLOW_S <= MAX_PENDING_S + PERIOD_S
        undecided_yet = not decoding.shared
        assert undecided_yet == (end * SLOW_S < MAX_PENDING_S + PERIOD_S)
    [[found]] = decoder.finish([decoding])
    assert [[found]] == decoder.decode(log_probs, torch.tensor([400]))
    assert found.text.split()[0] in ("aab", "bab")
    assert len(found.words) == 67


def test_a_bad_chunk_is_refused_and_the_rest_decoded(tmp_path: Path) -> None:
    decoder = make(*CASES["words"], tmp_path)
    log_probs, decoding = speechlike(20, 1, 4), decoder.start()
    decoder.step([decoding], log_probs[:9], torch.tensor([9]))
    with pytest.raises(Exception, match="NaN"):
        decoder.step([decoding], torch.full((3, 1, 4), math.nan), torch.tensor([3]))
    decoder.step([decoding], log_probs[9:], torch.tensor([11]))
    assert decoder.finish([decoding]) == decoder.decode(log_probs, torch.tensor([20]))


def test_without_times_no_frame_is_kept(tmp_path: Path) -> None:
    decoder = make(replace(SURE, times=False), CHARACTERS, "word", tmp_path)
    streams = in_chunks(decoder, speechlike(60, 2, 4), torch.tensor([60, 9]), 11, 0)
    nbest = decoder.finish(streams)
    assert all(stream.aligner.pending_frames == 0 for stream in streams)
    assert all(h.text and not h.words for h in nbest[0])
    assert nbest == decoder.decode(speechlike(60, 2, 4), torch.tensor([60, 9]))


def test_the_search_of_streams_is_there_before_threads_start_some(tmp_path: Path) -> None:
    """Made by the first stream, two threads could have tables each: streams would get slots of the wrong ones."""
    assert "streams" in vars(make(*CASES["words"], tmp_path).search)
