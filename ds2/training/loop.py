"""The training loop: run folder, trainer, then epochs of steps, evaluation and saves."""

import logging
import time
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from ds2.config.convert import not_default, save_config
from ds2.config.schema import Config
from ds2.data.splits import report_changes
from ds2.distributed.communicator import Communicator
from ds2.distributed.launch import connect, rank_log
from ds2.distributed.members import View
from ds2.distributed.process_group import LostRankError
from ds2.model.acoustic import AcousticModel
from ds2.system import UserError
from ds2.system.machine import git_commit, short_collections
from ds2.system.plain import counted
from ds2.system.signals import Stopped
from ds2.training.metrics import LogWindow, RunLog, load_tensorboard, progress_bar
from ds2.training.optim import learning_rate, longest_key, set_learning_rate
from ds2.training.run_folder import check_shared, make_folder, sole_use
from ds2.training.state import Progress, resolve_position, state_file
from ds2.training.stopping import Interrupts, report_lost_device
from ds2.training.trainer import Trainer

log = logging.getLogger(__name__)

PROGRESS_EVERY_S = 60.0  # a line of progress where no terminal shows a bar


def train(config: Config, run_dir: Path) -> int:
    """Train from the config, or go on where `run_dir` stopped.

    Args:
        config: a checked configuration.
        run_dir: receives the resolved config, log, TensorBoard, model files and the trainer state.

    Returns:
        0 when training ended by itself; 128 + n when signal n stopped it, in a step after a save.

    Raises:
        UserError: of config, corpus, audio, checkpoint, training or device, with the reason and the way out.
    """
    try:
        with (
            torch.inference_mode(False),  # where the caller, a notebook perhaps, has set this
            torch.enable_grad(),
            Interrupts() as interrupts,
            connect(config.comm, config.device, run_dir) as comm,
            make_folder(run_dir),
            sole_use(run_dir, comm),
            rank_log(comm, run_dir),
            report_lost_device(comm),
        ):
            check_shared(run_dir, config, comm)
            return _train(config, run_dir, comm, interrupts)
    except Stopped as stopped:
        log.warning("stopped by %s; what was saved stays, the same command goes on from there", stopped)
        return stopped.status


def _train(config: Config, run_dir: Path, comm: Communicator, interrupts: Interrupts) -> int:
    with interrupts.at_once():
        trainer = Trainer(config, run_dir, comm)
    with closing(trainer), trainer.files:
        if comm.elastic:
            with interrupts.at_once():
                load_tensorboard()  # before the ranks wait for this one, which may be rank 0 some day
                view = trainer.regroup(interrupts)
            _end_if_too_few(trainer, view, interrupts)
            _save_first(trainer)
        if comm.rank == 0:
            _write_settings(trainer)
        run_log = _open_log(trainer)
        _log_again(trainer, run_log)
        _log_start(trainer, run_log)
        while True:
            try:
                with short_collections():
                    return _run(trainer, run_log, interrupts)
            except LostRankError as error:
                if not comm.elastic:
                    raise
                log.info("step %d: %s", trainer.progress.step, error)
            run_log = _regroup(trainer, run_log, interrupts)
            _save_first(trainer)
            if comm.rank == 0 and not (run_dir / "corpus.json").is_file():  # the lost rank 0 had not written it
                _write_settings(trainer)


def _save_first(trainer: Trainer) -> None:
    """Write a state where there is none: a process that is left behind goes on from it, not from its own steps."""
    if trainer.comm.rank == 0 and not state_file(trainer.run_dir).is_file():
        trainer.files.save_and_wait(alone=True)


def _write_settings(trainer: Trainer) -> None:
    """Write the config and what the corpus is; report what has changed in it since the last start."""
    run_dir = trainer.run_dir
    try:
        save_config(trainer.config, run_dir / "config.yaml")
        report_changes(run_dir / "corpus.json", [*trainer.utterances, *trainer.dev.utterances], log.info)
    except OSError:  # the others go on without this process, which was stopped, and have removed its file
        if not trainer.comm.superseded():
            raise


def _open_log(trainer: Trainer) -> RunLog:
    comm, step = trainer.comm, trainer.progress.step
    writes, superseded = comm.rank == 0, comm.superseded
    if writes and step and not (trainer.run_dir / "log.jsonl").is_file():
        log.warning(
            "%s has no log.jsonl, so its log begins after step %d: earlier lines are in the file that was moved or "
            "removed", trainer.run_dir, step,
        )  # fmt: skip
    return RunLog(trainer.run_dir, resume_step=step, writes=writes, superseded=superseded, takes_over=comm.elastic)


def _log_again(trainer: Trainer, run_log: RunLog) -> None:
    """Log the last step once more, which a rank 0 that was lost may not have done."""
    if trainer.logged is not None and trainer.logged[1] == trainer.progress.step:
        run_log.scalars(*trainer.logged)


def _regroup(trainer: Trainer, previous: RunLog, interrupts: Interrupts) -> RunLog:
    """Continue with the processes that are present; return the log of this one.

    Raises:
        UserError: they are fewer than `comm.min_ranks`; the state is saved.
    """
    logged, began_s = trainer.logged if previous.writes else None, time.monotonic()
    view, comm = trainer.regroup(interrupts), trainer.comm
    step = trainer.progress.step
    previous.close()
    run_log = _open_log(trainer)
    if trainer.logged != logged:  # a rank that was further, and lost while the ranks met, may have passed it on
        _log_again(trainer, run_log)
    run_log.event("ranks", step, {"ranks": comm.world, "joined": view.joined, "left": view.left})
    log.info(
        "step %d: going on with %s after %.1f s, this is rank %d; %d joined%s",
        *(step, counted(comm.world, "rank"), time.monotonic() - began_s, comm.rank, view.joined),
        "".join(f"; {text}" for text in view.left),
    )
    if interrupts.agreed:
        trainer.files.save_and_wait(alone=True)
    _end_if_too_few(trainer, view, interrupts)
    return run_log


def _end_if_too_few(trainer: Trainer, view: View, interrupts: Interrupts) -> None:
    """Save and raise UserError where a view has fewer ranks than `comm.min_ranks`, unless a signal ends it."""
    if view.enough or interrupts.agreed:
        return
    comm, limits = trainer.comm, trainer.config.comm
    trainer.files.save_and_wait(alone=True)
    with suppress(LostRankError):
        comm.allgather(None)  # rank 0 has saved
    raise UserError(
        f"{counted(comm.world, 'rank')} for comm.wait_s={limits.wait_s:g} s, fewer than comm.min_ranks="
        f"{limits.min_ranks}; step {trainer.progress.step} is saved: start more with the same command, they go on "
        "from there; a process on another host counts only if it sees this run_dir, on a shared disk"
    )


def _log_start(trainer: Trainer, run_log: RunLog) -> None:
    """Log the start of the run, and warn of settings that will have no effect."""
    config, run_dir, comm, progress = trainer.config, trainer.run_dir, trainer.comm, trainer.progress
    facts = {"git_commit": git_commit(), "epoch": progress.epoch, "ranks": comm.world}
    run_log.event("resume" if progress.step else "start", progress.step, facts)
    log.info("%s; run folder %s", trainer.describe(), run_dir)
    if comm.world == 1 < config.comm.max_ranks:
        log.info("no other rank yet: one on another host joins only if it sees this very folder, on a shared disk")
    _warn_of_short_warm_up(config, len(trainer.plan()))
    _warn_of_early_delay_penalty(config)
    _warn_of_lone_settings(config, trainer.model, on_gpu=comm.device.type == "cuda")
    if trainer.dev_data is not None and (warning := trainer.dev_data.warning()):
        log.warning("%s", warning)
    if not trainer.dev.utterances:
        log.warning(
            "no dev set (data.dev is empty): nothing will say how good the model is, and there will be no "
            "best.safetensors, only last.safetensors; `ds2 data split` makes a dev set"
        )


def _run(trainer: Trainer, run_log: RunLog, interrupts: Interrupts) -> int:
    """Train until training ends or is stopped; returns the exit status."""
    config, comm, progress = trainer.config, trainer.comm, trainer.progress
    written = trainer.files.has_last_model()  # not if the run was killed before the evaluation after its last step
    while not (reason := interrupts.name or (written and why_finished(config, progress))):
        complete = run_epoch(trainer, run_log, interrupts)
        due = evaluation_due(trainer, complete)
        # An evaluation may be long: a process that is killed in it loses no step.
        if interrupts.agree(comm) or not complete or due:
            trainer.files.save_and_wait()
            if interrupts.agree(comm):  # after rank 0 has written: a signal may end the job from here
                continue
        metrics: dict[str, float] = {}
        if due:
            with comm.status.slow("evaluation"), interrupts.at_once():
                metrics = trainer.evaluate(run_log)
        keep = due or is_last(trainer, complete) or progress.epoch % config.checkpoint.every_epochs == 0
        if keep:
            trainer.files.keep_last(metrics)
        if complete:
            progress.epoch, progress.batch = progress.epoch + 1, 0
        if complete and keep:
            trainer.files.save()
        if comm.elastic:
            trainer.files.wait()  # if rank 0 is lost, the others repeat the steps that it has not written
        if interrupts.agree(comm) and complete and not keep:
            trainer.files.save_and_wait()
            interrupts.agree(comm)
        trainer.commit()
        written = True
    if comm.superseded():  # while this process was stopped: it has not written its last files
        raise LostRankError("the others went on without this process")
    log.info("stopped after step %d: %s", progress.step, reason)
    return _end(trainer, run_log, interrupts)


def _end(trainer: Trainer, run_log: RunLog, interrupts: Interrupts) -> int:
    """Log the best scores and what training did not reach; return the exit status.

    Raises:
        UserError: it took no step.
    """
    config, progress = trainer.config, trainer.progress
    epochs = progress.epoch - (progress.batch == 0)  # that took a step
    if epochs > 0 and not interrupts.agreed:
        _warn_of_unfinished_schedules(config, progress, epochs)
    run_log.settings(not_default(config), {"wer": progress.best_wer, "cer": progress.best_cer})
    run_log.close()
    if not progress.step and not interrupts.agreed:
        raise UserError(
            f"{trainer.run_dir}: nothing was learned: {progress.skipped} steps were tried, none was finite. "
            "The warnings above name the utterances; lower optim.learning_rate or the augmentation, or run `ds2 data "
            "check`"
        )
    return 128 + interrupts.agreed if interrupts.agreed else 0


def run_epoch(trainer: Trainer, run_log: RunLog, interrupts: Interrupts) -> bool:
    """Take the remaining steps of the running epoch; return whether it was completed (not stopped)."""
    config, progress, comm = trainer.config, trainer.progress, trainer.comm
    plan = trainer.plan()
    resolve_position(progress, plan, trainer.utterances)
    batches = trainer.epoch(plan)
    trainer.model.train()
    epoch, window = LogWindow(progress), LogWindow(progress)
    counted_at = reported_at = time.monotonic()
    # In elapsed_s, the same on all ranks, so that all save after the same step; None: the next step begins to count.
    saved_at_s: float | None = None
    with progress_bar(len(plan), progress.epoch, config.train.epochs, progress.batch, shown=comm.rank == 0) as bar:
        while progress.batch < len(plan) and not interrupts.agreed and not why_finished(config, progress):
            group = plan[progress.batch : progress.batch + config.train.accumulate]
            done = completed_part(config, progress, len(plan))
            warmed_up = warm_up_part(config, progress, done)
            rate = learning_rate(config.optim, progress.step, progress.epoch, done, warmed_up)
            set_learning_rate(trainer.optimizer, rate)
            now = time.monotonic()
            passed_s, counted_at = now - counted_at, now
            loss = trainer.step(batches, group, partial(_own_counts, trainer, interrupts, passed_s))
            epoch.add(loss)
            window.add(loss)
            passed_s, joiners, unsaved, *flags = trainer.extra_sums  # those of `_own_counts` over all ranks
            progress.elapsed_s += passed_s
            saved_at_s = progress.elapsed_s if saved_at_s is None else saved_at_s
            interrupts.receive(flags, comm)
            trainer.commit()
            now = time.monotonic()
            bar.update(len(group))
            left_min = minutes_left(config, progress, len(plan))
            if bar.disable and comm.rank == 0 and now - reported_at >= PROGRESS_EVERY_S:
                reported_at = now
                log.info("%s, %.0f min left", _progress_line(trainer, epoch, len(plan)), left_min)
            if window.steps >= config.train.log_every_steps or progress.batch == len(plan):
                values = _log_window(trainer, run_log, window, rate)
                bar.set_postfix_str(
                    f"loss {values['loss']:.2f}, {values['audio_s_per_s']:.0f} audio s/s, {left_min:.0f} min left"
                )
                window = LogWindow(progress)
            if unsaved or _save_is_due(config, progress, progress.elapsed_s - saved_at_s):
                trainer.files.save_in_epoch()
                saved_at_s = None
            trainer.files.check()
            if comm.elastic and any(flags):
                interrupts.leave()
            if joiners:
                raise LostRankError("a process joins")
    progress.elapsed_s += comm.broadcast(time.monotonic() - counted_at)
    if epoch.steps:  # none where a run resumes at the end of an epoch
        log.info("%s", _progress_line(trainer, epoch, len(plan)))
    return progress.batch == len(plan)


def _own_counts(trainer: Trainer, interrupts: Interrupts, passed_s: float) -> list[float]:
    """What this rank adds to the numbers that are summed over ranks: time counts once, as rank 0 has it."""
    comm = trainer.comm
    time_s = passed_s if comm.rank == 0 else 0.0
    return [time_s, float(comm.joiners_wait()), float(trainer.files.unsaved), *interrupts.send()]


def _progress_line(trainer: Trainer, epoch: LogWindow, batches: int) -> str:
    """Describe the position in an epoch of so many batches, and the steps of it that this process took."""
    progress = trainer.progress
    batch = "" if progress.batch == batches else f", batch {progress.batch} of {batches}"
    return (
        f"epoch {progress.epoch}/{trainer.config.train.epochs}{batch}, step {progress.step}: loss {epoch.loss:.2f}, "
        f"{epoch.audio_s_per_s:.0f} audio s/s"
    )


def _log_window(trainer: Trainer, run_log: RunLog, window: LogWindow, rate: float) -> dict[str, float]:
    """Log the scalars of the steps of a window, whose learning rate is that of the last; returns them."""
    values = window.values(trainer.timer.means(window.steps), rate, trainer.grad_norm, trainer.comm.world)
    if trainer.noise is not None:
        values["noise_scale"] = trainer.noise.end_window(trainer.progress)
    trainer.logged = run_log.scalars("train", trainer.progress.step, values)
    return values


def _save_is_due(config: Config, progress: Progress, since_s: float) -> bool:
    """Whether the state is saved after this step; the last save in mid-epoch was `since_s` ago."""
    every = config.checkpoint
    return 0 < 60 * every.every_minutes < since_s or (every.every_steps > 0 and progress.step % every.every_steps == 0)


def evaluation_due(trainer: Trainer, complete: bool) -> bool:
    """Whether the dev set is decoded now: at the epochs that the config names, and always when training ends."""
    config, epoch = trainer.config.train, trainer.progress.epoch
    regular = epoch % config.evaluate_every_epochs == 0
    return bool(trainer.dev.utterances) and (regular or is_last(trainer, complete))


def is_last(trainer: Trainer, complete: bool) -> bool:
    """Whether training ends with the running epoch: stopped within it, or with all that was planned done."""
    after = replace(trainer.progress, epoch=trainer.progress.epoch + 1)
    return not complete or bool(why_finished(trainer.config, after))


def completed_part(config: Config, progress: Progress, batches: int) -> float:
    """Return the completed part of the planned training: of the epochs, which have `batches` batches each.

    With optim.schedule=timed_cosine it is the part of the minutes, if that is larger.
    """
    limits = config.train
    done = (progress.epoch - 1 + progress.batch / batches) / limits.epochs
    if config.optim.schedule == "timed_cosine":
        return max(done, min(1.0, progress.elapsed_s / (60 * limits.max_minutes)))
    return done


def warm_up_part(config: Config, progress: Progress, done: float) -> float:
    """Return the completed part of the longest warm-up; `done` is that of the planned training.

    A warm-up takes at most a third of the training, or a tenth where the run starts from another model.
    """
    return _part_until_end(config, progress, done) * (10 if config.checkpoint.init_from else 3)


def _part_until_end(config: Config, progress: Progress, done: float) -> float:
    """Return the completed part of a training that train.max_steps may end before the planned one."""
    return max(done, progress.step / config.train.max_steps) if config.train.max_steps else done


def minutes_left(config: Config, progress: Progress, batches: int) -> float:
    """Return the minutes until epochs of `batches` batches, steps or minutes end training, at its pace so far."""
    limit_min, passed_min = config.train.max_minutes, progress.elapsed_s / 60
    done = _part_until_end(config, progress, completed_part(config, progress, batches))
    remaining_min = passed_min / done - passed_min
    return max(0.0, min(remaining_min, limit_min - passed_min)) if limit_min else remaining_min


def why_finished(config: Config, progress: Progress) -> str:
    """Return why training is complete, or ''; it depends on the state only, so a resumed run agrees."""
    limits, epochs_done = config.train, progress.epoch - 1
    if epochs_done >= limits.epochs:
        return f"{counted(epochs_done, 'epoch')} trained (train.epochs)"
    if limits.max_steps and progress.step >= limits.max_steps:
        return f"{counted(progress.step, 'step')} taken (train.max_steps)"
    if limits.max_minutes and progress.elapsed_s >= 60 * limits.max_minutes:
        return f"{progress.elapsed_s / 60:.1f} minutes trained (train.max_minutes)"
    patience = limits.early_stop_epochs
    if patience and progress.best_epoch and epochs_done - progress.best_epoch >= patience:
        return f"no better dev {limits.metric.upper()} for {counted(patience, 'epoch')} (train.early_stop_epochs)"
    return ""


def _warn_of_lone_settings(config: Config, network: AcousticModel, *, on_gpu: bool) -> None:
    """Warn of settings that have no effect without another one."""
    augment, model, optim, limits = config.augment, config.model, config.optim, config.train
    clipped = model.convs or (model.cell, model.nonlinearity) == ("rnn", "clipped_relu")
    changed = not_default(config)
    for keys, needs, has in (
        ("data.cache_gb", "data.cache=auto or data.cache=disk", config.data.cache != "none"),
        ("alphabet.locale", "alphabet.case=lower or alphabet.case=upper", config.alphabet.case != "keep"),
        ("augment.noise augment.noise_snr_db augment.noise_colours augment.babble_share",
         "augment.noise_probability above 0", augment.noise_probability),
        ("augment.noise", "augment.babble_share below 1", augment.babble_share < 1),
        ("augment.noise_colours", "generated noise, without augment.noise", not augment.noise),
        ("augment.room_rt60_s", "augment.room_probability above 0", "augment.room_probability" in changed),
        ("augment.codecs", "augment.codec_probability above 0", augment.codec_probability),
        ("augment.frequency_masks", "augment.frequency_width above 0", augment.frequency_width),
        ("augment.frequency_width", "augment.frequency_masks above 0", augment.frequency_masks),
        ("augment.time_masks", "augment.time_width_s above 0", augment.time_width_s),
        ("augment.time_masks", "augment.time_fraction above 0", augment.time_fraction),
        ("augment.time_width_s augment.time_fraction", "augment.time_masks above 0", augment.time_masks),
        ("features.mels", "mel bands, such as those of features=log_mel", config.features.kind != "log_spectrogram"),
        ("model.nonlinearity model.start", "model.cell=rnn", model.cell == "rnn"),
        ("model.clip", "a clipped ReLU, as of convolutions", clipped),
        ("model.row_conv_context", "model.row_convs above 0", model.row_convs),
        ("model.skip_first", "model.skip above 0", model.skip),
        ("model.batch_norm_momentum", "model.batch_norm=true", model.batch_norm),
        ("optim.momentum", "optim.name=sgd", optim.name == "sgd"),
        ("optim.betas", "optim.name=adamw", optim.name == "adamw"),
        ("optim.anneal", "optim.schedule=anneal", optim.schedule == "anneal"),
        ("train.calibrate", "a GPU (device)", on_gpu),
        ("train.ctc_weight train.denominator_order train.denominator_prune train.denominator_text",
         "train.objective=ctc_crf", limits.objective == "ctc_crf"),
        ("train.intermediate_weight train.intermediate_lexicon", "model.intermediate", model.intermediate),
        ("train.early_stop_epochs", "a dev set (data.dev)", config.data.dev),
        ("train.delay_penalty_after_epochs", "train.delay_penalty above 0", limits.delay_penalty),
        ("comm.wait_s", "comm.max_ranks above 0", config.comm.max_ranks),
    ):  # fmt: skip
        for key in keys.split():
            if key in changed and not has:
                log.warning("%s=%s has no effect: it needs %s", key, changed[key], needs)
    for key, rate in optim.layer_rates.items():
        learning = [name for name, weight in network.named_parameters() if weight.requires_grad]
        if not any(longest_key(name, optim.layer_rates) == key for name in learning):
            log.warning(
                "optim.layer_rates={%s: %s} has no effect: all weights of that name are in train.freeze or have a rate "
                "of a longer name", key, rate,
            )  # fmt: skip


def _warn_of_short_warm_up(config: Config, batches: int) -> None:
    """Warn where the planned steps, in epochs of so many batches, are too few for `optim.warmup_steps`."""
    steps = config.train.epochs * -(-batches // config.train.accumulate)
    steps = min(steps, config.train.max_steps or steps)
    divisor = round(warm_up_part(config, Progress(), 1.0))
    if config.optim.warmup_steps > max(1, steps // divisor):
        log.warning(
            f"this training has {counted(steps, 'step')}, so the warm-up ends after {max(1, steps // divisor)} of them "
            f"(1/{divisor}), not after optim.warmup_steps={config.optim.warmup_steps}"
        )


def _warn_of_early_delay_penalty(config: Config) -> None:
    """Warn where a network that knows nothing yet is trained with `train.delay_penalty`."""
    limits = config.train
    if limits.delay_penalty and not limits.delay_penalty_after_epochs and not config.checkpoint.init_from:
        log.warning(
            "train.delay_penalty=%g counts from the first step: on AN4 no network began to align with it; set "
            "train.delay_penalty_after_epochs to the epochs after which yours does, or checkpoint.init_from to a model",
            limits.delay_penalty,
        )


def _warn_of_unfinished_schedules(config: Config, progress: Progress, epochs: int) -> None:
    """Warn of schedules that a training of `epochs` epochs did not complete."""
    done = epochs / config.train.epochs
    if 0 < progress.step < config.optim.warmup_steps and warm_up_part(config, progress, done) < 1:
        log.warning(
            "the learning rate never reached optim.learning_rate=%g: training ended after %d of optim.warmup_steps=%d "
            "steps; set optim.warmup_steps to a tenth of the steps that it has time for",
            config.optim.learning_rate, progress.step, config.optim.warmup_steps,
        )  # fmt: skip
    noisy, without_penalty = config.augment.noisy_epochs, config.train.delay_penalty_after_epochs
    if epochs <= noisy:
        log.warning(
            "no epoch was without noise: training ended before augment.noisy_epochs=%d did; set it to about two thirds "
            "of the epochs that training has time for, or the WER of clean speech rises", noisy,
        )  # fmt: skip
    if config.train.delay_penalty and epochs <= without_penalty:
        log.warning(
            "no epoch had train.delay_penalty=%g: training ended before train.delay_penalty_after_epochs=%d did; a "
            "third of the epochs that it has time for is enough", config.train.delay_penalty, without_penalty,
        )  # fmt: skip
