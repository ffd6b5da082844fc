"""The batched beam search as a decoder that steps: utterances of any length, in memory that does not grow with them."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from ds2.config.schema import DecodeConfig
from ds2.decoding.alignment import with_times
from ds2.decoding.beam.fusion import Fusion
from ds2.decoding.beam.search import BatchedBeamSearch, Found, Held, Labels
from ds2.decoding.beam.torch_search import Beams
from ds2.decoding.decoder import check_log_probs
from ds2.decoding.hypothesis import EMPTY, Hypothesis, spell_words
from ds2.decoding.lexicon import ROOT, HotWords
from ds2.decoding.rescore import SecondPass
from ds2.decoding.timeline import Timeline, with_words
from ds2.lm.ngram import NGram
from ds2.text.alphabet import WORD_MARK, Alphabet

_PIECE = 64  # frames that a CPU searches between two looks at what is certain; a GPU's are one CUDA graph


@dataclass
class Row:
    """What is kept of one utterance beside its prefixes."""

    timeline: Timeline
    heard: int = 0  # frames
    certain: list[int] = field(default_factory=list)  # labels that all hypotheses share
    hot: frozenset[str] = frozenset()  # words of its own that the lexicon may lack


class BeamDecoder:
    """The batched prefix beam search on the model's device; decodes and steps as `ds2.decoding.decoder.Decoder` says.

    Labels are certain as soon as all prefixes share them, and words get their times piece by piece in what is longer
    than `ds2.decoding.timeline.LONGEST_S`, so a source may go on for ever.
    """

    def __init__(
        self,
        alphabet: Alphabet,
        options: DecodeConfig,
        lm: NGram | None,
        frame_s: float,
        device: torch.device,
        second: SecondPass | None = None,
    ) -> None:
        self.alphabet, self.options, self.frame_s, self.device = alphabet, options, frame_s, device
        self.second = second
        fusion = Fusion(alphabet, options, lm, device)
        self.beams = BatchedBeamSearch(fusion, options)
        self.hot_characters = frozenset(fusion.forest.codes)
        self.lexicon = {*lm.vocabulary, *options.hot_words} if options.lexicon and lm is not None else None

    def decode(self, log_probs: Tensor, lengths: Tensor) -> list[list[Hypothesis]]:
        """Decode whole utterances as `Decoder` says; on a GPU in one launch, which aligns words in one piece."""
        check_log_probs(log_probs, lengths, len(self.alphabet))
        if not len(lengths):
            return []
        log_probs = log_probs.float().to(self.device)
        if self.beams.kernel is not None and self.beams.kernel.fits(log_probs):
            rows = self._chosen(self.hypotheses(self.beams.search(log_probs, lengths)))
            return with_times(rows, log_probs, lengths, self.alphabet, self.frame_s) if self.options.times else rows
        decoding = self.start(len(lengths))
        self._hear([decoding], log_probs, lengths)
        return decoding.finish()

    def start(self, rows: int = 1, hot_words: HotWords | None = None) -> BeamDecoding:
        """Begin utterances whose frames come chunk by chunk; the result is that of `decode` of the whole.

        Raises:
            LexiconError: hot words that the network cannot write, or too many.
        """
        return BeamDecoding(self, rows, hot_words)

    def step(self, decodings: Sequence[BeamDecoding], log_probs: Tensor, lengths: Tensor) -> None:
        """Let all utterances of several decodings hear their next frames in one batch; see `Decoder`."""
        check_log_probs(log_probs, lengths, len(self.alphabet), empty_too=True)
        self._hear(decodings, log_probs.float().to(self.device), lengths)

    def best(self, decodings: Sequence[BeamDecoding]) -> list[list[Hypothesis]]:
        """The best of each utterance of each decoding; see `Decoder`."""
        rows = [row for d in decodings for row in d.rows]
        found = self._read(self.beams.read(self.beams.join([d.held for d in decodings])), rows)
        return _parted([row[0] for row in found], decodings)

    def finish(self, decodings: Sequence[BeamDecoding]) -> list[list[list[Hypothesis]]]:
        """The N best of each utterance of each decoding; see `Decoder`."""
        rows = [row for d in decodings for row in d.rows]
        found = self._chosen(self._read(self.beams.closed(self.beams.join([d.held for d in decodings])), rows))
        heard = [index for index, row in enumerate(rows) if row.heard]
        if self.options.times and heard:
            timed = with_words([found[index] for index in heard], [rows[index].timeline for index in heard])
            for index, hypotheses in zip(heard, timed, strict=True):
                found[index] = hypotheses
        return _parted(found, decodings)

    def _hear(self, decodings: Sequence[BeamDecoding], log_probs: Tensor, lengths: Tensor) -> None:
        parts = [d.held for d in decodings]
        held, rows = self.beams.join(parts), [row for d in decodings for row in d.rows]
        longest = len(log_probs) if log_probs.is_cuda else _PIECE
        start, counts = 0, lengths.tolist()
        while start < max(counts, default=0):
            turns = [row.timeline.until_turn() for row, count in zip(rows, counts, strict=True) if count > start]
            end = start + min(longest, *turns)
            held, certain = self.beams.hear(held, log_probs[start:end], (lengths - start).clamp(0, end - start))
            _take(certain, rows)
            for index, (row, count) in enumerate(zip(rows, counts, strict=True)):
                if count > start and self.options.times:
                    row.timeline.hear(log_probs, index, start, min(end, count))
                row.heard += max(0, min(end, count) - start)
            due = [i for i, row in enumerate(rows) if counts[i] >= end and row.timeline.is_due()]
            held, start = self._settle(held, rows, due) if due else held, end
        for decoding, part in zip(
            decodings, self.beams.split(held, parts, [len(d.rows) for d in decodings]), strict=True
        ):
            decoding.held = part

    def _settle(self, held: Held, rows: Sequence[Row], due: Sequence[int]) -> Held:
        """Give times to what is certain in the utterances whose turn it is."""
        beams = self.beams.read(held)
        best = self.beams.found(beams, [row.certain for row in rows]).labels
        agrees = torch.ones_like(beams.blank, dtype=torch.bool)
        for index in due:
            row, labels = rows[index], best[index][0]
            first = len(row.certain)
            settled = row.timeline.settle(labels, first)
            if settled > first:
                wanted = torch.tensor(labels[first:settled], dtype=torch.int16, device=self.device)
                own = beams.spelled[index, :, : len(wanted)]
                agrees[index] = (own == wanted).all(1) & (beams.counts[index] >= len(wanted))
        if agrees.all():
            return held
        held, certain = self.beams.only(held, agrees)
        _take(certain, rows)
        return held

    def _chosen(self, rows: list[list[Hypothesis]]) -> list[list[Hypothesis]]:
        return rows if self.second is None else self.second(rows)

    def _read(self, beams: Beams, rows: Sequence[Row]) -> list[list[Hypothesis]]:
        found = self.hypotheses(self.beams.found(beams, [row.certain for row in rows]), rows)
        return [hypotheses if row.heard else [EMPTY] for row, hypotheses in zip(rows, found, strict=True)]

    def hypotheses(self, found: Found, rows: Sequence[Row] = ()) -> list[list[Hypothesis]]:
        """What was found as hypotheses, without word times."""
        hot: list[frozenset[str]] = [row.hot for row in rows] or [frozenset()] * len(found.labels)
        return [
            _distinct(
                [
                    self._hypothesis(labels_, scores_, own)
                    for labels_, scores_ in zip(labels, scores, strict=True)
                    if scores_[0] > -torch.inf
                ]
            )
            for labels, scores, own in zip(found.labels, found.scores.tolist(), hot, strict=True)
        ]

    def _hypothesis(self, labels: Labels, scores: Sequence[float], hot: frozenset[str]) -> Hypothesis:
        if self.lexicon is not None:
            words = spell_words([(label, at, 0, 0.0) for at, label in enumerate(labels)], self.alphabet, 1.0)
            if words and words[-1].text not in self.lexicon and words[-1].text not in hot:  # none ended in a whole word
                labels = labels[: int(words[-1].start_s)]
        if labels and self.alphabet.symbols[labels[-1]].isspace():
            labels = labels[:-1]
        text = " ".join(self.alphabet.decode(labels).replace(WORD_MARK, " ").split())
        score, acoustic, log_prob, bonus = scores
        return Hypothesis(text, score, labels, (), acoustic, log_prob, bonus)


class BeamDecoding:
    """Utterances that a `BeamDecoder` is hearing; see `ds2.decoding.decoder.Decoding`."""

    def __init__(self, decoder: BeamDecoder, rows: int, hot_words: HotWords | None) -> None:
        self.decoder, root = decoder, ROOT
        if hot_words:
            forest = decoder.beams.fusion.forest
            root = forest.plant(hot_words)
            weakref.finalize(self, forest.uproot, root)
        self.held = decoder.beams.start(rows, len(decoder.alphabet), root)
        silent, hot = decoder.options.label_min_log_prob, frozenset(w for p in hot_words or () for w in p.split())
        self.rows = [Row(Timeline(decoder.alphabet, decoder.frame_s, silent), hot=hot) for _ in range(rows)]

    def step(self, log_probs: Tensor, lengths: Tensor) -> None:
        """Hear the next frames; see :class:`~ds2.decoding.decoder.Decoding`."""
        self.decoder.step([self], log_probs, lengths)

    def best(self) -> list[Hypothesis]:
        """The best so far, without its words, that cost an alignment, and the score of the silence that it ends in."""
        return self.decoder.best([self])[0]

    def finish(self) -> list[list[Hypothesis]]:
        """The N best of what was heard."""
        return self.decoder.finish([self])[0]


def _take(certain: Sequence[Sequence[int]], rows: Sequence[Row]) -> None:
    """Labels that all prefixes shared belong to their utterances."""
    for row, labels in zip(rows, certain, strict=True):
        row.certain += labels


def _parted(found: Sequence[Any], decodings: Sequence[BeamDecoding]) -> list[list[Any]]:
    """What was found of all rows, decoding by decoding."""
    rows = iter(found)
    return [list(islice(rows, len(decoding.rows))) for decoding in decodings]


def _distinct(hypotheses: Sequence[Hypothesis]) -> list[Hypothesis]:
    """The best of each text (pieces spell a text in several ways); an empty one where the lexicon let none through."""
    best = {h.text: h for h in reversed(hypotheses)}
    kept = [h for h in hypotheses if best[h.text] is h]
    return kept or [Hypothesis("", -torch.inf, (), (), -torch.inf)]
