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

import math
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ds2.decoding.decoder import Decoder, check_log_probs
from ds2.decoding.hypothesis import Hypothesis, Word
from ds2.decoding.phrases import (
    ALLOWANCE,
    DEFAULT_ALLOWANCE,
    END,
    OTHERS,
    ROOT,
    HotWords,
    PhraseError,
    PhraseGraph,
    compile_phrases,
    refuse_hot_words,
)
from ds2.system.plain import grouped, short_repr
from ds2.text.alphabet import BLANK, WORD_MARK, Alphabet

# Natural log: paths that are less probable than the best one by more are dropped, except the best that may end.
_BEAM = 60.0
_TRACE_S = 1.0
_MAX_PENDING_S = 10.0  # paths that disagree for longer: the best one is final
_NEVER = -math.inf


class PhraseStates:
    """The states of the search, which are numbered, and for each the states that may come before it.

    W words have P labels in all. State p < P writes label p, state P + p the blank after it. State 2 P + w writes the
    space after word w, state 2 P + W + w the silence after that space. The last four states are the space and the
    silence before a phrase, and the first frame and the other frames of other speech. In an alphabet without a space
    its log-prob is -inf, and words follow each other directly.

    Behind the states come junctions, which take no frame: one for all words that follow the same words, and one for
    the ends of phrases. With them each state has three predecessors at most.
    """

    def __init__(self, graph: PhraseGraph, alphabet: Alphabet, allowance: float) -> None:
        words = self.words = graph.words
        sizes = np.array([len(word.labels) for word in words])
        count, total = len(words), int(sizes.sum())
        self.labels = np.array([label for word in words for label in word.labels])  # (P,)
        self.word_of = np.repeat(np.arange(count), sizes)  # (P,)
        self.last = np.cumsum(sizes) - 1  # (W,) position of the last label of each word
        self.first = self.last - sizes + 1
        spaces = [label for label, symbol in enumerate(alphabet.symbols) if symbol and symbol.isspace()]
        self.space = spaces[0] if spaces else -1
        marked = [label for label, symbol in enumerate(alphabet.symbols) if symbol.startswith(WORD_MARK)]
        everything = [label for label in range(1, len(alphabet)) if label not in spaces]
        self.starts = np.array(marked or everything)  # labels that other speech may begin with
        self.blank0, self.space0, self.count = total, 2 * total, 2 * (total + count) + 4
        label, blank = np.arange(total), total + np.arange(total)
        space, quiet = self.space0 + np.arange(count), self.space0 + count + np.arange(count)
        self.root_space, self.root_quiet, self.other_first, self.other = range(2 * total + 2 * count, self.count)
        of_space, silence, start, rest = range(len(alphabet), len(alphabet) + 4)  # what `advance` puts behind a frame
        kinds = np.array([BLANK, of_space, silence, of_space, silence, start, rest])
        self.writes = np.append(self.labels, kinds.repeat([total, count, count, 1, 1, 1, 1]))  # by state

        endings = np.stack([self.last, blank[self.last]])  # (2, W) states at the end of each word
        exits = endings[:, [n for n, word in enumerate(words) if END in graph.reached[word.end]]]
        # States in which a stream may end; of equally good ones the first counts, so no [unk] after a phrase.
        self.ends = np.array([self.root_quiet, self.root_space, *exits.flat, self.other, self.other_first])
        others = [self.other, self.other_first]
        before_phrase = [self.root_space, self.root_quiet] if spaces else [self.root_quiet, *others]
        after_word = np.stack([space, quiet]) if spaces else endings
        junctions, of_word = self._junctions(graph, after_word.T, before_phrase)
        of_word, after_phrase = self.count + of_word, self.count + len(junctions)
        never = after_phrase + 1
        junctions.append([*exits.T.flat, *others] if spaces else [*others, *exits.T.flat])
        sizes = np.array([len(states) for states in junctions])
        self.before_junctions = np.concatenate(junctions)  # the states before the first junction, the second, ...
        self.starts_of_junctions = sizes.cumsum() - sizes
        self.junction_numbers = np.repeat(np.arange(len(sizes)), sizes)
        self.before = np.full((3, self.count), never)  # the predecessors; of equally good ones the first counts
        self.gains = np.zeros((3, self.count))  # log-prob that a step from one adds
        inner = np.setdiff1d(label, self.first)
        repeats = inner[self.labels[inner] == self.labels[inner - 1]]
        self.before[:2, self.first] = self.first, of_word
        self.before[:, inner] = inner, inner - 1, blank[inner - 1]
        self.before[1, repeats] = never  # the same label again needs a blank between them
        self.gains[1:, label] = allowance
        self.before[:2, blank] = label, blank
        self.before[:, space] = space, *endings
        self.before[:2, quiet] = space, quiet
        self.before[:2, self.root_space] = self.root_space, after_phrase
        self.before[:2, self.root_quiet] = self.root_space, self.root_quiet
        if graph.others:
            self.before[:2, self.other_first] = before_phrase if spaces else (self.root_quiet, after_phrase)
            self.before[:2, self.other] = self.other, self.other_first

    def _junctions(
        self, graph: PhraseGraph, after_word: NDArray[np.int64], before_phrase: Sequence[int]
    ) -> tuple[list[list[int]], NDArray[np.int64]]:
        """Return the states before each junction, and the number of the junction (W,) before each word.

        In an alphabet without a space, a word that begins with the last label of the word before needs a blank between
        them: there, words of a junction have their first label in common too, and a word that ends a phrase leads to
        the words that begin one.

        Args:
            after_word: (W, 2) states after which the next word may begin; without a space the second is a blank.
            before_phrase: states after which a phrase may begin.
        """
        spaced, root = self.space >= 0, graph.reached[ROOT]
        keys = [(word.start, 0 if spaced else word.labels[0]) for word in graph.words]
        before: dict[tuple[int, int], list[int]] = {key: [] for key in keys}
        at_point = grouped(before, lambda key: key[0])
        for word, states in zip(graph.words, after_word.tolist(), strict=True):
            points = graph.reached[word.end]
            for point in points | root if END in points and not spaced else points:
                for key in at_point.get(point, []):
                    before[key] += states[1:] if word.labels[-1] == key[1] else states  # 0 is no label of a word
        for key in before:
            before[key] += before_phrase if key[0] in root else []
        numbers = {key: number for number, key in enumerate(before)}
        return list(before.values()), np.array([numbers[key] for key in keys])

    def advance(
        self, scores: NDArray[np.float64], frame: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], NDArray[np.int32]]:
        """Return the next scores of all states, and the state before each, from a frame of log-probs (V,)."""
        reached = scores[self.before_junctions]
        highest = np.maximum.reduceat(reached, self.starts_of_junctions)
        best = np.flatnonzero(reached == highest[self.junction_numbers])[::-1]
        moves = np.arange(self.count + len(highest) + 1, dtype=np.int32)
        moves[self.count + self.junction_numbers[best]] = self.before_junctions[best]  # the first one, assigned last
        first, second, third = np.concatenate([scores, highest, [_NEVER]])[self.before] + self.gains
        before = np.where(second > first, self.before[1], self.before[0])
        higher = np.maximum(first, second)
        before = np.where(third > higher, self.before[2], before)
        space = frame[self.space] if self.space >= 0 else _NEVER
        values = np.append(frame, [space, max(frame[BLANK], space), frame[self.starts].max(), 0.0])
        return np.maximum(higher, third) + values[self.writes], moves[before]


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
        self.scores, moves = self.states.advance(self.scores, relative)
        alive = self.scores >= self.scores.max() - _BEAM
        ends = self.states.ends
        alive[ends[self.scores[ends].argmax()]] = True  # the result if the source stops within a phrase
        self.scores[~alive] = _NEVER
        self.moves.append(moves)
        self.losses.append((-relative).astype(np.float32))
        self.frames += 1
        if self.frames % self.trace_every == 0:
            self._finalise()

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
            self.reader.read(self._trace(int(alive[0]), frame), self.losses)
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
        if at_end and np.isfinite(self.scores[s.ends]).any():
            state = int(s.ends[self.scores[s.ends].argmax()])
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

    def copy(self) -> "_PathReader":
        """Return a reader that goes on without changing this one."""
        other = copy(self)
        other.words, other.labels, other.open = [*self.words], [*self.labels], copy(self.open)
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

    Phrases, `allowance` and errors are as of `Recogniser.only_phrases`.
    """

    def __init__(
        self, phrases: Iterable[str], alphabet: Alphabet, frame_s: float, allowance: float = DEFAULT_ALLOWANCE
    ) -> None:
        self.alphabet, self.frame_s = alphabet, frame_s
        if allowance not in ALLOWANCE:
            raise PhraseError(f"allowance={short_repr(allowance)}: give {ALLOWANCE}")
        graph = compile_phrases(phrases, alphabet)
        self.allowance = allowance if graph.others else 0.0
        self.states = PhraseStates(graph, alphabet, self.allowance)

    def start(self, hot_words: HotWords | None = None) -> _PhraseStream:
        refuse_hot_words(hot_words)
        return _PhraseStream(self.states, self.allowance, self.frame_s)

    def step(self, streams: Sequence[_PhraseStream], log_probs: Tensor, lengths: Tensor) -> None:
        check_log_probs(log_probs, lengths, len(self.alphabet))
        frames = log_probs.double().cpu().numpy()
        for row, (stream, length) in enumerate(zip(streams, lengths.tolist(), strict=True)):
            for frame in frames[:length, row]:
                stream.step(frame)

    def best(self, streams: Sequence[_PhraseStream], *, words: bool = False) -> list[Hypothesis]:
        """Return the hypotheses so far, always with words."""
        return [stream.hypothesis(at_end=False) for stream in streams]

    def finish(self, streams: Sequence[_PhraseStream]) -> list[list[Hypothesis]]:
        return [[stream.hypothesis(at_end=True)] for stream in streams]
