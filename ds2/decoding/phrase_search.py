"""A decoder that writes typed phrases and nothing else: the most probable path through their graph, frame by frame.

The graph of `ds2.decoding.phrases` is repeated: any number of phrases follow each other. Other speech has a path of its
own, which writes the most probable label of every frame and becomes the word `[unk]`. That path is never less probable
than a phrase, so a phrase is allowed to be less probable by `allowance` for each of its labels (natural log). What is
compared is thus the phrase with what the network would write freely over the same frames, which makes one allowance fit
long and short phrases, quiet and noisy speech; a path over characters with a fixed price would not.

A word begins after a space, or with a piece that has the word mark, so a phrase inside a longer word pays for the space
that is missing. A network of phones writes neither: there the phrase may be part of a longer word.

Streams: the path is traced back every second. As far as all paths within the beam agree it is final, its words too.
Scores are float64 and depend on the frames alone, so any cutting of a stream gives the same words.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ds2.decoding.decoder import Decoder, Decoding, check_log_probs, refuse_hot_words
from ds2.decoding.hypothesis import Hypothesis, Word
from ds2.decoding.lexicon import HotWords
from ds2.decoding.phrases import DEFAULT_ALLOWANCE, END, OTHERS, ROOT, PhraseGraph, compile_phrases
from ds2.text.alphabet import BLANK, WORD_MARK, Alphabet

_BEAM = 60.0  # natural log: paths that are less probable than the best one by more are dropped
_TRACE_S = 1.0
_MAX_PENDING_S = 10.0  # paths that disagree for longer: the best one is final
_NEVER = -math.inf


class PhraseStates:
    """The states of the search, which are numbered, and the words that may stand before each word.

    W words have P labels in all. State p < P writes label p, state P + p the blank after it. State 2 P + w writes the
    space after word w, state 2 P + W + w the silence after that space. The last four states are the space and the
    silence before a phrase, and the first frame and the other frames of other speech.
    """

    def __init__(self, graph: PhraseGraph, alphabet: Alphabet) -> None:
        words = graph.words
        sizes = np.array([len(word.labels) for word in words])
        self.words, self.others = words, graph.others
        self.labels = np.array([label for word in words for label in word.labels])  # (P,)
        self.word_of = np.repeat(np.arange(len(words)), sizes)  # (P,)
        self.last = np.cumsum(sizes) - 1  # (W,) position of the last label of each word
        self.first = self.last - sizes + 1
        repeats = np.concatenate([[False], self.labels[1:] == self.labels[:-1]])
        self.barred = np.where(repeats, _NEVER, 0.0)  # (P,) added to a step from the label before without a blank
        spaces = [label for label, symbol in enumerate(alphabet.symbols) if symbol and symbol.isspace()]
        self.space = spaces[0] if spaces else -1
        marked = [label for label, symbol in enumerate(alphabet.symbols) if symbol.startswith(WORD_MARK)]
        everything = [label for label in range(1, len(alphabet)) if label not in spaces]
        self.starts = np.array(marked or everything)  # labels that other speech may begin with
        self._find_sources(graph)
        count, total = len(words), len(self.labels)
        self.blank0, self.space0, self.quiet0 = total, 2 * total, 2 * total + count
        self.root_space, self.root_quiet = 2 * (total + count), 2 * (total + count) + 1
        self.other_first, self.other = self.root_quiet + 1, self.root_quiet + 2
        self.count = self.other + 1

    def _find_sources(self, graph: PhraseGraph) -> None:
        """List the sources of each word: w is word w, W + w is word w and a blank, 2 W is the start of a phrase.

        Words with the same sources share a row. In an alphabet without a space, a word that begins with the last label
        of the word before needs a blank between them: there, words of a row have their first label in common too, and
        a word that ends a phrase is a source of the words that begin one.
        """
        words = graph.words
        spaced = self.space >= 0
        before: dict[tuple[int, int], list[int]] = {(word.start, 0 if spaced else word.labels[0]): [] for word in words}
        labels: dict[int, list[int]] = {}  # by point
        for point, label in before:
            labels.setdefault(point, []).append(label)
        ends = [*((n, graph.reached[word.end]) for n, word in enumerate(words)), (2 * len(words), graph.reached[ROOT])]
        for source, points in ends:
            following = points | graph.reached[ROOT] if END in points and not spaced else points
            for point in following:
                for label in labels.get(point, []):
                    repeats = not spaced and source < len(words) and words[source].labels[-1] == label
                    before[point, label].append(source + len(words) if repeats else source)
        rows = [key for key, sources in before.items() if sources]
        row_of = {key: row for row, key in enumerate(rows)}
        counts = [len(before[key]) for key in rows]
        self.sources = np.array([source for key in rows for source in before[key]])  # rows after each other
        self.row_starts = np.cumsum([0, *counts[:-1]])
        self.row_of_source = np.repeat(np.arange(len(rows)), counts)
        self.row_of_word = np.array([row_of[word.start, 0 if spaced else word.labels[0]] for word in words])
        self.exits = np.array([n for n, word in enumerate(words) if END in graph.reached[word.end]])


@dataclass
class _OpenWord:
    """A word that the path is in."""

    word: int  # index, or -1 for other speech
    first: int  # frame
    end: int  # frame after the last one that writes a letter
    loss: float  # how much less probable its frames are than the most probable labels
    position: int  # of the label that was written last


class _PhraseStream:
    """One stream: scores of all states, the steps of paths that still disagree, and the words that are final."""

    def __init__(self, states: PhraseStates, allowance: float, frame_s: float) -> None:
        self.states, self.allowance, self.frame_s = states, allowance, frame_s
        self.scores = np.full(states.count, _NEVER)
        self.scores[states.root_quiet] = 0.0
        self.free = 0.0  # log-prob of the most probable labels
        self.frames = 0
        self.moves: list[NDArray[np.int32]] = []  # (states,) the state before, of each frame that is not final
        self.losses: list[NDArray[np.float32]] = []  # (V,) of each of these frames
        self.reader = _PathReader(states, frame_s)
        self.trace_every, self.max_pending = (max(1, round(s / frame_s)) for s in (_TRACE_S, _MAX_PENDING_S))

    def step(self, frame: NDArray[np.float64]) -> None:
        """Add the log-probs (V,) of the next frame."""
        best = frame.max()
        self.free += float(best)
        relative = frame - best
        self.scores, moves = self._advance(relative)
        self.scores[self.scores < self.scores.max() - _BEAM] = _NEVER
        self.moves.append(moves)
        self.losses.append((-relative).astype(np.float32))
        self.frames += 1
        if self.frames % self.trace_every == 0:
            self._finalise()

    def _advance(self, relative: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.int32]]:
        s, old = self.states, self.scores
        total = len(s.labels)
        label, blank = old[:total], old[s.blank0 : s.space0]
        in_word = np.maximum(label, blank)
        in_word_from = np.where(label >= blank, np.arange(total), np.arange(s.blank0, s.space0))
        ended, ended_from = in_word[s.last], in_word_from[s.last]  # (W,) words that may end here
        root, root_from = self._root(ended, ended_from)
        before_phrase = max((s.root_space, s.root_quiet), key=old.__getitem__)
        if s.space >= 0:
            space, quiet = old[s.space0 : s.quiet0], old[s.quiet0 : s.root_space]
            after = np.maximum(space, quiet)
            after_from = np.where(space >= quiet, np.arange(s.space0, s.quiet0), np.arange(s.quiet0, s.root_space))
        else:
            after, after_from = ended, ended_from
            before_phrase = max((s.root_quiet, s.other, s.other_first), key=old.__getitem__)
        entry = np.concatenate([after, blank[s.last], old[[before_phrase]]])
        entry_from = np.concatenate([after_from, s.blank0 + s.last, [before_phrase]])
        candidates = entry[s.sources]
        highest = np.maximum.reduceat(candidates, s.row_starts)
        chosen = np.flatnonzero(candidates == highest[s.row_of_source])[::-1]
        source = np.zeros(len(highest), np.int64)
        source[s.row_of_source[chosen]] = chosen  # the first one, as the last assignment counts

        new, moves = np.full(s.count, _NEVER), np.zeros(s.count, np.int32)
        step = np.empty(total)
        step[1:] = np.maximum(label[:-1] + s.barred[1:], blank[:-1])
        step_from = np.empty(total, np.int64)
        step_from[1:] = np.where(
            label[:-1] + s.barred[1:] >= blank[:-1], np.arange(total - 1), s.blank0 - 1 + np.arange(1, total)
        )
        step[s.first] = highest[s.row_of_word]
        step_from[s.first] = entry_from[s.sources[source]][s.row_of_word]
        step += self.allowance
        emitted = relative[s.labels]
        new[:total] = np.maximum(label, step) + emitted
        moves[:total] = np.where(label >= step, np.arange(total), step_from)
        new[s.blank0 : s.space0] = in_word + relative[BLANK]
        moves[s.blank0 : s.space0] = in_word_from
        quietest = relative[BLANK] if s.space < 0 else max(relative[BLANK], relative[s.space])
        if s.space >= 0:
            new[s.space0 : s.quiet0] = np.maximum(space, ended) + relative[s.space]
            moves[s.space0 : s.quiet0] = np.where(space >= ended, np.arange(s.space0, s.quiet0), ended_from)
            new[s.quiet0 : s.root_space] = after + quietest
            moves[s.quiet0 : s.root_space] = after_from
            new[s.root_space], moves[s.root_space] = max(
                (old[s.root_space] + relative[s.space], s.root_space),
                (root + relative[s.space], root_from),
                key=lambda pair: pair[0],
            )
            new[s.root_quiet], moves[s.root_quiet] = old[before_phrase] + quietest, before_phrase
        else:
            new[s.root_quiet], moves[s.root_quiet] = old[s.root_quiet] + quietest, s.root_quiet
        if s.others:
            start = before_phrase if s.space >= 0 else max((before_phrase, root_from), key=old.__getitem__)
            new[s.other_first], moves[s.other_first] = old[start] + relative[s.starts].max(), start
            same = max((s.other, s.other_first), key=old.__getitem__)
            new[s.other], moves[s.other] = old[same], same
        return new, moves

    def _root(self, ended: NDArray[np.float64], ended_from: NDArray[np.int64]) -> tuple[float, int]:
        """Return score and state of the best path that has just ended a phrase or other speech."""
        s, old = self.states, self.scores
        last = int(s.exits[ended[s.exits].argmax()])
        ways = [(float(ended[last]), int(ended_from[last]))]
        ways += [(float(old[state]), state) for state in (s.other, s.other_first)]
        return max(ways, key=lambda way: way[0])

    def _finalise(self) -> None:
        """Read the part that all paths share: its words are final."""
        if len(self.moves) > self.max_pending:
            best = int(self.scores.argmax())
            self.scores[np.arange(len(self.scores)) != best] = _NEVER
        alive = np.flatnonzero(np.isfinite(self.scores))
        frame = len(self.moves)
        while len(alive) > 1 and frame > 0:
            frame -= 1
            alive = np.unique(self.moves[frame][alive])
        if len(alive) == 1 and frame > 0:
            path = self._trace(int(alive[0]), frame)
            self.reader.read(path, self.losses)
            del self.moves[:frame], self.losses[:frame]

    def _trace(self, state: int, frames: int) -> list[int]:
        """Return the states of the first frames that are not final, of which `state` is the last."""
        path = [state]
        for moves in self.moves[frames - 1 : 0 : -1]:
            path.append(int(moves[path[-1]]))
        return path[::-1]

    def hypothesis(self, *, at_end: bool) -> Hypothesis:
        """Return the best hypothesis so far; `at_end`: the best one of whole phrases."""
        s = self.states
        state = int(self.scores.argmax())
        if at_end:
            label, blank = s.last[s.exits], s.last[s.exits] + s.blank0
            ends = np.concatenate([[s.root_quiet, s.root_space, s.other, s.other_first], label, blank])
            state = int(ends[self.scores[ends].argmax()])
        reader = self.reader.copy()
        fixed = len(reader.words)
        if self.moves:
            reader.read(self._trace(state, len(self.moves)), self.losses)
        reader.close()
        score = (
            self.free + float(self.scores[state]) - self.allowance * sum(label != s.space for label in reader.labels)
        )
        words = tuple(reader.words)
        text = " ".join(word.text for word in words)
        return Hypothesis(text, score, tuple(reader.labels), words, score, fixed_words=fixed)


class _PathReader:
    """Turns a path into words."""

    def __init__(self, states: PhraseStates, frame_s: float) -> None:
        self.states, self.frame_s = states, frame_s
        self.words: list[Word] = []
        self.labels: list[int] = []  # of the words
        self.frame = 0
        self.open: _OpenWord | None = None
        self.before = -1  # state of the frame before

    def copy(self) -> _PathReader:
        """Return a reader that goes on without changing this one."""
        other = _PathReader(self.states, self.frame_s)
        other.words, other.labels, other.frame, other.before = [*self.words], [*self.labels], self.frame, self.before
        other.open = replace(self.open) if self.open is not None else None
        return other

    def read(self, path: Iterable[int], losses: Sequence[NDArray[np.float32]]) -> None:
        """Read the states of the next frames, and the losses (V,) of these frames."""
        s = self.states
        for state, loss in zip(path, losses, strict=False):
            if state < s.space0:
                position = state % s.blank0
                writes = state < s.blank0
                if writes and position == s.first[s.word_of[position]] and self.before != state:
                    self.close()
                    self.open = _OpenWord(int(s.word_of[position]), self.frame, self.frame, 0.0, position)
                assert self.open is not None
                self.open.loss += float(loss[s.labels[position] if writes else BLANK])
                if writes:
                    self.open.position, self.open.end = position, self.frame + 1
            elif state in (s.other_first, s.other):
                if state == s.other_first:
                    self.close()
                    self.open = _OpenWord(-1, self.frame, self.frame, 0.0, 0)
                assert self.open is not None
                self.open.loss += float(loss[s.starts].min()) if state == s.other_first else 0.0
                quietest = min(loss[BLANK], loss[s.space] if s.space >= 0 else loss[BLANK])
                if quietest > 0:
                    self.open.end = self.frame + 1
            else:
                self.close()
            self.before = state
            self.frame += 1

    def close(self) -> None:
        """End the open word; one whose last label was not written yet is dropped."""
        word, self.open = self.open, None
        if word is None or (word.word >= 0 and word.position != self.states.last[word.word]):
            return
        spelled = self.states.words[word.word] if word.word >= 0 else None
        labels = spelled.labels if spelled is not None else ()
        confidence = math.exp(-word.loss / max(1, len(labels)))
        text = spelled.text if spelled is not None else OTHERS
        end = max(word.end, word.first + 1)
        self.words.append(Word(text, word.first * self.frame_s, end * self.frame_s, confidence))
        if labels and self.labels and self.states.space >= 0:
            self.labels.append(self.states.space)
        self.labels += labels


class PhraseDecoder(Decoder):
    """Decodes to phrases; see the head of this module.

    The confidence of a word is exp(-difference), where the difference is how much less probable it is than what the
    network would write, natural log a label: 1 if the network would write the same.

    Args:
        phrases: as `compile_phrases`; with `[unk]` among them other speech becomes the word `[unk]`, without it all
            speech becomes phrases.
        frame_s: seconds per output frame.
        allowance: how much less probable than other speech a phrase may be, natural log a label.

    Raises:
        PhraseError: as `compile_phrases`.
    """

    def __init__(
        self, phrases: Iterable[str], alphabet: Alphabet, frame_s: float, allowance: float = DEFAULT_ALLOWANCE
    ) -> None:
        self.alphabet, self.frame_s = alphabet, frame_s
        graph = compile_phrases(phrases, alphabet)
        self.states = PhraseStates(graph, alphabet)
        self.allowance = allowance if graph.others else 0.0

    def start(self, rows: int = 1, hot_words: HotWords | None = None) -> PhraseDecoding:
        """Begin streams; the result of their chunks is that of the whole."""
        refuse_hot_words(hot_words)
        return PhraseDecoding(self, rows)


class PhraseDecoding(Decoding):
    """Streams of a phrase decoder."""

    def __init__(self, decoder: PhraseDecoder, rows: int) -> None:
        self.decoder = decoder
        self.streams = [_PhraseStream(decoder.states, decoder.allowance, decoder.frame_s) for _ in range(rows)]

    def step(self, log_probs: Tensor, lengths: Tensor) -> None:
        check_log_probs(log_probs, lengths, len(self.decoder.alphabet), allow_empty=True)
        frames = log_probs.double().cpu().numpy()
        for row, (stream, length) in enumerate(zip(self.streams, lengths.tolist(), strict=True)):
            for frame in frames[:length, row]:
                stream.step(frame)

    def best(self) -> list[Hypothesis]:
        """Return the hypotheses so far, with words."""
        return [stream.hypothesis(at_end=False) for stream in self.streams]

    def finish(self) -> list[list[Hypothesis]]:
        return [[stream.hypothesis(at_end=True)] for stream in self.streams]
