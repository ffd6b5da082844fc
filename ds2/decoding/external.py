"""Beam searches of other packages: ctc-beam-decoder, flashlight-text and ctcdecode.

Each class reads our settings, searches the utterances of a batch on the CPU, and returns our hypotheses.
"""

import importlib
import math
import multiprocessing
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from copy import copy
from dataclasses import replace
from multiprocessing.util import Finalize
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ds2.config.schema import DecodeConfig
from ds2.decoding.frames import pack
from ds2.decoding.hypothesis import DecodeError, Hypothesis
from ds2.decoding.lexicon import Spelling
from ds2.decoding.phrases import LexiconError, as_written
from ds2.lm.files import arpa_file
from ds2.lm.ngram import UNKNOWN, NGram
from ds2.system.machine import usable_cores
from ds2.system.plain import shortened
from ds2.system.terminal import stderr_without
from ds2.text.alphabet import WORD_MARK, Alphabet

_NATIVE_SPARE = 14  # results of ctc-beam-decoder beyond twice `nbest` that are ranked again
_NATIVE_MIN_LOG_PROB = -34.0  # ctc-beam-decoder raises smaller probabilities to 1e-15: such labels are never followed
_CTCDECODE_UNKNOWN = -1000.0  # score of an n-gram with an unknown word, OOV_SCORE of ctcdecode
_FLASHLIGHT_MAX_LABELS = 5  # per frame: more take time and remove no errors, even of a network with many errors
_KENLM_ORDERS = range(2, 7)  # as its packages are built
# What KenLM prints as it reads an ARPA file: a hint at a tool that its packages lack, the path, and a bar of stars.
_KENLM_PROGRESS = re.compile(r"Loading the LM will be faster if you build a binary file\.|Reading .*|-*5-[-0-9]*|\**")
UtteranceSearch = Callable[[NDArray[np.float32]], list[Hypothesis]]
_worker_search: UtteranceSearch  # of a worker process of `LexiconSearch`


def find_package(name: str, project: str, method: str) -> Any:
    """Import the package of a decode method; raise a DecodeError that names it if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise DecodeError(
            f"decode.method={method} needs the package {project}: pip install {project}, or take decode.method=beam"
        ) from error


def check_model(lm: NGram | None, method: str) -> None:
    """Raise a DecodeError for a model whose tokens are no words, or that KenLM does not read."""
    if lm is not None and (lm.unit != "word" or lm.order not in _KENLM_ORDERS):
        raise DecodeError(
            f"decode.method={method} reads models of words of orders {_KENLM_ORDERS[0]} to {_KENLM_ORDERS[-1]}, not "
            f"one of {lm.unit}s of order {lm.order}: take decode.method=beam"
        )


def hypothesis_of(
    text: str, acoustic: float, alphabet: Alphabet, options: DecodeConfig, lm: NGram | None
) -> Hypothesis:
    """Return the hypothesis of a text, with Q(y) = acoustic + alpha x lm + bonus, as all decoders report it."""
    words, log_prob = text.split(), 0.0
    bonus = sum(word in options.hot_words for word in words) * options.hot_word_bonus
    if lm is not None:
        state = lm.start()
        for word in words:
            score, state = lm.score(state, word)
            log_prob += score + (0.0 if word in lm.ids else options.unknown_score)
        log_prob += lm.finish(state)
        bonus = options.beta * len(words) + bonus
    labels = tuple(alphabet.spell(" ".join(words)))
    return Hypothesis(
        " ".join(words), acoustic + options.alpha * log_prob + bonus, labels, (), acoustic, log_prob, bonus
    )


class NativeSearch:
    """decode.method=native: the C++ beam search of ctc-beam-decoder, one thread per core (it releases Python's lock).

    It follows pyctcdecode, as our search does: with equal settings both keep the same prefixes. Differences: it reads
    models of words only and has no lexicon (see `LexiconSearch`). In alphabets of pieces it joins prefixes that spell
    one text in several ways, where ours joins them at the end. To a hypothesis that ends in a space it adds the score
    of an unknown empty word. With a language model we therefore append a frame in which the space is certain: all
    hypotheses then have this score, and the best are ranked again without it.
    """

    def __init__(self, alphabet: Alphabet, options: DecodeConfig, lm: NGram | None) -> None:
        package = find_package("ctc_beam_decoder", "ctc-beam-decoder", "native")
        check_model(lm, "native")
        if lm is not None:
            lm.check_alphabet(alphabet)
        options = replace(options, hot_words=list(as_written(dict.fromkeys(options.hot_words), alphabet)))
        codes = Spelling.of(alphabet).codes
        if bad := [word for word in options.hot_words if not word or not codes.keys() >= set(word)]:
            raise LexiconError(
                f"hot words {bad}: decode.method=native takes single words in the characters that the network writes: "
                f"{shortened(' '.join(sorted(codes)))}; phrases need decode.method=beam"
            )
        self.alphabet, self.options, self.lm = alphabet, options, lm
        self.closing_space = Spelling.of(alphabet).space if lm is not None else -1
        self.threads = options.threads or usable_cores()
        if lm is None:
            self.decoder = package.BeamSearchDecoder(list(alphabet.symbols))
            return
        with arpa_file(lm, options.lm) as arpa, stderr_without(_KENLM_PROGRESS):
            self.decoder = package.BeamSearchDecoder(
                list(alphabet.symbols),
                kenlm_model_path=str(arpa),
                unigrams=lm.tokens,
                alpha=options.alpha,
                beta=options.beta,
                unk_score_offset=options.unknown_score / math.log(10),
            )

    def search(self, log_probs: Tensor, lengths: Tensor) -> list[list[Hypothesis]]:
        """Return the N best of each utterance, without word times; arguments as `BatchedBeamSearch.search`."""
        packed, counts = pack(log_probs, lengths, self.options)  # fewer frames, the same result
        rows = zip(packed.transpose(0, 1).contiguous().numpy(), counts.tolist(), strict=True)
        with ThreadPoolExecutor(self.threads) as pool:
            return list(pool.map(self._one, (row[:count] for row, count in rows)))

    def _one(self, log_probs: NDArray[np.float32]) -> list[Hypothesis]:
        options = self.options
        best = log_probs.max(1).astype(np.float64)
        sums = best + np.log(np.exp(log_probs - best[:, None]).sum(1))
        rest = float(sums.sum())  # the package scales the probabilities of a frame to sum to 1
        if self.closing_space >= 0:
            closing = np.full((1, log_probs.shape[1]), -np.inf, np.float32)
            closing[0, self.closing_space] = 0.0
            log_probs = np.concatenate([log_probs, closing])
        beams = self.decoder.decode_beams(
            log_probs,
            beam_width=options.beam,
            beam_prune_logp=-options.prune,
            token_min_logp=max(options.label_min_log_prob, _NATIVE_MIN_LOG_PROB),
            hotwords=options.hot_words,
            hotword_weight=options.hot_word_bonus,
        )
        hypotheses = [
            hypothesis_of(text, acoustic + rest, self.alphabet, options, self.lm)
            for text, _, _, acoustic, _ in beams[: 2 * options.nbest + _NATIVE_SPARE]
        ]
        return sorted(hypotheses, key=lambda h: -h.score)[: options.nbest]


class LexiconSearch:
    """decode.method=native with decode.lexicon=true: the C++ search of flashlight-text, one process per core.

    It follows the words of a trie whose nodes look ahead to the most probable word below them, and joins prefixes that
    the language model cannot distinguish, summing their alignments. So it reaches a WER with a narrower beam than
    decode.method=beam, but a score may contain alignments of texts that were joined. In each frame it follows as many
    labels as the least certain frame of the utterance has above `label_min_log_prob`, at most five. If no hypothesis
    ends with a whole word, the part after the last word is dropped at the cost of `prune`.

    The package holds Python's lock, hence the processes; they share the memory of the model.
    """

    def __init__(self, alphabet: Alphabet, options: DecodeConfig, lm: NGram | None) -> None:
        spelling = Spelling.of(alphabet)
        check_model(lm, "native")
        if lm is None:
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
        self.words = [word for word in lm.tokens if labels.keys() >= set(word)]
        known = dictionary.Dictionary([*self.words, UNKNOWN])
        with arpa_file(lm, options.lm) as arpa, stderr_without(_KENLM_PROGRESS):
            self.model = kenlm.KenLM(str(arpa), known)  # the decoder does not keep it alive
        self.trie, start = self.decoding.Trie(len(alphabet), self.space), self.model.start(False)
        for index, word in enumerate(self.words):
            _, score = self.model.score(start, index)
            self.trie.insert([*map(labels.__getitem__, word), self.space], index, score)
        self.trie.smear(self.decoding.SmearingMode.MAX)
        self.workers = options.threads or usable_cores()
        self.pool: ProcessPoolExecutor | None = None

    def search(self, log_probs: Tensor, lengths: Tensor) -> list[list[Hypothesis]]:
        """Return the N best of each utterance, without word times; arguments as `BatchedBeamSearch.search`."""
        rows = zip(log_probs.transpose(0, 1).numpy(), lengths.tolist(), strict=True)
        inputs = [row[:length] for row, length in rows]
        if self.workers == 1:
            return list(map(self._one, inputs))
        if self.pool is None:  # forked, as the decoder cannot be pickled; a copy, as the pool should end with its owner
            context, arguments = multiprocessing.get_context("fork"), (copy(self)._one, os.getpid())
            self.pool = ProcessPoolExecutor(self.workers, context, initializer=_start_worker, initargs=arguments)
            # A process that multiprocessing started closes queues (by priority 10), then waits for its processes.
            Finalize(self, self.pool.shutdown, exitpriority=11)
        try:
            return list(self.pool.map(_search_in_worker, inputs))
        except BrokenProcessPool as error:
            self.pool = None  # later searches have another one
            raise DecodeError(
                "a process of decode.method=native was killed, as where memory runs out: take fewer decode.threads"
            ) from error

    def _one(self, log_probs: NDArray[np.float32]) -> list[Hypothesis]:
        options, decoding = self.options, self.decoding
        log_probs = self._prepared(log_probs)
        settings = decoding.LexiconDecoderOptions(
            beam_size=options.beam,
            beam_size_token=min(_FLASHLIGHT_MAX_LABELS, int((log_probs >= options.label_min_log_prob).sum(1).max())),
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
        for result in searcher.decode(log_probs.ctypes.data, *log_probs.shape)[: 2 * options.nbest]:
            words = [self.words[word] for word in result.words if word >= 0]
            text, lm, bonus = " ".join(words), result.lmScore * math.log(10), options.beta * len(words)
            acoustic = result.score - options.alpha * lm - bonus
            spelled = tuple(self.alphabet.spell(text))
            best.setdefault(text, Hypothesis(text, result.score, spelled, (), acoustic, lm, bonus))
        return list(best.values())[: options.nbest]

    def _prepared(self, log_probs: NDArray[np.float32]) -> NDArray[np.float32]:
        """Join runs of frames in which only the blank is followed; add a space, which completes the last word."""
        silent = (log_probs[:, 1:] < self.options.label_min_log_prob).all(1) & (log_probs.argmax(1) == 0)
        first = np.flatnonzero(~(silent & np.insert(silent[:-1], 0, False)))
        closing = np.full((1, log_probs.shape[1]), -self.options.prune, np.float32)
        closing[0, self.space] = 0.0
        return np.concatenate([np.add.reduceat(log_probs, first), closing])


def _start_worker(search: UtteranceSearch, parent: int) -> None:
    """Prepare a worker, which leaves Ctrl-C to its parent, and ends after it: it holds the parent's open files."""
    global _worker_search  # noqa: PLW0603 (one decoder per process)
    _worker_search = search
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # of a pool that is broken
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_after, args=(parent,), daemon=True).start()


def _end_after(parent: int) -> None:
    """End this process after its parent. A signal of the kernel would come when the thread ends that forked it."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def _search_in_worker(log_probs: NDArray[np.float32]) -> list[Hypothesis]:
    return _worker_search(log_probs)


class CtcdecodeSearch:
    """decode.method=ctcdecode: the beam search of the package ctcdecode, which users build themselves."""

    def __init__(self, alphabet: Alphabet, options: DecodeConfig, lm: NGram | None) -> None:
        package = find_package("ctcdecode", "ctcdecode", "ctcdecode")
        check_model(lm, "ctcdecode")
        if options.hot_words or options.lexicon:
            raise DecodeError(
                "decode.method=ctcdecode has no hot words and no lexicon apart from its model: take decode.method=beam"
            )
        self.alphabet, self.options, self.lm = alphabet, options, lm
        settings = {
            "beam_width": options.beam,
            "cutoff_top_n": len(alphabet),
            "cutoff_prob": 1.0,
            "num_processes": options.threads or usable_cores(),
            "blank_id": 0,
            "log_probs_input": True,
        }
        labels = ["_", *alphabet.symbols[1:]]
        if lm is None:
            self.decoder = package.CTCBeamDecoder(labels, **settings)
            return
        with arpa_file(lm, options.lm) as arpa, stderr_without(_KENLM_PROGRESS):  # KenLM reads no other
            self.decoder = package.CTCBeamDecoder(
                labels, model_path=str(arpa), alpha=options.alpha, beta=options.beta, **settings
            )

    def search(self, log_probs: Tensor, lengths: Tensor) -> list[list[Hypothesis]]:
        """Return the N best of each utterance, without word times; arguments as `BatchedBeamSearch.search`."""
        labels, scores, _, sizes = self.decoder.decode(log_probs.transpose(0, 1).contiguous(), lengths)
        rows = []
        for row in range(len(lengths)):
            hypotheses = []
            for rank in range(min(self.options.nbest, labels.shape[1])):
                written = labels[row, rank, : int(sizes[row, rank])].tolist()
                text = self.alphabet.decode(written).replace(WORD_MARK, " ")
                acoustic = self._acoustic(text, len(written), -float(scores[row, rank]))
                hypotheses.append(hypothesis_of(text, acoustic, self.alphabet, self.options, self.lm))
            rows.append(sorted(hypotheses, key=lambda h: -h.score))
        return rows

    def _acoustic(self, text: str, labels: int, returned: float) -> float:
        """Return the log-prob of the labels alone, from the score that the package returns for a text.

        With a model the package subtracts from its score alpha log p_lm including the end of the sentence, which it had
        not added, and beta per label, where it had added beta per word (`ctc_beam_search_decoder.cpp`, approx_ctc).
        """
        lm, words = self.lm, text.split()
        if lm is None:
            return returned
        state = lm.start()
        for word in words:
            _, state = lm.score(state, word)
        last = words[len(words) - min(len(words), lm.order - 1) :]  # an unknown word here decides the whole n-gram
        end = lm.finish(state) if all(word in lm.ids for word in last) else _CTCDECODE_UNKNOWN
        return returned + self.options.alpha * end + self.options.beta * (labels - len(words))
