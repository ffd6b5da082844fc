"""`ds2 info`: the content of a model file, or the layers, parameters, lookahead and memory of a configuration."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ds2.audio.features import Features
from ds2.commands.common import ALL_SETTINGS, Parser, with_search_path
from ds2.commands.compose import compose_config
from ds2.config.schema import Config, ConfigError
from ds2.export import sherpa
from ds2.model.acoustic import AcousticModel
from ds2.model.checkpoint import find_model, load_model
from ds2.model.shipped import folder_of
from ds2.model.summary import contents, summary
from ds2.recognition.session import describe_delays
from ds2.recognition.settings import tuned_file
from ds2.text.alphabet import Alphabet


def make_parser() -> Parser:
    """Return the parser of `ds2 info`."""
    parser = Parser(
        prog="ds2 info",
        settings=ALL_SETTINGS,
        usage="%(prog)s MODEL | %(prog)s [OVERRIDE ...] [--config-dir DIR]",
        description="what a model file or run folder holds; or the model that overrides describe: model=rnn_8",
    )
    parser.add_argument("what", nargs="*", help="a model file or run folder; or overrides, KEY=VALUE or GROUP=CHOICE")
    return parser


def run(arguments: Sequence[str]) -> int:
    """`ds2 info MODEL` or `ds2 info [OVERRIDE...]`."""
    words = make_parser().parse_args(with_search_path(arguments)).what
    named = [argument for argument in words if "=" not in argument]
    if named:
        if len(words) > 1:
            raise ConfigError(
                f"{named[0]!r} is no override (KEY=VALUE); with a model there are no other arguments: ds2 info MODEL"
            )
        _show_file(Path(named[0]))
        return 0
    config = compose_config(words)
    features = Features(config.features, config.data.sample_rate_hz)
    labels = len(Alphabet.from_config(config.alphabet))
    print(summary(AcousticModel(config.model, features.bins, labels, config.features.step_s)))
    print(f"{_live(config)}\n\nexport      {sherpa.why_not(config) or 'sherpa-onnx runs models of this configuration'}")
    return 0


def _show_file(path: Path) -> None:
    if not folder_of(path).exists():
        raise ConfigError(
            f"there is no model {str(path)!r}: give a model file or a run folder, or overrides such as model=rnn_8"
        )
    file = find_model(path)
    loaded = load_model(file)
    print(f"{file}\n\n{contents(loaded)}")
    tuned = tuned_file(file)
    print(f"tuned       {tuned if tuned.is_file() else 'no decoder settings beside it (`ds2 lm tune` writes them)'}\n")
    print(summary(loaded.model))
    print(_live(loaded.config))


def _live(config: Config) -> str:
    return f"live        {'needs a unidirectional model' if config.model.bidirectional else describe_delays(config)}"
