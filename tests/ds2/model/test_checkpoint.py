"""Model files from anywhere: whole ones load, damaged and hostile ones are CheckpointErrors that name the field."""

from __future__ import annotations

import copy
import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ds2.audio.features import Features
from ds2.commands.compose import resolve_options
from ds2.config.schema import Config, ConfigError, FeaturesConfig
from ds2.model.acoustic import AcousticModel
from ds2.model.checkpoint import load_model, prepare_model
from ds2.system.tensor_file import CheckpointError, make_header, read_header
from ds2.text import pieces
from ds2.text.alphabet import Alphabet

MakeConfig = Callable[..., Config]


@pytest.fixture
def model_file(tiny_config: MakeConfig, tmp_path: Path) -> Path:
    config = tiny_config()
    features = Features(config.features, config.data.sample_rate_hz)
    alphabet = Alphabet.from_config(config.alphabet)
    model = AcousticModel(config.model, features.bins, len(alphabet), config.features.step_s)
    prepare_model(tmp_path / "best.safetensors", model, features, alphabet, config, {"wer": 0.5})()
    return tmp_path / "best.safetensors"


def rewrite(path: Path, change: Callable[[dict[str, Any], dict[str, torch.Tensor]], Any], form: int = 2) -> None:
    """Write a changed file with a digest that fits, as a stranger could, or (form 1) one of before digests."""
    with safe_open(path, "pt") as opened:
        metadata = read_header(opened.metadata(), form + 1) | {"format": form}
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    change(metadata, tensors)
    save_file(tensors, path, make_header(metadata, tensors) if form > 1 else {"ds2": json.dumps(metadata)})


def set_key(*place: str, value: object) -> Callable[[dict[str, Any], Any], None]:
    def change(metadata: dict[str, Any], _: Any) -> None:
        node = metadata
        for key in place[:-1]:
            node = node[key]
        node[place[-1]] = value

    return change


@pytest.mark.parametrize("kind", ["log_mel", "kaldi_fbank", "nemo_fbank"])
def test_models_with_filter_banks_load(make_model: Callable[..., Path], kind: str) -> None:
    overrides = f"features.kind={kind}", "features.window_s=0.025", "features.mels=40"
    assert load_model(make_model(*overrides)).features.bins == 40
    with pytest.raises(ConfigError, match=r"features\.mels=9000 filters of 192001 bins"):
        Features(FeaturesConfig(kind=kind, window_s=0.5, mels=9000), 768_000)


def test_a_file_without_digest_loads(model_file: Path) -> None:
    before = load_model(model_file)
    rewrite(model_file, lambda *_: None, form=1)
    after = load_model(model_file)
    assert after.config == before.config and after.alphabet == before.alphabet
    assert all(torch.equal(a, b) for a, b in zip(before.model.parameters(), after.model.parameters(), strict=True))


def leaves(node: object, place: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    inner = [leaf for key in node for leaf in leaves(node[key], (*place, key))] if isinstance(node, dict) else []
    return [*([place] if place else []), *inner]


@pytest.mark.parametrize("form", [1, 2])
def test_metadata_of_a_wrong_type_is_named(model_file: Path, form: int) -> None:
    whole = model_file.read_bytes()
    with safe_open(model_file, "pt") as opened:
        metadata = read_header(opened.metadata(), 2)
    places = [place for place in leaves(metadata) if place[0] not in ("format", "kind") and place[0] != "metrics"][::3]
    assert len(places) > 30
    for place in places:
        model_file.write_bytes(whole)
        rewrite(model_file, set_key(*place, value=None), form)
        with pytest.raises(CheckpointError, match=rf"best\.safetensors: .*{place[-1]}"):
            load_model(model_file)


@pytest.mark.parametrize(
    ("place", "value", "says"),
    [
        (("config", "model", "depth"), 100_000, "model.depth=100000: allowed are"),
        (("config", "model", "depth"), 1000, "has 100[0-9] layers, but there are"),
        (("config", "model", "hidden"), 100_000, "lower model.hidden=100000|weights do not fit the config"),
        (("config", "model", "hidden"), 5000, "weights do not fit the config"),
        (("config", "model", "convs"), [], "weights do not fit the config"),
        (("config", "model", "cell"), "lstmm", "model.cell='lstmm' is not one of"),
        (("config", "model", "hiden"), 3, "unknown key 'model.hiden'; did you mean 'model.hidden'"),
        (("config", "model"), None, "config.model: is None"),
        (("alphabet", "symbols"), "abcd ", "weights do not fit the config"),
        (("alphabet", "case"), "shout", "alphabet.case='shout' must be"),
        (("alphabet",), [], "metadata.alphabet"),
        (("metrics",), 1, "metadata.metrics: is 1"),
    ],
)
def test_a_config_that_does_not_fit_the_tensors_is_refused_before_allocation(
    model_file: Path, place: tuple[str, ...], value: object, says: str
) -> None:
    rewrite(model_file, set_key(*place, value=value))
    began = time.process_time()
    with pytest.raises(CheckpointError, match=says):
        load_model(model_file)
    assert time.process_time() - began < 60  # 100,000 layers take minutes and gigabytes


def test_tensors_that_are_missing_or_of_another_shape_are_named(model_file: Path) -> None:
    whole = model_file.read_bytes()
    rewrite(model_file, lambda _, tensors: tensors.pop("features.mean"))
    with pytest.raises(CheckpointError, match=r"features\.mean: weights do not fit the config, the tensor is missing"):
        load_model(model_file)
    model_file.write_bytes(whole)
    rewrite(model_file, lambda _, tensors: tensors.update({"model.classifier.bias": torch.zeros(3)}))
    with pytest.raises(CheckpointError, match=r"model\.classifier\.bias: .* is \(3,\), expected \(5,\)"):
        load_model(model_file)


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_weights_that_are_not_floats_are_refused(model_file: Path, dtype: torch.dtype) -> None:
    def cast(_: Any, tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.classifier.bias"] = tensors["model.classifier.bias"].to(dtype)

    rewrite(model_file, cast)
    with pytest.raises(CheckpointError, match=r"model\.classifier\.bias: is \w+, expected float32 or float16"):
        load_model(model_file)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_of_another_float_type_load(model_file: Path, dtype: torch.dtype) -> None:
    rewrite(
        model_file,
        lambda _, tensors: tensors.update({k: v.to(dtype) for k, v in tensors.items() if v.is_floating_point()}),
    )
    assert all(weight.dtype == torch.float32 for weight in load_model(model_file).model.parameters())


@pytest.mark.parametrize(
    ("tensor", "value", "says"),
    [
        ("model.classifier.weight", math.inf, "NaN or infinite"),
        ("model.classifier.weight", math.nan, "NaN or infinite"),
        ("model.classifier.weight", 1e300, "NaN or infinite"),
        ("features.mean", math.nan, "NaN or infinite"),
        ("features.std", 0.0, "a standard deviation of 0, all must be above 0"),
        ("features.std", -1.0, "a standard deviation of -1, all must be above 0"),
        (".running_mean", math.nan, "NaN or infinite"),
        (".running_var", -1.0, "-1, variances and counts must not be negative"),
        ("_extra_state", -1, "-1, variances and counts must not be negative"),
    ],
)
def test_impossible_values_are_refused(model_file: Path, tensor: str, value: float, says: str) -> None:
    def change(_: Any, tensors: dict[str, torch.Tensor]) -> None:
        name = next(name for name in tensors if name.endswith(tensor))
        wide = tensors[name].double() if value == 1e300 else tensors[name].clone()
        wide.view(-1)[-1:] = value
        tensors[name] = wide

    rewrite(model_file, change)
    with pytest.raises(CheckpointError, match=rf"best\.safetensors: .*{tensor}: holds .*{says}"):
        load_model(model_file)


@pytest.mark.parametrize("nested", [1, 40])
def test_strings_of_a_model_file_are_not_interpolated(
    model_file: Path, monkeypatch: pytest.MonkeyPatch, nested: int
) -> None:
    monkeypatch.setenv("SECRET", "hunter2")
    text = "${oc.env:" * nested + "SECRET" + "}" * nested
    rewrite(model_file, set_key("config", "data", "corpus", value=text))
    assert load_model(model_file).config.data.corpus == text
    rewrite(model_file, set_key("config", "decode", "lm", value=text))
    loaded = load_model(model_file)
    assert resolve_options(["decode.beam=8"], model_file, loaded.config).lm == text
    model_file.with_name("best-decode.yaml").write_text(f"rescore: '{text}'\n")
    assert resolve_options([], model_file, loaded.config).rescore == text
    assert resolve_options(["decode.lm=${oc.env:SECRET}.lm"], model_file, loaded.config).lm == "hunter2.lm"  # as Hydra


def test_the_file_of_pieces_is_not_opened(model_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Path] = []
    monkeypatch.setattr(pieces, "read_pieces", opened.append)
    secret = model_file.with_name("pieces.txt")
    os.mkfifo(secret)  # who opens it waits for ever
    rewrite(model_file, set_key("config", "alphabet", "pieces_file", value=str(secret)))
    assert load_model(model_file).config.alphabet.pieces_file == str(secret)
    assert opened == []


TUNED = {
    "broken": (b"beam: [", "no YAML"),
    "a list": (b"- 1", "expected lines"),
    "a text": (b"hello", "beam|expected lines|unknown key|hello"),
    "bytes": (b"\xff\xfe\x00", "no YAML"),
    "a wrong type": (b"beam: many", "beam"),
    "an unknown key": (b"baem: 3", "beam"),
    "deep": (b"[" * 1000 + b"]" * 1000, "no YAML .maximum recursion depth"),
    "an alias bomb": (b"a: &a [x,x]\nb: &b [*a,*a]\n" + b"beam: *b", "alias"),
    "a whole film": (b"#" * (1 << 21), "at most"),
}


@pytest.mark.parametrize("case", TUNED)
def test_damaged_tuned_settings_are_named(model_file: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "hunter2")
    content, says = TUNED[case]
    model_file.with_name("best-decode.yaml").write_bytes(content)
    with pytest.raises(ConfigError, match=says) as caught:
        resolve_options([], model_file, copy.deepcopy(load_model(model_file).config))
    assert "best-decode.yaml" in str(caught.value) and "hunter2" not in str(caught.value)


def test_a_model_runs_without_the_backend_of_its_training(model_file: Path) -> None:
    rewrite(model_file, set_key("config", "model", "backend", value="persistent"))
    loaded = load_model(model_file)
    logits, _ = loaded.model(torch.zeros(1, loaded.features.bins, 20), torch.tensor([20]))
    assert bool(logits.isfinite().all())
