"""The decoders by the name that `decode.method` gives them: one row a method, with the settings that it takes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

import torch

from ds2.config.check import check_allowed
from ds2.config.schema import DecodeConfig
from ds2.decoding.beam.decoder import BeamDecoder
from ds2.decoding.confidence import AS_IT_IS, CalibratedDecoder
from ds2.decoding.decoder import Decoder, Search, SearchDecoder
from ds2.decoding.external.ctc_beam_decoder import NativeSearch
from ds2.decoding.external.ctcdecode import CtcdecodeSearch
from ds2.decoding.external.flashlight import LexiconSearch
from ds2.decoding.greedy import GreedyDecoder
from ds2.decoding.rescore import SecondPass, make_second_pass, recurrent_model, searched
from ds2.lm.files import load_ngram
from ds2.lm.ngram import NGram
from ds2.text.alphabet import Alphabet

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Parts:
    """What a decoder is made of: settings that were checked, and what they name."""

    options: DecodeConfig
    alphabet: Alphabet
    frame_s: float
    device: torch.device
    lm: NGram | None
    second: SecondPass | None


Maker = Callable[[Parts], Decoder]


@dataclass(frozen=True)
class Method:
    """A way to decode: how its decoder is made, and the settings that change what it finds."""

    make: Maker
    options: frozenset[str]


def _greedy(parts: Parts) -> Decoder:
    return GreedyDecoder(parts.alphabet, parts.frame_s)


def _beam(parts: Parts) -> Decoder:
    found = (parts.alphabet, parts.options, parts.lm, parts.frame_s, parts.device, parts.second)
    return BeamDecoder(*found)


def _on_cpu(search: Callable[[Alphabet, DecodeConfig, NGram | None], Search]) -> Maker:
    """The decoder of a package's search, which runs on the CPU wherever the model does."""

    def make(parts: Parts) -> Decoder:
        found = search(parts.alphabet, parts.options, parts.lm)
        return SearchDecoder(found, parts.alphabet, parts.frame_s, parts.options.times, parts.second)

    return make


def _native(alphabet: Alphabet, options: DecodeConfig, lm: NGram | None) -> Search:
    return (LexiconSearch if options.lexicon else NativeSearch)(alphabet, options, lm).search


def _ctcdecode(alphabet: Alphabet, options: DecodeConfig, lm: NGram | None) -> Search:
    return CtcdecodeSearch(alphabet, options, lm).search


_RESCORED = frozenset({"rescore", "rescore_weight", "rescore_hypotheses"})
_WITH_LM = frozenset({"beam", "lm", "alpha", "beta", "unknown_score", "nbest", "times"}) | _RESCORED
_PRUNED = frozenset({"lexicon", "hot_words", "hot_word_bonus", "label_min_log_prob", "prune"})
METHODS: dict[str, Method] = {
    "greedy": Method(_greedy, frozenset()),
    "beam": Method(_beam, _WITH_LM | _PRUNED),
    "native": Method(_on_cpu(_native), _WITH_LM | _PRUNED | {"threads"}),
    "ctcdecode": Method(_on_cpu(_ctcdecode), _WITH_LM | {"threads"}),
}
_EVERY_METHOD = frozenset({"method", "confidence"})
_NEEDS = {  # what a setting is of no use without
    "alpha": ("lm", "rescore"),
    "beta": ("lm", "rescore"),
    "unknown_score": ("lm",),
    "rescore_weight": ("rescore",),
    "rescore_hypotheses": ("rescore",),
}


def ignored_options(options: DecodeConfig) -> list[str]:
    """Return the settings that were changed but that the method does not look at."""
    taken = METHODS[options.method].options | _EVERY_METHOD
    return [name for name in _changed(options) if name not in taken]


def useless_options(options: DecodeConfig) -> dict[str, tuple[str, ...]]:
    """Return the settings that were changed and that the method would look at, by the settings of which one is missing.

    Of such with which the method does nothing either way `ignored_options` tells.
    """
    taken = METHODS[options.method].options
    missing = {name: needed for name, needed in _NEEDS.items() if not any(getattr(options, n) for n in needed)}
    return {name: missing[name] for name in _changed(options) if name in taken and name in missing}


def _changed(options: DecodeConfig) -> list[str]:
    plain = DecodeConfig()
    names = (field.name for field in fields(options))
    return [name for name in names if getattr(options, name) != getattr(plain, name)]


def make_decoder(
    options: DecodeConfig, alphabet: Alphabet, frame_s: float, device: torch.device, lm: NGram | None = None
) -> Decoder:
    """Build the decoder that a configuration names; reads its language model unless `lm` is given.

    Settings that the method does not look at are named in a warning, with the methods that do, and those that are of no
    use without another.

    Raises:
        ConfigError: settings that no search can work with.
        DecodeError: settings that this method cannot work with, or its package is not installed.
        LanguageModelError, CheckpointError: a model that cannot be read or does not fit the alphabet.
    """
    check_allowed(options, "decode")
    for name in ignored_options(options):
        others = ", ".join(key for key, method in METHODS.items() if name in method.options)
        hint = f"it counts for {others}" if others else "no method has it any more"
        log.warning("decode.%s changes nothing under decode.method=%s; %s", name, options.method, hint)
    row = METHODS[options.method]
    for name, needed in ({} if lm is not None else useless_options(options)).items():
        log.warning("decode.%s changes nothing without %s", name, " or ".join(f"decode.{other}" for other in needed))
    if lm is None and options.lm and "lm" in row.options:
        lm = load_ngram(Path(options.lm)).check()
    recurrent = recurrent_model(options, alphabet, device) if "rescore" in row.options else None
    second = make_second_pass(options, alphabet, recurrent) if recurrent is not None else None
    parts = Parts(searched(options), alphabet, frame_s, device, lm, second)
    decoder = row.make(parts)
    return decoder if tuple(options.confidence) == AS_IT_IS else CalibratedDecoder(decoder, options.confidence)
