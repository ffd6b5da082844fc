"""`ds2 init FOLDER`: a folder to work in, with a recipe that extends one of ours and a page of three commands."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from ds2.commands.common import Parser
from ds2.commands.compose import choices
from ds2.config.schema import ConfigError
from ds2.system.files import files_beneath, write_text

_RECIPE = """\
# A recipe of your own: ds2 train --config-dir conf recipe=mine
# It sets what differs from the recipe that it extends; `ds2 train --help` lists all keys.
defaults:
  - {base}
  # - override /model: lstm_4_512
  # - override /alphabet: mine  # conf/alphabet/mine.yaml, which `ds2 data alphabet` writes
  - _self_

run_dir: runs/mine

# Your own speech: ds2 data import folder RECORDINGS all.jsonl && ds2 data split all.jsonl --out corpora/mine
# data:
#   prepare: ""
#   train: [corpora/mine/train.jsonl]
#   dev: [corpora/mine/dev.jsonl]
#   test: [corpora/mine/test.jsonl]
"""
_README = """\
# {name}

Made by `ds2 init`. Run the commands in this folder:

    ds2 data check --config-dir conf recipe=mine   # makes manifests, reads everything, says whether to start
    ds2 train --config-dir conf recipe=mine        # trains, and resumes after an interruption
    ds2 evaluate runs/mine                         # the word error rate, with a report beside the model

`conf/recipe/mine.yaml` extends `recipe={base}`. Further files of `conf` (`conf/model/NAME.yaml`,
`conf/alphabet/NAME.yaml`) are choices besides those of ds2: `model=NAME`.
"""
_IGNORED = "/runs/\n/corpora/\n"


def make_parser() -> Parser:
    parser = Parser(
        prog="ds2 init", description="make a folder with a recipe of your own and a README of three commands"
    )
    parser.add_argument("folder", type=Path, help="new or empty")
    parser.add_argument(
        "--recipe", choices=choices("recipe"), default="synthetic", metavar="NAME",
        help="the recipe that yours extends (synthetic, which needs no corpus)",
    )  # fmt: skip
    return parser


def run(arguments: Sequence[str]) -> None:
    """`ds2 init FOLDER [--recipe NAME]`: write the folder."""
    args = make_parser().parse_args(arguments)
    folder: Path = args.folder
    texts = {
        "README.md": _README.format(name=folder.resolve().name, base=args.recipe),
        "conf/recipe/mine.yaml": _RECIPE.format(base=args.recipe),
        ".gitignore": _IGNORED,
    }

    def is_own(file: Path) -> bool:  # of an earlier call, which may have met a full disk, or of `git init`
        name = file.relative_to(folder).as_posix()
        return name.split("/")[0] == ".git" or (name in texts and file.read_bytes() == texts[name].encode())

    if folder.exists() and not (folder.is_dir() and all(map(is_own, files_beneath(folder)))):
        raise ConfigError(f"{folder} is not empty: ds2 init writes into a new or empty folder")
    for name, text in texts.items():
        write_text(folder / name, text)
    place = shlex.quote(f"./{folder}" if str(folder).startswith("-") else str(folder))
    print(f"{folder}: wrote {', '.join(texts)}\nnext: cd {place} && ds2 data check --config-dir conf recipe=mine")
