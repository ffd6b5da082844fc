"""The decoders by the name that `decode.method` gives them, and which settings they can work with."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from ds2.config.check import DECODE_METHODS
from ds2.config.schema import DecodeConfig
from ds2.decoding.beam.decoder import BeamDecoder
from ds2.decoding.confidence import AS_IT_IS, CalibratedDecoder
from ds2.decoding.decoder import Decoder, SearchDecoder
from ds2.decoding.external.ctc_beam_decoder import NativeSearch
from ds2.decoding.external.ctcdecode import CtcdecodeSearch
from ds2.decoding.external.flashlight import LexiconSearch
from ds2.decoding.greedy import GreedyDecoder
from ds2.decoding.hypothesis import DecodeError
from ds2.lm.files import load_ngram
from ds2.lm.ngram import NGram
from ds2.text.alphabet import Alphabet


def check_options(options: DecodeConfig) -> None:
    """Raise DecodeError for settings that no search can work with."""
    if options.method not in DECODE_METHODS:
        raise DecodeError(f"decode.method={options.method!r} is not one of {', '.join(DECODE_METHODS)}")
    for key, least in (("beam", 1), ("nbest", 1), ("threads", 0)):
        if getattr(options, key) < least:
            raise DecodeError(f"decode.{key}={getattr(options, key)} must be at least {least}")
    if not 0 < options.prune < math.inf:
        raise DecodeError(f"decode.prune={options.prune} must be above 0: the distance to the best, natural log")
    if len(options.confidence) != 2 or not all(map(math.isfinite, options.confidence)):
        raise DecodeError(
            f"decode.confidence={options.confidence} must be a slope and an offset: [1,0] changes nothing"
        )
    if not options.label_min_log_prob < 0:
        raise DecodeError(f"decode.label_min_log_prob={options.label_min_log_prob} must be below 0")


def make_decoder(
    options: DecodeConfig, alphabet: Alphabet, frame_s: float, device: torch.device, lm: NGram | None = None
) -> Decoder:
    """Build the decoder that a configuration names; reads its language model unless `lm` is given.

    Raises:
        DecodeError: settings that cannot work, or a decoder package that is not installed.
        LanguageModelError: a model that cannot be read or does not fit the alphabet.
    """
    check_options(options)
    decoder = _uncalibrated(options, alphabet, frame_s, device, lm)
    return decoder if tuple(options.confidence) == AS_IT_IS else CalibratedDecoder(decoder, options.confidence)


def _uncalibrated(
    options: DecodeConfig, alphabet: Alphabet, frame_s: float, device: torch.device, lm: NGram | None
) -> Decoder:
    if options.method == "greedy":
        return GreedyDecoder(alphabet, frame_s)
    if lm is None and options.lm:
        lm = load_ngram(Path(options.lm))
    if options.method == "beam":
        return BeamDecoder(alphabet, options, lm, frame_s, device)
    native = LexiconSearch if options.lexicon else NativeSearch
    search = (native if options.method == "native" else CtcdecodeSearch)(alphabet, options, lm).search
    return SearchDecoder(search, alphabet, frame_s, options.times)
