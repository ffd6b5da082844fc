"""Every preset of conf/model composes, and the paper's tables come out as printed."""

import functools
import math
import re

import pytest
import torch

from ds2.commands.compose import compose_config, config_dir
from ds2.config.schema import ModelConfig
from ds2.model.acoustic import AcousticModel

BINS, LABELS = 161, 29
PRESETS = sorted(path.stem for path in (config_dir() / "model").glob("*.yaml"))
TABLE_2_WIDTHS = {8: 1632, 24: 928, 40: 704, 56: 608, 72: 544, 88: 480}
TABLE_3 = {8: (21, 22), 24: (37, 65), 40: (53, 107), 56: (69, 149), 72: (85, 192), 88: (101, 234)}


@functools.cache
def compose(preset: str) -> ModelConfig:
    return compose_config([f"model={preset}", "run_dir=unused"]).model


def build(preset: str) -> AcousticModel:
    with torch.device("meta"):
        return AcousticModel(compose(preset), BINS, LABELS)


def residual_spans(model: AcousticModel) -> list[int]:
    """Recurrent layers of each module, 0 where it has no skip."""
    return [len(m.recurrent) if m.residual else 0 for m in model.recurrent_modules]  # type: ignore[arg-type]


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_builds_within_its_lookahead(preset: str) -> None:
    model = build(preset)
    assert model.lookahead_ms <= (model.config.max_lookahead_ms or math.inf)
    assert math.isinf(model.lookahead_ms) == model.config.bidirectional


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_sets_nothing_but_what_its_name_or_comment_is_about(preset: str) -> None:
    text = (config_dir() / "model" / f"{preset}.yaml").read_text()
    assert text.startswith("# ")
    for depth in re.findall(r"^(?:rnn|lstm|gru)_(\d+)", preset):
        assert compose(preset).depth == int(depth)


@pytest.mark.parametrize("depth", TABLE_3)
def test_table_3(depth: int) -> None:
    layers_total, millions = TABLE_3[depth]
    model = build(f"rnn_{depth}")
    assert model.layers_total == layers_total
    assert model.parameter_count / 1e6 == pytest.approx(millions, rel=0.02)
    assert model.config.hidden == 1152
    assert residual_spans(model) == [0] + [4] * (depth // 4 - 1)


@pytest.mark.parametrize("depth", TABLE_2_WIDTHS)
def test_table_2(depth: int) -> None:
    model = build(f"rnn_{depth}_narrow")
    assert (model.config.depth, model.config.hidden) == (depth, TABLE_2_WIDTHS[depth])
    assert model.parameter_count / 1e6 == pytest.approx(42, rel=0.05)  # "approximately constant"


@pytest.mark.parametrize("skip", range(9))
def test_table_1(skip: int) -> None:
    model = build(f"rnn_48_skip_{skip}" if skip else "rnn_48_no_skip")
    assert model.layers_total == 61
    assert (model.config.depth, model.config.hidden, model.config.skip) == (48, 1152, skip)
    spans = residual_spans(model)
    assert spans[0] == 0
    assert set(spans[1:-1]) == ({skip} if skip else {0})
    assert sum(spans) == (48 - skip if skip else 0)


def test_the_classic_is_bidirectional_without_residuals() -> None:
    model = build("ds2_classic")
    assert model.config.bidirectional
    assert not any(residual_spans(model))
