"""Which tile each recurrent kernel of a run uses, where these are measured instead of estimated."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from ds2_ops.recurrent.backends import why_not_unasked
from ds2_ops.recurrent.calibrate import calibrate, wanted
from ds2_ops.recurrent.plan.problem import DoesNotFit, Problem
from ds2_ops.recurrent.planned import adopt

from ds2.config.schema import Config, ConfigError
from ds2.data.batching import deal
from ds2.distributed.communicator import Communicator
from ds2.training.state import Progress

log = logging.getLogger(__name__)
_SIZES = 3  # of batches, the most frequent: each takes a moment to measure


def settle_tiles(
    progress: Progress, config: Config, precision: str, comm: Communicator, plan: Sequence[Sequence[int]]
) -> None:
    """Make all ranks use the tiles that a run has, and keep.

    They are measured by rank 0 when a run begins with `train.calibrate`, or $DS2_OPS_CALIBRATE, above 0: another tile
    rounds differently, so ranks use the same, and a resumed run those that it began with.

    Args:
        progress: of the run; the tiles are written there.
        config: of the run.
        precision: "bf16" or "fp32".
        comm: all ranks.
        plan: an epoch's batches.
    """
    try:
        most = config.train.calibrate or wanted()
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if comm.rank == 0 and most and not progress.tiles and not progress.step and comm.device.type == "cuda":
        sizes = Counter(len(deal(batch, 0, comm.world)) for batch in plan)
        problems = recurrent_problems(config, precision, [size for size, _ in sizes.most_common(_SIZES)])
        for problem in problems:
            try:
                progress.tiles |= calibrate([(problem, None)], comm.device.index or 0, most)
            except DoesNotFit:
                continue  # runs as a loop of products
        log.info("recurrent kernels, fastest of %d: %s", most, progress.tiles or "none to choose")
    progress.tiles = comm.broadcast(progress.tiles)
    adopt(progress.tiles)


def recurrent_problems(config: Config, precision: str, batches: Iterable[int]) -> list[Problem]:
    """What a model's recurrent layers ask of the persistent kernels in steps of these batches, if anything."""
    model, dtype = config.model, {"bf16": "bfloat16", "fp32": "float32"}[precision]
    unasked = why_not_unasked(getattr(torch, dtype), torch.get_float32_matmul_precision())
    if model.backend not in ("auto", "persistent") or (model.backend == "auto" and unasked):
        return []
    cell = {"rnn": model.nonlinearity, "lstm": "lstm", "gru": "gru_after"}[model.cell]
    directions = (1, 2) if model.bidirectional else (1,)  # both at once, where they fit
    return [
        Problem(batch, model.hidden, dtype, cell, backward, ways)
        for batch in batches
        for backward in (False, True)
        for ways in directions
    ]
