"""Every number of the schema has a range, checked by one rule; what lies outside is one line with the way out."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import Field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from ds2.cli import main
from ds2.config import schema
from ds2.config.allowed import ALLOWED, REMOVED, Range
from ds2.config.check import check, check_allowed
from ds2.config.convert import config_from_dict, documented_keys
from ds2.config.schema import Config, ConfigError, DataConfig, ModelConfig, OptimConfig, TrainConfig

SECTIONS = [value for value in vars(schema).values() if isinstance(value, type) and is_dataclass(value)]


def number_settings() -> Iterator[tuple[type, Field[Any], Any]]:
    for section in SECTIONS:
        hints = get_type_hints(section)
        for declared in fields(section):
            numeric = hints[declared.name] in (int, float, list[int], list[float], dict[str, float])
            if numeric and REMOVED not in declared.metadata:
                yield section, declared, hints[declared.name]


NUMBERS = list(number_settings())
IDS = [f"{section.__name__}.{declared.name}" for section, declared, _ in NUMBERS]


@pytest.mark.parametrize(("section", "declared", "kind"), NUMBERS, ids=IDS)
def test_every_number_has_a_range_that_is_checked(section: type, declared: Field[Any], kind: Any) -> None:
    allowed = declared.metadata[ALLOWED]
    assert isinstance(allowed, Range)
    check_allowed(section() if section is not Config else Config(run_dir="x"))  # the default is allowed

    def refused(value: float) -> bool:
        many = kind in (list[int], list[float])
        given = [value] * max(allowed.lengths or (1,)) if many else {"x": value} if kind == dict[str, float] else value
        section_with = replace(section(), **{declared.name: given})
        try:
            check_allowed(section_with, "section")
        except ConfigError as error:
            assert str(error).startswith(f"section.{declared.name}=") and "allowed are" in str(error)
            return True
        return False

    assert refused(math.nan)
    assert refused(allowed.low) == allowed.above and refused(allowed.high) == allowed.below
    assert refused(-math.inf) == (allowed.low != -math.inf) and refused(math.inf) == (allowed.high != math.inf)
    for end, outwards in ((allowed.low, -math.inf), (allowed.high, math.inf)):
        assert math.isinf(end) or refused(math.nextafter(end, outwards))


def test_names_of_ranges_read_well() -> None:
    assert str(Range(0, 1)) == "numbers from 0 to 1"
    assert str(Range(0, 1, above=True, below=True, lengths=(0, 2))) == "0 or 2 numbers above 0 to below 1"


def test_a_setting_without_limit_may_be_infinite() -> None:
    check(
        Config(
            data=DataConfig(max_duration_s=math.inf),
            model=ModelConfig(max_lookahead_ms=math.inf),
            optim=OptimConfig(clip_norm=math.inf),
            train=TrainConfig(max_minutes=math.inf),
            run_dir="x",
        )
    )


def named(override: str) -> str:
    """The part of an override's key that a message must hold."""
    return "kernel" if "kernel" in override else override.partition("=")[0].rsplit(".", 1)[-1]


@pytest.mark.parametrize(
    "override",
    [
        "decode.alpha=nan",
        "decode.alpha=inf",
        "decode.threads=100000",
        "optim.betas=[2,2]",
        "optim.learning_rate=nan",
        "train.seed=-1",
        "train.seed=99999999999999999999",
        "model.clip=inf",
        "model.clip=nan",
        "features.window_s=1e9",
        "features.window_s=1e-9",
        "features.mels=100000000",
        "model.hidden=100000",
        "model.depth=100000",
        "model.batch_norm_momentum=nan",
        "data.workers=100000",
        "data.sample_rate_hz=0",
        "augment.gain_db=[1000,1000]",
        "augment.speed=[nan]",
        "model.convs=[{kernel:[nan,3],stride:[1,1],channels:2}]",
        "model.convs=[{kernel:[3],stride:[1,1],channels:2}]",
        "batching.utterances=-1",
        "comm.timeout_s=nan",
        "run_dir=${oc.env:DS2_NO_SUCH_VARIABLE}",
        "run_dir=${run_dir}",
        "alphabet.replace=${decode}",
    ],
)
def test_an_invalid_number_stops_training_with_one_line(
    override: str, tiny_overrides: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = tiny_overrides if not override.startswith("model.") else [o for o in tiny_overrides if "model" not in o]
    assert main(["train", *given, override]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    lines = [line for line in said if line.startswith("ds2: ")]
    assert len(lines) == 1 and named(override) in lines[0]
    assert not any("Traceback" in line for line in said)
    assert not list((tmp_path / "run").glob("*.safetensors"))


def test_a_removed_setting_is_read_with_a_warning_and_not_listed(caplog: pytest.LogCaptureFixture) -> None:
    check(config_from_dict({}))
    assert not caplog.records
    check(config_from_dict({"train": {"evaluate_from_epoch": 3}, "augment": {"tempo": [0.9]}}))
    tempo, record = caplog.records
    assert tempo.getMessage().startswith("augment.tempo=[0.9] has no effect since this setting was removed: ")
    assert record.getMessage().startswith("train.evaluate_from_epoch=3 has no effect since this setting was removed: ")
    listed = {key.name for _, _, keys in documented_keys() for key in keys}
    assert "train.epochs" in listed and not {"train.evaluate_from_epoch", "decode.rescore_in_search"} & listed


def test_every_setting_has_a_comment_for_the_help() -> None:
    assert [key.name for _, _, keys in documented_keys() for key in keys if not key.comment] == []
