"""`ds2 train`: compose and check the configuration, then train; with --multirun once for each point of a sweep."""

from __future__ import annotations

import logging
import sys
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
from ds2.commands.train_help import help_text, options_and_overrides
from ds2.distributed.launcher import launched
from ds2.system.signals import default_signals

log = logging.getLogger(__name__)


def run(arguments: Sequence[str]) -> int:
    """`ds2 train [OVERRIDE...] [--multirun]`: the worst status of its jobs."""
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
        keys[override.key_or_group] = override.is_sweep_override()  # of a key given twice the last one counts
    alike = ",".join(key for key, swept in keys.items() if not swept)
    named = f"hydra.job.config.override_dirname.exclude_keys=[{alike}]"
    sys.argv = ["ds2 train", *options, *open_free_form(overrides), *([named] if is_sweep(options) else [])]
    hydra.main(config_path=str(config_dir()), config_name=PRIMARY_CONFIG, version_base="1.3")(job)()
    if is_sweep(options) and jobs and launched().rank == 0:
        print(finish(jobs[0].run_dir.parent, jobs, config.train.metric))
    return max((job.status for job in jobs), default=0)


def is_sweep(options: Sequence[str]) -> bool:
    """Whether the command line asks for a run for each of several values."""
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
        from ds2.training.loop import train  # here: a mistake in the settings is told before torch is there

    return train(config, Path(config.run_dir))
