"""Measurements on the device before the first step: the most audio of a batch, and the fastest tiles.

`batching.auto` finds the largest budget of audio a batch whose worst batches fit the GPU, by running these.
`train.calibrate` times the tiles of the recurrent kernels.
"""

import copy
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch
from ds2_ops.recurrent.backends.choose import why_not_unasked
from ds2_ops.recurrent.calibrate import adopt, adopt_factors, calibrate, measured_factors, tiles_to_measure
from ds2_ops.recurrent.plan.problem import DoesNotFit, Problem
from numpy.typing import NDArray
from torch import Tensor

from ds2.audio.augment import speed_range
from ds2.config.schema import BatchingConfig, Config, ConfigError
from ds2.data.loader import Batch, pad_rows, plan_epoch, rank_part
from ds2.data.manifest import Utterance
from ds2.distributed.communicator import Communicator
from ds2.model.acoustic import AcousticModel
from ds2.model.structure import operator_cell
from ds2.text.alphabet import Alphabet
from ds2.training.ctc import Crf
from ds2.training.inputs import InputMaker
from ds2.training.optim import freeze, state_shapes
from ds2.training.passes import Passes, build_gradients
from ds2.training.state import Progress

log = logging.getLogger(__name__)

_TRIALS = 12
_LIMIT_S = 45.0  # no trial starts that would end later
_FIRST = 16  # utterances a rank, of the longest; smaller batches use kernels that large ones do not need
_GROWTH = 16.0  # largest factor from one trial to the next
_AIM, _CLOSE = 0.98, 0.95  # of the available bytes: the target of a trial, and where the search stops
_FEW_BATCHES = 50
_USABLE = 0.92  # of the memory: the rest is for what the allocator cannot use between blocks of other sizes
_SIZES = 3  # of batches, the most frequent: each takes a moment to measure
Measure = Callable[[list[int]], float | None]
"""Returns the bytes that both passes over utterances (indices) need at their peak; None where they do not fit."""


def check_batching(batching: BatchingConfig, comm: Communicator) -> None:
    """Raise ConfigError where `batching.auto` has no GPU memory to measure, or no number of ranks to share batches."""
    reason = "fits batches to the memory of a fixed number of GPUs, and comm.max_ranks lets it change"
    if not comm.elastic:
        reason = f"fills a GPU's memory, and the device is {comm.device}"
    if batching.auto and (comm.elastic or comm.device.type != "cuda"):
        way_out = "give batching.utterances, or batching.utterances=0 batching.audio_s=SECONDS"
        raise ConfigError(f"batching=auto {reason}: {way_out}")


def largest_budget(
    durations_s: NDArray[np.float64],
    batching: BatchingConfig,
    seed: int,
    world: int,
    measure: Measure,
    available_bytes: float,
    max_s: float = float("inf"),
) -> float:
    """Return the largest `batching.audio_s`, to three digits, whose worst batches fit one rank's memory.

    Args:
        durations_s: (U,) as long as the utterances can get (`padded_durations_s`).
        batching: whose buckets and order count.
        world: ranks that share a batch.
        available_bytes: that passes may need.
        max_s: an upper bound of the budget, also where more fits.

    Raises:
        ConfigError: the longest utterance alone does not fit.
    """
    longest_s = float(durations_s.max())
    max_s = min(max_s, longest_s * len(durations_s))  # the latter is all in one batch

    def need(budget_s: float) -> float:
        return _bytes_of_budget(budget_s, durations_s, batching, seed, world, measure)

    fits_s = _largest_that_fits(need, min(max_s, longest_s * world), max_s, available_bytes)
    if not fits_s:
        raise ConfigError(
            f"batching=auto: not even one utterance of {longest_s:.1f} s a rank fits the GPU's memory: "
            "lower data.max_duration_s, or choose a smaller model"
        )
    return float(f"{_round_down(fits_s):g}")


def _largest_that_fits(need: Callable[[float], float], min_s: float, max_s: float, available_bytes: float) -> float:
    """Return the largest budget found that needs no more than the available bytes; 0 if even the least needs more.

    The memory of a batch is nearly linear in its padded audio (activations) plus a constant (weights, workspaces). The
    search starts with a few utterances a rank, or one if these do not fit, and goes up the line through the last
    trials, at most `_GROWTH`-fold each time, until the largest that fits and the smallest that does not are close.
    Passes over n times the audio take at most n times as long, which bounds what can be tried in the time left.
    """
    started = time.monotonic()
    measured: list[tuple[float, float]] = []  # budgets, and the bytes that they need
    fits_s, fails_s, rate = 0.0, float("inf"), 0.0
    budget_s = min(max_s, _FIRST * min_s)
    for trial in range(1, _TRIALS + 1):
        began = time.monotonic()
        size = need(budget_s)
        ended = time.monotonic()
        log.info(
            "batching=auto: trial %d, %.0f s of audio: %.2f GB of %.2f, in %.1f s",
            *(trial, budget_s, size / 1e9, available_bytes / 1e9, ended - began),
        )
        if size <= available_bytes:
            fits_s = max(fits_s, budget_s)
        else:
            fails_s = min(fails_s, budget_s)
        if not fits_s and budget_s > min_s:
            budget_s = min_s
            continue
        if not fits_s:
            break
        if np.isfinite(size):
            measured.append((budget_s, size))
        rate = max(rate, budget_s / max(ended - began, 1e-6))
        affordable_s = rate * (_LIMIT_S - (ended - started))
        next_s = min(_proposal(measured, available_bytes), max_s)
        if next_s >= fails_s:
            next_s = (fits_s + fails_s) / 2
        budget_s = min(next_s, affordable_s)
        if _CLOSE * available_bytes < size <= available_bytes or next_s < 1.02 * fits_s:
            break
        if budget_s < 1.02 * fits_s:
            log.warning("batching=auto: ended after %.0f s, before all that fits was found", ended - started)
            break
    return fits_s


def _bytes_of_budget(
    budget_s: float, durations_s: NDArray[np.float64], batching: BatchingConfig, seed: int, world: int, measure: Measure
) -> float:
    """Return the bytes that the worst batches of a budget need, infinity if they do not fit."""
    sizes = [0.0]
    for part in worst_parts(durations_s, replace(batching, utterances=0, audio_s=budget_s), seed, world):
        size = measure(part)
        padded_s = world * float(durations_s[part[0]]) * len(part)
        # A batch of a later epoch may be nearer to the budget than all that were tried.
        sizes.append(float("inf") if size is None else size * max(1.0, budget_s / padded_s))
    return max(sizes)


def _proposal(measured: Sequence[tuple[float, float]], available_bytes: float) -> float:
    """Return where the line through the largest two trials, or through one and zero, reaches the available bytes."""
    (low_s, low), (high_s, high) = sorted([(0.0, 0.0), *measured])[-2:]
    if high <= low:
        return _GROWTH * high_s
    return min(_GROWTH * high_s, low_s + (_AIM * available_bytes - low) * (high_s - low_s) / (high - low))


def _round_down(value: float) -> float:
    unit = 10.0 ** (np.floor(np.log10(value)) - 2)
    return float(np.floor(value / unit) * unit)


def worst_parts(durations_s: NDArray[np.float64], batching: BatchingConfig, seed: int, world: int) -> list[list[int]]:
    """Return one rank's parts of the batches that need most: of most padded audio, and of most utterances.

    Searches the first two epochs: in order of duration, and shuffled in buckets. `durations_s` is (N,), seconds of
    each utterance; parts are positions in it.
    """
    parts = [rank_part(batch, 0, world) for epoch in (1, 2) for batch in plan_epoch(durations_s, batching, epoch, seed)]
    padded = max(parts, key=lambda part: durations_s[part[0]] * len(part))
    return [padded] if len(padded) == max(map(len, parts)) else [padded, max(parts, key=len)]


def choose_batching(
    config: Config,
    progress: Progress,
    comm: Communicator,
    durations_s: NDArray[np.float64],
    make_probe: "Callable[[], MemoryProbe]",
) -> BatchingConfig:
    """Return how the run's batches are made: as the config says, or, with `batching.auto`, by a measured budget.

    All ranks call this together. The budget is noted in `progress`, so that a resumed run keeps it.

    Args:
        comm: the ranks; the one with the least memory decides.
        durations_s: (U,) as long as the utterances can get.
        make_probe: makes a `MemoryProbe`; called only if a budget has to be found.

    Raises:
        ConfigError: nothing fits.
    """
    batching = config.batching
    if not batching.auto:
        return batching
    if not progress.budget_s:
        started = time.monotonic()
        probe = make_probe()
        world, seed = comm.world, config.train.seed
        budget_s = largest_budget(durations_s, batching, seed, world, probe, probe.available_bytes, world * probe.max_s)
        budget_s = min(comm.allgather(budget_s))
        log.info("batching=auto: %g s of audio a batch, found in %.0f s", budget_s, time.monotonic() - started)
        _warn_of_few_batches(durations_s, budget_s)
        progress.budget_s = budget_s
    return replace(batching, utterances=0, audio_s=progress.budget_s)


def _warn_of_few_batches(durations_s: NDArray[np.float64], budget_s: float) -> None:
    """Warn where the budget makes epochs of few steps: the largest batch is not always the one that learns best."""
    batches = len(plan_epoch(durations_s, BatchingConfig(utterances=0, audio_s=budget_s), 2, 0))
    if batches < _FEW_BATCHES:
        smaller_s = _round_down(max(float(durations_s.max()), float(durations_s.sum()) / _FEW_BATCHES))
        log.warning(
            "batching=auto: %g s of audio make an epoch of %d batches; a model may learn faster from more and smaller "
            "ones: batching=fixed batching.utterances=0 batching.audio_s=%g", budget_s, batches, smaller_s,
        )  # fmt: skip


def out_of_memory_message(
    where: str, lengths_s: Tensor, configured: BatchingConfig, batching: BatchingConfig, *, graphs: bool
) -> str:
    """The message for a batch (lengths (B,) in seconds) that did not fit: what to lower, by the settings in use."""
    return (
        f"out of memory on {where}: {len(lengths_s)} utterances, the longest {float(lengths_s.max()):.1f} s. "
        + (
            f"batching=auto found {batching.audio_s:g} s, on more GPUs or with more memory free: go on with "
            "batching=fixed batching.utterances=0 batching.audio_s=LESS "
            if configured.auto
            else f"Lower batching.utterances={batching.utterances} or batching.audio_s={batching.audio_s}, or let "
            "batching=auto find what fits "
        )
        + "(and raise train.accumulate to keep the step's size), or lower data.max_duration_s; "
        + ("train.graphs=off keeps no memory for CUDA graphs; " if graphs else "")
        + "batching.longest_first=true shows the need in the first step"
    )


class MemoryProbe:
    """Measures the memory of both passes of training, on made-up audio and a second model with fresh weights.

    Args:
        alphabet, inputs: of the run.
        autocast: to bfloat16.
        crf: of `train.objective=ctc_crf`.
    """

    def __init__(
        self,
        config: Config,
        utterances: Sequence[Utterance],
        alphabet: Alphabet,
        inputs: InputMaker,
        *,
        autocast: bool,
        crf: Crf | None = None,
    ) -> None:
        device, bins = inputs.device, inputs.features.bins
        self._config, self._utterances, self._alphabet, self._device = config, utterances, alphabet, device
        self._inputs = inputs
        self._slowest = min(1.0, speed_range(config.augment)[0])
        longest = self._samples(max(u.duration_s for u in utterances))
        self._noise = 0.01 * torch.randn(longest, generator=torch.Generator().manual_seed(0))
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated(device)
        with torch.random.fork_rng(devices=[device]):
            model = AcousticModel(config.model, bins, len(alphabet), config.features.step_s).to(device)
        freeze(model, config.train.freeze)
        features = copy.deepcopy(inputs.features)
        self._gradients = build_gradients(config, model, Communicator(device), autocast=autocast)
        self._passes = Passes(model, features, self._gradients, config.train, autocast=autocast, crf=crf)
        self._own_bytes = torch.cuda.memory_allocated(device) - before
        shapes = [shape for p in model.parameters() for shape in state_shapes(config.optim, p).values()]
        self._optimizer_bytes = 4 * sum(shape.numel() for shape in shapes)  # made by the first step

    @property
    def available_bytes(self) -> float:
        """Bytes that a rank may take: what is free, and what torch holds for this process."""
        free, _ = torch.cuda.mem_get_info(self._device)
        return _USABLE * float(free + torch.cuda.memory_reserved(self._device))

    @property
    def max_s(self) -> float:
        """Padded audio below which no activation has 2^31 values; above, libraries are slow or fail."""
        features = self._passes.features
        values, bins, frames_per_s = 1.0, features.bins, 1 / features.step_s
        for conv in self._config.model.convs:
            bins, frames_per_s = -(-bins // conv.stride[0]), frames_per_s / conv.stride[1]
            values = max(values, conv.channels * bins * frames_per_s)
        return 2.0**31 / max(values, features.bins / features.step_s)

    def __call__(self, indices: list[int]) -> float | None:
        """Bytes at the peak of both passes over utterances, with what training will hold besides; None: too much."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        try:
            self._gradients.start_step()
            inputs = self._inputs(self._batch(indices), 1)
            self._passes.forward(inputs, len(indices), last=True, idle=False)
            self._passes.backward()
            self._gradients.finish_step()
            torch.cuda.synchronize(self._device)
        except torch.OutOfMemoryError:
            return None
        next_inputs = inputs.waveforms.nbytes  # made while this step runs
        return torch.cuda.max_memory_allocated(self._device) - self._own_bytes + self._optimizer_bytes + next_inputs

    def _batch(self, indices: list[int]) -> Batch:
        chosen = [self._utterances[index] for index in indices]
        lengths = torch.tensor([self._samples(u.duration_s) for u in chosen])
        waveforms = self._noise[: int(lengths.max())].to(self._device).repeat(len(chosen), 1)
        labels = [torch.tensor(self._alphabet.encode(u.text), dtype=torch.int64) for u in chosen]
        return Batch(waveforms, lengths, *pad_rows(labels), torch.tensor(indices))

    def _samples(self, duration_s: float) -> int:
        return int(duration_s / self._slowest * self._config.data.sample_rate_hz)


def choose_factors(progress: Progress, comm: Communicator) -> None:
    """Make the planner of all ranks use the same times of a GPU, and that of a resumed run the times of its start.

    Rank 0 measures them when a run begins on a GPU that no recorded sweep is of. Another kind of GPU in the job has
    the constants by its clock. To be called before anything asks what the kernels can run.

    Args:
        progress: of the run; the times are written there.
    """
    if comm.rank == 0 and not progress.factors and not progress.step and comm.device.type == "cuda":
        progress.factors = measured_factors(comm.device.index or 0)
    progress.factors = comm.broadcast(progress.factors)
    adopt_factors(progress.factors)


def adopt_measurements(progress: Progress) -> None:
    """Use the times and tiles of a run's progress, which may come from another rank."""
    adopt_factors(progress.factors)
    adopt(progress.tiles)


def choose_tiles(
    progress: Progress, config: Config, precision: str, comm: Communicator, plan: Sequence[Sequence[int]]
) -> None:
    """Make all ranks use the same tiles of the recurrent kernels, and a resumed run the tiles of its start.

    Rank 0 measures them when a run begins with `train.calibrate`, or $DS2_OPS_CALIBRATE, above 0. Another tile rounds
    differently, so tiles are part of the run's progress.

    Args:
        progress: of the run; the tiles are written there.
        precision: "bf16" or "fp32".
        plan: an epoch's batches.
    """
    try:
        max_tiles = config.train.calibrate or tiles_to_measure()
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if comm.rank == 0 and max_tiles and not progress.tiles and not progress.step and comm.device.type == "cuda":
        sizes = Counter(len(rank_part(batch, 0, comm.world)) for batch in plan)
        problems = recurrent_problems(config, precision, [size for size, _ in sizes.most_common(_SIZES)])
        for problem in problems:
            try:
                progress.tiles |= calibrate([(problem, None)], comm.device.index or 0, max_tiles)
            except DoesNotFit:
                continue  # runs as a loop of products
            except RuntimeError as error:  # such as of a driver that is too old: the layers have another path
                log.warning("train.calibrate: no tile of the recurrent kernels was timed: %s", error)
                break
        log.info("recurrent kernels, fastest of %d: %s", max_tiles, progress.tiles or "none to choose")
    progress.tiles = comm.broadcast(progress.tiles)
    adopt(progress.tiles)


def recurrent_problems(config: Config, precision: str, batches: Iterable[int]) -> list[Problem]:
    """Return the problems of the persistent kernels that a model's recurrent layers have in steps of these batches."""
    model, dtype = config.model, {"bf16": "bfloat16", "fp32": "float32"}[precision]
    unasked = why_not_unasked(getattr(torch, dtype), torch.get_float32_matmul_precision())
    if model.backend not in ("auto", "persistent") or (model.backend == "auto" and unasked):
        return []
    directions = (1, 2) if model.bidirectional else (1,)  # both at once, where they fit
    return [
        Problem(batch, model.hidden, dtype, operator_cell(model), backward, direction_count)
        for batch in batches
        for backward in (False, True)
        for direction_count in directions
    ]
