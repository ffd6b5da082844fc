"""Reading YAML with the words of YAML 1.2, and settings that are true or false."""

import math
import re
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from ds2.commands.compose import config_dir
from ds2.config.convert import declared_settings, inherit, read_yaml, to_config
from ds2.config.schema import AlphabetConfig, Config, ConfigError, ConvConfig


@pytest.mark.parametrize("word", ["no", "off", "yes", "2024_01", "007", "12:30", "2024-01-01", "0x1f", "1_000.5", "5e"])
def test_words_stay_words(word: str) -> None:
    assert read_yaml(f"key: {word}") == {"key": word}


@pytest.mark.parametrize(
    ("text", "value"),
    [("-3", -3), ("+5", 5), ("1e5", 1e5), ("1.5e-3", 1.5e-3), (".5", 0.5), ("1.", 1.0), ("-.inf", -math.inf),
     ("true", True), ("FALSE", False), ("~", None), ("", None), ("'5'", "5"), ("[1, 2.0, no]", [1, 2.0, "no"])],
)  # fmt: skip
def test_numbers_and_truth_values(text: str, value: object) -> None:
    read = read_yaml(f"key: {text}")["key"]
    assert read == value and type(read) is type(value)


def test_a_key_that_is_there_twice_is_an_error() -> None:
    with pytest.raises(yaml.YAMLError, match="key 'b' is there twice"):
        read_yaml("a: {b: 1, b: 2}")


@pytest.mark.parametrize("file", sorted(config_dir().rglob("*.yaml")), ids=lambda file: Path(file).stem)
def test_our_own_files_are_read_as_hydra_reads_them(file: Path) -> None:
    assert (read_yaml(file.read_text(encoding="utf-8")) or {}) == OmegaConf.to_container(OmegaConf.load(file))


BOOLS = [key for key, (_, kind) in declared_settings().items() if kind is bool] + ["model.convs[0].causal"]


@pytest.mark.parametrize("number", [0, 1, 3])
def test_a_number_is_not_true_or_false(number: int) -> None:
    assert "checkpoint.sharded" in BOOLS and "batching.auto" in BOOLS
    for key in BOOLS:
        tree = OmegaConf.create(asdict(Config(run_dir="x")))
        OmegaConf.update(tree, key, number)
        with pytest.raises(ConfigError, match=rf"{re.escape(key)}: .*{number}"):
            to_config(OmegaConf.to_container(tree))


def test_a_tree_becomes_the_configuration_that_it_came_from() -> None:
    config = Config(run_dir="x")
    config.model.convs = [ConvConfig(causal=True)]
    config.checkpoint.sharded = True
    tree = asdict(config)
    assert to_config(tree) == config
    assert to_config(tree | {"checkpoint": {"sharded": "No"}}).checkpoint.sharded is False
    assert to_config(tree | {"model": {"bidirectional": "yes"}}).model.bidirectional is True


@pytest.mark.parametrize("key", ["model", "model.convs", "model.convs.0.causal"])
def test_a_setting_of_the_command_line_stays_beside_those_of_the_first_model(key: str) -> None:
    mine, theirs = Config(run_dir="x"), Config(run_dir="y")
    mine.model.convs[0].causal, theirs.model.depth = True, 3
    inherit(mine, theirs, {key})
    assert mine.model.convs[0].causal and mine.model.depth == (8 if key == "model" else 3)


def test_labels_stay_together_and_other_settings_of_the_alphabet_alone() -> None:
    mine, theirs = Config(run_dir="x"), Config(run_dir="y")
    theirs.alphabet = AlphabetConfig(symbols="ab", pieces=["ab"], case="upper")
    inherit(mine, theirs, {"alphabet.symbols"})
    assert mine.alphabet == AlphabetConfig(case="upper")
    mine = Config(run_dir="x")
    inherit(mine, theirs, {"alphabet.case"})
    assert mine.alphabet == AlphabetConfig(symbols="ab", pieces=["ab"])


def test_words_and_numbers_get_the_type_of_their_setting() -> None:
    """Numbers of the environment are words, and YAML takes some words for numbers."""
    values = {"run_dir": 2024, "optim": {"learning_rate": "1e-3"}, "alphabet": {"replace": {1: "one", "x": 10}}}
    config = to_config(values | {"model": {"depth": "12"}, "augment": {"speed": ["0.9", 1]}})
    assert (config.run_dir, config.optim.learning_rate, config.model.depth) == ("2024", 1e-3, 12)
    assert config.augment.speed == [0.9, 1.0] and config.alphabet.replace == {"1": "one", "x": "10"}
