"""`ds2 train`: compose and check the configuration, then train; with --multirun once for each point of a sweep."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from ds2.commands.common import report_errors, with_search_path
from ds2.commands.compose import (
    PRIMARY_CONFIG,
    compose_config,
    config_dir,
    first_of_sweep,
    open_free_form,
    read_config,
    register,
)
from ds2.training.loop import train

log = logging.getLogger(__name__)


def run(arguments: Sequence[str]) -> int:
    """`ds2 train [OVERRIDE...] [--multirun]`: the worst status of its jobs."""
    arguments = with_search_path(arguments)
    arguments.sort(key=lambda argument: argument in ("-m", "--multirun"))  # Hydra wants its overrides in one piece
    compose_config(first_of_sweep([a for a in arguments if not a.startswith("-")]))
    statuses: list[int] = []

    def job(composed: DictConfig) -> None:
        statuses.append(report_errors(lambda: _train(composed)))

    register()
    sys.argv = ["ds2 train", *open_free_form(arguments)]
    hydra.main(config_path=str(config_dir()), config_name=PRIMARY_CONFIG, version_base="1.3")(job)()
    return max(statuses, default=0)


def _train(composed: DictConfig) -> int:
    job = HydraConfig.get()
    run_dir = Path(job.runtime.output_dir) if job.mode == RunMode.MULTIRUN else None
    config, inheritance = read_config(composed, list(job.overrides.task), run_dir)
    if inheritance.replaced:
        log.info("as in %s: %s", config.checkpoint.init_from, inheritance.replaced)
    if inheritance.differing:
        log.warning("unlike %s, as you set it: %s", config.checkpoint.init_from, inheritance.differing)
    return train(config, Path(config.run_dir))
