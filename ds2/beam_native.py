"""Beam search in C++ on the CPU by the package ctc-beam-decoder, many utterances at once; and ctcdecode's own package.

ctc-beam-decoder follows pyctcdecode and so does our batched search: with equal settings both follow and drop the same
prefixes. Where it differs: it reads models of words only and knows no lexicon (`LexiconSearch` does); in alphabets of
pieces it joins prefixes that spell one text in several ways, where ours joins them at the end only; and it charges a
hypothesis that ends in a space an unknown empty word. So with a language model we close every utterance with a frame
that is a space for certain: all hypotheses are charged alike, and the best are ranked anew by their scores without that
word.
"""

from __future__ import annotations

import importlib
import math
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ds2.beam_batched import pack_frames
from ds2.beam_search import DecodeError, Hypothesis
from ds2.config.schema import DecodeConfig
from ds2.lexicon import Spelling, build_trie
from ds2.lm.arpa_cache import arpa_file
from ds2.lm.ngram import END, START, UNKNOWN, NGram
from ds2.text.alphabet import WORD_MARK, Alphabet

_SPARE = 14  # more of the package's best that are scored anew
_LEAST_LABEL = -34.0  # ctc-beam-decoder takes all probabilities below 1e-15 for 1e-15: those are never followed


def find_package(name: str, project: str, method: str) -> Any:
    """Import what a decode method needs; a DecodeError names the package where it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise DecodeError(
            f"decode.method={method} needs the package {project}: pip install {project}, or take decode.method=beam"
        ) from error


def thread_count(options: DecodeConfig) -> int:
    """Return how many utterances are searched at once."""
    return options.threads or len(os.sched_getaffinity(0))


def packed_rows(log_probs: Tensor, lengths: Tensor, options: DecodeConfig) -> list[NDArray[np.float32]]:
    """Return (T'', V) of each utterance as `pack_frames` gives them: less frames to search, the same result."""
    packed = pack_frames(log_probs.cpu(), lengths, options)
    counts = packed.prune.isfinite().sum(0).tolist()
    rows = packed.log_probs.transpose(0, 1).contiguous().numpy()
    return [row[:count] for row, count in zip(rows, counts, strict=True)]


class Rescorer:
    """Splits the score of a text as Q(y) = acoustic + alpha x lm + bonus, so that all decoders report alike."""

    def __init__(self, alphabet: Alphabet, options: DecodeConfig, lm: NGram | None) -> None:
        self.alphabet, self.options, self.lm = alphabet, options, lm
        self.beta = options.beta if lm is not None else 0.0

    def hypothesis(self, text: str, acoustic: float) -> Hypothesis:
        """Return the hypothesis of a text, without word times."""
        words, log_prob = text.split(), 0.0
        if self.lm is not None:
            state = self.lm.start()
            for word in words:
                score, state = self.lm.score(state, word)
                log_prob += score + (0.0 if word in self.lm.ids else self.options.unknown_score)
            log_prob += self.lm.finish(state)
        hot = sum(word in self.options.hot_words for word in words) * self.options.hot_word_bonus
        bonus = self.beta * len(words) + hot
        labels = tuple(self.alphabet.spell(" ".join(words)))
        score = acoustic + (self.options.alpha * log_prob if self.lm is not None else 0.0) + bonus
        return Hypothesis(" ".join(words), score, labels, (), acoustic, log_prob, bonus)

    def split(self, text: str, score: float) -> Hypothesis:
        """Return the hypothesis of a text whose whole Q(y) is `score`."""
        found = self.hypothesis(text, 0.0)
        return replace(found, score=score, acoustic=score - found.score)


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


class CtcdecodeSearch:
    """The package ctcdecode where a user has built it: its settings from ours, and its results in our form."""

    def __init__(self, alphabet: Alphabet, options: DecodeConfig, lm: NGram | None) -> None:
        package = find_package("ctcdecode", "ctcdecode", "ctcdecode")
        if lm is not None and lm.unit != "word":
            raise DecodeError(
                f"decode.method=ctcdecode reads models of words, not of {lm.unit}s: take decode.method=beam"
            )
        if options.hot_words or options.lexicon:
            raise DecodeError(
                "decode.method=ctcdecode has no hot words and no lexicon apart from its model: take decode.method=beam"
            )
        self.rescorer = Rescorer(alphabet, options, lm)
        self.options = options
        settings = {
            "beam_width": options.beam,
            "cutoff_top_n": len(alphabet),
            "cutoff_prob": 1.0,
            "num_processes": thread_count(options),
            "blank_id": 0,
            "log_probs_input": True,
        }
        labels = ["_", *alphabet.symbols[1:]]
        if lm is None:
            self.decoder = package.CTCBeamDecoder(labels, **settings)
            return
        with arpa_file(lm, options.lm) as arpa:  # its KenLM does not read our binary
            self.decoder = package.CTCBeamDecoder(
                labels, model_path=str(arpa), alpha=options.alpha, beta=options.beta, **settings
            )

    def search(self, log_probs: Tensor, lengths: Tensor) -> list[list[Hypothesis]]:
        """Return the N best of each utterance, without word times; arguments as `BatchedBeamSearch.search`."""
        batch = log_probs.transpose(0, 1).contiguous().cpu()
        labels, scores, _, sizes = self.decoder.decode(batch, lengths)
        rows = []
        for row in range(len(batch)):
            found = []
            for rank in range(min(self.options.nbest, labels.shape[1])):
                text = self.rescorer.alphabet.decode(labels[row, rank, : int(sizes[row, rank])].tolist())
                text = text.replace(WORD_MARK, " ")
                found.append(self.rescorer.split(text, -float(scores[row, rank])))  # the package's score is minus Q
            rows.append(found)
        return rows
