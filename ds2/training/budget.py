"""`batching.auto`: the largest budget of audio a batch whose worst batches fit the GPU, found by running them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ds2.config.schema import BatchingConfig, Config, ConfigError
from ds2.data.batching import deal, plan_epoch
from ds2.distributed.communicator import Communicator
from ds2.training.state import Progress

log = logging.getLogger(__name__)

_TRIALS = 12
_LIMIT_S = 45.0  # no trial begins that would end later
_FIRST = 16  # utterances a rank, of the longest; small batches would meet kernels that large ones do not need
_GROWTH = 16.0  # from one trial to the next
_AIM, _CLOSE = 0.98, 0.95  # of the room: what is tried for, and what is near enough
_FEW_BATCHES = 50
Measure = Callable[[list[int]], float | None]


def check_device(batching: BatchingConfig, device: torch.device) -> None:
    """Raise ConfigError where `batching.auto` has no GPU memory to measure."""
    if batching.auto and device.type != "cuda":
        raise ConfigError(
            f"batching=auto fills a GPU's memory, and the device is {device}: give batching.utterances, or "
            "batching.utterances=0 batching.audio_s=SECONDS"
        )


def largest_budget(
    durations_s: NDArray[np.float64],
    batching: BatchingConfig,
    seed: int,
    world: int,
    measure: Measure,
    room: float,
    most_s: float = float("inf"),
) -> float:
    """Return the largest `batching.audio_s`, to three digits, whose worst batches fit one rank's memory.

    What a batch needs is nearly a line over its padded audio (activations), above what is always there (weights,
    workspaces). From a few utterances a rank, or one where these do not fit, the search goes up the line that the last
    trials give, at most `_GROWTH`-fold each time; what fits and what does not close in on the largest. Passes over n
    times the audio take at most n times as long, so the fastest trial tells how much can be tried in the time left.

    Args:
        durations_s: (U,) as long as the utterances can get (`padded_durations_s`).
        batching: whose buckets and order count.
        seed: of the run.
        world: ranks that a batch is dealt to.
        measure: bytes that both passes over utterances (indices) need at their peak; None where they do not fit.
        room: bytes that they may need.
        most_s: a budget that is not to be passed, whatever fits.
    Raises:
        ConfigError: the longest utterance alone does not fit.
    """
    longest_s = float(durations_s.max())
    most_s = min(most_s, longest_s * len(durations_s))  # the latter is all in one batch
    started = time.monotonic()

    def need(budget_s: float) -> float:
        config = replace(batching, utterances=0, audio_s=budget_s)
        sizes = [0.0]
        for part in worst_parts(durations_s, config, seed, world):
            size = measure(part)
            padded_s = world * float(durations_s[part[0]]) * len(part)
            # A later epoch may have a batch that is nearer to the budget than any of those looked at.
            sizes.append(float("inf") if size is None else size * max(1.0, budget_s / padded_s))
        return max(sizes)

    known: list[tuple[float, float]] = []  # budgets, and the bytes that they need
    fits_s, fails_s, rate = 0.0, float("inf"), 0.0
    least_s = min(most_s, longest_s * world)
    budget_s = min(most_s, _FIRST * least_s)
    for trial in range(1, _TRIALS + 1):
        began = time.monotonic()
        size = need(budget_s)
        ended = time.monotonic()
        log.info(
            "batching=auto: trial %d, %.0f s of audio: %.2f GB of %.2f, in %.1f s",
            *(trial, budget_s, size / 1e9, room / 1e9, ended - began),
        )
        if size <= room:
            fits_s = max(fits_s, budget_s)
        else:
            fails_s = min(fails_s, budget_s)
        if not fits_s and budget_s > least_s:
            budget_s = least_s
            continue
        if not fits_s:
            raise ConfigError(
                f"batching=auto: not even one utterance of {longest_s:.1f} s a rank fits the GPU's memory: "
                "lower data.max_duration_s, or choose a smaller model"
            )
        if np.isfinite(size):
            known.append((budget_s, size))
        rate = max(rate, budget_s / max(ended - began, 1e-6))
        affordable_s = rate * (_LIMIT_S - (ended - started))
        wished_s = min(_proposal(known, room), most_s)
        if wished_s >= fails_s:
            wished_s = (fits_s + fails_s) / 2
        budget_s = min(wished_s, affordable_s)
        if _CLOSE * room < size <= room or wished_s < 1.02 * fits_s:
            break
        if budget_s < 1.02 * fits_s:
            log.warning("batching=auto: ended after %.0f s, before all that fits was found", ended - started)
            break
    return float(f"{_down(fits_s):g}")


def _proposal(known: Sequence[tuple[float, float]], room: float) -> float:
    """Where the line through the largest two trials reaches the room, after one trial that through nothing."""
    (low_s, low), (high_s, high) = sorted([(0.0, 0.0), *known])[-2:]
    most_s = _GROWTH * high_s
    return min(most_s, low_s + (_AIM * room - low) * (high_s - low_s) / (high - low)) if high > low else most_s


def _down(value: float) -> float:
    """Round down to three digits."""
    unit = 10.0 ** (np.floor(np.log10(value)) - 2)
    return float(np.floor(value / unit) * unit)


def worst_parts(durations_s: NDArray[np.float64], batching: BatchingConfig, seed: int, world: int) -> list[list[int]]:
    """Return one rank's parts of the batches that need most: of most padded audio, and of most utterances.

    Looked for in the first two epochs: in order of duration, and shuffled in buckets. `durations_s` is (N,), seconds of
    each utterance; parts are positions in it.
    """
    parts = [deal(batch, 0, world) for epoch in (1, 2) for batch in plan_epoch(durations_s, batching, epoch, seed)]
    padded = max(parts, key=lambda part: durations_s[part[0]] * len(part))
    return [padded] if len(padded) == max(map(len, parts)) else [padded, max(parts, key=len)]


def settle_batching(
    config: Config,
    progress: Progress,
    comm: Communicator,
    durations_s: NDArray[np.float64],
    trial: Callable[[], tuple[Measure, float, float]],
) -> BatchingConfig:
    """Return how the run's batches are made: as the config says, or, with `batching.auto`, by the budget found.

    All ranks call this together. What was found is noted in `progress`, and a resumed run keeps it.

    Args:
        config: of the run.
        progress: of the run.
        comm: the ranks, of which the one with the least memory counts.
        durations_s: (U,) as long as the utterances can get.
        trial: gives `measure`, `room` and, for one rank, `most_s` of `largest_budget`; called only where there is
            something to find.
    Raises:
        ConfigError: nothing fits.
    """
    batching = config.batching
    if not batching.auto:
        return batching
    if not progress.budget_s:
        started = time.monotonic()
        measure, room, most_s = trial()
        world, seed = comm.world, config.train.seed
        found_s = largest_budget(durations_s, batching, seed, world, measure, room, world * most_s)
        found_s = min(comm.allgather(found_s))
        log.info("batching=auto: %g s of audio a batch, found in %.0f s", found_s, time.monotonic() - started)
        _warn_of_few_batches(durations_s, found_s)
        progress.budget_s = found_s
    return replace(batching, utterances=0, audio_s=progress.budget_s)


def _warn_of_few_batches(durations_s: NDArray[np.float64], budget_s: float) -> None:
    """Say so where a budget makes epochs of few steps: what fits is not always what learns."""
    batches = len(plan_epoch(durations_s, BatchingConfig(utterances=0, audio_s=budget_s), 2, 0))
    if batches < _FEW_BATCHES:
        log.warning(
            "batching=auto: %g s of audio make an epoch of %d batches; a model may learn faster from more and smaller "
            "ones: batching=fixed batching.utterances=0 batching.audio_s=%g",
            budget_s,
            batches,
            _down(max(float(durations_s.max()), float(durations_s.sum()) / _FEW_BATCHES)),
        )


def out_of_memory(
    where: str, lengths_s: Tensor, given: BatchingConfig, batching: BatchingConfig, *, graphs: bool
) -> str:
    """What to say of a batch (lengths (B,) in seconds) that did not fit, and what to lower, by the settings in use."""
    return (
        f"out of memory on {where}: {len(lengths_s)} utterances, the longest {float(lengths_s.max()):.1f} s. "
        + (
            f"batching=auto found {batching.audio_s:g} s, on more GPUs or with more memory free: go on with "
            "batching=fixed batching.utterances=0 batching.audio_s=LESS "
            if given.auto
            else f"Lower batching.utterances={batching.utterances} or batching.audio_s={batching.audio_s}, or let "
            "batching=auto find what fits "
        )
        + "(and raise train.accumulate to keep the step's size), or lower data.max_duration_s; "
        + ("train.graphs=off keeps no memory for CUDA graphs; " if graphs else "")
        + "batching.longest_first=true shows the need in the first step"
    )
