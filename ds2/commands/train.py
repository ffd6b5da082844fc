"""`ds2 train`: compose and check the configuration, then train; with --multirun once for each point of a sweep."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from ds2.commands.common import report_errors, with_search_path
from ds2.commands.compose import PRIMARY_CONFIG, compose_config, config_dir, first_of_sweep, read_config, register
from ds2.training.loop import train


def run(arguments: Sequence[str]) -> int:
    """`ds2 train [OVERRIDE...] [--multirun]`: the worst status of its jobs."""
    arguments = with_search_path(arguments)
    arguments.sort(key=lambda argument: argument in ("-m", "--multirun"))  # Hydra wants its overrides in one piece
    compose_config(first_of_sweep([a for a in arguments if not a.startswith("-")]))
    statuses: list[int] = []

    def job(composed: DictConfig) -> None:
        config = read_config(composed)
        sweep = HydraConfig.get().mode == RunMode.MULTIRUN
        run_dir = Path(HydraConfig.get().runtime.output_dir if sweep else config.run_dir)
        config.run_dir = str(run_dir)
        statuses.append(report_errors(lambda: train(config, run_dir)))

    register()
    sys.argv = ["ds2 train", *arguments]
    hydra.main(config_path=str(config_dir()), config_name=PRIMARY_CONFIG, version_base="1.3")(job)()
    return max(statuses, default=0)
