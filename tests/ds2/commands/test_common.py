"""What commands share: arguments and options in any order."""

from __future__ import annotations

import argparse
import socket
from itertools import permutations
from pathlib import Path

import pytest

from ds2.cli import main
from ds2.commands.common import NumberArgument, Parser, manifests_of, real, whole
from ds2.config.allowed import COUNT, UNLIMITED, Range
from ds2.config.schema import ConfigError


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
            parsed = parser().parse_args([word for piece in order for word in piece])
            assert (parsed.model, parsed.manifests, parsed.device, parsed.quiet) == ("m", ["a", "b"], "cpu", True)


def test_below_a_command_too(capsys: pytest.CaptureFixture[str]) -> None:
    above = Parser(prog="ds2 data")
    commands = above.add_subparsers(dest="command")
    below = commands.add_parser("alphabet")
    below.add_argument("arguments", nargs="+")
    below.add_argument("--out")
    parsed = above.parse_args(["alphabet", "a", "--out", "x", "alphabet.locale=tr"])
    assert (parsed.command, parsed.arguments, parsed.out) == ("alphabet", ["a", "alphabet.locale=tr"], "x")
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
    "words",
    [
        ["export", "english", "--to", "onnx", "--out", ""],
        ["evaluate", "english", "t.jsonl", "--out="],
        ["data", "split", "t.jsonl", "--out", ""],
        ["data", "stats", ""],
    ],
)
def test_an_empty_path_is_not_the_working_folder(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status: int | str | None = main(words)
    except SystemExit as end:
        status = end.code
    assert status == 2
    assert "is empty: name a file or a folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "arguments are required: model"),
        (["m", "--none"], "unrecognized arguments: --none"),
        (["m", "--device"], "expected one argument"),
    ],
)
def test_mistakes_are_named_with_the_whole_usage(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        parser().parse_args(words)
    assert end.value.code == 2
    shown = capsys.readouterr().err
    assert message in shown and "[--quiet]" in shown and "model" in shown.split("error")[0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("lm trian", "did you mean 'train'?"),
        ("data statz", "did you mean 'stats'?"),
        ("data import librispeach x y", "did you mean 'librispeech'?"),
        ("transcribe m x.wav --format str", "did you mean 'srt'?"),
        ("evaluate m --rubustness 5", "did you mean '--robustness'?"),
        ("lm train t --output o --layerz=3", "did you mean '--layers'?"),
        ("lm quack", "'tune')\n"),  # nothing is near
    ],
)
def test_a_misspelt_word_gets_a_suggestion(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(words.split())
    assert end.value.code == 2
    assert capsys.readouterr().err.endswith(message if message.endswith("\n") else f"{message}\n")


@pytest.mark.parametrize("words", ["evaluate", "lm tune"])
def test_what_may_be_left_out_is_not_asked_for(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(words.split())
    assert "manifests" not in capsys.readouterr().err.split("required: ")[1]


def test_manifests_that_a_model_names_are_asked_for_where_they_are_not(tmp_path: Path) -> None:
    model, manifest = tmp_path / "best.safetensors", tmp_path / "test.jsonl"
    manifest.touch()
    assert manifests_of(model, ["other.jsonl"], ["gone.jsonl"], "data.test") == [Path("other.jsonl")]
    assert manifests_of(model, [], [str(manifest)], "data.test") == [manifest]
    with pytest.raises(ConfigError, match=r"data.test of its config, gone.jsonl, is not here: add MANIFEST"):
        manifests_of(model, [], [str(manifest), "gone.jsonl"], "data.test")
    with pytest.raises(ConfigError, match=r"it names none \(data.dev is empty\): add MANIFEST"):
        manifests_of(model, [], [], "data.dev")


def test_serve_says_where_it_cannot_listen_before_it_loads_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("uvicorn")
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert main(["serve", "none", "--port", str(port)]) == 2
        assert (
            f"cannot listen on 127.0.0.1:{port} (Address already in use): give another --port"
            in capsys.readouterr().err
        )
    assert main(["serve", "none", "--host", "192.0.2.1"]) == 2
    assert "--host is an address of this machine" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "shown"),
    [
        (whole(1, 64), "1 to 64"),
        (whole(0, COUNT), "0 or more"),
        (real(0, 60_000, above=True), "above 0 to 60000"),
        (real(0, UNLIMITED, above=True), "above 0"),
        (NumberArgument(float, Range(0, 1, below=True)), "0 to below 1"),
    ],
)
def test_help_shows_default_and_range_of_numbers(kind: NumberArgument, shown: str) -> None:
    made = Parser(prog="ds2 try")
    made.add_argument("--with", type=kind, default=5, help="a number")
    made.add_argument("--without", type=kind, help="another, default: by device")
    text = " ".join(made.format_help().split())
    assert f"a number (default 5, {shown})" in text
    assert f"another, default: by device ({shown})" in text


def test_help_of_the_server_shows_all_limits(capsys: pytest.CaptureFixture[str]) -> None:
    limits = pytest.importorskip("ds2.serve.limits").Limits()
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for option, default in (
        ("--port", 2700),
        ("--uploads-mb", limits.uploads_bytes >> 20),
        ("--sessions", limits.sessions),
        ("--duration-s", limits.duration_s),
        ("--idle-s", limits.idle_s),
    ):
        about = text.rpartition(f" {option} ")[2]
        assert f"(default {default:g}, " in about[:250], option
    assert f"an upload has {limits.upload_bytes >> 20} MiB at most" in text
    assert f"a message of a WebSocket {limits.message_bytes >> 20} MiB" in text


@pytest.mark.parametrize("words", ["data check", "data alphabet", "lm ppl"])
def test_help_of_a_sub_command_says_what_it_does(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    group, name = words.split()
    with pytest.raises(SystemExit):
        main([group, "--help"])
    summary = capsys.readouterr().out.split(f"    {name} ")[1].split("\n")[0].strip()
    with pytest.raises(SystemExit):
        main([group, name, "--help"])
    assert summary in " ".join(capsys.readouterr().out.split("options:")[0].split())
