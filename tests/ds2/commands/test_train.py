"""`ds2 train --help` and what becomes of options: each works or is refused with a sentence."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import hydra
import pytest
import yaml

import ds2
from ds2.cli import COMMANDS, main
from ds2.config.allowed import REMOVED
from ds2.config.convert import documented_keys
from ds2.config.schema import Config, TrainConfig


def test_help_lists_every_key_with_its_comment_and_the_users_recipes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text("# @package _global_\n")
    assert main(["train", "--config-dir", str(tmp_path), "--help"]) == 0
    shown = capsys.readouterr().out
    assert "recipe=     mine* | an4 |" in shown and "german" in shown
    lines = {line.split("=")[0].strip(): line for line in shown.splitlines() if line.startswith("  ") and "=" in line}
    for field in fields(TrainConfig):
        assert (f"train.{field.name}" in lines) == (REMOVED not in field.metadata)
    assert lines["train.metric"].endswith("wer | cer; the dev score that selects the best model")


def test_the_documentation_has_every_field_once() -> None:
    names = [key.name for _, _, keys in documented_keys() for key in keys]
    assert len(names) == len(set(names)) and "run_dir" in names
    assert {name.split(".")[0] for name in names} == {field.name for field in fields(Config)}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        assert main([command, "--help"]) == 0
    except SystemExit as ended:
        assert ended.code == 0
    assert "usage: ds2" in capsys.readouterr().out


def test_the_configuration_is_printed_instead_of_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "recipe=synthetic", f"run_dir={tmp_path / 'run'}", "--cfg", "job", "--resolve"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["data"]["train"] == ["corpora/synthetic/train.jsonl"] and shown["train"]["epochs"] == 4
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shell-completion", "install=bash"], "`ds2 completion bash|zsh|fish` prints a script"),
        (["-cn", "mine"], "put what differs into a recipe"),
        (["--cfg"], "--cfg needs a value"),
        (["--resolve"], "--cfg job --resolve"),
        (["--cfg", "job", "-m", "recipe=an4,an4_demo"], "leave one of the two out"),
        (["--multrun"], "did you mean '--multirun'?"),
        (["lr=1"], "did you mean 'optim.learning_rate'?"),
        (["--config-dir", "/nowhere", "--help"], "is not a folder"),
    ],
)
def test_other_options_are_refused_with_the_way_out(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_hydra_composes_once_unless_it_is_asked_for_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    composed, trained = Mock(wraps=hydra.compose), Mock(return_value=0)
    monkeypatch.setattr("ds2.commands.compose.compose", composed)
    monkeypatch.setattr("ds2.training.loop.train", trained)
    monkeypatch.setattr(hydra, "main", as_hydra := Mock())
    assert main(["train", "recipe=an4", f"run_dir={tmp_path}"]) == 0
    ((config, run_dir), _) = trained.call_args
    assert (config.data.train != [], run_dir, config.run_dir) == (True, tmp_path, str(tmp_path))
    composed.assert_called_once()
    as_hydra.assert_not_called()
    for asked in ("hydra.job.chdir=false", "hydra/launcher=basic"):
        assert main(["train", f"run_dir={tmp_path}", asked]) == 0
    assert as_hydra.call_count == 2


def test_ctrl_c_while_torch_is_loaded_ends_the_command_but_no_program_that_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program, or a notebook, may hold what it has not saved."""
    handlers = list[Any]()

    @contextmanager
    def loading() -> Iterator[None]:
        handlers.append(signal.getsignal(signal.SIGINT))
        yield

    monkeypatch.setattr("ds2.commands.train.quick_imports", loading)
    monkeypatch.setattr("ds2.training.loop.train", Mock(return_value=0))
    own = signal.default_int_handler  # where tests run in the background, the shell lets them ignore it
    before = signal.signal(signal.SIGINT, own)
    try:
        assert main(["train", "recipe=an4", f"run_dir={tmp_path}"]) == 0
        assert ds2.train("recipe=an4", f"run_dir={tmp_path}") == tmp_path
    finally:
        signal.signal(signal.SIGINT, before)
    assert handlers == [signal.SIG_DFL, own]


def test_a_wrong_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian"]) == 2
    assert "unknown command 'trian'; did you mean 'train'?" in capsys.readouterr().err


def test_a_reader_that_leaves_early_gets_no_traceback() -> None:
    command = [sys.executable, "-m", "ds2.cli", "train", "--help"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.close()
    assert process.communicate(timeout=600)[1] == ""
    assert process.returncode == 128 + signal.SIGPIPE
