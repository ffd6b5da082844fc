"""One base for every error of ds2: a new class cannot be forgotten, and each becomes one line and status 2."""

from __future__ import annotations

import inspect
import pkgutil
import re
import signal
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import mpi4py
import pytest

import ds2
from ds2 import cli
from ds2.commands import data
from ds2.lm.sentences import SentenceReader
from ds2.recognition.recogniser import Recogniser
from ds2.system import UserError
from ds2.system.files import sole_writer
from ds2.system.signals import Stopped

mpi4py.rc.initialize = False  # all modules are imported below: MPI would start, for which each worker waits a second


def exception_classes() -> Iterator[type[BaseException]]:
    """Every exception class that a module of ds2 defines; only those of Exception are errors."""
    for module_info in pkgutil.walk_packages(ds2.__path__, "ds2."):
        module = import_module(module_info.name)
        for value in vars(module).values():
            if inspect.isclass(value) and issubclass(value, BaseException) and value.__module__ == module_info.name:
                yield value


CLASSES = sorted({c for c in exception_classes() if issubclass(c, Exception)}, key=lambda c: c.__qualname__)


def test_the_walk_finds_them() -> None:
    assert {c.__name__ for c in exception_classes() if not issubclass(c, Exception)} == {"Stopped"}  # by a signal
    assert {"UserError", "AudioError", "ConfigError", "AlphabetError", "CacheError"} <= {c.__name__ for c in CLASSES}


@pytest.mark.parametrize("error", CLASSES, ids=lambda c: c.__name__)
def test_every_error_derives_from_the_one_that_users_can_mend(error: type[Exception]) -> None:
    assert issubclass(error, UserError)


@pytest.mark.parametrize("error", CLASSES, ids=lambda c: c.__name__)
def test_every_error_is_one_line_and_status_2_of_every_command(
    error: type[UserError], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(arguments: list[str]) -> int:
        raise error.__new__(error, "what was given, what is allowed, the way out")

    for command in cli.COMMANDS:
        stand_in = ModuleType(f"ds2.commands.{command}")
        stand_in.run = fail  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, stand_in.__name__, stand_in)
        assert cli.main([command]) == 2, command
        printed = capsys.readouterr()
        assert printed.err == "ds2: what was given, what is allowed, the way out\n" and printed.out == "", command


NUMBERS = (
    ("lm build t.txt --output t.lm --order", "0 21 two nan 1e9"),
    ("lm build t.txt --output t.lm --memory-mib", "0 -5"),
    ("lm build t.txt --output t.lm --prune", "-1"),
    ("lm train t.txt --output t.lm --dropout", "nan 1 -0.1"),
    ("lm train t.txt --output t.lm --hidden", "0 100000000 8.5"),
    ("lm train t.txt --output t.lm --learning-rate", "0 inf nan"),
    ("lm tune m l --beam", "0 -1"),
    ("lm tune m l --alphas", "0:1:1000000000 nan:1:2 0:inf:2 1:0:2 0:1 x"),
    ("data split m --out o --seed", "-1 0.5"),
    ("data filter m o --min-s", "nan -1 x"),
    ("data shards m o --rate", "0 -1 1e9"),
    ("data shards m o --shard-mb", "0 nan inf"),
    ("data alphabet m --least", "0"),
    ("data pieces o recipe=synthetic --count", "0 10000000000"),
    ("evaluate m --batch-audio-s", "0 nan"),
    ("evaluate m --workers", "-2 100000"),
    ("transcribe m a --rate", "0 -1 1000000000"),
    ("export m --to onnx --chunk-ms", "0 nan inf"),
    ("serve m --port", "-1 70000 " + "9" * 5000),
    ("serve m --sessions", "0"),
    ("serve m --duration-s", "nan 0"),
    ("serve m --idle-s", "nan inf 0"),
)


@pytest.mark.parametrize(("command", "values"), NUMBERS, ids=lambda value: value[:40])
def test_a_number_outside_its_range_is_refused_before_any_work(
    command: str, values: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for value in values.split():
        with pytest.raises(SystemExit) as ended:
            cli.main([*command.split()[:-1], f"{command.rsplit(maxsplit=1)[-1]}={value}"])
        assert ended.value.code == 2
        printed = capsys.readouterr().err
        assert f"argument {command.rsplit(maxsplit=1)[-1]}: " in printed and len(printed) < 2000


@pytest.mark.parametrize(
    "command",
    [
        "lm build t.txt --output",
        "lm build t.txt --output t.lm --arpa",
        "lm train t.txt --output",
        "lm tune best.safetensors t.lm m.jsonl --picture",
        "align best.safetensors m.jsonl --out",
        "evaluate best.safetensors m.jsonl --out",
        "data import folder recordings",
    ],
)
def test_results_that_have_no_place_are_refused_before_the_work(
    command: str, make_model: Callable[..., Path], tone_manifest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def work(*arguments: object, **named: object) -> None:
        raise AssertionError("worked for nothing")

    monkeypatch.chdir(tmp_path)
    make_model().rename("best.safetensors")
    Path("m.jsonl").symlink_to(tone_manifest)
    Path("t.txt").write_text("a b c\nb c a\n" * 20, encoding="utf-8")
    assert cli.main(["lm", "build", "t.txt", "--output", "t.lm", "--order", "2"]) == 0
    before = set(tmp_path.iterdir())
    for owner, name in ((SentenceReader, "__iter__"), (Recogniser, "recognise"), (Recogniser, "logits")):
        monkeypatch.setattr(owner, name, work)
    monkeypatch.setattr(data, "import_corpus", work)
    for place, reason in (("m.jsonl/there", "Not a directory"), (".", "Is a directory")):
        if command.startswith("evaluate") and place == ".":  # a folder is what it wants
            continue
        capsys.readouterr()
        assert cli.main([*command.split(), place]) == 2
        printed = capsys.readouterr()
        assert f"could not be written: {reason}" in printed.err and place.rstrip(".") in printed.err and not printed.out
    assert set(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    "command",
    [
        "lm build t.txt --output t.txt",
        "lm build t.txt --output t.lm --arpa t.lm",
        "lm train t.txt --output t.txt",
        "lm convert t.txt t.txt",
        "align t.txt t.txt --out t.txt",
        "export t.txt --to torch --out t.txt",
        "export t.txt --to torch --out tokens.txt",
    ],
)
def test_a_result_replaces_no_input_and_no_other_result(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t.txt").write_text("a b c\n", encoding="utf-8")
    assert cli.main(command.split()) == 2
    assert "is read too, or is to be written twice: choose another path" in capsys.readouterr().err
    assert Path("t.txt").read_text("utf-8") == "a b c\n" and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    "command",
    [
        "align . t.txt --out best.safetensors",
        "export . --to torch --out best.safetensors",
        "lm build t.txt --model . --output best.safetensors",
        "lm train t.txt --model . --output best.safetensors",
    ],
)
def test_a_result_does_not_replace_the_model_of_a_run_folder(
    command: str,
    make_model: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    model = make_model().rename("best.safetensors").read_bytes()
    Path("t.txt").write_text("a b c\n", encoding="utf-8")
    assert cli.main(command.split()) == 2
    assert "best.safetensors is read too" in capsys.readouterr().err
    assert Path("best.safetensors").read_bytes() == model


def test_every_number_of_a_command_has_a_range() -> None:
    sources = (Path(ds2.__path__[0]) / "commands").glob("*.py")
    assert not [path.name for path in sources if re.search(r"type=(int|float)\b", path.read_text())]


def test_a_signal_is_its_own_status(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(arguments: list[str]) -> int:
        raise Stopped(signal.SIGTERM)

    stand_in = ModuleType("ds2.commands.info")
    stand_in.run = fail  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, stand_in.__name__, stand_in)
    assert cli.main(["info"]) == 143
    assert capsys.readouterr().err == "ds2: stopped by SIGTERM\n"


def test_a_fault_of_ds2_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = ModuleType("ds2.commands.info")
    stand_in.run = lambda arguments: {}["no such key"]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, stand_in.__name__, stand_in)
    with pytest.raises(KeyError):
        cli.main(["info"])


@pytest.mark.parametrize(
    ("command", "output"),
    [
        ("lm build t.txt --output a.lm", "a.lm"),
        ("lm tune best.safetensors t.lm {dev} --device cpu", "best-decode.yaml"),
        ("export best.safetensors --to onnx --interface plain --out a.onnx", "a.onnx"),
    ],
)
def test_a_second_process_computes_nothing_that_the_first_one_replaces(
    command: str,
    output: str,
    make_model: Callable[..., Path],
    tone_manifest: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    make_model().rename("best.safetensors")
    Path("t.txt").write_text("ab\n", encoding="utf-8")
    assert cli.main(["lm", "build", "t.txt", "--output", "t.lm", "--order", "1", "--symbols", "abc "]) == 0
    with sole_writer(Path(output)):
        assert cli.main(command.format(dev=tone_manifest).split()) == 2
    assert f"{output} is written by another process" in capsys.readouterr().err
