"""Shared by commands: the argument parser, arguments that several have, and errors as messages."""

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds2.audio.read import MAX_CHANNELS
from ds2.config.allowed import COUNT, Range
from ds2.config.schema import ConfigError
from ds2.decoding.phrases import ALLOWANCE, DEFAULT_ALLOWANCE
from ds2.distributed.launcher import yield_to_rank_0
from ds2.model.shipped import DEFAULT
from ds2.system import USER_ERROR, UserError
from ds2.system.files import describe_full_disk
from ds2.system.plain import did_you_mean, short_repr
from ds2.system.signals import Stopped, kill_workers, raise_on_stop_signals
from ds2.system.terminal import visible

# Sections whose overrides a Parser may take as arguments.
ALL_SETTINGS, ALPHABET_SETTINGS, DECODER_SETTINGS = "", "alphabet", "decode"


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that accepts options before, between and after arguments, and suggests corrections.

    argparse alone ends an optional list at the first option, and refuses the arguments behind that option:
    `ds2 evaluate MODEL --device cpu MANIFEST`.

    Args:
        settings: the section of the configuration whose overrides are arguments too, in `overrides` of the parsed
            arguments unless they are ALL_SETTINGS, of which the parser has an argument; None: no overrides.
        arguments, others: as of argparse.
    """

    _mixing = False

    def __init__(self, *arguments: Any, settings: str | None = None, **others: Any) -> None:
        others.setdefault("formatter_class", _HelpFormatter)
        super().__init__(*arguments, **others)
        self.settings = settings

    def actions(self) -> list[argparse.Action]:
        """Return its options and arguments, in order."""
        return self._actions

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse as argparse does, which calls this again for each kind of argument; refuse unknown arguments."""
        if self.settings and not self._mixing:
            from ds2.commands.compose import split_overrides  # imported late: other commands need no Hydra

            overrides, args = split_overrides(args or (), self.settings)
            namespace = argparse.Namespace(overrides=overrides)
        if self._mixing or self._subparsers is not None or "--" in (args or ()):  # Python 3.11 would drop the --
            return super().parse_known_args(args, namespace)
        self._mixing = True
        try:
            parsed, unknown = self.parse_known_intermixed_args(args, namespace)
        finally:
            self._mixing = False
        if unknown:
            hint = did_you_mean(unknown[0].split("=")[0], self._option_string_actions)
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return parsed, []

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        if action.type is Path and not arg_string:  # of an unset variable of a shell; Path("") is the working folder
            raise argparse.ArgumentError(action, "is empty: name a file or a folder; the working folder is .")
        return super()._get_value(action, arg_string)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            hint = did_you_mean(str(value), action.choices or ())
            raise argparse.ArgumentError(action, f"{error.message}{hint}") from error


def add_command(
    commands: Any, name: str, summary: str, run: Callable[[argparse.Namespace], int | None], **others: Any
) -> Parser:
    """Add a sub-command whose summary is in the list of commands and at the head of its own help.

    Args:
        commands: what `add_subparsers` returned.
        run: the attribute `run` of the parsed arguments: takes them and returns the exit status, None for 0.
    """
    others.setdefault("description", summary)
    parser: Parser = commands.add_parser(name, help=summary, **others)
    parser.set_defaults(run=run)
    return parser


class _HelpFormatter(argparse.HelpFormatter):
    """Ends the help of an option that is a number with its default and the numbers that it allows."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        if not isinstance(action.type, NumberArgument):
            return text
        has_default = action.default is not None and not isinstance(action.default, list) and "default" not in text
        default = f"default {action.default:g}, " if has_default else ""
        return f"{text} ({default}{action.type})".strip()


def manifests_of(model_file: Path, paths: Sequence[str | Path], configured: Sequence[str], key: str) -> list[Path]:
    """Return the manifests of the command line, or else those of the model's config.

    Args:
        model_file: for the message.
        paths: of the command line.
        configured: by `key` of the model's config, relative to the folder in which it was trained.
        key: data.dev or data.test.

    Raises:
        ConfigError: the command line has none, and the config has none or one that does not exist.
    """
    if paths or (configured and all(Path(path).is_file() for path in configured)):
        return [Path(path) for path in paths or configured]
    missing = next((path for path in configured if not Path(path).is_file()), "")
    lacks = f"{key} of its config, {missing}, is not here" if missing else f"it names none ({key} is empty)"
    raise ConfigError(f"{model_file}: no manifests were given, and {lacks}: add MANIFEST... to the command")


def add_model(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    """Add MODEL. An optional one is of a live command: without it `default_model` of ds2.model.shipped is meant."""
    kinds = "model file or run folder of a unidirectional model, or" if optional else "model file, run folder or"
    default = f" (default: {DEFAULT})" if optional else ""
    parser.add_argument(
        "model", type=Path, nargs="?" if optional else None, help=f"{kinds} a name of `ds2 models`{default}"
    )


def add_device(parser: argparse.ArgumentParser, *, precision: bool = False) -> None:
    """Add --device and, of commands that allow one, --precision."""
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N")
    if precision:
        parser.add_argument(
            "--precision", default="auto", choices=["fp32", "bf16", "auto"],
            help="auto: on a GPU the precision that the model was trained in, on a CPU fp32",
        )  # fmt: skip


def add_channel(parser: argparse.ArgumentParser) -> None:
    """Add --channel, which is data.channel in training."""
    parser.add_argument(
        "--channel", type=whole(0, MAX_CHANNELS), default=0, metavar="N",
        help="of files with several: 1 is the first, 0 their average",
    )  # fmt: skip


def add_phrases(parser: argparse.ArgumentParser) -> None:
    """Add --phrases and --allowance, as `Recogniser.only_phrases` takes them."""
    parser.add_argument(
        "--phrases",
        action="append",
        default=[],
        metavar="PHRASE",
        help="recognise only these phrases, such as 'turn [the] (light|lamp) (on|off)' or 'set volume to <0-100>'; "
        "other speech is [unk]; may be repeated",
    )
    parser.add_argument(
        "--allowance",
        type=NumberArgument(float, ALLOWANCE),
        metavar="NATS",
        help="how much less probable than other speech a phrase may be, natural log a letter: a larger value finds "
        f"more phrases, and more that nobody said (default {DEFAULT_ALLOWANCE})",
    )


@dataclass(frozen=True)
class NumberArgument:
    """The `type` of an argument that is a number in a range of the configuration schema; its str is for the help."""

    kind: type[int] | type[float]
    allowed: Range

    def __call__(self, text: str) -> float:
        """Convert the text, as argparse asks for."""
        with suppress(ValueError):
            value = self.kind(text)
            if value in self.allowed:
                return value
        wanted = f"{'whole ' * (self.kind is int)}{self.allowed}"
        raise argparse.ArgumentTypeError(f"{short_repr(text)} is not allowed: {wanted}")

    def __str__(self) -> str:
        low, high = (f"{limit:.15g}" for limit in (self.allowed.low, self.allowed.high))
        if self.allowed.high >= COUNT:
            return f"above {low}" if self.allowed.above else f"{low} or more"
        low = f"above {low}" if self.allowed.above else low
        return f"{low} to {'below ' if self.allowed.below else ''}{high}"


def whole(low: int, high: int) -> NumberArgument:
    """Return the `type` of an argument that is an integer between `low` and `high`, inclusive."""
    return NumberArgument(int, Range(low, high))


def real(low: float, high: float, *, above: bool = False) -> NumberArgument:
    """Return the `type` of an argument that is a number between `low` and `high`; `above` excludes `low`."""
    return NumberArgument(float, Range(low, high, above))


def report_errors(action: Callable[[], int]) -> int:
    """Run `action`; user errors become one message and status 2, SIGTERM status 143, SIGINT 130.

    Other exceptions keep their traceback.
    """
    try:
        with raise_on_stop_signals():
            status = action()
            sys.stdout.flush()
            return status
    except Stopped as stopped:
        kill_workers()
        print(f"ds2: stopped by {stopped}", file=sys.stderr)
        return stopped.status
    except BrokenPipeError:  # the reader of our output has closed it: `ds2 ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except (UserError, OSError) as error:
        yield_to_rank_0()
        print(visible(f"ds2: {error}{describe_full_disk(error)}"), file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        print("ds2: interrupted", file=sys.stderr)
        return 130
