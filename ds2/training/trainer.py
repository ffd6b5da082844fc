"""The trainer of a run on one device: its construction, steps and evaluations."""

import gc
import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

import torch
from ds2_ops.checks import why_no_gpu
from ds2_ops.ctc.loss import why_not as why_no_loss
from torch import Tensor, nn

from ds2.audio.augment import speed_range
from ds2.audio.features import Features
from ds2.config.device import resolve_device, resolve_precision
from ds2.config.schema import Config, ConfigError
from ds2.data.loader import Batch, SpeechLoader, padded_durations_s, plan_epoch
from ds2.data.manifest import corpus, hours
from ds2.data.splits import ScoredData, ensure_manifests, require_files, training_utterances
from ds2.distributed.communicator import Communicator, settings
from ds2.distributed.elastic import ElasticCommunicator
from ds2.distributed.launch import share_cores
from ds2.distributed.members import JOINER, LeftBehindError, View
from ds2.distributed.process_group import LostRankError
from ds2.lm.files import save_ngram
from ds2.model.acoustic import AcousticModel
from ds2.model.norm import SequenceBatchNorm
from ds2.model.structure import check_backend
from ds2.model.wavefront import Wavefront
from ds2.model.wavefront import why_not as why_no_wavefront
from ds2.system import UserError
from ds2.system.plain import counted
from ds2.system.tensor_file import counting_modules
from ds2.text.alphabet import Alphabet
from ds2.training import device_tuning
from ds2.training.ctc import Crf
from ds2.training.dev_set import DevEvaluator
from ds2.training.device_tuning import MemoryProbe, adopt_measurements, check_batching
from ds2.training.inputs import FRAMES_MULTIPLE, EpochBatches, InputMaker, PreparedBatches, phones_of
from ds2.training.metrics import LoggedScalars, NoiseScale, RunLog, StepTimer
from ds2.training.optim import OptimizerStep, freeze, make_optimizer
from ds2.training.passes import GraphedPasses, Passes, build_gradients, use_graphs, why_sums_are_launched
from ds2.training.reductions import NormStatistics, OverlapChoice, StepNumbers, StepReport
from ds2.training.run_folder import RunFiles
from ds2.training.state import Parts, Progress, TrainState, broadcast_state, initial_state, read_state, state_file
from ds2.training.stopping import Interrupts

log = logging.getLogger(__name__)


class LastCommit:
    """What a run goes back to where a rank is lost: the progress and a model's buffers, which a step changes too early.

    The buffers are copied without state dicts, which take milliseconds of every step of a deep model.
    """

    def __init__(self, model: nn.Module) -> None:
        self.number = JOINER  # counts commits; JOINER in a process that has not the state of the run
        self.progress: Progress | None = None  # None before the first commit
        self._model, self._buffers = model, dict(model.named_buffers())
        self._copies = {name: torch.empty_like(buffer) for name, buffer in self._buffers.items()}
        self._counting = counting_modules(model)
        self._counts: dict[str, Tensor] = {}

    def record(self, progress: Progress) -> None:
        """Copy progress and buffers as they are now."""
        self.number += 1
        self.progress = replace(progress)
        if self._copies:
            torch._foreach_copy_(list(self._copies.values()), list(self._buffers.values()))
        self._counts = {name: module.get_extra_state() for name, module in self._counting.items()}

    def restore(self) -> Progress | None:
        """Load the buffers back; return the progress."""
        if self.progress is None:
            return None
        self._model.load_state_dict({**self._copies, **self._counts}, strict=False)
        return replace(self.progress)


def ranks_with_state(commits: Sequence[int]) -> list[int]:
    """Return the ranks whose state has the bits of rank 0's, rank 0 among them: those whose last commit has its number.

    Equal numbers are one commit of one view:

    - The ranks that have a commit were ranks of the same view. A process that joins, or was left behind, has none.
    - A view's first commit is one above that of its rank 0, the highest that any of its ranks has. So no commit of an
      earlier view that a rank may still have has the number of one of this view.

    At a commit all ranks of a view have one state. At its first one they have what rank 0 sent, or had the same commit.
    After that each step computes the same on all: weights, momenta, their counts and the average of weights follow from
    those before and from sums over ranks, which have one order. What differs between ranks is no state: batches, masks
    and dropout are functions of seed, epoch, utterance and rank.

    A step or an evaluation that broke has left nothing. Buffers, counts of batch norm and the progress go back to the
    commit. Weights, momenta and the average change after the last sum of a step, and no call between that and the
    commit can fail, but for a step that is not finite, which changes none of them.

    Args:
        commits: the number of the last commit of each rank; where rank 0 has none, it has read a file.
    """
    return [rank for rank, number in enumerate(commits) if rank == 0 or number == commits[0] != JOINER]


class Trainer:
    """The state of a run on one device, its steps and its evaluations."""

    logged: LoggedScalars | None = None  # of the last step that was logged, on all ranks; None: none was taken or read
    grad_norm = 0.0  # of the last step
    extra_sums: Sequence[float] = ()  # over ranks, of the last step's extra counts

    def __init__(self, config: Config, run_dir: Path, comm: Communicator | None = None) -> None:
        """Build data, model and optimizer, equal on all ranks; resume where `run_dir` holds a trainer state."""
        self.config, self.run_dir = config, run_dir
        self.comm = comm or Communicator(resolve_device(config.device))
        self.device = self.comm.device
        check_run(config, self.comm)
        torch.backends.cudnn.deterministic = True  # a resumed run repeats the losses of an unbroken one, bit for bit
        torch.backends.cudnn.benchmark = False
        self.precision = resolve_precision(config.train.precision, self.device)
        autocast = self.precision == "bf16"
        self.alphabet = Alphabet.from_config(config.alphabet)
        self.features = Features(config.features, config.data.sample_rate_hz)
        torch.manual_seed(config.train.seed)  # of the weights, which are drawn on the CPU
        self.model = AcousticModel(config.model, self.features.bins, len(self.alphabet), config.features.step_s)
        freeze(self.model, config.train.freeze)
        self._read_data()
        self.crf = self._build_crf()
        self.phones = phones_of(config, self.alphabet, self.utterances)
        remedy = "give all hosts the same alphabet.lexicon and train.intermediate_lexicon"
        self._contents = pronunciations_of_run(self.alphabet, self.phones)
        self.comm.agree(self._contents, remedy)
        self._contents |= {"denominator": self.crf.digest} if self.crf is not None else {}
        self.durations_s = padded_durations_s([u.duration_s for u in self.utterances], speed_range(config.augment))
        self._make_state()
        if self.crf is not None and self.comm.rank == 0:
            # For decoding. Not before the state, which may be refused: the folder's own must stay then.
            save_ngram(self.crf.model, run_dir / "denominator.lm")
        self._compare_contents()
        device_tuning.choose_factors(self.progress, self.comm)
        dev = self.dev.utterances
        # What scores are measured on.
        self.dev_data = ScoredData.of(config.data.dev, dev, self.utterances) if dev else None
        self.files = RunFiles(run_dir, config, self.state, self.alphabet, self.precision, self.dev_data, self.comm)
        self.timer = StepTimer(self.device, self.comm.status.enter)
        self.gradients = build_gradients(config, self.model, self.comm, autocast=autocast)
        self._why_no_kernels = why_no_kernels(self.comm)
        self._prepare_steps()
        parts = (config, self.utterances, self.alphabet, self.inputs)
        self.memory_probe = partial(MemoryProbe, *parts, autocast=autocast, crf=self.crf)
        self.batching = device_tuning.choose_batching(
            config, self.progress, self.comm, self.durations_s, self.memory_probe
        )
        repeated = self.utterances if config.data.repeats else None
        self._plan = partial(  # of an epoch
            plan_epoch, self.durations_s, self.batching, seed=config.train.seed, utterances=repeated
        )
        self._batches = EpochBatches(self.loader, self._plan, config.train.epochs, self.comm)
        device_tuning.choose_tiles(self.progress, config, self.precision, self.comm, self.plan())
        self._last_commit = LastCommit(self.model)

    def _prepare_steps(self) -> None:
        """Make what the launches and sums of a step depend on: the ranks, and the memory of the state.

        Recordings hold addresses, and the sums of so many ranks: they are made anew, as all else that a run with this
        number of ranks begins with.
        """
        config, comm, autocast = self.config, self.comm, self.precision == "bf16"
        shared = config.comm.batch_norm == "shared"
        self.statistics = NormStatistics(self.model, comm, shared=shared, kernels=not self._why_no_kernels)
        self.gradients.overlap, self.gradients.copied = config.comm.overlap, False
        self.gradients.set_copies_current(False)
        self.overlap = OverlapChoice(self.gradients)
        self.noise = NoiseScale(self.gradients.buckets) if config.train.noise_scale else None
        why_launched = why_sums_are_launched(config, comm)
        graphed = self._graphs_possible(why_launched)
        self.model.wavefront = choose_wavefront(config, self.precision, self.device, graphed=graphed)
        passes = partial(GraphedPasses, records_sums=not why_launched) if graphed else Passes
        self.passes: Passes = passes(
            self.model, self.features, self.gradients, config.train, autocast=autocast, crf=self.crf
        )
        log_probs = self.crf.label_log_probs if self.crf is not None else None
        self.inputs = InputMaker(
            self.features, self.model, config, padded=graphed, label_log_probs=log_probs, phones=self.phones
        )
        self.update = OptimizerStep(
            self.optimizer, self.gradients, config.optim.clip_norm, graphed=graphed, why_no_kernels=self._why_no_kernels
        )
        self._step_s = 0.0  # the time of the last step
        self._read_at_s = 0.0  # when its report was read

    def _graphs_possible(self, why_launched: str) -> bool:
        """Whether steps run as CUDA graphs: see `use_graphs`."""
        config, crf = self.config, self.crf
        longest_s = float(padded_durations_s([config.data.max_duration_s], speed_range(config.augment))[0])
        samples = int(longest_s * config.data.sample_rate_hz)
        max_frames = self._output_frames(samples) + FRAMES_MULTIPLE
        labels = max(len(self.alphabet), len(config.model.intermediate_phones) + 1)
        no_loss = why_no_loss(max_frames, labels, self.device)
        if crf is not None:
            no_loss = no_loss or crf.denominator.why_not(self.device)
        return use_graphs(config, self.comm, why_launched, no_loss, self.model.why_torch(self.precision))

    def _output_frames(self, samples: int) -> int:
        """Output frames of the model for a number of audio samples."""
        return int(self.model.output_frames(self.features.frames(samples)))

    def _read_data(self) -> None:
        """Read the manifests, one rank of a host after the other, and check that all ranks have read the same."""
        data, augment, seed = self.config.data, self.config.augment, self.config.train.seed
        with self.comm.in_turn():
            ensure_manifests(data)
            require_files(self.config)
            self.utterances = training_utterances(data, augment, self.alphabet, self._output_frames)
            self.loader = SpeechLoader(self.utterances, data, self.device, self.alphabet, augment, seed)
            self.dev = DevEvaluator(data, self.features, self.alphabet, self.device, self.precision)
        contents = corpus("training", self.utterances) | corpus("dev", self.dev.utterances)
        self.comm.agree(contents, "give all hosts the same manifests")

    def _make_state(self) -> None:
        """Move model and features to the device; load the state that the run starts or resumes from on all ranks."""
        config, comm = self.config, self.comm
        self.model.to(comm.device)
        self.features.to(comm.device)
        self.optimizer = make_optimizer(self.model, config.optim)
        self.state = TrainState(self.model, self.features, self.optimizer)
        parts, progress = Parts(), Progress()
        if comm.rank == 0:
            whole = not comm.elastic  # else rank 0 of the first view reads the tensors
            parts, progress = initial_state(self.state, self.loader, self.alphabet, config, self.run_dir, whole=whole)
        broadcast_state(self.state, parts, progress, config.train.average_decay, comm)

    def _build_crf(self) -> Crf | None:
        """Make what CTC-CRF needs, equal on all ranks."""
        if self.config.train.objective == "ctc":
            return None
        with self.comm.in_turn():
            crf = Crf.of(self.config.train, self.alphabet, self.utterances)
        self.comm.agree({"denominator": crf.digest}, "give all hosts the same train.denominator_text")
        return crf

    @property
    def progress(self) -> Progress:
        return self.state.progress

    def commit(self) -> None:
        """Record the end of a step or evaluation: if a rank is lost in the next, the others return to this."""
        self.files.write_held()  # the step needed all ranks, so all have ended the one before
        self._record()

    def _record(self) -> None:
        if self.comm.elastic:
            self._last_commit.record(self.progress)

    def regroup(self, interrupts: Interrupts) -> View:
        """Continue from the last commit with the processes that are present as the ranks.

        No completed step is lost: all ranks get the state of the rank that is furthest. Only the progress and
        the buffers have changed since its commit, for weights change where a step ends.

        Raises:
            UserError: as `ElasticCommunicator.regroup`.
        """
        comm = self.comm
        assert isinstance(comm, ElasticCommunicator)
        self.statistics.release()  # a copy of the model must not hold connections
        self.files.give_up_shards()
        while True:
            try:
                view = comm.regroup(self._last_commit.number, stop_signal=lambda: interrupts.received)
                self._take_state(view)
                if comm.rank != 0:
                    self.files.wait()  # if this process was rank 0, its files are older than those of the next rank 0
                interrupts.agreed = 0  # by the ranks of the previous view
                interrupts.agree(comm)
                share_cores(comm)
                self._why_no_kernels = why_no_kernels(comm)
                break
            except LeftBehindError as error:
                log.warning("%s; it joins them again", error)
                self.files.drop_held()  # it is of a step that may not count
                self.files.wait()
                self._last_commit.number, self.logged = JOINER, None
            except LostRankError as error:
                log.info("a rank was lost while the ranks met: %s", error)
        self.files.remove_partial_files()  # all ranks have ended their writing
        if comm.rank == 0 and not view.fresh:  # all ranks have its state
            self.files.write_held()
        self.files.drop_held()
        self._prepare_steps()
        if self.device.type == "cuda":
            gc.collect()  # the error of a broken step holds tensors
            torch.cuda.empty_cache()  # of recordings and larger batches: another rank may share this GPU now
        self._batches = EpochBatches(self.loader, self._plan, self.config.train.epochs, comm)
        return view

    def _take_state(self, view: View) -> None:
        """Load on all ranks the state of rank 0: of its last commit, or, where no rank has one, of the run folder."""
        state, config = self.state, self.config
        state.progress = self._last_commit.restore() or state.progress
        parts, progress = state.tensors(), state.progress
        if view.fresh:
            self.files.remove_partial_files()  # before the state is read: a lost rank that wakes up would replace it
            if self.comm.rank == 0 and (progress.step or state_file(self.run_dir).is_file()):
                parts, progress = read_state(self.run_dir, config, state)
        of_ranks = self.comm.allgather((self._last_commit.number, self.logged))
        holders = ranks_with_state([commits for commits, _ in of_ranks])
        if self.comm.rank == 0 and len(holders) < len(of_ranks):
            log.info("the state is sent to %d of %d ranks, which lack it", len(of_ranks) - len(holders), len(of_ranks))
        broadcast_state(state, parts, progress, config.train.average_decay, self.comm, holders)
        self._compare_contents()
        # From here to the record there is no call that a lost rank could end: weights and progress belong together.
        adopt_measurements(self.progress)
        self._last_commit.number, self.logged = of_ranks[0]
        self._record()

    def _compare_contents(self) -> None:
        if self.dev.utterances:
            self.progress.note_dev_set(str(corpus("dev", self.dev.utterances)["dev"]))
        self.progress.note_contents(self._contents)

    def describe(self) -> str:
        """One line: data, device, precision and size."""
        utterances, dev = counted(len(self.utterances), "utterance"), len(self.dev.utterances)
        return (
            f"training {utterances} ({hours(self.utterances):.2f} h), {dev} dev, on {self.device} in "
            f"{self.precision}, {self.model.parameter_count:,} parameters, lookahead {self.model.lookahead_ms:.0f} ms"
        )

    def close(self) -> None:
        """End the processes that load audio."""
        self.loader.close()
        self.dev.loader.close()

    def plan(self) -> list[list[int]]:
        """The batches of the running epoch, as utterance indices."""
        return self._plan(self.progress.epoch)

    def epoch(self, plan: Sequence[Sequence[int]]) -> PreparedBatches:
        """This rank's parts of the remaining batches of the running epoch."""
        epoch, batch = self.progress.epoch, self.progress.batch
        return self.prepared(self._batches.remaining(epoch, batch, len(plan) - batch))

    def prepared(self, batches: Iterator[Batch]) -> PreparedBatches:
        """Batches of the running epoch with their inputs, as `step` takes them."""
        return PreparedBatches(batches, partial(self.inputs, epoch=self.progress.epoch))

    def step(
        self,
        batches: PreparedBatches,
        group: Sequence[Sequence[int]],
        extra_counts: Callable[[], Sequence[float]] = list,
    ) -> float | None:
        """Take one optimizer step over all ranks.

        Args:
            batches: this rank's parts of the batches, as `epoch` returns them; the inputs of the batch after the step's
                are made before the host waits for the step's results.
            group: the whole batches that make up the step, as utterance indices.
            extra_counts: returns further numbers of this rank; called once the passes are launched. `extra_sums` holds
                their sums over ranks afterwards.

        Returns:
            The mean loss an utterance in nats, or None for a step that was skipped because it was not finite.
        """
        utterances = sum(map(len, group))
        self.overlap.start_step()
        self.gradients.start_step()
        losses_of_batches, counts = self._run_passes(batches, group)
        with self.timer.phase("allreduce_exposed"):
            for began, ended in self.gradients.finish_step():
                self.timer.add("allreduce_total", began, ended)
        with self.timer.phase("optimizer"):
            counts = [*counts, self._step_s, *extra_counts()]
            report = StepReport(self.comm, [losses for _, losses in losses_of_batches], self.update.norm(), counts)
            launched = self.update.ignores_nonfinite and not self.comm.confirms
            if launched:
                self.update(report.norm)
            numbers = report.read()
            self.comm.confirm_sums()
            loss = self._add_to_progress(numbers, len(group), utterances)
            if not numbers.finite:
                self._skip_step(losses_of_batches, loss)
                return None
            if self.noise is not None:
                self.noise.add(self.grad_norm, utterances)
            if not launched:
                self.update(report.norm)
            if self.state.average is not None:
                self.state.average.update(self.model)
                self.progress.averaged = self.state.average.updates
            self.progress.step += 1
            self.comm.status.step = self.progress.step
        return loss

    def _add_to_progress(self, numbers: StepNumbers, batches: int, utterances: int) -> float:
        """Add a step's numbers of all ranks to the progress; returns the mean loss."""
        infeasible, audio_s, atypical, previous_s, *self.extra_sums = numbers.counts
        now_s = time.perf_counter()
        self._step_s, self._read_at_s = now_s - self._read_at_s, now_s
        self.overlap.end_step(audio_s, typical=not atypical, previous_s=previous_s / self.comm.world)
        progress = self.progress
        progress.batch += batches
        progress.infeasible += round(infeasible)
        progress.audio_s += audio_s
        self.grad_norm = numbers.norm
        return numbers.loss / utterances

    def _run_passes(
        self, batches: PreparedBatches, group: Sequence[Sequence[int]]
    ) -> tuple[list[tuple[Batch, Tensor]], list[float]]:
        """Run the forward and backward passes of a step.

        Returns:
            This rank's batches with their losses; its counts of infeasible utterances, of seconds of audio, and of
            passes that took longer than later ones will.
        """
        config, comm = self.config, self.comm
        utterances = sum(map(len, group))
        infeasible, audio_s, atypical = 0, 0.0, 0
        losses_of_batches: list[tuple[Batch, Tensor]] = []
        for number, whole in enumerate(group):
            with self.timer.phase("data"):
                batch, inputs = next(batches)
            idle = self.statistics.idle = comm.rank >= len(whole)  # its batch repeats another rank's utterance
            last = number == len(group) - 1
            try:
                with self.timer.phase("forward"), self.statistics.during_pass(backward=False):
                    losses = self.passes.forward(inputs, utterances, last=last, idle=idle)
                with self.timer.phase("backward"), self.statistics.during_pass(backward=True, last=last):
                    self.passes.backward()
                if last:
                    with self.timer.phase("data"):
                        batches.prepare_next()
            except torch.OutOfMemoryError as error:
                lengths_s = batch.sample_lengths / config.data.sample_rate_hz
                where = f"{self.device} in epoch {self.progress.epoch}, batch {self.progress.batch + 1}"
                raise UserError(
                    device_tuning.out_of_memory_message(
                        where, lengths_s, config.batching, self.batching, graphs=self.inputs.padded
                    )
                ) from error
            atypical += not self.passes.typical
            if not idle:
                losses_of_batches.append((batch, losses))
                infeasible += inputs.infeasible
                audio_s += float(batch.sample_lengths.sum()) / config.data.sample_rate_hz
        return losses_of_batches, [infeasible, audio_s, atypical]

    def _skip_step(self, losses_of_batches: Sequence[tuple[Batch, Tensor]], loss: float) -> None:
        own = [
            self.utterances[index].name
            for batch, losses in losses_of_batches
            for index, ok in zip(batch.indices.tolist(), torch.isfinite(losses).tolist(), strict=True)
            if not ok
        ]
        bad = list(chain.from_iterable(self.comm.allgather(own)))
        self.progress.skipped += 1
        for module in self.model.modules():
            if isinstance(module, SequenceBatchNorm):
                module.forget_broken_averages()
        names = ", ".join(bad) if bad else "none alone: the gradient overflowed"
        log.warning("step skipped: loss %s, gradient norm %s; utterances: %s", loss, self.grad_norm, names)
        limit = self.config.train.max_skipped_steps
        if self.progress.skipped > limit:
            raise UserError(
                f"{self.progress.skipped} steps were not finite (train.max_skipped_steps={limit}); last utterances: "
                f"{names}. "
                "Lower optim.learning_rate or optim.clip_norm, or run `ds2 data check` on the manifest"
            )

    def evaluate(self, run_log: RunLog) -> dict[str, float]:
        """WER and CER on the dev set with the averaged weights if there are any; keeps the best model."""
        progress = self.progress
        scores = self.dev.evaluate(self.state.evaluated, run_log, progress.step, self.comm)
        self.model.train()
        better = self.files.keep_best(scores)
        metric = self.config.train.metric
        best = 100 * {"wer": progress.best_wer, "cer": progress.best_cer}[metric]
        log.info(
            f"epoch {progress.epoch}: dev WER {100 * scores['wer']:.2f} %, CER {100 * scores['cer']:.2f} %"
            + (" (best)" if better else f"; best {best:.2f} % {metric.upper()} in epoch {progress.best_epoch}")
        )
        return scores


def check_run(config: Config, comm: Communicator) -> None:
    """Check what can fail before any data is read.

    Raises:
        ConfigError: a setting that this device cannot do.
        UserError: ranks have other settings.
    """
    check_backend(config.model, comm.device)
    check_batching(config.batching, comm)
    if comm.elastic and config.train.wavefront == "on" and config.train.graphs != "on":
        raise ConfigError(
            "train.wavefront=on needs steps that are recorded with any number of ranks (comm.max_ranks): set "
            "train.graphs=on too, or train.wavefront=auto"
        )
    comm.agree(settings(config), "start all ranks with the same overrides, recipes and environment")
    comm.agree({"kind of device": comm.device.type}, "train on GPUs alone or on CPUs alone (device=cpu)")


def why_no_kernels(comm: Communicator) -> str:
    """Why all ranks use torch's kernels to update weights and averages of batch norm; '' if those of ds2_ops.

    These are the same on all ranks, and torch's kernels round differently. So one rank that cannot run those of ds2_ops
    decides for all, which call this together.
    """
    reason = why_no_gpu(comm.device) if comm.device.type == "cuda" else None
    reasons = comm.allgather(f"rank {comm.rank}: {reason}" if reason else "")
    return next((text for text in reasons if text), "")


def pronunciations_of_run(alphabet: Alphabet, phones: Sequence[Tensor]) -> dict[str, str]:
    """Return digests of what lexicons give: words of the alphabet, and phones of the utterances, see `phones_of`."""
    words = alphabet.pronunciations.lines() if alphabet.pronunciations is not None else []
    of_utterances = b"".join(labels.numpy().tobytes() for labels in phones)
    content = {"pronunciations": "\n".join(words).encode(), "phones": of_utterances}
    return {name: hashlib.sha256(octets).hexdigest()[:12] for name, octets in content.items()}


def choose_wavefront(config: Config, precision: str, device: torch.device, *, graphed: bool) -> Wavefront | None:
    """How layers run side by side (`train.wavefront`); None: one after the other.

    Raises:
        ConfigError: train.wavefront=on where they cannot.
    """
    if config.train.wavefront == "off":
        return None
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    reason = why_no_wavefront(config.model, dtype, device)
    if reason is None and not graphed:
        reason = "steps are launched kernel by kernel, which takes the host longer than the GPU; see train.graphs"
    if reason is None:
        return Wavefront.of(config.model, dtype, device)
    if config.train.wavefront == "on":
        raise ConfigError(f"train.wavefront=on cannot run: {reason}; set train.wavefront=auto or off")
    return None
