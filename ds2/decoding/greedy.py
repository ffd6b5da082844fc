"""Greedy decoding: the most probable label of every frame, collapsed, with times and confidences.

Shapes: T' output frames, B batch, V labels (0 is the CTC blank).
"""

from collections.abc import Sequence

from torch import Tensor

from ds2.decoding.decoder import Decoder, start_check, start_copy
from ds2.decoding.hypothesis import Hypothesis, Run, Word, spell_words
from ds2.decoding.phrases import HotWords, refuse_hot_words
from ds2.text.alphabet import BLANK, Alphabet


class BestPath:
    """Collapses the best path of one stream: merges repeats, drops blanks and groups labels into words."""

    def __init__(self, alphabet: Alphabet, frame_s: float) -> None:
        self.alphabet, self.frame_s = alphabet, frame_s
        self.score = 0.0  # sum of the log-probs of the labels
        self._labels: list[int] = []  # of complete runs
        self._words: list[Word] = []  # complete ones
        self._text = ""  # of these
        self._runs: list[Run] = []  # complete ones of the last word
        self._open: Run = (BLANK, 0, 0, 0.0)  # the last run, which the next frame may extend
        self._unfinished: tuple[Word, ...] | None = ()  # of the last two; None: they have changed

    def step(self, labels: Sequence[int], log_probs: Sequence[float]) -> None:
        """Add the next frames: the likeliest label of each, and its log-prob."""
        label, start, frame, peak = self._open
        if label != BLANK or any(labels):
            self._unfinished = None
        for likeliest, log_prob in zip(labels, log_probs, strict=True):
            self.score += log_prob  # in order, so that sums do not depend on the chunks
            if likeliest == label:
                peak = max(peak, log_prob)
            else:
                if label != BLANK:
                    self._close((label, start, frame, peak))
                label, start, peak = likeliest, frame, log_prob
            frame += 1
        self._open = (label, start, frame, peak)

    def _close(self, run: Run) -> None:
        label = run[0]
        if self.alphabet.starts_word[label]:
            words = spell_words(self._runs, self.alphabet, self.frame_s)
            self._words += words
            self._text = " ".join(filter(None, [self._text, *(word.text for word in words)]))
            self._runs = []
        self._labels.append(label)
        self._runs.append(run)

    def hypothesis(self) -> Hypothesis:
        """Return the hypothesis of all frames so far."""
        label = self._open[0]
        last = [] if label == BLANK else [self._open]
        if self._unfinished is None:
            self._unfinished = spell_words(self._runs + last, self.alphabet, self.frame_s)
        words = (*self._words, *self._unfinished)
        labels = (*self._labels, *(run[0] for run in last))
        text = " ".join(filter(None, [self._text, *(word.text for word in self._unfinished)]))
        complete = len(words) - (not self.alphabet.symbols[label].isspace())
        fixed = complete if self.alphabet.starts_word[label] else len(self._words)
        return Hypothesis(text, self.score, labels, words, self.score, fixed_words=fixed)


class GreedyDecoder(Decoder):
    """Decodes each utterance by its best path: the most probable label of every frame, collapsed; one hypothesis."""

    def __init__(self, alphabet: Alphabet, frame_s: float) -> None:
        self.alphabet, self.frame_s = alphabet, frame_s

    def start(self, hot_words: HotWords | None = None) -> BestPath:
        refuse_hot_words(hot_words)
        return BestPath(self.alphabet, self.frame_s)

    def step(self, streams: Sequence[BestPath], log_probs: Tensor, lengths: Tensor) -> None:
        _, raise_if_wrong = start_check(log_probs, lengths, len(self.alphabet))
        highest, likeliest = log_probs.max(2)
        path_copies = start_copy(likeliest, highest.float())
        raise_if_wrong()  # waits; the copies have begun, so that the second wait is short
        rows = [copy.T.tolist() for copy in path_copies()]
        for path, labels, scores, count in zip(streams, *rows, lengths.tolist(), strict=True):
            path.step(labels[:count], scores[:count])

    def best(self, streams: Sequence[BestPath], *, words: bool = False) -> list[Hypothesis]:
        """Return the hypotheses so far, always with words."""
        return [path.hypothesis() for path in streams]
