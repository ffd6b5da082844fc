"""The batched beam search as a decoder that steps: utterances of any length, in memory that does not grow with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ds2.config.schema import DecodeConfig
from ds2.decoding.alignment import with_times
from ds2.decoding.beam.fusion import Fusion
from ds2.decoding.beam.search import BatchedBeamSearch, Found, Labels
from ds2.decoding.beam.torch_search import Beams, join, split
from ds2.decoding.decoder import check_log_probs
from ds2.decoding.hypothesis import EMPTY, Hypothesis, spell_words
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


class BeamDecoder:
    """The batched prefix beam search on the model's device; decodes and steps as `ds2.decoding.decoder.Decoder` says.

    Labels are certain as soon as all prefixes share them, and words get their times piece by piece in what is longer
    than `ds2.decoding.timeline.LONGEST_S`, so a source may go on for ever.
    """

    def __init__(
        self, alphabet: Alphabet, options: DecodeConfig, lm: NGram | None, frame_s: float, device: torch.device
    ) -> None:
        self.alphabet, self.options, self.frame_s, self.device = alphabet, options, frame_s, device
        self.beams = BatchedBeamSearch(Fusion(alphabet, options, lm, device), options)
        self.lexicon = {*lm.vocabulary, *options.hot_words} if options.lexicon and lm is not None else None

    def decode(self, log_probs: Tensor, lengths: Tensor) -> list[list[Hypothesis]]:
        """Decode whole utterances; on a GPU by one launch of the kernel, which aligns words in one piece."""
        check_log_probs(log_probs, lengths, len(self.alphabet))
        if not len(lengths):
            return []
        log_probs = log_probs.float().to(self.device)
        if self.beams.kernel is not None and self.beams.kernel.fits(log_probs):
            rows = self.hypotheses(self.beams.search(log_probs, lengths))
            return with_times(rows, log_probs, lengths, self.alphabet, self.frame_s) if self.options.times else rows
        decoding = self.start(len(lengths))
        self._hear([decoding], log_probs, lengths)
        return decoding.finish()

    def start(self, rows: int = 1) -> BeamDecoding:
        """Begin utterances whose frames come chunk by chunk; the result is that of `decode` of the whole."""
        return BeamDecoding(self, rows)

    def step(self, decodings: Sequence[BeamDecoding], log_probs: Tensor, lengths: Tensor) -> None:
        """Let all utterances of several decodings hear their next frames in one batch; see `Decoder`."""
        check_log_probs(log_probs, lengths, len(self.alphabet), empty_too=True)
        self._hear(decodings, log_probs.float().to(self.device), lengths)

    def _hear(self, decodings: Sequence[BeamDecoding], log_probs: Tensor, lengths: Tensor) -> None:
        beams, rows = join([d.beams for d in decodings]), [row for d in decodings for row in d.rows]
        longest = len(log_probs) if log_probs.is_cuda else _PIECE
        start, counts = 0, lengths.tolist()
        while start < max(counts, default=0):
            turns = [row.timeline.until_turn() for row, count in zip(rows, counts, strict=True) if count > start]
            end = start + min(longest, *turns)
            beams = self.beams.hear(beams, log_probs[start:end], (lengths - start).clamp(0, end - start))
            beams = _with_certain(beams, rows)
            for index, (row, count) in enumerate(zip(rows, counts, strict=True)):
                if count > start and self.options.times:
                    row.timeline.hear(log_probs[start : min(end, count), index])
                row.heard += max(0, min(end, count) - start)
            due = [i for i, row in enumerate(rows) if counts[i] >= end and row.timeline.is_due()]
            beams, start = self._settle(beams, rows, due) if due else beams, end
        for decoding, part in zip(decodings, split(beams, [len(d.rows) for d in decodings]), strict=True):
            decoding.beams = part

    def _settle(self, beams: Beams, rows: Sequence[Row], due: Sequence[int]) -> Beams:
        """Give times to what is certain in the utterances whose turn it is."""
        best = self.beams.found(beams, [row.certain for row in rows]).labels
        agrees = torch.ones_like(beams.blank, dtype=torch.bool)
        for index in due:
            row, labels = rows[index], best[index][0]
            first = len(row.certain)
            settled = row.timeline.settle(labels, first)
            if settled > first:
                wanted = torch.tensor(labels[first:settled], dtype=torch.int16, device=self.device)
                agrees[index] = (beams.spelled[index, :, : len(wanted)] == wanted).all(1)
        return beams if agrees.all() else _with_certain(beams.only(agrees), rows)

    def hypotheses(self, found: Found) -> list[list[Hypothesis]]:
        """What was found as hypotheses, without word times."""
        return [
            _distinct([self._hypothesis(*pair) for pair in zip(labels, scores, strict=True) if pair[1][0] > -torch.inf])
            for labels, scores in zip(found.labels, found.scores.tolist(), strict=True)
        ]

    def _hypothesis(self, labels: Labels, scores: Sequence[float]) -> Hypothesis:
        if self.lexicon is not None:
            words = spell_words([(label, at, 0, 0.0) for at, label in enumerate(labels)], self.alphabet, 1.0)
            if words and words[-1].text not in self.lexicon:  # no prefix ended with a whole word
                labels = labels[: int(words[-1].start_s)]
        if labels and self.alphabet.symbols[labels[-1]].isspace():
            labels = labels[:-1]
        text = " ".join(self.alphabet.decode(labels).replace(WORD_MARK, " ").split())
        score, acoustic, log_prob, bonus = scores
        return Hypothesis(text, score, labels, (), acoustic, log_prob, bonus)


class BeamDecoding:
    """Utterances that a `BeamDecoder` is hearing; see `ds2.decoding.decoder.Decoding`."""

    def __init__(self, decoder: BeamDecoder, rows: int) -> None:
        self.decoder = decoder
        self.beams = decoder.beams.start(rows, len(decoder.alphabet))
        silent = decoder.options.label_min_log_prob
        self.rows = [Row(Timeline(decoder.alphabet, decoder.frame_s, silent)) for _ in range(rows)]

    def step(self, log_probs: Tensor, lengths: Tensor) -> None:
        """Hear the next frames."""
        self.decoder.step([self], log_probs, lengths)

    def best(self) -> list[Hypothesis]:
        """The best so far, without its words, that cost an alignment, and the score of the silence that it ends in."""
        return [row[0] for row in self._read(self.beams)]

    def finish(self) -> list[list[Hypothesis]]:
        """The N best of what was heard."""
        found = self._read(self.decoder.beams.closed(self.beams))
        heard = [index for index, row in enumerate(self.rows) if row.heard]
        if self.decoder.options.times and heard:
            timed = with_words([found[index] for index in heard], [self.rows[index].timeline for index in heard])
            for index, hypotheses in zip(heard, timed, strict=True):
                found[index] = hypotheses
        return found

    def _read(self, beams: Beams) -> list[list[Hypothesis]]:
        found = self.decoder.hypotheses(self.decoder.beams.found(beams, [row.certain for row in self.rows]))
        return [hypotheses if row.heard else [EMPTY] for row, hypotheses in zip(self.rows, found, strict=True)]


def _with_certain(beams: Beams, rows: Sequence[Row]) -> Beams:
    """Move labels that all prefixes share to their utterances."""
    counts = beams.certain()
    if not counts.any():
        return beams
    slots = (beams.acoustic > -torch.inf).int().argmax(1)
    shared = beams.spelled[torch.arange(len(slots), device=slots.device), slots].cpu().numpy()
    for row, labels, count in zip(rows, shared, counts.tolist(), strict=True):
        row.certain += labels[:count].tolist()
    return beams.without_first(counts)


def _distinct(hypotheses: Sequence[Hypothesis]) -> list[Hypothesis]:
    """The best of each text (pieces spell a text in several ways); an empty one where the lexicon let none through."""
    best = {h.text: h for h in reversed(hypotheses)}
    kept = [h for h in hypotheses if best[h.text] is h]
    return kept or [Hypothesis("", -torch.inf, (), (), -torch.inf)]
