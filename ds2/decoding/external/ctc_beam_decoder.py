"""Beam search in C++ on the CPU by the package ctc-beam-decoder, many utterances at once.

ctc-beam-decoder follows pyctcdecode and so does our batched search: with equal settings both follow and drop the same
prefixes. Where it differs: it reads models of words only and knows no lexicon (`LexiconSearch` does); in alphabets of
pieces it joins prefixes that spell one text in several ways, where ours joins them at the end only; and it charges a
hypothesis that ends in a space an unknown empty word. So with a language model we close every utterance with a frame
that is a space for certain: all hypotheses are charged alike, and the best are ranked anew by their scores without that
word.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ds2.config.schema import DecodeConfig
from ds2.decoding.external.adapter import Rescorer, find_package, packed_rows, thread_count
from ds2.decoding.hypothesis import DecodeError, Hypothesis
from ds2.decoding.lexicon import Spelling, build_trie
from ds2.lm.arpa import arpa_file
from ds2.lm.ngram import END, START, UNKNOWN, NGram
from ds2.text.alphabet import Alphabet

_SPARE = 14  # more of the package's best that are scored anew
_LEAST_LABEL = -34.0  # ctc-beam-decoder takes all probabilities below 1e-15 for 1e-15: those are never followed


class NativeSearch:
    """ctc-beam-decoder over the utterances of a batch, one thread a core: it works outside Python's lock."""

    def __init__(self, alphabet: Alphabet, options: DecodeConfig, lm: NGram | None) -> None:
        package = find_package("ctc_beam_decoder", "ctc-beam-decoder", "native")
        if lm is not None and lm.unit != "word":
            raise DecodeError(f"decode.method=native reads models of words, not of {lm.unit}s: take decode.method=beam")
        if lm is not None:
            lm.check_alphabet(alphabet)
        build_trie({}, options.hot_words, Spelling.of(alphabet))  # refuses hot words that cannot be written
        self.options, self.rescorer = options, Rescorer(alphabet, options, lm)
        self.closing_space = Spelling.of(alphabet).space if lm is not None else -1
        self.threads = thread_count(options)
        if lm is None:
            self.decoder = package.BeamSearchDecoder(list(alphabet.symbols))
            return
        with arpa_file(lm, options.lm) as arpa:
            self.decoder = package.BeamSearchDecoder(
                list(alphabet.symbols),
                kenlm_model_path=str(arpa),
                unigrams=[word for word in lm.vocabulary if word not in (UNKNOWN, START, END)],
                alpha=options.alpha,
                beta=options.beta,
                unk_score_offset=options.unknown_score / math.log(10),
            )

    def search(self, log_probs: Tensor, lengths: Tensor) -> list[list[Hypothesis]]:
        """Return the N best of each utterance, without word times; arguments as `BatchedBeamSearch.search`."""
        with ThreadPoolExecutor(self.threads) as pool:
            return list(pool.map(self._one, packed_rows(log_probs, lengths, self.options)))

    def _one(self, log_probs: NDArray[np.float32]) -> list[Hypothesis]:
        options = self.options
        best = log_probs.max(1).astype(np.float64)
        rest = float(
            (best + np.log(np.exp(log_probs - best[:, None]).sum(1))).sum()
        )  # the package makes frames sum to 1
        if self.closing_space >= 0:
            closing = np.full((1, log_probs.shape[1]), -np.inf, np.float32)
            closing[0, self.closing_space] = 0.0
            log_probs = np.concatenate([log_probs, closing])
        beams = self.decoder.decode_beams(
            log_probs,
            beam_width=options.beam,
            beam_prune_logp=-options.prune,
            token_min_logp=max(options.label_min_log_prob, _LEAST_LABEL),
            hotwords=options.hot_words,
            hotword_weight=options.hot_word_bonus,
        )
        found = [
            self.rescorer.hypothesis(text, acoustic + rest)
            for text, _, _, acoustic, _ in beams[: 2 * options.nbest + _SPARE]
        ]
        return sorted(found, key=lambda h: -h.score)[: options.nbest]
