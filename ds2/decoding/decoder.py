"""The interface of all decoders: log-probs and lengths to the N best hypotheses, for batches and for streams."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor

from ds2.decoding.alignment import add_word_times
from ds2.decoding.hypothesis import EMPTY, DecodeError, Hypothesis, Word
from ds2.decoding.phrases import HotWords, refuse_hot_words
from ds2.decoding.postprocess import SecondPass
from ds2.text.alphabet import BLANK, Alphabet

Search = Callable[[Tensor, Tensor], list[list[Hypothesis]]]  # log-probs and lengths to the N best, without word times
_SUM_TOLERANCE = 0.02  # of the probabilities of a frame: the error of log-probs rounded to bfloat16


def start_copy(*tensors: Tensor) -> Callable[[], list[NDArray[Any]]]:
    """Start to copy tensors of one device to the host; the function that is returned waits and returns the arrays.

    Processes that share a GPU use it in turns. Each wait lasts until this process has its turn, so one wait is best.
    """
    copies = [tensor.to("cpu", non_blocking=True) for tensor in tensors]  # a GPU's to pinned memory
    device = tensors[0].device
    copied = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None

    def wait() -> list[NDArray[Any]]:
        if copied is not None:
            copied.synchronize()
        return [copy.numpy() for copy in copies]

    return wait


class Decoder(Protocol):
    """Decodes batches of utterances, and streams: chunks of any length give the bits of the whole.

    What is computed of a frame must therefore not depend on its place in a tensor, as exp and log of float32 on a CPU.
    """

    hot_characters: frozenset[str] = frozenset()  # that hot words of a session may have; empty: it takes no hot words

    def start(self, hot_words: HotWords | None = None) -> Any:
        """Begin a stream and return its state, which `step` changes.

        Args:
            hot_words: words and phrases to prefer in it, and the bonus of each, natural log.

        Raises:
            LexiconError: the network cannot write these hot words, or the decoder takes none.
        """

    def step(self, streams: Sequence[Any], log_probs: Tensor, lengths: Tensor) -> None:
        """Decode the next frames of streams.

        Args:
            streams: B results of `start`, also of other decoders that are equal when `unwrapped`.
            log_probs: (T', B, V) natural log-probs of any floating type on any device, T' >= 0.
            lengths: (B,) CPU int64, valid frames of each stream, 0 too.

        Raises:
            DecodeError: NaN or infinite values, or frames that do not sum to one.
        """

    def step_and_best(
        self, streams: Sequence[Any], log_probs: Tensor, lengths: Tensor, wanted: Sequence[int]
    ) -> list[Hypothesis] | None:
        """`step`, and `best` of the streams at the indices `wanted`; None where that waits for the device once more."""
        self.step(streams, log_probs, lengths)
        return None

    def best(self, streams: Sequence[Any], *, words: bool = False) -> list[Hypothesis]:
        """Return the best hypothesis of each stream so far; empty before the first frame.

        A beam search returns text and labels only, as words cost an alignment, unless `words` is true. `fixed_words`
        says how much of the text no later frame changes; a decoder of whole utterances says 0.
        """

    def finish(self, streams: Sequence[Any]) -> list[list[Hypothesis]]:
        """Return the N best hypotheses of each stream, best first, at least one."""
        return [[hypothesis] for hypothesis in self.best(streams)]

    def decode(self, log_probs: Tensor, lengths: Tensor) -> list[list[Hypothesis]]:
        """Return the N best hypotheses of each utterance, best first, at least one.

        Args:
            log_probs: (T', B, V) natural log-probs of any floating type on any device.
            lengths: (B,) CPU int64, valid frames.

        Raises:
            DecodeError: NaN or infinite values, frames that do not sum to one, or utterances without frames.
        """
        refuse_empty(lengths)
        streams = [self.start() for _ in lengths]
        self.step(streams, log_probs, lengths)
        return self.finish(streams)


def refuse_empty(lengths: Tensor) -> None:
    """Raise DecodeError if an utterance has no frames, by lengths (B,)."""
    if empty := (lengths == 0).nonzero()[:, 0].tolist():
        raise DecodeError(f"the utterances at {empty} in the batch have no frames (T = 0): leave them out", empty)


def check_log_probs(log_probs: Tensor, lengths: Tensor, labels: int) -> None:
    """`start_check`, and wait for it."""
    _, raise_if_wrong = start_check(log_probs, lengths, labels)
    raise_if_wrong()


def start_check(log_probs: Tensor, lengths: Tensor, labels: int) -> tuple[Tensor, Callable[[], None]]:
    """Start to check log-probs before decoding.

    Args:
        log_probs: (T', B, V).
        lengths: (B,) CPU integers.
        labels: V of the alphabet.

    Returns:
        Whether the values of each utterance are right, (B,) bool on the device of the log-probs, and a function that
        waits for the device and raises DecodeError for NaN, +inf, and frames whose probabilities do not sum to one.

    Raises:
        ValueError: shapes or lengths that do not fit, or another number of labels.
    """
    if log_probs.dim() != 3 or log_probs.shape[2] != labels or lengths.shape != log_probs.shape[1:2]:
        raise ValueError(
            f"log-probs have shape {tuple(log_probs.shape)} and lengths {tuple(lengths.shape)}; expected (T', B, V), "
            f"where V is the alphabet's {labels} labels with the blank, and B lengths"
        )
    counts, frames = lengths.tolist(), len(log_probs)
    if any(not 0 <= count <= frames for count in counts):
        raise ValueError(f"lengths {counts} must lie between 0 and the {frames} frames of the log-probs")
    sums = log_probs.float().exp().sum(2)
    ok = (sums - 1).abs() <= _SUM_TOLERANCE  # false for NaN too
    if min(counts, default=frames) < frames:
        ok |= torch.arange(frames, device=sums.device)[:, None] >= lengths.to(sums.device, non_blocking=True)
    right = ok.all(0)
    copy = start_copy(right)

    def raise_if_wrong() -> None:
        bad = [row for row, is_right in enumerate(copy()[0].tolist()) if not is_right]
        if not bad:
            return
        values = sums[: counts[bad[0]], bad[0]].tolist()
        frame, value = next((t, v) for t, v in enumerate(values) if not abs(v - 1) <= _SUM_TOLERANCE)
        problem = (
            f"sum to {value:.4g}, not to one: apply log_softmax to logits first"
            if math.isfinite(value)
            else "are NaN or infinite: the model's weights are broken, or its input was"
        )
        raise DecodeError(f"log-probs of the utterances at {bad} in the batch {problem} (first at frame {frame})", bad)

    return right, raise_if_wrong


class ChangedStream(NamedTuple):
    """A stream of another decoder, and how its hypotheses change."""

    inner: Any
    change: Callable[[Hypothesis], Hypothesis]


class ChangedDecoder(Decoder):
    """A decoder whose hypotheses are changed, such as by a calibration of confidences.

    Args:
        change: maps a hypothesis of the decoder to the one that is returned.
        hot_words: of every stream; streams then take none of their own. None: each stream has its own.
    """

    def __init__(
        self, decoder: Decoder, change: Callable[[Hypothesis], Hypothesis], hot_words: HotWords | None = None
    ) -> None:
        self.decoder, self.change, self.hot_words = decoder, change, hot_words
        self.hot_characters = decoder.hot_characters if hot_words is None else frozenset[str]()

    def decode(self, log_probs: Tensor, lengths: Tensor) -> list[list[Hypothesis]]:
        if self.hot_words is not None:  # of streams
            return super().decode(log_probs, lengths)
        return [[self.change(h) for h in row] for row in self.decoder.decode(log_probs, lengths)]

    def start(self, hot_words: HotWords | None = None) -> ChangedStream:
        if self.hot_words is not None:
            refuse_hot_words(hot_words)
            hot_words = self.hot_words
        return ChangedStream(self.decoder.start(hot_words), self.change)

    def step(self, streams: Sequence[ChangedStream], log_probs: Tensor, lengths: Tensor) -> None:
        self.decoder.step([stream.inner for stream in streams], log_probs, lengths)

    def step_and_best(
        self, streams: Sequence[ChangedStream], log_probs: Tensor, lengths: Tensor, wanted: Sequence[int]
    ) -> list[Hypothesis] | None:
        best = self.decoder.step_and_best([stream.inner for stream in streams], log_probs, lengths, wanted)
        return None if best is None else [streams[index].change(h) for index, h in zip(wanted, best, strict=True)]

    def best(self, streams: Sequence[ChangedStream], *, words: bool = False) -> list[Hypothesis]:
        best = self.decoder.best([stream.inner for stream in streams], words=words)
        return [stream.change(hypothesis) for stream, hypothesis in zip(streams, best, strict=True)]

    def finish(self, streams: Sequence[ChangedStream]) -> list[list[Hypothesis]]:
        nbest = self.decoder.finish([stream.inner for stream in streams])
        return [[stream.change(h) for h in row] for stream, row in zip(streams, nbest, strict=True)]


def unwrapped(decoder: Decoder) -> tuple[int, Decoder]:
    """Return how many `ChangedDecoder`s are around a decoder, and that decoder; of equal ones streams share a batch."""
    changes = 0
    while isinstance(decoder, ChangedDecoder):
        changes, decoder = changes + 1, decoder.decoder
    return changes, decoder


class SearchDecoder(Decoder):
    """A decoder on a CPU search of whole utterances; it checks log-probs and adds word times.

    It buffers the frames of streams, some kilobytes a second, and searches them all for each result.
    """

    def __init__(
        self, search: Search, alphabet: Alphabet, frame_s: float, times: bool, second_pass: SecondPass | None = None
    ) -> None:
        self.search, self.alphabet, self.frame_s, self.times = search, alphabet, frame_s, times
        self.second_pass = second_pass

    def decode(self, log_probs: Tensor, lengths: Tensor) -> list[list[Hypothesis]]:
        refuse_empty(lengths)
        check_log_probs(log_probs, lengths, len(self.alphabet))
        if not len(lengths):
            return []
        log_probs = log_probs.float().cpu()
        rows = self.search(log_probs, lengths)
        rows = self.second_pass(rows) if self.second_pass is not None else rows
        return add_word_times(rows, log_probs, lengths, self.alphabet, self.frame_s) if self.times else rows

    def start(self, hot_words: HotWords | None = None) -> list[Tensor]:
        refuse_hot_words(hot_words)
        return []

    def step(self, streams: Sequence[list[Tensor]], log_probs: Tensor, lengths: Tensor) -> None:
        check_log_probs(log_probs, lengths, len(self.alphabet))
        for row, (frames, length) in enumerate(zip(streams, lengths.tolist(), strict=True)):
            if length:
                frames.append(log_probs[:length, row].float())

    def best(self, streams: Sequence[list[Tensor]], *, words: bool = False) -> list[Hypothesis]:
        """Decode all frames by `decode_long`."""
        return [decode_long(self, torch.cat(f), self.alphabet, self.frame_s) if f else EMPTY for f in streams]


def decode_long(
    decoder: Decoder, log_probs: Tensor, alphabet: Alphabet, frame_s: float, piece_s: float = 20.0
) -> Hypothesis:
    """Decode a recording of any length in pieces: memory of search and alignment grows with the square of the length.

    A piece ends in the most certain silence (blank for 0.2 s) of its last quarter; each piece starts a new sentence for
    the language model.

    Args:
        log_probs: (T, V) natural log-probs, T above 0.
        piece_s: length of the longest piece, seconds.
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
    best = [row[0] for row in decoder.decode(torch.nn.utils.rnn.pad_sequence(pieces), lengths)]
    separator = tuple(label for label, symbol in enumerate(alphabet.symbols) if symbol and symbol.isspace())
    labels: tuple[int, ...] = ()
    words: list[Word] = []
    for piece, start in zip(best, cuts, strict=True):
        separated = not labels or labels[-1:] == separator or not piece.labels
        labels += (() if separated else separator) + piece.labels
        shift_s = start * frame_s
        words += [replace(w, start_s=w.start_s + shift_s, end_s=w.end_s + shift_s) for w in piece.words]
    score, acoustic, lm, bonus = (sum(getattr(h, k) for h in best) for k in ("score", "acoustic", "lm", "bonus"))
    text = " ".join(piece.text for piece in best if piece.text)
    return Hypothesis(text, score, labels, tuple(words), acoustic, lm, bonus)
