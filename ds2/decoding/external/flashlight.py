"""Lexicon-bound beam search in C++ on the CPU by the package flashlight-text, one process a core.

It follows the words of a trie, whose nodes look ahead to the most probable word below them, and joins prefixes that the
language model cannot tell apart, summing their alignments. So it reaches a WER with a narrower beam than decode=beam
does, but a score may hold alignments of texts that were joined. In each frame it follows as many labels as the
utterance's least certain frame has above `label_min_log_prob`, five at most. A hypothesis that ends inside a word,
where none ends with one, loses that part and pays `prune`.

The package works inside Python's lock, hence the processes; they share the model's memory.
"""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ds2.config.schema import DecodeConfig
from ds2.decoding.external.adapter import find_package, thread_count
from ds2.decoding.hypothesis import DecodeError, Hypothesis
from ds2.decoding.lexicon import LexiconError, Spelling
from ds2.lm.arpa import arpa_file
from ds2.lm.ngram import END, START, UNKNOWN, NGram
from ds2.text.alphabet import Alphabet

_MOST_LABELS = 5  # in a frame: more cost time and take no errors away, even of a network that errs in every other word
One = Callable[[NDArray[np.float32]], list[Hypothesis]]
_search_here: One  # of a worker process


class LexiconSearch:
    """flashlight-text's lexicon decoder over the utterances of a batch."""

    def __init__(self, alphabet: Alphabet, options: DecodeConfig, lm: NGram | None) -> None:
        spelling = Spelling.of(alphabet)
        if lm is None or lm.unit != "word":
            raise LexiconError("decode.lexicon=true needs a language model of words: its vocabulary is the lexicon")
        if options.hot_words or spelling.space < 0 or alphabet.has_pieces:
            raise DecodeError(
                "decode.method=native with decode.lexicon=true takes no hot words, and alphabets of characters with a "
                "space only: take decode.method=beam"
            )
        self.decoding, kenlm, dictionary = (
            find_package(f"flashlight.lib.text.{name}", "ufal-flashlight-text", "native with decode.lexicon=true")
            for name in ("decoder", "decoder.kenlm", "dictionary")
        )
        lm.check_alphabet(alphabet)
        self.options, self.alphabet, self.space = options, alphabet, spelling.space
        labels = {symbol: label for label, symbol in enumerate(alphabet.symbols)}
        self.words = [w for w in lm.vocabulary if w not in (UNKNOWN, START, END) and labels.keys() >= set(w)]
        known = dictionary.Dictionary([*self.words, UNKNOWN])
        with arpa_file(lm, options.lm) as arpa:
            self.model = kenlm.KenLM(str(arpa), known)  # the decoder does not keep it alive
        self.trie, start = self.decoding.Trie(len(alphabet), self.space), self.model.start(False)
        for index, word in enumerate(self.words):
            _, score = self.model.score(start, index)
            self.trie.insert([*map(labels.__getitem__, word), self.space], index, score)
        self.trie.smear(self.decoding.SmearingMode.MAX)
        self.workers = thread_count(options)
        self.pool: ProcessPoolExecutor | None = None

    def search(self, log_probs: Tensor, lengths: Tensor) -> list[list[Hypothesis]]:
        """Return the N best of each utterance, without word times; arguments as `BatchedBeamSearch.search`."""
        rows = zip(log_probs.transpose(0, 1).cpu().numpy(), lengths.tolist(), strict=True)
        inputs = [row[:length] for row, length in rows]
        if self.workers == 1:
            return list(map(self._one, inputs))
        if self.pool is None:  # forked: the workers inherit the decoder, which cannot be sent
            context = multiprocessing.get_context("fork")
            self.pool = ProcessPoolExecutor(self.workers, context, initializer=_adopt, initargs=(self._one,))
        return list(self.pool.map(_search, inputs))

    def _one(self, log_probs: NDArray[np.float32]) -> list[Hypothesis]:
        options, decoding = self.options, self.decoding
        log_probs = self._prepared(log_probs)
        settings = decoding.LexiconDecoderOptions(
            beam_size=options.beam,
            beam_size_token=min(_MOST_LABELS, int((log_probs >= options.label_min_log_prob).sum(1).max())),
            beam_threshold=options.prune,
            lm_weight=options.alpha * math.log(10),
            word_score=options.beta,
            unk_score=-math.inf,
            sil_score=0.0,
            log_add=True,
            criterion_type=decoding.CriterionType.CTC,
        )
        searcher = decoding.LexiconDecoder(settings, self.trie, self.model, self.space, 0, len(self.words), [], False)
        best: dict[str, Hypothesis] = {}
        for found in searcher.decode(log_probs.ctypes.data, *log_probs.shape)[: 2 * options.nbest]:
            words = [self.words[word] for word in found.words if word >= 0]
            text, lm, bonus = " ".join(words), found.lmScore * math.log(10), options.beta * len(words)
            acoustic = found.score - options.alpha * lm - bonus
            spelled = tuple(self.alphabet.spell(text))
            best.setdefault(text, Hypothesis(text, found.score, spelled, (), acoustic, lm, bonus))
        return list(best.values())[: options.nbest]

    def _prepared(self, log_probs: NDArray[np.float32]) -> NDArray[np.float32]:
        """Join runs of frames in which only the blank is followed; end with a space, so that the last word is done."""
        silent = (log_probs[:, 1:] < self.options.label_min_log_prob).all(1) & (log_probs.argmax(1) == 0)
        first = np.flatnonzero(~(silent & np.insert(silent[:-1], 0, False)))
        closing = np.full((1, log_probs.shape[1]), -self.options.prune, np.float32)
        closing[0, self.space] = 0.0
        return np.concatenate([np.add.reduceat(log_probs, first), closing])


def _adopt(search: One) -> None:
    global _search_here  # noqa: PLW0603 (one decoder a process)
    _search_here = search


def _search(log_probs: NDArray[np.float32]) -> list[Hypothesis]:
    return _search_here(log_probs)
