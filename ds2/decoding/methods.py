"""The table of decode methods: for each `decode.method` its builder and the settings that it reads.

A new method needs its decoder (a module of this package, such as `greedy`), a row of `METHODS`, and its name in
`DecodeConfig.method`.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ds2.config.check import check_allowed
from ds2.config.schema import DecodeConfig
from ds2.decoding.beam.decoder import BeamDecoder
from ds2.decoding.decoder import ChangedDecoder, Decoder, SearchDecoder
from ds2.decoding.external import CtcdecodeSearch, LexiconSearch, NativeSearch
from ds2.decoding.greedy import GreedyDecoder
from ds2.decoding.hypothesis import DecodeError
from ds2.decoding.postprocess import IDENTITY, SecondPass, calibrated, load_second_pass
from ds2.lm.files import load_ngram
from ds2.lm.ngram import NGram
from ds2.text.alphabet import Alphabet

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Method:
    """A decode method: its builder, of the arguments of `BeamDecoder`, and the settings that it reads."""

    build: Callable[..., Decoder]
    options: frozenset[str]


def _greedy(alphabet: Alphabet, options: DecodeConfig, lm: NGram | None, frame_s: float, *_: Any) -> Decoder:
    if options.hot_words:
        raise DecodeError(
            "decode.method=greedy has no search that could prefer hot words: take decode=beam, or leave out "
            "decode.hot_words"
        )
    return GreedyDecoder(alphabet, frame_s)


def _native(alphabet: Alphabet, options: DecodeConfig, *inputs: Any) -> Decoder:
    return _on_cpu(LexiconSearch if options.lexicon else NativeSearch, alphabet, options, *inputs)


def _on_cpu(
    kind: type[NativeSearch | LexiconSearch | CtcdecodeSearch],
    alphabet: Alphabet,
    options: DecodeConfig,
    lm: NGram | None,
    frame_s: float,
    device: torch.device,
    second_pass: SecondPass | None,
) -> Decoder:
    """Build the decoder of another package's search, which runs on the CPU whatever the device of the model."""
    if alphabet.pronunciations is not None:
        raise DecodeError(
            f"decode.method={options.method} searches no pronunciations, and the network writes phones: choose "
            "decode.method=beam with a decode.lm of words, or greedy for the phones"
        )
    return SearchDecoder(kind(alphabet, options, lm).search, alphabet, frame_s, options.times, second_pass)


_RESCORED = frozenset({"rescore", "rescore_weight", "rescore_hypotheses"})
_WITH_LM = frozenset({"beam", "lm", "alpha", "beta", "unknown_score", "nbest", "times"}) | _RESCORED
_PRUNED = frozenset({"lexicon", "hot_words", "hot_word_bonus", "label_min_log_prob", "prune"})
METHODS: dict[str, Method] = {
    "greedy": Method(_greedy, frozenset()),
    "beam": Method(BeamDecoder, _WITH_LM | _PRUNED | {"keyword_alarms"}),
    "native": Method(_native, _WITH_LM | _PRUNED | {"threads"}),
    "ctcdecode": Method(partial(_on_cpu, CtcdecodeSearch), _WITH_LM | {"threads"}),
}
_EVERY_METHOD = frozenset({"method", "confidence"})
_NEEDS = {  # the settings one of which must be set for this one to have an effect
    "alpha": ("lm", "rescore"),
    "beta": ("lm", "rescore"),
    "unknown_score": ("lm",),
    "rescore_weight": ("rescore",),
    "rescore_hypotheses": ("rescore",),
}


def make_decoder(
    options: DecodeConfig, alphabet: Alphabet, frame_s: float, device: torch.device, lm: NGram | None = None
) -> Decoder:
    """Build the decoder of a configuration; load its language model unless `lm` is passed.

    A warning names settings that the method does not read, with the methods that do, and settings that have no effect
    without another one.

    Raises:
        ConfigError: a setting is out of range.
        DecodeError: the method does not support these settings, or its package is not installed.
        LanguageModelError, CheckpointError: a model cannot be read or does not fit the alphabet.
    """
    check_allowed(options, "decode")
    row, defaults = METHODS[options.method], DecodeConfig()
    for name in [f.name for f in fields(options) if getattr(options, f.name) != getattr(defaults, f.name)]:
        needed = () if lm is not None else _NEEDS.get(name, ())
        if name not in row.options | _EVERY_METHOD:
            others = ", ".join(key for key, method in METHODS.items() if name in method.options)
            readers = f"{others} read it" if others else "no method reads it"
            log.warning("decode.%s has no effect with decode.method=%s; %s", name, options.method, readers)
        elif needed and not any(getattr(options, other) for other in needed):
            missing = " or ".join(f"decode.{other}" for other in needed)
            log.warning("decode.%s has no effect without %s", name, missing)
    if lm is None and options.lm and "lm" in row.options:
        lm = load_ngram(Path(options.lm)).check()
    second_pass = load_second_pass(options, alphabet, device) if "rescore" in row.options else None
    if second_pass is not None:
        options = replace(options, nbest=max(options.nbest, options.rescore_hypotheses))  # it ranks all of these
    decoder = row.build(alphabet, options, lm, frame_s, device, second_pass)
    if tuple(options.confidence) == IDENTITY:
        return decoder
    return ChangedDecoder(decoder, partial(calibrated, calibration=options.confidence))
