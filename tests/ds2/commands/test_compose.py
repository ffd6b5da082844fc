"""Composition: every recipe and preset works, wrong keys name the right one, values that cannot work are refused."""

import re
from dataclasses import asdict
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from ds2.commands.compose import (
    check_sweep,
    compose_config,
    config_dir,
    first_of_sweep,
    read_config,
    resolve_options,
    split_overrides,
    with_search_path,
)
from ds2.config.convert import config_from_dict, save_config
from ds2.config.schema import ConfigError
from ds2.model.shipped import FOLDER

RECIPES = sorted(p.stem for p in (config_dir() / "recipe").glob("*.yaml"))
# Models are composed in tests/end_to_end/test_presets.py, recipes below.
GROUPS = [
    [f"{group.name}={path.stem}" for path in sorted(group.glob("*.yaml"))]
    for group in sorted(config_dir().iterdir())
    if group.is_dir() and group.name not in ("recipe", "model")
]


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_composes(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("lexicon.txt").write_text("a EY\n", encoding="utf-8")  # a recipe's train.intermediate_lexicon
    config = compose_config([f"recipe={recipe}"])
    assert config.data.train
    assert config.run_dir == f"runs/{recipe}"


@pytest.mark.parametrize("choices", list(zip_longest(*GROUPS)))
def test_every_choice_of_every_group_composes(choices: tuple[str | None, ...]) -> None:
    """One of each group at a time, as long as there are others."""
    compose_config([choice for choice in choices if choice is not None])


def test_of_a_setting_and_a_mapping_of_its_section_the_later_one_holds() -> None:
    overrides = ["model.hidden=40", "model={hidden:32,depth:3}", "model.depth=5"]
    model = compose_config(overrides).model
    assert (model.hidden, model.depth) == (32, 5)


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("model.dept=8", "did you mean 'model.depth'?"),
        ("model.heigth=8", "unknown key 'model.heigth'"),
        ("modle.depth=8", "did you mean 'model.depth'?"),
        ("learning_rate=1", "did you mean 'optim.learning_rate'?"),
        ("optim.lr=1", "did you mean 'optim.learning_rate'?"),
        ("train.batch_size=8", "did you mean 'batching.utterances'?"),
        ("+train.foo=1", "unknown key 'train.foo'; `ds2 train --help` lists all"),
        ("+model.deph=8", "did you mean 'model.depth'?"),
        ("recipe=an5", "did you mean 'an4"),
        ("recipe=librispeech_5h_phone", "is called recipe=librispeech_5h_sherpa now"),
        ("optim=adam", "did you mean 'adamw'?"),
        (
            "model.depth=many",
            "model.depth: takes a whole number, not 'many'; allowed are numbers from 1 to 1000 (default",
        ),
        (
            "model.hidden=null",
            "model.hidden: takes a whole number, not null; allowed are numbers from 1 to 1000000 (defa",
        ),
        ("optim.learning_rate=null", "optim.learning_rate: takes a number, not null; allowed are numbers above 0"),
        ("optim.learning_rate=true", "optim.learning_rate: takes a number, not True; allowed are numbers above 0"),
        ("train.graphs=null", "train.graphs: takes one of auto, on, off, not null (default auto)"),
        ("checkpoint.init_from=null", "checkpoint.init_from: takes a string, not null (default '')"),
        ("model.bidirectional=maybe", "model.bidirectional: takes true or false, not 'maybe' (default false)"),
        ("checkpoint={sharded:3}", "checkpoint.sharded: takes true or false, not 3 (default false)"),
        ("checkpoint.sharded='1'", "checkpoint.sharded: takes true or false, not '1' (default false)"),
        ("checkpoint.sharded=${train.seed}", "checkpoint.sharded: takes true or false, not 1 (default false)"),
        ("model.convs=[{causal:3}]", "model.convs[0].causal: cannot be 3: an entry is {kernel:[FREQUENCY,TIME],"),
        ("model.convs=3", "model.convs: takes a list"),
        ("model.convs.0.kernal=3", "unknown key 'model.convs[0].kernal'; an entry is {kernel:"),
        ("model.convs=[3]", "model.convs[0]: cannot be 3: an entry is {kernel:"),
        ("train=3", "train: takes train.KEY=VALUE, not 3"),
        ("augment=[]", "augment: takes augment.KEY=VALUE, not []"),
        ("augment=[a]", "augment: takes augment.KEY=VALUE, not ['a']"),
        ("model=[]", "model=[]: choose one of algoperf, "),
        ("data=[a.jsonl]", "There are an4, english, librispeech"),
        (
            "optim.layer_rates={convs:a}",
            "optim.layer_rates.convs: takes a number, not 'a'; allowed are numbers above 0",
        ),
        ("augment.speed=[1,b]", "augment.speed[1]: takes a number, not 'b'; allowed are numbers from 0.25 to 4"),
        ("data.train=train.jsonl", "data.train: takes a list, in brackets even of one: data.train=[A,B], not "),
        ("decode.hot_words={zero:5}", "decode.hot_words: takes a list"),
        ("decode.hot_words.zero=5", "decode.hot_words: takes a list"),
        ("model.convs.x.kernel=[1,1]", "model.convs: takes a list"),
        ("~model.convs.0", "~model.convs.0: a setting cannot be taken away; set it: model.convs=VALUE"),
        ("model.convs.0=[1]", "model.convs[0]: cannot be [1]: an entry is {kernel:"),
        ("model.convs.0.kernel.x=3", "model.convs[0].kernel: cannot be {'x': 3}: an entry is {kernel:"),
        ("model.convs.0={kernel:{a:1}}", "model.convs[0].kernel: cannot be {'a': 1}: an entry is {kernel:"),
        ("model.convs.9.kernel=[1,1]", "model.convs[9]: the list has 2 entries, counted from 0; set it as a"),
        ("data.train.0=a", "data.train[0]: the list has 0 entries, counted from 0; set it as a whole: data.train=["),
        ("+model.depth=3", "+model.depth=3: ds2 has model.depth in its place: write model.depth=VALUE, without"),
        ("++recipe=an4", "ds2 has recipe in its place"),
        ("model@features=rnn_8", "ds2 has model in its place"),
        ("=3", "'=3' is no override (no key): write key=value"),
        ("~", "'~' is no override (no key)"),
        ("model={null:1}", "model: takes model.KEY=VALUE, not {None: 1}"),
        ("data.train=['${']", "no viable alternative at input '${'"),
        ("optim.layer_rates=3", "optim.layer_rates: takes a mapping: optim.layer_rates={KEY:VALUE}, not 3"),
        ("model.cell=rnm", "model.cell='rnm' is not one of rnn, lstm, gru, gru_before"),
        ("train.epochs=0", "train.epochs=0: allowed are numbers from 1 to "),
        ("model.hidden=16,24", "model.hidden=16,24 has several values: `ds2 train --multirun`"),
        ("recipe=an4,an4_demo", "has several values"),
        ("batching.audio_s=10", "set one of batching.utterances"),
        ("augment.gain_db=[3,1]", "augment.gain_db"),
        ("model.depth", "model.depth"),
        ("model.convs=[{kernel:5}]", "model.convs[0].kernel: cannot be 5: an entry is {kernel:[FREQUENCY,TIME],"),
        ("model.convs=[{kernel:[5,a]}]", "model.convs[0].kernel[1]: cannot be 'a': an entry is {kernel:"),
        ("model.convs=[{kernal:[5,5]}]", "unknown key 'model.convs[0].kernal'; an entry is {kernel:"),
        ("optim=null", "optim=null: choose one of adamw, sgd, or leave optim= out"),
        ("recipe={a:1}", "recipe={a:1}: choose one of an4, "),
        ("optim=", "optim=: choose one of adamw, sgd"),
        ("optim=[1]", "optim=[1]: choose one of adamw, sgd"),
        ("~optim.momentum", "~optim.momentum: a setting cannot be taken away; set it: optim.momentum=VALUE"),
        ("~optim", "~optim: a choice cannot be taken away; choose one of adamw, sgd"),
        ("hydra.run.dir=x", "hydra.run.dir=x has no effect: name the folder of the run by run_dir=FOLDER"),
        ("optim.layer_rates={a:1, b:1, a : 2}", "{a:1, b:1, a : 2}: a is there twice; write each key once"),
        ("~train", "~train: a setting cannot be taken away; set it: train.KEY=VALUE"),
        ("~device", "~device: a setting cannot be taken away; set it: device=VALUE"),
        ("alphabet.replace={true:a}", "alphabet.replace: takes a mapping: alphabet.replace={KEY:VALUE}, with quotes"),
        ("alphabet.replace={null:a}", "with quotes around 1.50, true or null"),
        ("recipe=null", "or leave recipe= out"),
        ("corpora/train.jsonl", "name manifests by data.train=[corpora/train.jsonl]"),
        ("run_dir=${oc.env:DS2_NO_SUCH_VARIABLE}", "Environment variable 'DS2_NO_SUCH_VARIABLE' not found"),
    ],
)
def test_a_wrong_override_names_the_key_and_the_nearest_right_one(override: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose_config([override])
    assert hint in str(caught.value)


def test_a_tilde_is_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/zoë x")
    config = compose_config(["run_dir=~/runs/a", "data.train=[~/t.jsonl, ~/u.jsonl,v/~/w]", "decode.lm=~/books.lm"])
    assert (config.run_dir, config.decode.lm) == ("/home/zoë x/runs/a", "/home/zoë x/books.lm")
    assert config.data.train == ["/home/zoë x/t.jsonl", "/home/zoë x/u.jsonl", "v/~/w"]
    split = split_overrides(["m", "decode.lm=~/books.lm"], "decode")
    assert split == (["decode.lm=/home/zoë x/books.lm"], ["m"])


def test_a_wrong_key_in_a_users_recipe_is_named(tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text("# @package _global_\nmodel:\n  depht: 3\n")
    with pytest.raises(ConfigError, match=r"did you mean 'model\.depth'"):
        compose_config([f"hydra.searchpath=[file://{tmp_path}]", "recipe=mine"])


def test_a_value_in_the_place_of_a_recipes_section_is_named(tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text("# @package _global_\noptim: adamw\n")
    with pytest.raises(ConfigError, match=r"optim\.momentum: the recipe has a value in the place of its section"):
        compose_config([f"hydra.searchpath=[file://{tmp_path}]", "recipe=mine", "optim.momentum=0.5"])


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("recipe/mine.yaml", "augment: []", "augment: takes augment.KEY=VALUE, not []"),
        ("recipe/mine.yaml", "optim: {layer_rates: [a]}", "takes a mapping: optim.layer_rates={KEY:VALUE}, not ['a']"),
        (
            "model/mine.yaml",
            "convs: {}",
            "model.convs: takes a list, in brackets even of one: model.convs=[A,B], not {}",
        ),
    ],
)
def test_lists_and_mappings_in_each_others_place_are_named(
    file: str, content: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / file).parent.mkdir()
    (tmp_path / file).write_text(content)
    with pytest.raises(ConfigError, match=rf"mine\.yaml: .*{re.escape(message)}"):
        compose_config(with_search_path(["--config-dir", str(tmp_path), f"{Path(file).parent}=mine"]))


@pytest.mark.parametrize("head", ["", "# @package _global_\n", "# Mine.\n# @package _global_\n", "# Mine.\n\n"])
@pytest.mark.parametrize("base", ["", "  - an4_demo\n"])
def test_a_users_recipe_needs_no_header(head: str, base: str, tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    text = f"defaults:\n{base}  - override /model: rnn_small\n  - _self_\nrun_dir: r\nmodel:\n  depth: 6\n"
    (tmp_path / "recipe" / "mine.yaml").write_text(head + text)
    config = compose_config(with_search_path(["--config-dir", str(tmp_path), "recipe=mine"]))
    assert (config.run_dir, config.model.depth, config.model.hidden) == ("r", 6, 320)
    assert (config.data.prepare == "an4") == bool(base)


def test_a_users_group_is_read_without_a_header(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("depth: 6\n")
    command = ["--config-dir", str(tmp_path), "model=mine", "run_dir=r"]
    assert compose_config(with_search_path(command)).model.depth == 6


WORDS = """\
run_dir: 2024_01
alphabet:
  locale: no
  replace: {on: an, yes: ja}
train:
  graphs: off
model:
  batch_norm: no
  bidirectional: false
  convs: [{causal: yes}, {causal: no}]
decode:
  hot_words: [yes, no, 007, 12:30]
"""


def test_words_of_a_users_recipe_stay_words(tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text(WORDS)
    config = compose_config(with_search_path(["--config-dir", str(tmp_path), "recipe=mine"]))
    assert (config.run_dir, config.alphabet.locale, config.train.graphs) == ("2024_01", "no", "off")
    assert config.alphabet.replace == {"on": "an", "yes": "ja"} and config.model.batch_norm is False
    assert [conv.causal for conv in config.model.convs] == [True, False]
    assert config.decode.hot_words == ["yes", "no", "007", "12:30"]


@pytest.mark.parametrize("word", ["2024_01", "1e3", "007", "true", "2024-01-15", "nan", "sweep/lr=0.1"])
def test_words_of_the_command_line_stay_words(word: str) -> None:
    texts = (f"run_dir={word}", f"data.train=[{word},a/{word}]", f"alphabet.replace={{1:{word},a : {word}}}")
    config = compose_config([*texts, "model.depth=6"])
    assert (config.run_dir, config.data.train, config.model.depth) == (word, [word, f"a/{word}"], 6)
    assert config.alphabet.replace == {"1": word, "a": word}


def test_a_run_folder_without_a_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="run_dir is empty: name the folder"):
        compose_config(["run_dir="])


@pytest.mark.parametrize(
    "content, reason",
    [
        (b"train:\n  epochs: 3\n  epochs: 4\n", "is no YAML: .*key .epochs. is there twice"),
        (b"train:\n\tepochs: 3\n", "is no YAML: .*cannot start any token"),
        (b"\xff\xfe", "is no YAML: .*can't decode byte 0xff"),
        (b"- a\n", "holds a list: expected lines"),
    ],
)
def test_a_users_recipe_that_cannot_be_read_is_named(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_bytes(content)
    with pytest.raises(ConfigError, match=rf"recipe/mine\.yaml {reason}"):
        compose_config(with_search_path(["--config-dir", str(tmp_path), "recipe=mine"]))


def test_a_recipe_that_extends_itself_is_refused(tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text("defaults:\n  - /recipe: an4_demo\n")
    with pytest.raises(ConfigError, match="extends another one by its name alone"):
        compose_config(with_search_path(["--config-dir", str(tmp_path), "recipe=mine"]))


def test_a_users_file_that_hydra_would_not_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    ours = config_dir() / "recipe" / "an4.yaml"
    (tmp_path / "recipe" / "an4.yaml").write_bytes(ours.read_bytes())
    command = ["--config-dir", str(tmp_path), "recipe=an4"]
    compose_config(with_search_path(command))
    (tmp_path / "recipe" / "an4.yaml").write_text("run_dir: mine\n")
    with pytest.raises(ConfigError, match=r"ds2 has a recipe/an4\.yaml too, .*: rename yours"):
        with_search_path(command)
    assert compose_config([f"hydra.searchpath=[ds2://{tmp_path}]", "recipe=an4"]).run_dir == "runs/an4"  # indeed


def test_the_command_line_wins_over_the_recipe() -> None:
    assert compose_config(["recipe=an4_demo", "train.epochs=3", "model.depth=2"]).train.epochs == 3


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("optim=adamw,null", "optim=null: choose one of adamw, sgd"),
        ("model.hidden=16,abc", "model.hidden: takes a whole number, not 'abc'"),
        ("recipe=an4_demo,an5", "did you mean 'an4"),
        ("model.dropout=interval(0,1)", "lists no values: write KEY=A,B or KEY=range(1,4)"),
        ("model=glob(rnn_*)", "lists no values"),
        ("train.seed=range(3,1)", "lists no values"),
        ("train.seed=range(1,2,0)", "lists no values"),
        ("train.seed=choice(1,choice(2,3))", "lists no values"),
    ],
)
def test_every_value_of_a_sweep_is_read_before_its_first_run(override: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_sweep(["model.depth=2", override])
    assert hint in str(caught.value)


def test_values_that_other_runs_of_a_sweep_do_not_have_may_contradict_it() -> None:
    check_sweep(["model.depth=2,4", "batching.utterances=8,0", "recipe=an4_demo"])  # 0: these runs are refused


def test_a_setting_without_effect_is_named(caplog: pytest.LogCaptureFixture) -> None:
    settings = ["model=rnn_8", "data.train=[a.jsonl]", "train.epochs=3", "train.epochs=3", "run_dir=x"]
    assert compose_config(settings).train.epochs == 3
    assert not caplog.messages
    config = compose_config([*settings, "data.train=[b.jsonl]", "model=rnn_small"])
    assert config.data.train == ["b.jsonl"]
    assert caplog.messages == [
        "data.train=[a.jsonl] has no effect: data.train=[b.jsonl] comes after it",
        "model=rnn_8 has no effect: model=rnn_small comes after it",
    ]
    caplog.clear()
    assert resolve_options(["decode.beam=3", "decode.beam=4"], Path("none.safetensors"), config).beam == 4
    assert caplog.messages == ["decode.beam=3 has no effect: decode.beam=4 comes after it"]


def test_first_of_sweep_keeps_single_values() -> None:
    assert first_of_sweep(["model.depth=2,4", "recipe=an4_demo"]) == ["model.depth=2", "recipe=an4_demo"]


@pytest.mark.parametrize("override", ["alphabet.symbols='abc", "train.epochs", "a=[1", "train.epochs=" + "9" * 5000])
def test_what_is_no_override_is_named_with_the_way_out(override: str) -> None:
    with pytest.raises(ConfigError, match="quote a value") as caught:
        first_of_sweep(["recipe=an4_demo", override])
    assert repr(override) in str(caught.value)


@pytest.mark.parametrize(("written", "shown"), [("1", "1.0"), ("'1e-3'", "0.001"), ("2.5e-4", "0.00025")])
def test_a_number_that_names_a_folder_is_written_in_one_way(written: str, shown: str) -> None:
    config = compose_config(["run_dir=runs/${optim.learning_rate}", f"optim.learning_rate={written}"])
    assert config.run_dir == f"runs/{shown}"


def test_defaults_of_a_convolution_can_be_referred_to() -> None:
    config = compose_config(["recipe=an4_demo", "run_dir=${model.convs.0.causal}-${model.convs.1.channels}"])
    assert config.run_dir == "False-16"


@pytest.mark.parametrize("key", ["optim.learning_rate", "train.max_minutes", "model.dropout", "train.epochs"])
def test_a_number_too_large_for_a_float_is_named(key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        compose_config(["recipe=an4_demo", f"{key}=1{'0' * 400}"])


def test_config_survives_the_way_through_a_checkpoint(tmp_path: Path) -> None:
    config = compose_config(["recipe=an4_demo"])
    assert config_from_dict(asdict(config)) == config
    save_config(config, tmp_path / "config.yaml")
    assert "learning_rate" in (tmp_path / "config.yaml").read_text()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"augment": {"speed": [0.0]}}, r"augment.speed=\[0.0\]"),
        ({"augment": {"gain_db": [3.0]}}, "augment.gain_db"),
        ({"augment": {"noise_snr_db": [30.0, 10.0]}}, "augment.noise_snr_db"),
        ({"augment": {"noise_probability": 0.4, "noise_snr_db": []}}, "noise_snr_db=.* is needed"),
        ({"augment": {"noisy_epochs": 3}}, "augment.noisy_epochs=3 ends noise, rooms and codecs, but there are none"),
        ({"augment": {"noise_probability": 1.4}}, "augment.noise_probability=1.4"),
        ({"augment": {"time_fraction": 2.0}}, "augment.time_fraction"),
        ({"augment": {"time_masks": -1}}, "augment.time_masks=-1"),
        ({"augment": {"codecs": ["mp4"]}}, r"augment.codecs has \['mp4'\], allowed are mulaw"),
        ({"augment": {"codecs": []}}, "augment.codecs is empty"),
        ({"augment": {"noise_colours": []}}, "augment.noise_colours is empty"),
        ({"features": {"step_s": 0.03}}, "features.step_s=0.03 above features.window_s=0.02 would skip audio"),
        ({"data": {"min_duration_s": 40.0}}, "data.min_duration_s=40.0 must be below data.max_duration_s=40.0"),
        ({"alphabet": {"symbols": ""}}, "alphabet.symbols is empty"),
        ({"alphabet": {"symbols": "aba"}}, r"alphabet.symbols lists \['a'\] more than once"),
        ({"model": {"bidirectional": True}}, "model.bidirectional=true needs .* set model.max_lookahead_ms=0"),
        ({"train": {"consistency": 0.2}}, "train.consistency=0.2 compares two differently masked views"),
        ({"train": {"delay_penalty": 0.1, "objective": "ctc_crf"}}, "train.delay_penalty=0.1 weighs alignments"),
        (
            {"train": {"delay_penalty": 0.1}, "model": {"bidirectional": True, "max_lookahead_ms": 0.0}},
            "train.delay_penalty=0.1 makes words come earlier in a stream",
        ),
    ],
)
def test_senseless_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_from_dict(settings)


def test_mappings_of_the_user_are_set_on_the_command_line() -> None:
    recipe = compose_config(["recipe=an4", "data.corpus=x"])
    assert recipe.optim.layer_rates
    for none in ("optim.layer_rates={}", "++optim.layer_rates={}"):  # as `ds2 train` hands it to Hydra
        assert not read_config(OmegaConf.create(asdict(recipe)), [none])[0].optim.layer_rates
    some = ["optim.layer_rates={}", "optim.layer_rates.convs=0.5"]
    assert compose_config(["recipe=an4", "data.corpus=x", *some]).optim.layer_rates == {"convs": 0.5}
    config = compose_config(["alphabet.replace={x:ks}", "optim.layer_rates.convs=0.5", "run_dir=x"])
    assert config.alphabet.replace == {"x": "ks"} and config.optim.layer_rates == {"convs": 0.5}


@pytest.mark.parametrize("depth", [300, 900])
def test_brackets_that_hydra_cannot_parse_are_counted(depth: int) -> None:
    with pytest.raises(ConfigError, match=rf"decode.beam: {depth} brackets within each other, allowed are 3"):
        compose_config(["run_dir=x", f"decode.beam={'[' * depth}{']' * depth}"])


def test_letters_beyond_ascii_need_no_quotes() -> None:
    overrides = ["data.train=[ä b.jsonl,b.jsonl, 日本/ü.jsonl]", "run_dir=Läufe/é x", "alphabet.replace={x:é,y: ö}"]
    config = compose_config(overrides)
    assert config.data.train == ["ä b.jsonl", "b.jsonl", "日本/ü.jsonl"]
    assert config.run_dir == "Läufe/é x" and config.alphabet.replace == {"x": "é", "y": "ö"}
    assert compose_config(["data.train=['ä,[b].jsonl']"]).data.train == ["ä,[b].jsonl"]
    assert compose_config(["run_dir=runs/a#1&2~"]).run_dir == "runs/a#1&2~"
    assert compose_config(["decode.hot_words=['x, y',zürich,no]"]).decode.hot_words == ["x, y", "zürich", "no"]
    assert first_of_sweep(["data.corpus=é,ü"]) == ["data.corpus='é'"]
    assert compose_config(["run_dir=runs/a\u00a0b\u200b"]).run_dir == "runs/a\u00a0b\u200b"
    with pytest.raises(ConfigError, match="Keys in braces are ASCII"):
        compose_config(["alphabet.replace={é:e}"])


def test_an_override_that_is_no_text_is_refused() -> None:
    with pytest.raises(ConfigError, match="not UTF-8, as settings must be"):
        compose_config([b"run_dir=runs/\xff".decode(errors="surrogateescape")])


@pytest.mark.parametrize("name", ["my conf [1], é", "q'uote {x}", "back\\slash", "$(x) ${y}"])
def test_the_folder_of_own_recipes_may_be_called_anything(name: str, tmp_path: Path) -> None:
    (tmp_path / name / "recipe").mkdir(parents=True)
    (tmp_path / name / "recipe" / "mine.yaml").write_text("# @package _global_\ntrain:\n  epochs: 7\n")
    assert compose_config(with_search_path(["--config-dir", str(tmp_path / name), "recipe=mine"])).train.epochs == 7


def test_a_model_is_a_lexicon() -> None:
    names = ("alphabet.lexicon=english", "train.intermediate_lexicon=english")
    config = compose_config([*names, "model.intermediate=[1]", "run_dir=unused"])
    assert config.alphabet.lexicon == config.train.intermediate_lexicon == str(FOLDER / "english/best.safetensors")
    assert len(config.model.intermediate_phones) == 39
