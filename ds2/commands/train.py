"""`ds2 train`: compose and check the configuration, then train; with --multirun once per point of a sweep.

The result of a sweep is a table that ranks its runs, and a picture of their dev scores.
"""

import hashlib
import logging
import math
import re
import sys
import textwrap
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from ds2.commands import compose
from ds2.commands.common import report_errors
from ds2.config.convert import documented_keys
from ds2.config.schema import Config, ConfigError
from ds2.distributed.launcher import launched
from ds2.system import UserError
from ds2.system.files import new_figure, read_log, save_picture, write_text
from ds2.system.machine import quick_imports
from ds2.system.plain import did_you_mean
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
              "-i": 0, "--hydra-help": 0}  # how many values each takes # fmt: skip
_REFUSED = {
    "--shell-completion": "`ds2 completion bash|zsh|fish` prints a script for all commands",
    "--config-name": "there is one primary config: put what differs into a recipe (--config-dir DIR recipe=NAME)",
    "--config-path": "your own configs are added, not put in place of ours: --config-dir DIR",
    "--run": "it is what `ds2 train` does",
    "--experimental-rerun": "the same command again resumes the run; its config lies in run_dir/config.yaml",
}
_WIDTH = 120  # of the help
_LONGEST_NAME, _MOST_BYTES = 120, 240  # of a folder, in characters and in UTF-8: most file systems take 255
ALL = "all"  # name of a job that differs in nothing
_SHORT = {"-sc": "--shell-completion", "-cn": "--config-name", "-cp": "--config-path", "-r": "--run"}


def run(arguments: Sequence[str]) -> int:
    """`ds2 train [OVERRIDE...] [--multirun]`: return the worst status of its runs."""
    if "--help" in arguments or "-h" in arguments:
        print(help_text(compose.split_config_dirs(arguments)[1]), end="")
        return 0
    options, overrides = options_and_overrides(compose.with_search_path(arguments))
    settings = compose.compose_settings(compose.first_of_sweep(overrides) if is_sweep(options) else overrides)
    if not options and not any(override.lstrip("+~").startswith("hydra") for override in overrides):
        return _train(*settings, default_signals())  # `hydra.main` would compose the same once more
    if is_sweep(options):
        compose.check_sweep(overrides)
    jobs: list[Job] = []
    remaining: list[str] = []

    def job(composed: DictConfig) -> None:
        facts = HydraConfig.get()
        name = facts.job.override_dirname.replace("++", "") if facts.mode == RunMode.MULTIRUN else ""
        folder = Path(facts.runtime.output_dir)
        if any(other.stopped for other in jobs):  # the signal that stopped it is meant for the sweep
            remaining.append(name)
            return
        twins = [other.name for other in jobs if other.run_dir == folder]

        def train() -> int:
            if twins:
                raise ConfigError(
                    f"{name} and {twins[0]} of this sweep have one folder, {folder}: train them as runs of their own"
                )
            run_dir = folder if facts.mode == RunMode.MULTIRUN else None
            return _train(*compose.read_config(composed, list(facts.overrides.task), run_dir), default_signals())

        status = report_errors(train)
        jobs.append(Job(name or ALL, folder / "refused" if twins else folder, status))

    compose.register_schema()
    OmegaConf.register_new_resolver("ds2.folder_name", folder_name, replace=True)
    # Runs are named by what differs; the last one of equal keys counts.
    swept = {override.key_or_group: override.is_sweep_override() for override in map(compose.parse_override, overrides)}
    fixed = ",".join(key for key, differs in swept.items() if not differs)
    naming = [f"hydra.job.config.override_dirname.exclude_keys=[{fixed}]"] if is_sweep(options) else []
    sys.argv = ["ds2 train", *options, *compose.hydra_overrides(overrides), *naming]
    hydra.main(config_path=str(compose.config_dir()), config_name=compose.PRIMARY_CONFIG, version_base="1.3")(job)()
    if is_sweep(options) and jobs and launched().rank == 0:
        print(finish(jobs[0].run_dir.parent, jobs, settings[0].train.metric))
        if remaining:
            print(f"stopped before {', '.join(remaining)}: the same command goes on")
    return max((job.status for job in jobs), default=0)


def fit(overrides: Sequence[str]) -> Path:
    """Train as `ds2 train` does, in this process; see `ds2.train`."""
    if isinstance(overrides, str) or not all(isinstance(override, str) for override in overrides):
        raise ConfigError("train(...) takes overrides as on the command line: train('recipe=an4', 'run_dir=runs/an4')")
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError("train(...) handles signals: call it in the main thread, or in a process of its own")
    settings = compose.compose_settings(overrides)
    if _train(*settings, nullcontext()):  # Ctrl-C while torch is loaded must not end the caller's process
        raise KeyboardInterrupt("training was stopped and saved; the same call goes on from there")
    return Path(settings[0].run_dir)


def is_sweep(options: Sequence[str]) -> bool:
    """Whether options of Hydra ask for several runs."""
    return not {"-m", "--multirun"}.isdisjoint(options)


def _train(config: Config, replaced: str, differing: str, signals: AbstractContextManager[None]) -> int:
    if replaced:
        log.info("as in %s: %s", config.checkpoint.init_from, replaced)
    if differing:
        log.warning("unlike %s, as you set it: %s", config.checkpoint.init_from, differing)
    with signals, quick_imports():  # mistakes in the settings were reported before torch is loaded
        from ds2.training.loop import train

    return train(config, Path(config.run_dir))


def options_and_overrides(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separate the options for Hydra from the overrides; raises ConfigError for one that `ds2 train` does not take."""
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
            hint = did_you_mean(name, [*HYDRA_OPTIONS, "--help", "--config-dir"])
            raise ConfigError(f"unknown option {argument!r}{hint} (a setting is KEY=VALUE: `ds2 train --help`)")
        else:
            options.append(argument)
            if HYDRA_OPTIONS[name] and "=" not in argument:
                value = next(pending, "")
                if not value:
                    raise ConfigError(f"{argument} needs a value: --cfg job")
                options.append(value)
    shows = any(option.startswith(("--cfg", "-c")) for option in options)
    if is_sweep(options) and shows:
        raise ConfigError("--cfg shows one configuration, --multirun trains several: leave one of the two out")
    if "--resolve" in options and not shows:
        raise ConfigError("--resolve needs --cfg, which shows a configuration: --cfg job --resolve")
    return options, overrides


def help_text(own: Sequence[Path]) -> str:
    """Return usage, the choices of each group, with those of --config-dir, and every key with default and comment."""
    lines = [_HEAD, "Groups and their choices (* yours):", ""]
    groups = sorted({path.parent.name for folder in (compose.config_dir(), *own) for path in folder.glob("*/*.yaml")})
    for group in sorted(groups, key=lambda name: name != "recipe"):
        theirs = compose.choices(group, own)
        shown = [*(f"{name}*" for name in theirs), *(name for name in compose.choices(group) if name not in theirs)]
        lines += textwrap.wrap(
            " | ".join(shown), _WIDTH, initial_indent=f"  {group + '=':<12}", subsequent_indent=" " * 14
        )
    lines += ["", "Keys with their defaults (a recipe may set others: --cfg job shows them):"]
    for _, about, keys in documented_keys():
        lines += ["", f"  {about}"] if about else [""]
        for key in keys:
            lines.append(f"  {f'{key.name}={key.default}':<44} {key.comment}".rstrip())
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Job:
    """One run of a sweep."""

    name: str  # the settings in which it differs
    run_dir: Path
    status: int  # 0: it finished

    @property
    def stopped(self) -> bool:
        """Whether a signal ended it."""
        return self.status > 128

    def evaluations(self) -> list[dict[str, float]]:
        """Return the `dev` events of its log, in order."""
        events = read_log(self.run_dir / "log.jsonl")
        return [event for event in events if event.get("event") == "dev" and event.get("wer") is not None]


def folder_name(differing: str) -> str:
    """Return a folder name for `key=value,...`: unsafe characters become _, a long name ends in a hash."""
    if "++model.convs." in differing:  # `hydra_overrides` adds the ++; folders of earlier sweeps lack it
        settings = re.split(r",(?=[+~]*[\w.]+=)", differing.replace("++model.convs.", "model.convs."))
        differing = ",".join(sorted(settings))  # as Hydra sorts them
    name = re.sub(r"[^\w.,=+-]+", "_", differing) or ALL
    if len(name) <= _LONGEST_NAME and len(name.encode()) <= _MOST_BYTES:
        return name
    start = name[: _LONGEST_NAME - 9].encode()[: _MOST_BYTES - 9].decode(errors="ignore")
    return f"{start}-{hashlib.sha256(differing.encode()).hexdigest()[:8]}"


def ranking(jobs: Sequence[Job], metric: str) -> str:
    """Return the runs as a table, sorted by their best dev `metric`, wer or cer; runs without one come last."""
    first, second = ("cer", "wer") if metric == "cer" else ("wer", "cer")  # as training chooses the best model
    rows = []
    for job in jobs:
        events = job.evaluations()
        best = min(events, key=lambda event: (event[first], event[second]), default=None)
        key = (best[first], best[second]) if best else (math.inf, math.inf)
        scores = (f"{100 * best['wer']:.2f}", f"{100 * best['cer']:.2f}", f"{best['step']}") if best else ("-",) * 3
        rows.append((key, (*scores, job.name + ("" if job.status == 0 else f" (status {job.status})"))))
    rows.sort(key=lambda row: row[0])
    lines = [f"{'':>4} {'dev WER %':>9} {'CER %':>7} {'step':>7}  run"]
    lines += [
        f"{place:>4} {wer:>9} {cer:>7} {step:>7}  {name}" for place, (_, (wer, cer, step, name)) in enumerate(rows, 1)
    ]
    return "\n".join(lines)


def finish(folder: Path, jobs: Sequence[Job], metric: str) -> str:
    """Write ranking.txt and, if matplotlib is installed, ranking.png into the folder; return the text to print."""
    table = ranking(jobs, metric)
    write_text(folder / "ranking.txt", table + "\n")
    picture = folder / "ranking.png"
    try:
        _draw(jobs, metric, picture)
        drawn = f" and {picture}"
    except UserError as error:
        drawn = f"; {error}"
    return f"{table}\nwrote {folder / 'ranking.txt'}{drawn}"


def _draw(jobs: Sequence[Job], metric: str, path: Path) -> None:
    figure = new_figure(8, 5)
    axes = figure.subplots()
    for job in jobs:
        if events := job.evaluations():
            steps, rates = [event["step"] for event in events], [100 * event[metric] for event in events]
            axes.plot(steps, rates, marker="o", markersize=3, label=job.name)
    axes.set(xlabel="step", ylabel=f"dev {metric.upper()} %", title=f"{len(jobs)} runs")
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend(fontsize=7)
    save_picture(figure, path)
