"""One base for every error of ds2: a new class cannot be forgotten, and each becomes one line and status 2."""

from __future__ import annotations

import inspect
import pkgutil
import signal
import sys
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType

import pytest

import ds2
from ds2 import cli
from ds2.system.errors import UserError
from ds2.system.stops import Stopped


def exception_classes() -> Iterator[type[BaseException]]:
    """Every exception class that a module of ds2 defines; only those of Exception are errors."""
    for found in pkgutil.walk_packages(ds2.__path__, "ds2."):
        module = import_module(found.name)
        for value in vars(module).values():
            if inspect.isclass(value) and issubclass(value, BaseException) and value.__module__ == found.name:
                yield value


CLASSES = sorted({c for c in exception_classes() if issubclass(c, Exception)}, key=lambda c: c.__qualname__)


def test_the_walk_finds_them() -> None:
    assert {c.__name__ for c in exception_classes() if not issubclass(c, Exception)} == {"Stopped"}  # by a signal
    assert {"UserError", "AudioError", "ConfigError", "AlphabetError", "CacheError"} <= {c.__name__ for c in CLASSES}


@pytest.mark.parametrize("error", CLASSES, ids=lambda c: c.__name__)
def test_every_error_derives_from_the_one_that_users_can_mend(error: type[Exception]) -> None:
    assert issubclass(error, UserError)


@pytest.mark.parametrize("command", cli.COMMANDS)
@pytest.mark.parametrize("error", CLASSES, ids=lambda c: c.__name__)
def test_every_error_is_one_line_and_status_2_of_every_command(
    error: type[UserError], command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(arguments: list[str]) -> int:
        raise error.__new__(error, "what was given, what is allowed, the way out")

    stand_in = ModuleType(f"ds2.commands.{command}")
    stand_in.run = fail  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, stand_in.__name__, stand_in)
    assert cli.main([command]) == 2
    printed = capsys.readouterr()
    assert printed.err == "ds2: what was given, what is allowed, the way out\n" and printed.out == ""


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
