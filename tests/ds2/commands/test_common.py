"""What commands share: arguments and options in any order."""

from __future__ import annotations

import argparse
from itertools import permutations

import pytest

from ds2.commands.common import Parser


def parser() -> Parser:
    made = Parser(prog="ds2 try")
    made.add_argument("model")
    made.add_argument("manifests", nargs="*")
    made.add_argument("--device")
    made.add_argument("--quiet", action="store_true")
    return made


def test_options_may_stand_anywhere_among_arguments() -> None:
    pieces = (["m"], ["a", "b"], ["--device", "cpu"], ["--quiet"])
    for order in permutations(pieces):
        if order.index(pieces[0]) < order.index(pieces[1]):
            given = parser().parse_args([word for piece in order for word in piece])
            assert (given.model, given.manifests, given.device, given.quiet) == ("m", ["a", "b"], "cpu", True)


def test_below_a_command_too(capsys: pytest.CaptureFixture[str]) -> None:
    above = Parser(prog="ds2 data")
    commands = above.add_subparsers(dest="command")
    below = commands.add_parser("alphabet")
    below.add_argument("arguments", nargs="+")
    below.add_argument("--out")
    given = above.parse_args(["alphabet", "a", "--out", "x", "alphabet.locale=tr"])
    assert (given.command, given.arguments, given.out) == ("alphabet", ["a", "alphabet.locale=tr"], "x")
    with pytest.raises(SystemExit):
        above.parse_args(["alphabet", "a", "--none"])
    assert "usage: ds2 data alphabet" in capsys.readouterr().err


def test_what_follows_two_dashes_is_no_option_and_one_dash_is_an_argument() -> None:
    for words in (["m", "--", "--a", "-b"], ["--", "m", "--a", "-b"]):
        assert parser().parse_args(words) == argparse.Namespace(
            model="m", manifests=["--a", "-b"], device=None, quiet=False
        )
    assert parser().parse_args(["m", "-", "--quiet"]).manifests == ["-"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "arguments are required: model"),
        (["m", "--none"], "unrecognized arguments: --none"),
        (["m", "--device"], "expected one argument"),
    ],
)
def test_mistakes_are_named_with_the_whole_usage(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        parser().parse_args(words)
    assert end.value.code == 2
    shown = capsys.readouterr().err
    assert said in shown and "[--quiet]" in shown and "model" in shown.split("error")[0]
