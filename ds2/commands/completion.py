"""`ds2 completion bash|zsh|fish`: a script that completes commands, options and their choices, groups and keys.

The script holds all words, so that completing a word starts no process of Python; it is of this version of ds2.
"""

import pkgutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.resources import files

import ds2.commands
from ds2.commands.common import ALL_SETTINGS, DECODER_SETTINGS, Parser
from ds2.commands.compose import config_dir
from ds2.commands.train import HYDRA_OPTIONS
from ds2.config.convert import documented_keys

_CASES = "# THE CASES OF ALL COMMANDS\n"  # a line of completion.bash, .zsh and .fish, which are the rest of the scripts
_DIRECTLY = "test (count (commandline -opc)) -eq {count}"


@dataclass(frozen=True)
class Command:
    """The words, options and settings that may follow a command on the command line."""

    name: str  # the words before, such as `data import`; empty for ds2 itself
    words: tuple[str, ...]  # its sub-commands, or the choices of its arguments
    options: Mapping[str, tuple[str, ...] | None]  # the values that each allows; (): any, None: it takes none
    settings: str | None = None  # the section whose overrides are arguments; None: it takes no overrides

    def overrides(self) -> list[str]:
        """Return groups with their choices, and keys that end in `=`."""
        if self.settings is None:
            return []
        choices = sorted(config_dir().glob("*/*.yaml"), key=lambda path: (path.parent.name != "recipe", path))
        groups = [f"{path.parent.name}={path.stem}" for path in choices]
        keys = [f"{key.name}=" for _, _, section in documented_keys() for key in section]
        return [word for word in (*groups, *keys) if word.startswith(self.settings)]


def make_parser() -> Parser:
    parser = Parser(prog="ds2 completion", description="a script that lets the Tab key complete the arguments of ds2")
    parser.add_argument("shell", choices=["bash", "zsh", "fish"])
    return parser


def run(arguments: Sequence[str]) -> None:
    """`ds2 completion SHELL`: print the script."""
    shell = make_parser().parse_args(arguments).shell
    tree = list(command_tree())
    words = "words" if shell == "bash" else "candidates"  # words is a variable of zsh's own
    lines = _fish_lines(tree) if shell == "fish" else _cases(tree, words)
    script = files("ds2.commands").joinpath(f"completion.{shell}").read_text(encoding="utf-8")
    print(script.replace(_CASES, "".join(f"{line}\n" for line in lines)), end="")


def command_tree() -> Iterator[Command]:
    """Yield ds2 itself, each command and each sub-command."""
    below: list[Command] = []
    names = []
    for module in sorted(module.name for module in pkgutil.iter_modules(ds2.commands.__path__)):
        parser_of = getattr(import_module(f"ds2.commands.{module}"), "make_parser", None)
        if parser_of is not None:
            names.append(module)
            below += _commands(module, parser_of())
    options: dict[str, tuple[str, ...] | None] = {
        **{name: ("job", "hydra", "all") if takes_value else None for name, takes_value in HYDRA_OPTIONS.items()},
        **{"--package": (), "-p": (), "--config-dir": (), "--help": None},
    }
    yield Command("", (*names, "train"), {"--help": None, "--version": None})
    yield Command("train", (), options, ALL_SETTINGS)
    yield from below


def _commands(name: str, parser: Parser) -> Iterator[Command]:
    words: list[str] = []
    options: dict[str, tuple[str, ...] | None] = {}
    below: dict[str, Parser] = {}
    for action in parser.actions():
        choices = action.choices or ()
        if isinstance(choices, dict):
            below = choices
        elif not action.option_strings:
            words += choices
        for option in action.option_strings:
            options[option] = None if action.nargs == 0 else tuple(map(str, choices))
    if parser.settings not in (None, DECODER_SETTINGS):
        options["--config-dir"] = ()
    yield Command(name, (*below, *words), options, parser.settings)
    for sub_command, its_parser in below.items():
        yield from _commands(f"{name} {sub_command}", its_parser)


def _cases(tree: Sequence[Command], words: str) -> Iterable[str]:
    """Return statements for bash and zsh that set the variable `words`, or `values` after an option with a value.

    One blank in `values` stands for any value, such as a file.
    """
    sections = {command.settings: command.overrides() for command in tree if command.settings is not None}
    lines = [f"    local {_section(name)}='{' '.join(overrides)}'" for name, overrides in sections.items()]
    lines.append('    case "$command " in')
    for command in sorted(tree, key=lambda command: -len(command.name.split())):
        following = [*command.words, *command.options]
        if command.settings is not None:
            following.append(f"${_section(command.settings)}")
        lines.append(f'    "{command.name} "*)' if command.name else '    " ")')
        lines.append(f'        {words}="{" ".join(following)}"')
        listed = {option: values for option, values in command.options.items() if values}
        cases = [f"{option}) values='{' '.join(values)}'" for option, values in listed.items()]
        if free := "|".join(option for option, values in command.options.items() if values == ()):
            cases.append(f"{free}) values=' '")
        if cases:
            lines += ['        case "$option" in', *(f"        {case} ;;" for case in cases), "        esac"]
        lines.append("        ;;")
    return [*lines, "    esac"]


def _section(settings: str) -> str:
    return f"{settings or 'all'}_settings"


def _fish_lines(tree: Sequence[Command]) -> Iterable[str]:
    for command in tree:
        count = len(command.name.split())
        directly = _DIRECTLY.format(count=count + 1)
        after = f"__ds2_after {command.name}" if command.name else directly
        if command.words:
            yield f"complete -c ds2 -n '{after}; and {directly}' -a '{' '.join(command.words)}'"
        if overrides := command.overrides():
            yield f"complete -c ds2 -n '{after}' -a '{' '.join(overrides)}'"
        for option, values in command.options.items():
            kind = "l" if option.startswith("--") else "s" if len(option) == 2 else "o"
            value = "" if values is None else f" -x -a '{' '.join(values)}'" if values else " -r"
            yield f"complete -c ds2 -n '{after}' -{kind} {option.lstrip('-')}{value}"
