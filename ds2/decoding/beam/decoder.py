"""The beam decoder: whole batches, and streams of any length in bounded memory."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from ds2_ops.ctc import beam as kernel
from numpy.typing import NDArray
from torch import Tensor

from ds2.config.schema import DecodeConfig
from ds2.decoding.alignment import IncrementalAligner, add_stream_word_times, add_word_times, finalise
from ds2.decoding.beam.fusion import LENGTH, Fusion, PronouncedWords
from ds2.decoding.beam.kernel_search import KernelSearch, KernelStreams, read_labels
from ds2.decoding.beam.torch_search import HASH, PARENT, Beams, TorchStreams, first_of_rows, search
from ds2.decoding.decoder import Decoder, check_log_probs, refuse_empty, start_check, start_copy
from ds2.decoding.frames import NONE, pack
from ds2.decoding.hypothesis import EMPTY, DecodeError, Hypothesis
from ds2.decoding.lexicon import ROOT
from ds2.decoding.phrases import HotWords, as_written, check_hot_words
from ds2.decoding.postprocess import SecondPass
from ds2.lm.ngram import NGram
from ds2.text.alphabet import WORD_MARK, Alphabet

Labels = tuple[int, ...]
_ENTRY = 3  # column of the kernel's `names`: the last entry of the prefix in the trace
_MAX_BEAM = 10_000
_MAX_LABELS = 2**15  # they are stored in 16 bits
_CPU_FRAMES = 64  # searched at a time on a CPU, between removals of shared labels; a GPU takes a whole chunk


@dataclass(frozen=True)
class NBest:
    """The N best label sequences of each utterance, best first, on the CPU."""

    labels: list[list[Labels]]
    scores: NDArray[np.float64]  # (B, N, 4): total, acoustic, language model, bonus; total -inf: no hypothesis


class BatchedBeamSearch:
    """Searches batches of any size with fixed settings; only one thread may use it at a time."""

    def __init__(self, fusion: Fusion, options: DecodeConfig) -> None:
        self.fusion, self.options = fusion, options
        self.kernel = KernelSearch(fusion, options) if fusion.device.type == "cuda" else None
        self.streams: TorchStreams | KernelStreams = (  # made here, as threads may start the first ones together
            KernelStreams(self.kernel, options)
            if self.kernel is not None and self.kernel.fits(1)
            else TorchStreams(fusion, options)
        )

    def search(self, log_probs: Tensor, lengths: Tensor, root: int = ROOT) -> NBest:
        """Find the best label sequences of whole utterances, with one launch of the kernel if it takes them.

        Args:
            log_probs: (T, B, V) float32 on the device of the fusion, finite or -inf; the caller checks them.
            lengths: (B,) CPU int64, at least 1.
            root: of the trie, where words start.
        """
        packed, counts = pack(log_probs, lengths, self.options)
        if self.kernel is None or not self.kernel.fits(len(log_probs)):
            empty = Beams.start(self.fusion, len(lengths), self.options.beam, root)
            return self.nbest(search(self.fusion, empty, packed, counts, self.options.prune))
        roots = torch.full((len(lengths),), root, dtype=torch.int32, device=log_probs.device)
        end = self.kernel.search(packed, counts, roots=roots)
        table, slots = _rank(self.fusion, torch.logaddexp(*end.halves), end, self.options.nbest)
        entries = end.names[..., _ENTRY].gather(1, slots)
        return NBest(read_labels(kernel.trace_labels(entries, end.grown)), table.cpu().numpy())

    def nbest(self, beams: Beams) -> NBest:
        """Rank prefixes, without the labels that were taken away from them."""
        table, slots = _rank(self.fusion, beams.acoustic, beams, self.options.nbest)
        rows = beams.labels.gather(1, slots[..., None].expand(-1, -1, beams.labels.shape[2])).flatten(0, 1)
        all_labels, counts, scores = start_copy(rows, beams.counts.gather(1, slots).flatten(), table)()
        flat = iter(first_of_rows(all_labels, counts))
        return NBest([list(map(tuple, islice(flat, slots.shape[1]))) for _ in range(len(slots))], scores)


def _rank(fusion: Fusion, acoustic: Tensor, end: kernel.PrefixTables | Beams, nbest: int) -> tuple[Tensor, Tensor]:
    """Join prefixes that differ in a last space only; return scores (B, N, 4) as in `NBest` and slots (B, N)."""
    log_prob, bonus, fused = fusion.finish(end.integers, end.floats, acoustic > NONE)
    hashes, parents = end.names[..., HASH], end.names[..., PARENT]
    beam = hashes.shape[1]
    preferred = torch.arange(beam, device=hashes.device).expand_as(hashes)
    if fusion.spelling.space >= 0:
        ends_in_space = (end.integers[..., LENGTH] == 0) & (hashes != 0)
        hashes = torch.where(ends_in_space, parents, hashes)
        preferred = preferred + beam * ends_in_space
    same = hashes[:, None, :] == hashes[..., None]
    joined = torch.where(same, acoustic[:, None, :], NONE).logsumexp(2)
    first = torch.where(same, preferred[:, None, :], 2 * beam).amin(2) == preferred
    total = torch.where(first, joined + fused, NONE)
    _, slots = total.topk(min(nbest, beam), 1)
    table = torch.stack([total, joined, log_prob, bonus], -1).gather(1, slots[..., None].expand(-1, -1, 4))
    return table, slots


@dataclass(eq=False)
class BeamStream:
    """A stream of a `BeamDecoder`."""

    state: Any  # its prefixes, as the search keeps them
    aligner: IncrementalAligner
    hot: frozenset[str] = frozenset()  # hot words of its session, which the lexicon may lack
    frames: int = 0
    shared: list[int] = field(default_factory=list)  # the first labels, that all hypotheses share
    text: str = ""  # of these, with spaces for word marks
    fixed_words: int = 0  # complete ones in it


class BeamDecoder(Decoder):
    """The batched prefix beam search on the device of the model, as a `ds2.decoding.decoder.Decoder`.

    Labels that all prefixes share are final. In streams longer than `ds2.decoding.alignment.SINGLE_ALIGNMENT_S` their
    words get times step by step, so a stream may have no end.
    """

    def __init__(
        self,
        alphabet: Alphabet,
        options: DecodeConfig,
        lm: NGram | None,
        frame_s: float,
        device: torch.device,
        second_pass: SecondPass | None = None,
    ) -> None:
        if options.beam > _MAX_BEAM:  # all pairs of prefixes are compared in each frame
            raise DecodeError(
                f"decode.beam={options.beam} is not allowed with decode.method=beam: give {_MAX_BEAM} or less, "
                "or choose decode.method=native"
            )
        self.network_alphabet, self.options = alphabet, options
        self.frame_s, self.device = frame_s, device
        self.second_pass = second_pass
        self.pronounced = None if alphabet.pronunciations is None else PronouncedWords(alphabet, lm)
        self.alphabet = alphabet if self.pronounced is None else self.pronounced.alphabet
        if len(self.alphabet) > _MAX_LABELS:
            raise DecodeError(
                f"an alphabet of {len(self.alphabet)} labels is not allowed with decode.method=beam: choose "
                f"decode.method=greedy or native, or train with {_MAX_LABELS} or fewer, such as fewer pieces"
            )
        options = replace(options, lexicon=options.lexicon or self.pronounced is not None)
        fusion = Fusion(alphabet, options, lm, device, self.pronounced)
        self.hot_words = self._as_searched(dict.fromkeys(options.hot_words))
        self.root = fusion.trie.add_phrases(self.hot_words) if self.hot_words else ROOT
        self.search = BatchedBeamSearch(fusion, options)
        self.hot_characters = frozenset(
            fusion.trie.codes if self.pronounced is None else "".join(self.pronounced.spelled)
        )
        known = self.pronounced.ids if self.pronounced is not None else lm.vocabulary if lm is not None else ()
        self.lexicon = {*known, *" ".join(self.hot_words).split()} if options.lexicon else None

    def decode(self, log_probs: Tensor, lengths: Tensor) -> list[list[Hypothesis]]:
        """Decode whole utterances: on a GPU by one launch, and one alignment of each utterance."""
        refuse_empty(lengths)
        check_log_probs(log_probs, lengths, len(self.network_alphabet))
        if not len(lengths):
            return []
        log_probs = self._searched(log_probs)
        if self.search.kernel is not None and self.search.kernel.fits(len(log_probs)):
            aligner = IncrementalAligner(self.alphabet, self.frame_s, 0.0)
            whole = [BeamStream(None, aligner, frames=length) for length in lengths.tolist()]
            rows = self._rescored(self._hypotheses(self.search.search(log_probs, lengths, self.root), whole))
            if self.options.times:
                rows = add_word_times(rows, log_probs, lengths, self.alphabet, self.frame_s)
            return [self._in_words(row) for row in rows]
        streams = [self.start() for _ in lengths]
        self._step(streams, log_probs, lengths)
        return self.finish(streams)

    def start(self, hot_words: HotWords | None = None) -> BeamStream:
        """Begin a stream; in chunks of any length the result is that of `decode` of the whole.

        Raises:
            LexiconError: hot words that the network cannot write, or too many.
        """
        check_hot_words(hot_words or {})
        own, root, trie = self._as_searched(hot_words or {}), self.root, self.search.fusion.trie
        if own:
            root = trie.add_phrases({**self.hot_words, **own})
        aligner = IncrementalAligner(self.alphabet, self.frame_s, self.options.label_min_log_prob)
        stream = BeamStream(self.search.streams.start(root), aligner, frozenset(" ".join(own).split()))
        if own:
            weakref.finalize(stream, trie.remove_phrases, root)
        return stream

    def step(self, streams: Sequence[BeamStream], log_probs: Tensor, lengths: Tensor) -> None:
        check_log_probs(log_probs, lengths, len(self.network_alphabet))
        self._step(streams, self._searched(log_probs), lengths)

    def step_and_best(
        self, streams: Sequence[BeamStream], log_probs: Tensor, lengths: Tensor, wanted: Sequence[int]
    ) -> list[Hypothesis] | None:
        """`step`; on a GPU `best` of the streams at the indices `wanted` too, with one wait for all.

        None where it would be another wait: in PyTorch's search, and where times of a stream become final. None too
        where it needs more memory than there is.
        """
        kernel_streams, counts = self.search.streams, lengths.tolist()
        due = any(count >= s.aligner.due_at - s.aligner.total_frames for s, count in zip(streams, counts, strict=True))
        if not isinstance(kernel_streams, KernelStreams) or due or not wanted:
            return super().step_and_best(streams, log_probs, lengths, wanted)
        right, raise_if_wrong = start_check(log_probs, lengths, len(self.network_alphabet))
        log_probs, states = self._searched(log_probs), [stream.state for stream in streams]
        # Of wrong values no frame is searched: then no stream has changed when that is raised.
        searched = torch.where(right.all(), lengths.to(self.device, non_blocking=True), 0)
        shared = kernel_streams.start_step(states, log_probs, searched)
        nbest: NBest | None = None
        with suppress(torch.OutOfMemoryError):  # else callers try smaller batches, which search these frames again
            nbest = self.search.nbest(kernel_streams.beams([states[index] for index in wanted]))  # waits for all of it
        self._append(shared(), streams)
        raise_if_wrong()
        for index, (stream, count) in enumerate(zip(streams, counts, strict=True)):
            self._advance(stream, log_probs, index, 0, count)
        if nbest is None:
            return None
        hypotheses = self._hypotheses(nbest, [streams[index] for index in wanted])
        return [self._in_words(row)[0] for row in hypotheses]

    def best(self, streams: Sequence[BeamStream], *, words: bool = False) -> list[Hypothesis]:
        if not any(stream.frames for stream in streams):  # such as those whose segment has just ended
            return [EMPTY for _ in streams]
        beams = self.search.streams.beams([stream.state for stream in streams])
        nbest = self._hypotheses(self.search.nbest(beams), streams)
        if words:
            nbest = self._with_words([hypotheses[:1] for hypotheses in nbest], streams)
        return [self._in_words(row)[0] for row in nbest]

    def finish(self, streams: Sequence[BeamStream]) -> list[list[Hypothesis]]:
        beams = self.search.streams.flushed([stream.state for stream in streams])
        nbest = self._with_words(self._rescored(self._hypotheses(self.search.nbest(beams), streams)), streams)
        return [self._in_words(row) for row in nbest]

    def _with_words(self, nbest: list[list[Hypothesis]], streams: Sequence[BeamStream]) -> list[list[Hypothesis]]:
        """Add words with times to the hypotheses of streams, unless the settings want none."""
        nonempty = [index for index, stream in enumerate(streams) if stream.frames]
        if not self.options.times or not nonempty:
            return nbest
        timed = add_stream_word_times([nbest[i] for i in nonempty], [streams[i].aligner for i in nonempty])
        by_index = dict(zip(nonempty, timed, strict=True))
        return [by_index.get(index, hypotheses) for index, hypotheses in enumerate(nbest)]

    def _searched(self, log_probs: Tensor) -> Tensor:
        """Return log-probs (T, B, W) float32 of the labels of the search, from those (T, B, V) of the network."""
        log_probs = log_probs.float().to(self.device)
        return log_probs if self.pronounced is None else self.pronounced.frames(log_probs)

    def _as_searched(self, hot_words: HotWords) -> dict[str, float | None]:
        """Return hot words and phrases in the characters of the search's alphabet."""
        written = as_written(hot_words, self.network_alphabet)
        if self.pronounced is None:
            return written
        spelled = self.pronounced.spell_phrases(list(written))
        return {way: bonus for phrase, bonus in written.items() for way in spelled[phrase]}

    def _in_words(self, hypotheses: list[Hypothesis]) -> list[Hypothesis]:
        """Return hypotheses with written words and the network's labels, where the search has labels of its own."""
        return hypotheses if self.pronounced is None else [self.pronounced.in_words(h) for h in hypotheses]

    def _step(self, streams: Sequence[BeamStream], log_probs: Tensor, lengths: Tensor) -> None:
        states = [stream.state for stream in streams]
        longest = len(log_probs) if log_probs.is_cuda else _CPU_FRAMES
        start, counts = 0, lengths.tolist()
        while start < max(counts, default=0):
            active = [(i, streams[i], count) for i, count in enumerate(counts) if count > start]
            until_due = min(stream.aligner.due_at - stream.aligner.total_frames for _, stream, _ in active)
            end = start + min(longest, until_due)
            clamped = (lengths - start).clamp(0, end - start)
            self._append(self.search.streams.step(states, log_probs[start:end], clamped), streams)
            for index, stream, count in active:
                self._advance(stream, log_probs, index, start, min(end, count))
            if end - start == until_due:
                due = [i for i, stream, count in active if stream.aligner.total_frames == stream.aligner.due_at]
                if due:
                    self._finalise(states, streams, due)
            start = end

    def _advance(self, stream: BeamStream, log_probs: Tensor, index: int, first: int, end: int) -> None:
        """Count the frames of a stream that were searched, and keep them for its word times."""
        if first < end and self.options.times:
            stream.aligner.append(log_probs, index, first, end)
        stream.frames += end - first

    def _finalise(self, states: Sequence[Any], streams: Sequence[BeamStream], due: Sequence[int]) -> None:
        """Fix the word times of the streams at indices `due`, and drop prefixes that contradict them."""
        beams = self.search.streams.beams(states)
        best = [labels[0] for labels in self.search.nbest(beams).labels]
        agrees = torch.ones_like(beams.blank, dtype=torch.bool)
        shared = [len(streams[index].shared) for index in due]
        labels = [(*streams[index].shared, *best[index]) for index in due]
        final_counts = finalise([streams[index].aligner for index in due], labels, shared)
        for index, first, final in zip(due, shared, final_counts, strict=True):
            if final > first:
                wanted = torch.tensor(best[index][: final - first], dtype=torch.int16, device=self.device)
                own = beams.labels[index, :, : len(wanted)]
                agrees[index] = (own == wanted).all(1) & (beams.counts[index] >= len(wanted))
        if not agrees.all():
            self._append(self.search.streams.mask(states, agrees), streams)

    def _rescored(self, nbest: list[list[Hypothesis]]) -> list[list[Hypothesis]]:
        return nbest if self.second_pass is None else self.second_pass(nbest)

    def _append(self, shared: Sequence[Sequence[int]], streams: Sequence[BeamStream]) -> None:
        """Append the labels that all prefixes of a stream share to it."""
        for stream, labels in zip(streams, shared, strict=True):
            if labels:
                stream.shared += labels
                stream.text += self._written(tuple(labels))
                stream.fixed_words = max(0, len(stream.text.split()) - (not stream.text[-1:].isspace()))

    def _hypotheses(self, nbest: NBest, streams: Sequence[BeamStream]) -> list[list[Hypothesis]]:
        """Convert label sequences to hypotheses, without word times; `streams` have the first labels."""
        result = []
        for labels, scores, stream in zip(nbest.labels, nbest.scores.tolist(), streams, strict=True):
            exist = [pair for pair in zip(labels, scores, strict=True) if pair[1][0] > -torch.inf]
            result.append(_distinct([self._hypothesis(*pair, stream) for pair in exist]) if stream.frames else [EMPTY])
        return result

    def _hypothesis(self, labels: Labels, scores: Sequence[float], stream: BeamStream) -> Hypothesis:
        labels, before = (*stream.shared, *labels), len(stream.shared)
        if self.lexicon is not None:
            labels = self._without_unfinished(labels, stream.hot)
        if labels and self.alphabet.symbols[labels[-1]].isspace():
            labels = labels[:-1]
        text = stream.text + self._written(labels[before:]) if len(labels) >= before else self._written(labels)
        spelled = text.split()
        text = " ".join(spelled) if self.pronounced is None else self.pronounced.text(spelled)
        score, acoustic, log_prob, bonus = scores
        fixed = min(stream.fixed_words, len(spelled))
        return Hypothesis(text, score, labels, (), acoustic, log_prob, bonus, fixed)

    def _written(self, labels: Labels) -> str:
        """Return the text of labels, with spaces for word marks."""
        return self.alphabet.decode(labels).replace(WORD_MARK, " ")

    def _without_unfinished(self, labels: Labels, hot: frozenset[str]) -> Labels:
        """Return labels without their last word if neither the lexicon nor hot words have it: it is unfinished."""
        end = len(labels)
        while end and not self.alphabet.writes[labels[end - 1]]:
            end -= 1
        start = end - 1
        while start > 0 and not self.alphabet.starts_word[labels[start]]:
            start -= 1
        word = [at for at in range(max(0, start), end) if self.alphabet.writes[labels[at]]]
        text = self.alphabet.decode(labels[at] for at in word).replace(WORD_MARK, "")
        assert self.lexicon is not None
        return labels if not word or text in self.lexicon or text in hot else labels[: word[0]]


def _distinct(hypotheses: Sequence[Hypothesis]) -> list[Hypothesis]:
    """Return the best hypothesis of each text (pieces spell a text in several ways); at least an empty one."""
    best = {h.text: h for h in reversed(hypotheses)}
    distinct = [h for h in hypotheses if best[h.text] is h]
    return distinct or [Hypothesis("", -torch.inf, (), (), -torch.inf)]
