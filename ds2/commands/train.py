"""`ds2 train`: compose and check the configuration, then train; with --multirun once per point of a sweep."""

from __future__ import annotations

import difflib
import logging
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from ds2.commands.common import own_folders, report_errors, with_search_path
from ds2.commands.compose import (
    PRIMARY_CONFIG,
    compose_config,
    config_dir,
    first_of_sweep,
    open_free_form,
    parse_override,
    read_config,
    register,
)
from ds2.commands.sweep import Job, finish, folder_name
from ds2.config.convert import documented_keys
from ds2.config.schema import ConfigError
from ds2.distributed.launcher import launched
from ds2.system.signals import default_signals

log = logging.getLogger(__name__)
_HEAD = """\
usage: ds2 train [KEY=VALUE ...] [GROUP=CHOICE ...] [--multirun] [--config-dir DIR] [--cfg job [--resolve]]

Train, or go on where run_dir stopped: ds2 train recipe=an4 model.depth=8 run_dir=runs/deeper

  --config-dir DIR   your own recipes and groups: DIR/recipe/mine.yaml is recipe=mine
  --multirun, -m     a run for each of several values: optim.learning_rate=1e-3,2e-3; ends with a ranking
  --cfg job          print the configuration instead of training; --resolve fills in what refers to other keys
  --hydra-help       what Hydra itself offers
"""
HYDRA_OPTIONS = {"--multirun": 0, "-m": 0, "--cfg": 1, "-c": 1, "--resolve": 0, "--package": 1, "-p": 1, "--info": 0,
              "-i": 0, "--hydra-help": 0}  # fmt: skip
_REFUSED = {
    "--shell-completion": "`ds2 completion bash|zsh|fish` prints a script for all commands",
    "--config-name": "there is one primary config: put what differs into a recipe (--config-dir DIR recipe=NAME)",
    "--config-path": "your own configs are added, not put in place of ours: --config-dir DIR",
    "--run": "it is what `ds2 train` does",
    "--experimental-rerun": "the same command again resumes the run; its config lies in run_dir/config.yaml",
}
_WIDTH = 120
_SHORT = {"-sc": "--shell-completion", "-cn": "--config-name", "-cp": "--config-path", "-r": "--run"}


def run(arguments: Sequence[str]) -> int:
    """`ds2 train [OVERRIDE...] [--multirun]`: return the worst status of its runs."""
    if "--help" in arguments or "-h" in arguments:
        print(help_text(own_folders(arguments)), end="")
        return 0
    options, overrides = options_and_overrides(with_search_path(arguments))
    config = compose_config(first_of_sweep(overrides))
    jobs: list[Job] = []

    def job(composed: DictConfig) -> None:
        status = report_errors(lambda: _train(composed))
        facts = HydraConfig.get()
        name = facts.job.override_dirname if facts.mode == RunMode.MULTIRUN else ""
        jobs.append(Job(name, Path(facts.runtime.output_dir), status))

    register()
    OmegaConf.register_new_resolver("ds2.folder_name", folder_name, replace=True)
    keys: dict[str, bool] = {}
    for override in map(parse_override, overrides):
        keys[override.key_or_group] = override.is_sweep_override()  # the last one of equal keys counts
    fixed = ",".join(key for key, swept in keys.items() if not swept)
    named = f"hydra.job.config.override_dirname.exclude_keys=[{fixed}]"
    sys.argv = ["ds2 train", *options, *open_free_form(overrides), *([named] if is_sweep(options) else [])]
    hydra.main(config_path=str(config_dir()), config_name=PRIMARY_CONFIG, version_base="1.3")(job)()
    if is_sweep(options) and jobs and launched().rank == 0:
        print(finish(jobs[0].run_dir.parent, jobs, config.train.metric))
    return max((job.status for job in jobs), default=0)


def fit(overrides: Sequence[str]) -> Path:
    """Train as `ds2 train` does, in this process; see `ds2.train`."""
    if isinstance(overrides, str) or not all(isinstance(override, str) for override in overrides):
        raise ConfigError("train(...) takes overrides as on the command line: train('recipe=an4', 'run_dir=runs/an4')")
    config = compose_config(overrides)
    from ds2.training.loop import train

    if train(config, Path(config.run_dir)):
        raise KeyboardInterrupt("training was stopped and saved; the same call goes on from there")
    return Path(config.run_dir)


def is_sweep(options: Sequence[str]) -> bool:
    """Return whether the options ask for a sweep."""
    return not {"-m", "--multirun"}.isdisjoint(options)


def _train(composed: DictConfig) -> int:
    job = HydraConfig.get()
    run_dir = Path(job.runtime.output_dir) if job.mode == RunMode.MULTIRUN else None
    config, inheritance = read_config(composed, list(job.overrides.task), run_dir)
    if inheritance.replaced:
        log.info("as in %s: %s", config.checkpoint.init_from, inheritance.replaced)
    if inheritance.differing:
        log.warning("unlike %s, as you set it: %s", config.checkpoint.init_from, inheritance.differing)
    with default_signals():
        from ds2.training.loop import (
            train,  # imported late: mistakes in the settings are reported before torch is loaded
        )

    return train(config, Path(config.run_dir))


def options_and_overrides(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separate the options for Hydra from the overrides.

    Raises:
        ConfigError: an option is unknown, or does not work with `ds2 train`.
    """
    options, overrides = [], []
    pending = iter(arguments)
    for argument in pending:
        name = argument.split("=", 1)[0]
        full = _SHORT.get(name, name)
        if not argument.startswith("-"):
            overrides.append(argument)
        elif full in _REFUSED:
            raise ConfigError(f"{name} does not work with `ds2 train`: {_REFUSED[full]}")
        elif name not in HYDRA_OPTIONS:
            close = difflib.get_close_matches(name, [*HYDRA_OPTIONS, "--help", "--config-dir"], n=1, cutoff=0.6)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ConfigError(f"unknown option {argument!r}{hint} (a setting is KEY=VALUE: `ds2 train --help`)")
        else:
            options.append(argument)
            if HYDRA_OPTIONS[name] and "=" not in argument:
                value = next(pending, "")
                if not value:
                    raise ConfigError(f"{argument} needs a value: --cfg job")
                options.append(value)
    if is_sweep(options) and any(option.startswith(("--cfg", "-c")) for option in options):
        raise ConfigError("--cfg shows one configuration, --multirun trains several: leave one of the two out")
    if "--resolve" in options and not any(option.startswith(("--cfg", "-c")) for option in options):
        raise ConfigError("--resolve needs --cfg, which shows a configuration: --cfg job --resolve")
    return options, overrides


def help_text(own: Sequence[Path] = ()) -> str:
    """Return usage, the choices of each group and every key with its default and comment.

    Args:
        own: folders of --config-dir.
    """
    lines = [_HEAD, "Groups and their choices (* yours):", ""]
    groups = sorted({path.parent.name for folder in (config_dir(), *own) for path in folder.glob("*/*.yaml")})
    for group in sorted(groups, key=lambda name: name != "recipe"):
        ours, theirs = _choices([config_dir()], group), _choices(own, group)
        shown = [*(f"{name}*" for name in theirs), *(name for name in ours if name not in theirs)]
        lines += textwrap.wrap(
            " | ".join(shown), _WIDTH, initial_indent=f"  {group + '=':<12}", subsequent_indent=" " * 14
        )
    lines += ["", "Keys with their defaults (a recipe may set others: --cfg job shows them):"]
    for _, about, keys in documented_keys():
        lines += ["", f"  {about}"] if about else [""]
        for key in keys:
            lines.append(f"  {f'{key.name}={key.default}':<44} {key.comment}".rstrip())
    return "\n".join(lines) + "\n"


def _choices(folders: Sequence[Path], group: str) -> list[str]:
    return sorted({path.stem for folder in folders for path in (folder / group).glob("*.yaml")})
