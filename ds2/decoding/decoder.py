"""One interface over all decoders: log-probs and lengths in, N-best hypotheses with split scores and word times out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from ds2.decoding.alignment import with_times
from ds2.decoding.hypothesis import EMPTY, DecodeError, Hypothesis, Word
from ds2.decoding.lexicon import HotWords, LexiconError
from ds2.decoding.rescore import SecondPass
from ds2.text.alphabet import BLANK, Alphabet

Search = Callable[[Tensor, Tensor], list[list[Hypothesis]]]  # log-probs, lengths to N best without word times
_SUM_TOLERANCE = 0.02  # of a frame's probabilities: what log-probs rounded to bfloat16 miss 1 by


class Decoding(Protocol):
    """Utterances that a decoder is hearing, as flashlight's decoders step: the frames come chunk by chunk."""

    def step(self, log_probs: Tensor, lengths: Tensor) -> None:
        """Hear the next frames.

        Args:
            log_probs: (T', B, V) natural log-probs of any floating type on any device, T' >= 0.
            lengths: (B,) CPU int64, valid frames of each utterance, 0 too.

        Raises:
            DecodeError: NaN or infinite values, or frames that do not sum to one.
        """

    def best(self) -> list[Hypothesis]:
        """Return the best hypothesis of each utterance as far as it was heard; empty before the first frame.

        A search gives its text and labels, but no words: their times cost an alignment.
        """
        ...

    def finish(self) -> list[list[Hypothesis]]:
        """Return the N best hypotheses of each utterance, best first, at least one."""
        ...


class Decoder(Protocol):
    """What recognises a batch."""

    @property
    def hot_characters(self) -> frozenset[str]:
        """The characters that hot words of a session may have; none: this decoder takes no hot words."""
        ...

    def start(self, rows: int = 1, hot_words: HotWords | None = None) -> Decoding:
        """Begin `rows` utterances whose frames come chunk by chunk.

        Args:
            rows: utterances.
            hot_words: words and phrases that are likelier in them, and what each is worth, natural log.

        Raises:
            LexiconError: hot words that the network cannot write, or a decoder that takes none.
        """
        ...

    def step(self, decodings: Sequence[Any], log_probs: Tensor, lengths: Tensor) -> None:
        """Let what `start` began hear the next frames in one batch: as `Decoding.step`, rows in order of decodings."""
        ...

    def best(self, decodings: Sequence[Any]) -> list[list[Hypothesis]]:
        """`Decoding.best` of several in one batch."""
        ...

    def finish(self, decodings: Sequence[Any]) -> list[list[list[Hypothesis]]]:
        """`Decoding.finish` of several in one batch."""
        ...

    def decode(self, log_probs: Tensor, lengths: Tensor) -> list[list[Hypothesis]]:
        """Return the N best hypotheses of each utterance, best first, at least one.

        Args:
            log_probs: (T', B, V) natural log-probs of any floating type on any device.
            lengths: (B,) CPU int64, valid frames.

        Raises:
            DecodeError: NaN or infinite values, frames that do not sum to one, or utterances without frames.
        """


def check_log_probs(log_probs: Tensor, lengths: Tensor, labels: int, *, empty_too: bool = False) -> None:
    """Raise what cannot be decoded; waits for the device once. Utterances of no frames are let through if `empty_too`.

    Raises:
        DecodeError: NaN or +inf, frames whose probabilities do not sum to one, utterances of no frames; names rows.
        ValueError: shapes or lengths that do not fit, or another number of labels.
    """
    if log_probs.dim() != 3 or log_probs.shape[2] != labels or lengths.shape != log_probs.shape[1:2]:
        raise ValueError(
            f"log-probs have shape {tuple(log_probs.shape)} and lengths {tuple(lengths.shape)}; expected (T', B, V), "
            f"where V is the alphabet's {labels} labels with the blank, and B lengths"
        )
    counts = lengths.tolist()
    if any(not 0 <= count <= len(log_probs) for count in counts):
        raise ValueError(f"lengths {counts} must lie between 0 and the {len(log_probs)} frames of the log-probs")
    empty = [row for row, count in enumerate(counts) if count == 0]
    if empty and not empty_too:
        raise DecodeError(f"the utterances at {empty} in the batch have no frames (T = 0): leave them out", empty)
    sums = log_probs.float().exp().sum(2)
    ok = (sums - 1).abs() <= _SUM_TOLERANCE  # false for NaN too
    ok |= torch.arange(len(log_probs), device=sums.device)[:, None] >= lengths.to(sums.device)
    bad = (~ok.all(0)).nonzero()[:, 0].tolist()
    if bad:
        values = sums[: counts[bad[0]], bad[0]].tolist()
        frame, value = next((t, v) for t, v in enumerate(values) if not abs(v - 1) <= _SUM_TOLERANCE)
        what = (
            f"sum to {value:.4g}, not to one: apply log_softmax to logits first"
            if math.isfinite(value)
            else "are NaN or infinite: the model's weights are broken, or its input was"
        )
        raise DecodeError(f"log-probs of the utterances at {bad} in the batch {what} (first at frame {frame})", bad)


def refuse_hot_words(hot_words: HotWords | None) -> None:
    """Raise LexiconError where a decoder that takes none is given hot words of a session."""
    if hot_words:
        raise LexiconError(f"hot words {sorted(hot_words)[:3]}: decode.method=beam alone takes those of a session")


class SearchDecoder:
    """A search of whole utterances on the CPU, guarded against bad log-probs, and word times for what it finds."""

    def __init__(
        self, search: Search, alphabet: Alphabet, frame_s: float, times: bool, second: SecondPass | None = None
    ) -> None:
        self.search, self.alphabet, self.frame_s, self.times, self.second = search, alphabet, frame_s, times, second
        self.hot_characters = frozenset[str]()

    def decode(self, log_probs: Tensor, lengths: Tensor) -> list[list[Hypothesis]]:
        """Decode as :class:`Decoder` says; log-probs come to the CPU if they are elsewhere."""
        check_log_probs(log_probs, lengths, len(self.alphabet))
        if not len(lengths):
            return []
        log_probs = log_probs.float().cpu()
        rows = self.search(log_probs, lengths)
        rows = self.second(rows) if self.second is not None else rows
        return with_times(rows, log_probs, lengths, self.alphabet, self.frame_s) if self.times else rows

    def start(self, rows: int = 1, hot_words: HotWords | None = None) -> Kept:
        """Begin utterances of any length; what was heard is kept, and searched when it is asked for."""
        refuse_hot_words(hot_words)
        return Kept(self, rows, self.alphabet, self.frame_s)

    def best(self, decodings: Sequence[Kept]) -> list[list[Hypothesis]]:
        """The best of each."""
        return [decoding.best() for decoding in decodings]

    def finish(self, decodings: Sequence[Kept]) -> list[list[list[Hypothesis]]]:
        """The N best of each."""
        return [decoding.finish() for decoding in decodings]

    def step(self, decodings: Sequence[Kept], log_probs: Tensor, lengths: Tensor) -> None:
        """Keep the next frames of each; see :class:`Decoder`."""
        step_apart(decodings, log_probs, lengths)


def step_apart(decodings: Sequence[Decoding], log_probs: Tensor, lengths: Tensor) -> None:
    """`Decoder.step` one after the other, for decodings of one utterance each that gain nothing from a batch."""
    for row, decoding in enumerate(decodings):
        decoding.step(log_probs[:, row : row + 1], lengths[row : row + 1])


class Kept:
    """Frames kept until they are asked for, for decoders that take whole utterances: some kilobytes a second."""

    def __init__(self, decoder: Decoder, rows: int, alphabet: Alphabet, frame_s: float) -> None:
        self.decoder, self.alphabet, self.frame_s = decoder, alphabet, frame_s
        self._heard: list[list[Tensor]] = [[] for _ in range(rows)]

    def step(self, log_probs: Tensor, lengths: Tensor) -> None:
        """Keep the next frames; see :class:`Decoding`."""
        check_log_probs(log_probs, lengths, len(self.alphabet), empty_too=True)
        for row, length in enumerate(lengths.tolist()):
            if length:
                self._heard[row].append(log_probs[:length, row].float())

    def best(self) -> list[Hypothesis]:
        """Decode what was heard so far; see :class:`Decoding`."""
        return [row[0] for row in self.finish()]

    def finish(self) -> list[list[Hypothesis]]:
        """Decode what was heard, in pieces where it is long, of which only the best remain; see :class:`Decoding`."""
        return [
            [decode_long(self.decoder, torch.cat(heard), self.alphabet, self.frame_s)] if heard else [EMPTY]
            for heard in self._heard
        ]


def decode_long(
    decoder: Decoder, log_probs: Tensor, alphabet: Alphabet, frame_s: float, piece_s: float = 20.0
) -> Hypothesis:
    """Decode a recording of any length in pieces, as searching and aligning take memory by the square of the length.

    A piece ends amid the surest silence (blank over 0.2 s) of its last quarter; its language model starts a sentence.

    Args:
        decoder: any.
        log_probs: (T, V) natural log-probs, T above 0.
        alphabet, frame_s: of the decoder.
        piece_s: the longest piece, seconds.
    """
    longest, cuts = max(4, round(piece_s / frame_s)), [0]
    blanks = log_probs[:, BLANK].float().cpu()
    width = round(0.1 / frame_s)
    silence = torch.nn.functional.avg_pool1d(blanks[None], 2 * width + 1, 1, width, count_include_pad=False)[0]
    while len(blanks) - cuts[-1] > longest:
        first = cuts[-1] + longest * 3 // 4
        cuts.append(first + int(silence[first : cuts[-1] + longest].argmax()))
    pieces = [log_probs[a:b] for a, b in pairwise([*cuts, len(blanks)])]
    lengths = torch.tensor([len(piece) for piece in pieces])
    found = [row[0] for row in decoder.decode(torch.nn.utils.rnn.pad_sequence(pieces), lengths)]
    separator = tuple(label for label, symbol in enumerate(alphabet.symbols) if symbol and symbol.isspace())
    labels: tuple[int, ...] = ()
    words: list[Word] = []
    for piece, start in zip(found, cuts, strict=True):
        parted = not labels or labels[-1:] == separator or not piece.labels
        labels += (() if parted else separator) + piece.labels
        shift_s = start * frame_s
        words += [replace(w, start_s=w.start_s + shift_s, end_s=w.end_s + shift_s) for w in piece.words]
    score, acoustic, lm, bonus = (sum(getattr(h, k) for h in found) for k in ("score", "acoustic", "lm", "bonus"))
    text = " ".join(piece.text for piece in found if piece.text)
    return Hypothesis(text, score, labels, tuple(words), acoustic, lm, bonus)
