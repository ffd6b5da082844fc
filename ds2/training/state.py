"""The state of a run, its file, its position in an epoch, and where its first state comes from.

The first state is the saved trainer state, another model's weights, or fresh weights.
"""

import hashlib
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ds2.audio.features import Features
from ds2.config.allowed import REMOVED
from ds2.config.convert import declared_settings, flat
from ds2.config.schema import Config, ConfigError
from ds2.data.loader import SpeechLoader
from ds2.data.manifest import Utterance
from ds2.distributed.communicator import Communicator
from ds2.model.acoustic import AcousticModel
from ds2.model.checkpoint import LoadedModel, load_model
from ds2.system import tensor_file
from ds2.system.plain import FieldError, first_of, from_plain, short_repr
from ds2.system.tensor_file import WAY_OUT, CheckpointError, TensorCopies, counting_modules, with_prefix, without_prefix
from ds2.system.terminal import ProgressBar
from ds2.text.alphabet import Alphabet
from ds2.training.optim import WeightAverage, state_shapes

log = logging.getLogger(__name__)
Parts = dict[str, dict[str, Tensor]]
PARTS = ("model", "features", "optimizer", "average")
# Settings that change the plan of an epoch.
_PLANNED_BY = ("batching.", "augment.speed", "train.seed", "data.train", "data.repeats")
# Settings that a resumed run must share with its file: they decide the tensors, what features mean, and the order of
# the optimizer's parameters.
_FIXED = ("model.", "features.", "alphabet.", "data.sample_rate_hz", "train.freeze", "optim.layer_rates", "optim.name")
# Of these, what fits any weights: what changes training only, belongs to the machine, is a limit, or names a file whose
# content is compared.
_FREE = ("model.dropout", "model.backend", "model.max_lookahead_ms", "alphabet.pieces_file")
_MAX_NAMED = 12  # weights in a message
_POLL_S = 0.05
_STATISTICS_UTTERANCES = 1000  # drawn for the mean and deviation of the features


@dataclass
class Progress:
    """The progress of a run: all state that is not a tensor."""

    epoch: int = 1  # 1-based, the epoch that is running
    batch: int = 0  # completed batches of its plan
    plan: str = ""  # fingerprint of the plan that `batch` refers to; '' in old files
    batches: int = 0  # of that plan
    step: int = 0  # optimizer steps, skipped ones not counted
    skipped: int = 0  # steps skipped for a loss or gradient that was not finite
    infeasible: int = 0  # utterances left out of a loss because no alignment exists (after speed change)
    averaged: int = -1  # steps in the average of the weights; -1 in old files: all
    best_wer: float = float("inf")
    best_cer: float = float("inf")
    best_epoch: int = 0
    dev_set: str = ""  # digest of the utterances that the best scores are of; '' in old files
    phones: str = ""  # the labels, where alphabet.lexicon decides them; '' in old files
    contents: dict[str, str] = field(default_factory=dict)  # digests of what lexicons and the denominator's text give
    noise: float = 0.0  # this and the next: averages of `NoiseScale`
    signal: float = 0.0
    elapsed_s: float = 0.0
    audio_s: float = 0.0
    budget_s: float = 0.0  # of a batch, as `batching.auto` found it; 0: not looked for
    tiles: dict[str, str] = field(default_factory=dict)  # of recurrent kernels, where they were calibrated
    # GPU -> design -> link -> factor of the planner's constants, where they were fitted: `ds2_ops.recurrent.calibrate`.
    factors: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)

    def note_dev_set(self, dev_set: str) -> None:
        """Note the digest of the dev utterances; forget best scores of another dev set, as the two do not compare."""
        if self.dev_set not in ("", dev_set) and self.best_epoch:
            log.warning(
                "the dev set has changed: the best score so far, WER %.2f %% and CER %.2f %% in epoch %d, is of the "
                "other set and no longer counts. The next evaluation replaces best.safetensors; copy that file first "
                "to keep it", 100 * self.best_wer, 100 * self.best_cer, self.best_epoch,
            )  # fmt: skip
            self.best_wer = self.best_cer = float("inf")
            self.best_epoch = 0
        self.dev_set = dev_set

    def note_contents(self, contents: dict[str, str]) -> None:
        """Note the digests of what is learned from besides audio; warn of those that have changed."""
        changed = [name for name, digest in contents.items() if self.contents.get(name, digest) != digest]
        if changed:
            log.warning(
                "changed since it was saved: %s, which transcripts, alphabet.lexicon, train.intermediate_lexicon and "
                "train.denominator_text give; the run goes on with those of now", ", ".join(changed),
            )  # fmt: skip
        self.contents = contents


@dataclass
class _Header:
    """The metadata of a trainer state."""

    format: int
    kind: str
    progress: Progress
    config: Config


@dataclass(frozen=True)
class NamedTensors:
    """The tensors of a state, PART.NAME; to list them takes 1.5 ms with 50 layers, in which a GPU would wait."""

    owners: list[Any]  # the average and the optimizer's tensors, as they were when all was listed
    in_place: dict[str, Tensor]  # that steps change in place
    counting: dict[str, nn.Module]  # whose extra states, counts on the host, are made anew


@dataclass
class TrainState:
    """Everything that a step changes: a run that resumes from it gives the same bits as one that never stopped."""

    model: AcousticModel
    features: Features
    optimizer: torch.optim.Optimizer
    progress: Progress = field(default_factory=Progress)
    average: WeightAverage[AcousticModel] | None = None
    _named_tensors: NamedTensors | None = field(default=None, init=False, repr=False)

    @property
    def evaluated(self) -> AcousticModel:
        """The model that is evaluated and saved as a model file: the average where there is one."""
        return self.average.model if self.average is not None else self.model

    def tensors(self) -> Parts:
        """All tensors by part; those of the average are missing where there is none."""
        return {
            "model": self.model.state_dict(),
            "features": self.features.state_dict(),
            "optimizer": tensor_file.optimizer_tensors(self.optimizer),
            "average": self.average.model.state_dict() if self.average is not None else {},
        }

    def named_tensors(self) -> NamedTensors:
        """Return all tensors by name; they are listed anew where the optimizer or the average is not as it was."""
        owners = [self.average, *(value for entry in self.optimizer.state.values() for value in entry.values())]
        last = self._named_tensors
        if last is None or not tensor_file.same_objects(owners, last.owners):
            models = {"model": self.model} | ({"average": self.average.model} if self.average is not None else {})
            counting = {
                f"{part}.{name}": module
                for part, model in models.items()
                for name, module in counting_modules(model).items()
            }
            in_place = {name: value for name, value in _named(self.tensors()).items() if name not in counting}
            last = self._named_tensors = NamedTensors(owners, in_place, counting)
        return last

    def load(self, parts: Parts, progress: Progress, average_decay: float) -> None:
        """Load `parts` and `progress`; where these hold no average, one of this decay starts (0: none)."""
        self.progress = progress
        self.model.load_state_dict(parts["model"])
        self.features.load_state_dict(parts["features"])
        tensor_file.restore_optimizer(self.optimizer, parts["optimizer"])
        if average_decay:
            self.average = self.average or WeightAverage(self.model, average_decay)
            self.average.model.load_state_dict(parts["average"] or parts["model"])
            steps = progress.step if progress.averaged < 0 else progress.averaged
            progress.averaged = self.average.updates = steps if parts["average"] else 0


def broadcast_state(
    state: TrainState,
    parts: Parts,
    progress: Progress,
    average_decay: float,
    comm: Communicator,
    holders: Collection[int] = (0,),
) -> None:
    """Load into `state` on all ranks what rank 0 holds in `parts` and `progress`; those of other ranks are ignored.

    `holders` are the ranks whose `parts` have rank 0's bits, rank 0 among them: they load their own as it does, so that
    what follows from a load is the same on all ranks.
    """
    parts = {name: comm.broadcast_tensors(parts.get(name, {}), holders) for name in PARTS}
    progress = Progress(**comm.broadcast(vars(progress)))
    comm.status.step = progress.step
    state.load(parts, progress, average_decay)


def state_file(run_dir: Path) -> Path:
    """Return the path of the trainer state in a run folder."""
    return run_dir / "trainer.safetensors"


@dataclass(frozen=True)
class Shard:
    """The part of a rank in a state that all ranks write together, each a file of its own."""

    save: str  # a word that no other save has, so that a file of another one is never taken for one of this
    rank: int  # of the process that writes it
    world: int
    wait_s: float  # how long rank 0 waits for the files of the others, from the end of its own
    is_broken: Callable[[], bool]  # whether a rank is gone, and the state stays incomplete; in the thread that writes

    def file(self, run_dir: Path, rank: int) -> Path:
        """The file of a rank: not *.safetensors, for it is no model or state by itself."""
        return run_dir / f"trainer.{self.save}.{rank}-of-{self.world}.shard"

    def of(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Those of the tensors that this rank writes, the same in any process: about as many bytes as other ranks."""
        total, before, own = sum(value.nbytes for value in tensors.values()), 0, {}
        for name, value in tensors.items():
            if min(before * self.world // max(total, 1), self.world - 1) == self.rank:
                own[name] = value
            before += value.nbytes
        return own

    def wait(self, run_dir: Path) -> dict[str, str] | None:
        """Return the digests of the files of all ranks by name, once all are there; None where a rank is gone.

        Raises:
            CheckpointError: they are not there after `wait_s`.
        """
        files = [self.file(run_dir, rank) for rank in range(self.world)]
        waited_s = 0.0  # without the time in which this process was stopped, since others may be stopped with it
        while missing := {*files} - {*run_dir.glob(f"trainer.{self.save}.*.shard")}:
            if self.is_broken():
                return None
            if waited_s > self.wait_s:
                names = ", ".join(sorted(file.name for file in missing))
                raise CheckpointError(
                    f"{run_dir}: other ranks have not written {names} within comm.timeout_s={self.wait_s:g} s: give "
                    "a run_dir that all hosts share, or set checkpoint.sharded=false"
                )
            time.sleep(_POLL_S)
            waited_s += _POLL_S
        return {file.name: tensor_file.read_digest(file) for file in files}


def prepare_state(
    run_dir: Path,
    state: TrainState,
    config: Config,
    *,
    shard: Shard | None = None,
    check: Callable[[], None] = lambda: None,
    copies: TensorCopies | None = None,
) -> Callable[[], None]:
    """Copy the state, and return the function that writes what `read_state` reads: one file, or a shard of it.

    Of shards, rank 0 writes a file without tensors that names them once all of them are on the disk; until then the
    state before it holds. Shards that the state does not name are removed afterwards.

    Args:
        shard: the part of this rank.
        check: as in `ds2.system.tensor_file.save`, also for errors of the function.
        copies: of earlier calls, whose functions have returned.
    """

    def own(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return tensors if shard is None else shard.of(tensors)

    tensors, path = state.named_tensors(), state_file(run_dir)
    fetch_copies = (copies or TensorCopies()).start(own(tensors.in_place))  # first: a GPU copies during the rest
    counts = own({name: module.get_extra_state() for name, module in tensors.counting.items()})
    metadata = {"kind": "trainer", "progress": vars(replace(state.progress)), "config": asdict(config)}
    file, content = (path, metadata) if shard is None else (shard.file(run_dir, shard.rank), {"kind": "shard"})

    def fetch() -> dict[str, Tensor]:
        return fetch_copies() | counts

    def write_state() -> None:
        if shard is None:
            with _replace_shards(run_dir, ()):
                tensor_file.write_copies(file, fetch, content, check)
        elif not shard.is_broken():
            tensor_file.write_copies(file, fetch, content, check)
            if shard.rank == 0 and (shards := shard.wait(run_dir)) is not None:
                with _replace_shards(run_dir, shards):
                    tensor_file.save(path, {}, {**metadata, "shards": shards}, check)

    return write_state


@contextmanager
def _replace_shards(run_dir: Path, names: Collection[str]) -> Iterator[None]:
    """Let the block write a state that has the shards of these names, then remove all that were there, but for them.

    Looked for before, since a process that is stopped after the block may find those of a later state.
    """
    others = [path for path in run_dir.glob("trainer.*.shard") if path.name not in names]
    yield
    for path in others:
        path.unlink(missing_ok=True)


def read_state(run_dir: Path, config: Config, fresh: TrainState, *, whole: bool = True) -> tuple[Parts, Progress]:
    """Read the trainer state of a run folder: tensors by part, and how far the run is.

    Args:
        config: of this process.
        fresh: made from it; the tensors must fit.
        whole: False: no tensors are read, those of `fresh` take their place.

    Raises:
        CheckpointError: as `tensor_file.load`, another kind of file, damaged metadata, or tensors missing.
        ConfigError: the state is of another model, features, alphabet or optimizer than `config` describes.
    """
    try:
        return _read_state(state_file(run_dir), config, fresh, whole=whole)
    except CheckpointError as error:
        raise CheckpointError(
            f"{error}. To train on without this state: run_dir=NEW checkpoint.init_from={run_dir} starts from the best "
            "weights"
        ) from error


def _read_state(path: Path, config: Config, fresh: TrainState, *, whole: bool) -> tuple[Parts, Progress]:
    tensors, metadata = tensor_file.load(path) if whole else ({}, tensor_file.read_metadata(path))
    if metadata.get("kind") != "trainer":
        raise CheckpointError(f"{path} is a {metadata.get('kind')}, not a trainer state")
    try:
        stored = from_plain(_Header, metadata, "metadata")
    except FieldError as error:
        raise CheckpointError(f"{path}: {error}; {WAY_OUT}") from error
    progress, then = stored.progress, stored.config
    if min(progress.epoch - 1, progress.batch, progress.step, progress.skipped, progress.elapsed_s) < 0:
        raise CheckpointError(f"{path}: metadata.progress: counts from before the start, {progress}; {WAY_OUT}")
    old, new = flat(asdict(then)), flat(asdict(config))  # keys newer than the file have their defaults
    unused = {key for key, (declared, _) in declared_settings().items() if REMOVED in declared.metadata} | {"run_dir"}
    changed = [key for key in sorted({*new} - unused) if old[key] != new[key]]
    free = (*_FREE, "alphabet.lexicon") if progress.phones else _FREE  # its place; phones are compared below
    fixed = [key for key in changed if key.startswith(_FIXED) and key not in free]
    if fixed:
        values = ", ".join(f"{key}={short_repr(old[key])}, not {short_repr(new[key])}" for key in fixed)
        if "model.intermediate_phones" in fixed:  # which nobody sets
            values += f" (the phones that train.intermediate_lexicon={then.train.intermediate_lexicon} had)"
        raise ConfigError(
            f"{path} was trained with {values}: resume with the same values, give another run_dir, or start from its "
            "weights with checkpoint.init_from"
        )
    if progress.phones not in ("", fresh.progress.phones):
        raise ConfigError(
            f"{path}: alphabet.lexicon={config.alphabet.lexicon} has other phones now, and each is an output of the "
            f"network; they were {progress.phones}. Put the lexicon of before back, or start from these weights by "
            f"run_dir=NEW checkpoint.init_from={path.parent}"
        )
    progress.phones = fresh.progress.phones
    parts = {key: without_prefix(key, tensors) for key in PARTS} if whole else fresh.tensors()
    optim = replace(then.optim, momentum=min(then.optim.momentum, config.optim.momentum))  # 0 where either is
    if optim.name == "sgd" and not optim.momentum:
        parts["optimizer"] = {}  # momenta that nothing changes any more would be saved again
    if progress.step and whole and (misfit := _misfit(parts, fresh, replace(then, optim=optim))):
        raise CheckpointError(f"{path}: {misfit}; {WAY_OUT}")
    if not progress.plan and any(key.startswith(_PLANNED_BY) for key in changed):
        progress.plan = "of other settings"
    position = f"epoch {progress.epoch}, batch {progress.batch}, step {progress.step}"
    log.info("resumed %s: %s", path, position)
    if changed:
        values = ", ".join(f"{key}={short_repr(new[key])} (was {short_repr(old[key])})" for key in changed)
        log.warning(
            "settings have changed since it was saved: %s. A recipe may have changed: KEY=VALUE sets one back", values
        )
    if "checkpoint.init_from" in changed and config.checkpoint.init_from:
        log.warning(
            "checkpoint.init_from=%s has no effect: the run goes on from its own weights; give another run_dir",
            config.checkpoint.init_from,
        )
    return parts, progress


def _misfit(parts: Parts, fresh: TrainState, then: Config) -> str:
    """Return the first tensor that `parts` lack, or have in another shape than a run with config `then`; or ''."""
    expected = {name: tensor.shape for name, tensor in _named(fresh.tensors()).items()}
    for number, parameter in enumerate(p for group in fresh.optimizer.param_groups for p in group["params"]):
        expected |= {f"optimizer.{number}.{name}": shape for name, shape in state_shapes(then.optim, parameter).items()}
    if then.train.average_decay:
        expected |= {f"average.{name}": tensor.shape for name, tensor in fresh.model.state_dict().items()}
    actual = {name: tensor.shape for name, tensor in _named(parts).items()}
    first = next((name for name in sorted({*actual, *expected}) if actual.get(name) != expected.get(name)), "")
    shown = [tuple(shape) if shape is not None else "missing" for shape in (actual.get(first), expected.get(first))]
    return f"{first}: is {shown[0]}, expected {shown[1]}" if first else ""


def _named(parts: Parts) -> dict[str, Tensor]:
    return {name: value for key, values in parts.items() for name, value in with_prefix(key, values).items()}


def resolve_position(progress: Progress, plan: Sequence[Sequence[int]], utterances: Sequence[Utterance]) -> None:
    """Make `progress.batch` a position in the plan of the running epoch, and note which plan that is.

    A position counts batches of one plan: the same audio in the same batches. In another plan (other data, batching,
    speed factors or seed) it is meaningless: the epoch begins again, with a warning, unless it was complete. A state
    from a version that noted no plans keeps a position that the plan has.
    """
    fingerprint = plan_fingerprint(plan, utterances)
    known = progress.plan != ""
    if progress.batch and progress.plan != fingerprint and (known or progress.batch > len(plan)):
        if known and progress.batch == progress.batches:
            progress.batch = len(plan)
        else:
            log.warning(
                "epoch %d begins again: it was stopped after batch %d of another plan; data, batching, augment.speed, "
                "train.seed or ds2 have changed. Weights, optimizer, step %d go on. To finish the epoch as it began, "
                "start with the previous settings", progress.epoch, progress.batch, progress.step,
            )  # fmt: skip
            progress.batch = 0
    progress.plan, progress.batches = fingerprint, len(plan)


def plan_fingerprint(plan: Sequence[Sequence[int]], utterances: Sequence[Utterance]) -> str:
    """A digest of the audio of each batch; folders may differ between hosts, and texts may be corrected."""
    digest = hashlib.sha256()
    for batch in plan:
        for index in batch:
            u = utterances[index]
            digest.update(f"{u.audio_filepath.name}\0{u.offset_s!r}\0{u.duration_s!r}\n".encode())
        digest.update(b"\n")
    return digest.hexdigest()[:16]


def initial_state(
    state: TrainState, loader: SpeechLoader, alphabet: Alphabet, config: Config, run_dir: Path, *, whole: bool = True
) -> tuple[Parts, Progress]:
    """Read the state of a run folder or, where it holds no run, make the initial state.

    Args:
        state: the fresh one of this process; its tensors and progress are changed.
        loader: of the training utterances, from which feature statistics are estimated.
        whole: as in `read_state`.

    Raises:
        CheckpointError: the state cannot be read, or the folder holds another run.
        ConfigError: the state is of another model, or no weight of `checkpoint.init_from` fits.
        AudioError: audio cannot be read.
    """
    if alphabet.pronunciations is not None:
        state.progress.phones = " ".join(alphabet.pronunciations.phones)
    is_used = any(run_dir.glob("*.safetensors"))  # asked first: another rank may be writing the first state
    if config.checkpoint.resume and state_file(run_dir).is_file():
        return read_state(run_dir, config, state, whole=whole)
    if is_used:
        content = "a run: checkpoint.resume=true goes on with it"
        if not state_file(run_dir).is_file():
            content = f"models without their trainer state: run_dir=NEW checkpoint.init_from={run_dir} starts from them"
        raise CheckpointError(f"{run_dir} holds {content}; or give another run_dir, or move the folder away")
    loaded = load_model(config.checkpoint.init_from) if config.checkpoint.init_from else None
    if loaded is not None:
        copy_weights(state.model, alphabet, loaded)
    elif config.train.freeze:
        _warn_of_frozen(state.model, state.model.state_dict())
    normalised_alike = loaded is not None and loaded.config.features.normalise == config.features.normalise
    if loaded is not None and normalised_alike and _same_features(state.features, loaded.features):
        state.features.load_state_dict(loaded.features.state_dict())
    elif config.features.normalise == "corpus":
        drawn = np.random.default_rng(config.train.seed).permutation(len(loader.utterances))[:_STATISTICS_UTTERANCES]
        with ProgressBar("feature statistics", len(drawn), "utterances") as progress:
            state.features.estimate(torch.from_numpy(loader.audio[int(i)]) for i in progress.over(drawn))
    return state.tensors(), state.progress


def copy_weights(model: AcousticModel, alphabet: Alphabet, source: LoadedModel) -> None:
    """Copy weights of `source` into a fresh model: those of the same name and shape, those of labels by their symbols.

    Rows of classifiers whose symbol the other alphabet lacks, and weights that do not fit, stay as they were drawn.
    The log names them, and the symbols of the other alphabet that this one lacks.

    Raises:
        ConfigError: nothing fits.
    """
    mine, theirs = model.state_dict(), source.model.state_dict()
    drawn = set[str]()  # with rows of new labels
    for what, of_heads in (("labels", False), ("labels of intermediate classifiers", True)):
        symbols, others = _symbols(model, alphabet, of_heads), _symbols(source.model, source.alphabet, of_heads)
        ends = ("classifier.weight", "classifier.bias")
        names = [name for name in mine if name.startswith("heads.") == of_heads and name.endswith(ends)]
        names = [name for name in names if name in theirs and mine[name].shape[1:] == theirs[name].shape[1:]]
        if symbols == others or not names:
            continue
        labels = {symbol: label for label, symbol in enumerate(others)}
        shared = [(row, labels[symbol]) for row, symbol in enumerate(symbols) if symbol in labels]
        rows, sources = (list(column) for column in zip(*shared, strict=True))
        for name in names:
            moved = mine[name].clone()
            moved[rows] = theirs[name][sources].to(moved)
            theirs[name] = moved
        new = [symbol for symbol in symbols if symbol not in labels]
        drawn.update(names if new else ())
        dropped = [symbol for symbol in others if symbol not in symbols]
        listed = f": {' '.join(map(repr, new))}" if new else ""
        log.info("%s: %d as in the model to start from, %d new%s", what, len(rows), len(new), listed)
        if dropped and not of_heads:
            lost = " ".join(map(repr, dropped))
            log.warning("this run lacks labels of the model to start from and cannot write them: %s", lost)
    fitting = {name: value for name, value in theirs.items() if name in mine and mine[name].shape == value.shape}
    for name in counting_modules(model):
        # The count says how many batches are in the averages. With it, averages of other weights change too slowly.
        layer = name.removesuffix("norm._extra_state") or "norm."
        if any(other.startswith(layer) and other not in fitting for other in mine):
            fitting.pop(name, None)
    if not fitting:
        raise ConfigError("no weight of checkpoint.init_from fits this model: leave out model=... to take its own")
    model.load_state_dict({**mine, **fitting})
    fresh = [name for name in mine if name not in fitting]
    if fresh:
        named = ", ".join(first_of(fresh, _MAX_NAMED))
        log.warning(
            "%d of %d weights of the model to start from fit; these start from nothing: %s",
            len(fitting), len(theirs), named,
        )  # fmt: skip
    _warn_of_frozen(model, drawn.union(fresh))


def _warn_of_frozen(model: AcousticModel, drawn: Collection[str]) -> None:
    """Warn where weights that were drawn at random will not be learned either."""
    frozen = [name for name, weight in model.named_parameters() if name in drawn and not weight.requires_grad]
    if frozen:
        named = ", ".join(first_of(frozen, _MAX_NAMED))
        log.warning(
            "train.freeze keeps weights that start from nothing, wholly or for new labels, leave them out: %s", named
        )


def _symbols(model: AcousticModel, alphabet: Alphabet, of_heads: bool) -> tuple[str, ...]:
    """Return what the rows of the last classifier stand for, or those of the intermediate ones."""
    phones = model.config.intermediate_phones if of_heads else []
    return ("", *phones) if phones else alphabet.symbols


def _same_features(mine: Features, theirs: Features) -> bool:
    """Return whether statistics of the one hold for features of the other."""
    computed = [(f.window_samples, f.step_samples, f.sample_rate_hz, f.bins, f.kind) for f in (mine, theirs)]
    return computed[0] == computed[1]
