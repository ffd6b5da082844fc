"""Beam searches of other packages behind ds2's decoder interface, for `bench_decoders.py`: one small function each.

A function takes the alphabet, the model and its ARPA file, and settings with the names of `decode.KEY` (and `tokens`,
the labels that flashlight follows in a frame), and returns what decodes log-probs (T, V) to text.
"""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ds2.config.schema import DecodeConfig
from ds2.decoding.external import find_package
from ds2.decoding.hypothesis import Hypothesis
from ds2.decoding.lexicon import Spelling
from ds2.lm.ngram import END, START, UNKNOWN, NGram
from ds2.text.alphabet import Alphabet

One = Callable[[NDArray[np.float32]], str]
_decode_here: One  # of a worker process


@dataclass(frozen=True)
class Setup:
    """What an adapter is given."""

    alphabet: Alphabet
    lm: NGram
    arpa: Path
    options: DecodeConfig
    tokens: int

    @property
    def words(self) -> list[str]:
        """The model's words that the alphabet can write."""
        symbols = set(self.alphabet.symbols)
        return [word for word in self.lm.vocabulary if word not in (UNKNOWN, START, END) and symbols.issuperset(word)]


def pyctcdecode(setup: Setup) -> One:
    """Kensho's pyctcdecode, in Python with KenLM."""
    package, options = find_package("pyctcdecode", "pyctcdecode", "pyctcdecode"), setup.options
    decoder = package.build_ctcdecoder(
        list(setup.alphabet.symbols),
        str(setup.arpa),
        setup.words,
        alpha=options.alpha,
        beta=options.beta,
        unk_score_offset=options.unknown_score / math.log(10),
    )
    return lambda log_probs: str(
        decoder.decode(
            log_probs,
            beam_width=options.beam,
            beam_prune_logp=-options.prune,
            token_min_logp=options.label_min_log_prob,
        )
    )


def flashlight(setup: Setup) -> One:
    """flashlight/text as torchaudio's ctc_decoder sets it up, alignments summed."""
    name = "flashlight.lib.text."
    decoding, kenlm, dictionary = (
        find_package(name + part, "ufal-flashlight-text", "flashlight")
        for part in ("decoder", "decoder.kenlm", "dictionary")
    )
    options, words, space = setup.options, setup.words, Spelling.of(setup.alphabet).space
    labels = {symbol: label for label, symbol in enumerate(setup.alphabet.symbols)}
    model = kenlm.KenLM(str(setup.arpa), dictionary.Dictionary([*words, UNKNOWN]))
    trie, start = decoding.Trie(len(labels), space), model.start(False)
    for index, word in enumerate(words):
        trie.insert([*map(labels.__getitem__, word), space], index, model.score(start, index)[1])
    trie.smear(decoding.SmearingMode.MAX)
    weights = (options.alpha * math.log(10), options.beta, -math.inf, 0.0)
    settings = decoding.LexiconDecoderOptions(
        options.beam, setup.tokens, options.prune, *weights, True, decoding.CriterionType.CTC
    )
    decoder = decoding.LexiconDecoder(settings, trie, model, space, 0, len(words), [], False)

    def decode(log_probs: NDArray[np.float32], model: Any = model) -> str:  # the decoder does not keep the model alive
        closing = np.full((1, len(labels)), -1000.0, np.float32)  # the last word is complete
        closing[0, space] = 0.0
        emissions = np.concatenate([log_probs, closing])
        found = decoder.decode(emissions.ctypes.data, *emissions.shape)
        return " ".join(words[word] for word in found[0].words if word >= 0)

    return decode


def torchaudio(setup: Setup) -> One:
    """torchaudio.models.decoder.ctc_decoder: flashlight/text behind it, the best alignment of a text only."""
    import torch

    package, options = find_package("torchaudio.models.decoder", "torchaudio", "torchaudio"), setup.options
    symbols = ["-", "|", *setup.alphabet.symbols[2:]]
    decoder = package.ctc_decoder(
        lexicon={word: [[*word, "|"]] for word in setup.words},
        tokens=symbols,
        lm=str(setup.arpa),
        beam_size=options.beam,
        beam_size_token=setup.tokens,
        beam_threshold=options.prune,
        lm_weight=options.alpha * math.log(10),
        word_score=options.beta,
    )
    return lambda log_probs: " ".join(decoder(torch.from_numpy(log_probs)[None])[0][0].words)


PEERS: dict[str, Callable[[Setup], One]] = {
    "pyctcdecode": pyctcdecode,
    "flashlight": flashlight,
    "torchaudio": torchaudio,
}


class PeerDecoder:
    """A peer over the utterances of a batch, in as many processes as `decode.threads` says."""

    def __init__(self, one: One, processes: int) -> None:
        context = multiprocessing.get_context("fork")
        self.pool = ProcessPoolExecutor(processes, context, initializer=_adopt, initargs=(one,))

    def decode(self, log_probs: Tensor, lengths: Tensor) -> list[list[Hypothesis]]:
        """Decode as `ds2.decoding.decoder.Decoder` says; texts only."""
        rows = zip(log_probs.transpose(0, 1).numpy(), lengths.tolist(), strict=True)
        texts = self.pool.map(_decode, [np.ascontiguousarray(row[:length]) for row, length in rows])
        return [[Hypothesis(text, 0.0, (), ())] for text in texts]


def _adopt(one: One) -> None:
    global _decode_here  # noqa: PLW0603 (one decoder a process)
    _decode_here = one


def _decode(log_probs: NDArray[np.float32]) -> str:
    return _decode_here(log_probs)
