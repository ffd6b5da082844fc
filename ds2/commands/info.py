"""`ds2 info`: layers, parameters, lookahead and memory of the model that overrides describe."""

from __future__ import annotations

from collections.abc import Sequence

from ds2.audio.features import Features
from ds2.commands.common import with_search_path
from ds2.commands.compose import compose_config
from ds2.model.acoustic import AcousticModel
from ds2.model.summary import summary
from ds2.text.alphabet import Alphabet


def run(arguments: Sequence[str]) -> int:
    """`ds2 info [OVERRIDE...]`."""
    config = compose_config(with_search_path(arguments))
    features = Features(config.features, config.data.sample_rate_hz)
    labels = len(Alphabet.from_config(config.alphabet))
    print(summary(AcousticModel(config.model, features.bins, labels, config.features.step_s)))
    return 0
