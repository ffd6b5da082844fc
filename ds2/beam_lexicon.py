"""Lexicon-bound beam search in C++ on the CPU by the package flashlight-text, one process a core.

It follows the words of a trie, whose nodes look ahead to the most probable word below them, and joins prefixes that the
language model cannot tell apart, summing their alignments. So it reaches a WER with a narrower beam than decode=beam
does, but a score may hold alignments of texts that were joined. In each frame it follows as many labels as the
utterance's least certain frame has above `label_min_log_prob`. A hypothesis that ends inside a word, where none ends
with one, loses that part and pays `prune`.

The package works inside Python's lock, hence the processes; they share the model's memory.
"""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from itertools import starmap

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ds2.alphabet import Alphabet
from ds2.beam_native import Rescorer, arpa_file, find_package, thread_count
from ds2.beam_search import WORD_MARK, DecodeError, Hypothesis
from ds2.config import DecodeConfig
from ds2.language_model import END, START, UNKNOWN, NGram
from ds2.lexicon import LexiconError, Spelling

Decoded = list[tuple[list[int], float]]  # words and score of each hypothesis, best first
_decode_here: Callable[[NDArray[np.float32]], Decoded]  # of a worker process


class LexiconSearch:
    """flashlight-text's lexicon decoder over the utterances of a batch."""

    def __init__(self, alphabet: Alphabet, options: DecodeConfig, lm: NGram | None) -> None:
        spelling = Spelling.of(alphabet)
        if lm is None or lm.unit != "word":
            raise LexiconError("decode.lexicon=true needs a language model of words: its vocabulary is the lexicon")
        if options.hot_words or spelling.space < 0 or any(s.startswith(WORD_MARK) for s in alphabet.symbols):
            raise DecodeError(
                "decode.method=native with decode.lexicon=true takes no hot words, and alphabets of characters with a "
                "space only: take decode.method=beam"
            )
        decoding, kenlm, dictionary = (
            find_package(f"flashlight.lib.text.{name}", "ufal-flashlight-text", "native with decode.lexicon=true")
            for name in ("decoder", "decoder.kenlm", "dictionary")
        )
        lm.check_alphabet(alphabet)
        self.options, self.rescorer, self.space = options, Rescorer(alphabet, options, lm), spelling.space
        labels = {symbol: label for label, symbol in enumerate(alphabet.symbols)}
        self.words = [w for w in lm.vocabulary if w not in (UNKNOWN, START, END) and labels.keys() >= set(w)]
        known = dictionary.Dictionary([*self.words, UNKNOWN])
        with arpa_file(lm, options.lm) as arpa:
            self.model = kenlm.KenLM(str(arpa), known)  # the decoder does not keep it alive
        trie, start = decoding.Trie(len(alphabet), self.space), self.model.start(False)
        for index, word in enumerate(self.words):
            _, score = self.model.score(start, index)
            trie.insert([*map(labels.__getitem__, word), self.space], index, score)
        trie.smear(decoding.SmearingMode.MAX)

        def decode(log_probs: NDArray[np.float32]) -> Decoded:
            followed = int((log_probs >= options.label_min_log_prob).sum(1).max())
            settings = decoding.LexiconDecoderOptions(
                beam_size=options.beam,
                beam_size_token=followed,
                beam_threshold=options.prune,
                lm_weight=options.alpha * math.log(10),
                word_score=options.beta,
                unk_score=-math.inf,
                sil_score=0.0,
                log_add=True,
                criterion_type=decoding.CriterionType.CTC,
            )
            searcher = decoding.LexiconDecoder(settings, trie, self.model, self.space, 0, len(self.words), [], False)
            found = searcher.decode(log_probs.ctypes.data, *log_probs.shape)
            return [([w for w in f.words if w >= 0], f.score) for f in found[: 2 * options.nbest]]

        self.decode = decode
        self.workers = thread_count(options)
        self.pool: ProcessPoolExecutor | None = None

    def search(self, log_probs: Tensor, lengths: Tensor) -> list[list[Hypothesis]]:
        """Return the N best of each utterance, without word times; arguments as `BatchedBeamSearch.search`."""
        rows = zip(log_probs.transpose(0, 1).cpu().numpy(), lengths.tolist(), strict=True)
        inputs = [self._prepared(row[:length]) for row, length in rows]
        if self.workers == 1:
            return list(map(self._hypotheses, map(self.decode, inputs)))
        if self.pool is None:  # forked: the workers inherit the decoder, which cannot be sent
            context = multiprocessing.get_context("fork")
            self.pool = ProcessPoolExecutor(self.workers, context, initializer=_adopt, initargs=(self.decode,))
        return list(map(self._hypotheses, self.pool.map(_decode, inputs)))

    def _prepared(self, log_probs: NDArray[np.float32]) -> NDArray[np.float32]:
        """Join runs of frames in which only the blank is followed; end with a space, so that the last word is done."""
        silent = (log_probs[:, 1:] < self.options.label_min_log_prob).all(1) & (log_probs.argmax(1) == 0)
        first = np.flatnonzero(~(silent & np.insert(silent[:-1], 0, False)))
        closing = np.full((1, log_probs.shape[1]), -self.options.prune, np.float32)
        closing[0, self.space] = 0.0
        return np.concatenate([np.add.reduceat(log_probs, first), closing])

    def _hypotheses(self, decoded: Decoded) -> list[Hypothesis]:
        best: dict[str, float] = {}
        for words, score in decoded:
            best.setdefault(" ".join(self.words[word] for word in words), score)
        return list(starmap(self.rescorer.split, best.items()))[: self.options.nbest]


def _adopt(decode: Callable[[NDArray[np.float32]], Decoded]) -> None:
    global _decode_here  # noqa: PLW0603 (one decoder a process)
    _decode_here = decode


def _decode(log_probs: NDArray[np.float32]) -> Decoded:
    return _decode_here(log_probs)
