"""One run's state on one device: what happens to it in a step and an evaluation."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from ds2_ops.ctc.loss import why_not as why_no_loss
from torch import Tensor

from ds2.audio.augment import paces
from ds2.audio.features import Features
from ds2.config.device import resolve_device, resolve_precision
from ds2.config.schema import Config
from ds2.data.batching import padded_durations_s, plan_epoch
from ds2.data.loader import Batch, SpeechLoader
from ds2.data.manifest import corpus
from ds2.data.splits import ensure_manifests, training_utterances
from ds2.distributed.agreement import settings
from ds2.distributed.communicator import Communicator
from ds2.distributed.gradients import GradientReducer
from ds2.model.acoustic import AcousticModel
from ds2.model.norm import SequenceBatchNorm
from ds2.model.structure import check_backend
from ds2.system.errors import UserError
from ds2.text.alphabet import Alphabet
from ds2.training.batch_norm import NormStatistics
from ds2.training.budget import check_device, out_of_memory, settle_batching
from ds2.training.coming import ComingBatches
from ds2.training.dev_set import DevSet
from ds2.training.graphs import GraphedPasses
from ds2.training.graphs import wanted as graphs_wanted
from ds2.training.inputs import FRAMES_MULTIPLE, Ahead, InputMaker
from ds2.training.metrics import RunLog, StepTimer
from ds2.training.noise_scale import NoiseScale
from ds2.training.optim import make_optimizer
from ds2.training.overlap import OverlapTrial
from ds2.training.passes import Passes
from ds2.training.report import Numbers, StepReport
from ds2.training.run_files import RunFiles
from ds2.training.start import begin, freeze
from ds2.training.state import Progress, TrainState, share
from ds2.training.tiles import settle_tiles
from ds2.training.trial import Trial
from ds2.training.update import Update

log = logging.getLogger(__name__)


class TrainingError(UserError):
    """Training cannot go on; the message says why and what to set."""


class Trainer:
    """The state of one run on one device, and what happens to it in a step and an evaluation.

    Attributes:
        files: where it is kept.
        grad_norm: of the last step.
        heard: the sum over ranks of its news.
    """

    grad_norm = 0.0
    heard: Sequence[float] = ()
    _took_s = _read_s = 0.0  # the last step, and when its report was read

    def __init__(self, config: Config, run_dir: Path, comm: Communicator | None = None) -> None:
        """Build data, model and optimizer, equal on all ranks; resume where `run_dir` holds a trainer state."""
        self.config, self.run_dir = config, run_dir
        self.comm = comm or Communicator(resolve_device(config.device))
        self.device = self.comm.device
        self.precision = resolve_precision(config.train.precision, self.device)
        check_backend(config.model, self.device)
        check_device(config.batching, self.device)
        self.comm.agree(settings(config), "start all ranks with the same overrides, recipes and environment")
        torch.manual_seed(config.train.seed)
        torch.backends.cudnn.deterministic = True  # a resumed run repeats the unbroken one's losses bit for bit
        torch.backends.cudnn.benchmark = False
        self.alphabet = Alphabet.from_config(config.alphabet)
        self.features = Features(config.features, config.data.sample_rate_hz)
        self.model = AcousticModel(config.model, self.features.bins, len(self.alphabet), config.features.step_s)
        freeze(self.model, config.train.freeze)
        with self.comm.in_turn():
            ensure_manifests(config.data)
            self.utterances = training_utterances(config.data, config.augment, self.alphabet, self.output_frames)
            data, seed = config.data, config.train.seed
            self.loader = SpeechLoader(self.utterances, data, self.device, self.alphabet, config.augment, seed)
            self.dev = DevSet(data, self.features, self.alphabet, self.device, self.precision)
        seen = corpus("training", self.utterances) | corpus("dev", self.dev.utterances)
        self.comm.agree(seen, "give all hosts the same manifests")
        self.timer = StepTimer(self.device, self.comm.whereabouts.enter)
        self.model.to(self.device)
        self.features.to(self.device)
        self.optimizer = make_optimizer(self.model, config.optim)
        self.state = TrainState(self.model, self.features, self.optimizer)
        parts, progress = (
            begin(self.state, self.loader, self.alphabet, config, run_dir) if self.comm.rank == 0 else ({}, Progress())
        )
        share(self.state, parts, progress, config.train.average_decay, self.comm)
        self.progress, self.average = self.state.progress, self.state.average
        self.files = RunFiles(run_dir, config, self.state, self.alphabet, self.precision, self.comm)
        self.statistics = NormStatistics(self.model, self.comm, shared=config.comm.batch_norm == "shared")
        self.gradients = GradientReducer(
            self.model.parameters(),
            self.comm,
            int(config.comm.bucket_mib * 2**20),
            overlap=config.comm.overlap,
            low=self.model.low_precision_parameters() if self.precision == "bf16" else (),
        )
        self.overlap = OverlapTrial(self.gradients)
        longest_s = float(padded_durations_s([config.data.max_duration_s], paces(config.augment))[0])
        longest = self.output_frames(int(longest_s * config.data.sample_rate_hz)) + FRAMES_MULTIPLE
        no_loss = why_no_loss(longest, len(self.alphabet), self.device)
        graphed = graphs_wanted(config, self.comm, no_loss, self.model.why_torch(self.precision))
        kind = GraphedPasses if graphed else Passes
        self.passes = kind(self.model, self.features, self.gradients, config.train, autocast=self.precision == "bf16")
        self.inputs = InputMaker(self.features, self.model, config, self.device, padded=graphed)
        self.noise = NoiseScale(self.gradients.buckets) if config.train.noise_scale else None
        self.update = Update(self.optimizer, self.gradients, config.optim.clip_norm, graphed=graphed)
        self.durations_s = padded_durations_s([u.duration_s for u in self.utterances], paces(config.augment))
        self.batching = settle_batching(config, self.progress, self.comm, self.durations_s, self._trial)
        self._plan = partial(plan_epoch, self.durations_s, self.batching, seed=seed)  # by the number of the epoch
        self._coming = ComingBatches(self.loader, self._plan, config.train.epochs, self.comm)
        settle_tiles(self.progress, config, self.precision, self.comm, self.plan())

    def _trial(self) -> tuple[Trial, float, float]:
        """What measures the memory of batches, what there is of it, and the most audio that a rank should take."""
        parts = self.config, self.utterances, self.alphabet, self.features
        trial = Trial(*parts, autocast=self.precision == "bf16", padded=self.inputs.padded)
        return trial, trial.room, trial.most_s

    def describe(self) -> str:
        """One line: data, device, precision and size."""
        parameters = sum(p.numel() for p in self.model.parameters())
        hours = sum(u.duration_s for u in self.utterances) / 3600
        dev = len(self.dev.utterances)
        return (
            f"training {len(self.utterances)} utterances ({hours:.2f} h), {dev} dev, on {self.device} in "
            f"{self.precision}, {parameters:,} parameters, lookahead {self.model.lookahead_ms:.0f} ms"
        )

    def output_frames(self, samples: int) -> int:
        """Output frames of the model for a number of audio samples."""
        return int(self.model.output_frames(self.features.frames(samples)))

    def plan(self) -> list[list[int]]:
        """The batches of the running epoch, as utterance indices."""
        return self._plan(self.progress.epoch)

    def epoch(self, plan: Sequence[Sequence[int]]) -> Ahead:
        """This rank's parts of the batches that are left of the running epoch."""
        epoch, batch = self.progress.epoch, self.progress.batch
        return self.ahead(self._coming.rest(epoch, batch, len(plan) - batch))

    def ahead(self, batches: Iterator[Batch]) -> Ahead:
        """Batches of the running epoch as steps take them."""
        return Ahead(batches, partial(self.inputs, epoch=self.progress.epoch))

    def step(
        self, batches: Ahead, group: Sequence[Sequence[int]], news: Callable[[], Sequence[float]] = list
    ) -> float | None:
        """One optimizer step over all ranks.

        Args:
            batches: this rank's parts of the batches, as `epoch` gives them; the inputs of the one behind the step's
                are made before its results are waited for.
            group: the whole batches that make up the step, as utterance indices.
            news: further numbers of this rank, asked once its passes are launched; `heard` is then their sum.

        Returns:
            The mean loss an utterance in nats, or None for a step that was skipped because it was not finite.
        """
        utterances = sum(map(len, group))
        self.overlap.begin()
        self.gradients.start_step()
        seen, counts = self._passes(batches, group)
        with self.timer.phase("allreduce_exposed"):
            for began, ended in self.gradients.finish_step():
                self.timer.add("allreduce_total", began, ended)
        with self.timer.phase("optimizer"):
            told = [*counts, self._took_s, *news()]
            report = StepReport(self.comm, [losses for _, losses in seen], self.update.norm(), told)
            launched = self.update.harmless
            if launched:
                self.update(report.norm)
            numbers = report.read()
            loss = self._count(numbers, len(group), utterances)
            if not numbers.finite:
                self._skip(seen, loss)
                return None
            if self.noise is not None:
                self.noise.add(self.grad_norm, utterances)
            if not launched:
                self.update(report.norm)
            self._end_step()
        return loss

    def _count(self, numbers: Numbers, batches: int, utterances: int) -> float:
        """Count what all ranks did in a step; returns the mean loss."""
        infeasible, audio_s, unusual, former_s, *self.heard = numbers.counts
        now_s = time.perf_counter()
        self._took_s, self._read_s = now_s - self._read_s, now_s
        self.overlap.end(audio_s, usual=not unusual, former_s=former_s / self.comm.world)
        progress = self.progress
        progress.batch += batches
        progress.infeasible += round(infeasible)
        progress.audio_s += audio_s
        self.grad_norm = numbers.norm
        return numbers.loss / utterances

    def _passes(
        self, batches: Ahead, group: Sequence[Sequence[int]]
    ) -> tuple[list[tuple[Batch, Tensor]], tuple[float, float, float]]:
        """Forward and backward passes of a step.

        Returns:
            This rank's batches with their losses; how many of its utterances are infeasible, its seconds of audio, and
            how many passes took longer than later ones will.
        """
        config, comm = self.config, self.comm
        utterances = sum(map(len, group))
        infeasible, audio_s, unusual = 0, 0.0, 0
        seen: list[tuple[Batch, Tensor]] = []
        for number, whole in enumerate(group):
            with self.timer.phase("data"):
                batch, inputs = next(batches)
            idle = self.statistics.idle = comm.rank >= len(whole)  # its batch repeats another rank's utterance
            last = number == len(group) - 1
            try:
                with self.timer.phase("forward"), self.statistics.passing(backward=False):
                    losses = self.passes.forward(inputs, utterances, last=last, idle=idle)
                with self.timer.phase("backward"), self.statistics.passing(backward=True, last=last):
                    self.passes.backward()
                if last:
                    with self.timer.phase("data"):
                        batches.look()
            except torch.OutOfMemoryError as error:
                lengths_s = batch.sample_lengths / config.data.sample_rate_hz
                where = f"{self.device} in epoch {self.progress.epoch}, batch {self.progress.batch + 1}"
                raise TrainingError(
                    out_of_memory(where, lengths_s, config.batching, self.batching, graphs=self.inputs.padded)
                ) from error
            unusual += not self.passes.usual
            if not idle:
                seen.append((batch, losses))
                infeasible += inputs.infeasible
                audio_s += float(batch.sample_lengths.sum()) / config.data.sample_rate_hz
        return seen, (infeasible, audio_s, unusual)

    def _end_step(self) -> None:
        """Do what follows a change of the weights, and count the step."""
        if self.average is not None:
            self.average.update(self.model)
        self.progress.step += 1
        self.comm.whereabouts.step = self.progress.step

    def _not_finite(self, seen: Sequence[tuple[Batch, Tensor]]) -> list[str]:
        return [
            self.utterances[index].name
            for batch, losses in seen
            for index, ok in zip(batch.indices.tolist(), torch.isfinite(losses).tolist(), strict=True)
            if not ok
        ]

    def _skip(self, seen: Sequence[tuple[Batch, Tensor]], loss: float) -> None:
        bad = [name for names in self.comm.allgather(self._not_finite(seen)) for name in names]
        self.progress.skipped += 1
        for module in self.model.modules():
            if isinstance(module, SequenceBatchNorm):
                module.forget_broken_averages()
        names = ", ".join(bad) if bad else "none alone: the gradient overflowed"
        log.warning("step skipped: loss %s, gradient norm %s; utterances: %s", loss, self.grad_norm, names)
        limit = self.config.train.max_skipped_steps
        if self.progress.skipped > limit:
            raise TrainingError(
                f"{self.progress.skipped} steps were not finite (train.max_skipped_steps={limit}); last utterances: "
                f"{names}. "
                "Lower optim.learning_rate or optim.clip_norm, or run `ds2 data check` on the manifest"
            )

    def evaluate(self, board: RunLog) -> dict[str, float]:
        """WER and CER on the dev set with the averaged weights if there are any; keeps the best model."""
        progress = self.progress
        scores = self.dev.evaluate(self.state.judged, board, progress.step, self.comm)
        self.model.train()
        better = self.files.keep_best(scores)
        metric = self.config.train.metric
        best = 100 * {"wer": progress.best_wer, "cer": progress.best_cer}[metric]
        log.info(
            "epoch %d: dev WER %.2f %%, CER %.2f %%%s", progress.epoch, 100 * scores["wer"], 100 * scores["cer"],
            " (best)" if better else f"; best {best:.2f} % {metric.upper()} in epoch {progress.best_epoch}",
        )  # fmt: skip
        return scores
