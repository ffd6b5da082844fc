"""Reading YAML with the words of YAML 1.2."""

import math
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from ds2.commands.compose import config_dir
from ds2.config.convert import read_yaml


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
