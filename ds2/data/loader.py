"""Plans and loads batches: worker processes read, augment and pad utterances; order and bits do not depend on them.

The batches of an epoch are a pure function of durations, config, epoch and seed. The plan is the same on every rank, so
all ranks take the same number of steps, and a resumed run continues with plan[step:].
"""

import atexit
import logging
import signal
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info

from ds2.audio.augment import augment_in_epoch, augment_waveform, babble, coloured_noise, random_segment, utterance_rng
from ds2.audio.read import AudioError
from ds2.config.schema import AugmentConfig, BatchingConfig, DataConfig
from ds2.data.audio_cache import AudioStore, open_audio
from ds2.data.manifest import Utterance, read_manifests
from ds2.system import UserError
from ds2.system.machine import usable_cores
from ds2.system.signals import init_worker, kill_workers
from ds2.text.alphabet import Alphabet, AlphabetError

_BUCKETS = 10  # by duration, each shuffled separately
_MAX_WORKERS = 8
_PREFETCH_BATCHES = 2  # per worker
_BABBLE_VOICES = 4
_NOISE_SAMPLES = 1 << 21  # two minutes at 16 kHz
_LOST_WORKER = "DataLoader worker (pid"  # how torch's error of a worker that was killed begins

log = logging.getLogger(__name__)


class LoaderError(UserError):
    """Processes that load audio end again and again, or have no shared memory; the message names the way out."""


def padded_durations_s(durations_s: Sequence[float], speed: Sequence[float]) -> NDArray[np.float64]:
    """Return the longest duration of each utterance after augmentation: (U,) over the slowest factor (`speed_range`).

    With these durations in `plan_epoch`, an audio budget holds for every draw of speed.
    """
    return np.asarray(durations_s, dtype=np.float64) / min([1.0, *speed])


def plan_epoch(
    durations_s: NDArray[np.float64],
    config: BatchingConfig,
    epoch: int,
    seed: int,
    utterances: Sequence[Utterance] | None = None,
) -> list[list[int]]:
    """Return the batches of an epoch: lists of utterance indices, longest first; each utterance is in exactly one.

    Epoch 1 is SortaGrad (Deep Speech 2, section 3.2): batches in order of duration, copies in different ones. In later
    epochs, or without it, utterances are shuffled inside 10 duration buckets and the batches made of them are shuffled.
    A batch holds a fixed count of utterances, or as many as keep its padded audio (longest duration x count) within
    the budget; an utterance over the budget makes its own batch. The last batch may be short; nothing is dropped.

    Args:
        durations_s: (U,) seconds, see `padded_durations_s`.
        config: count or budget, of all ranks together.
        epoch: counted from 1.
        utterances: U, of which equal ones are copies (`data.repeats`); None: there are no copies.
    """
    if epoch < 1:
        raise ValueError(f"epoch {epoch}: epochs count from 1")
    ascending = np.argsort(durations_s, kind="stable")
    rng = np.random.default_rng([seed, epoch])
    sorted_epoch = config.sortagrad and epoch == 1
    buckets = [ascending] if sorted_epoch else [rng.permutation(b) for b in np.array_split(ascending, _BUCKETS)]
    keys = utterances if sorted_epoch and utterances is not None else range(len(ascending))
    batches = _cut(np.concatenate(buckets).tolist(), durations_s.tolist(), config, keys)
    batches = [sorted(batch, key=lambda index: -durations_s[index]) for batch in batches]
    if not sorted_epoch:
        batches = [batches[position] for position in rng.permutation(len(batches))]
    if config.longest_first:
        padded_s = [durations_s[batch[0]] * len(batch) for batch in batches]
        batches.insert(0, batches.pop(int(np.argmax(padded_s))))
    return batches


def rank_part(batch: Sequence[int], rank: int, world: int) -> list[int]:
    """Return one rank's part of a batch: every `world`-th utterance, so that all ranks get similar durations.

    Where a batch is shorter than `world`, the other ranks repeat its last utterance so that they make the same calls;
    the trainer gives it no weight.
    """
    return list(batch[rank::world]) or list(batch[-1:])


def _cut(
    order: list[int], durations_s: list[float], config: BatchingConfig, keys: Sequence[Utterance | int]
) -> list[list[int]]:
    """Cut an order of utterances into batches. Those with equal keys are copies: each goes into a batch of its own."""
    batches: list[list[int]] = []
    longest_s: list[float] = []  # of each batch
    first = 0  # batch that is not full
    first_of = dict[Utterance | int, int]()  # batch that may take the next copy, by key
    for index in order:
        at = max(first, first_of.get(keys[index], 0))
        while at < len(batches):
            size, padded_s = len(batches[at]), max(longest_s[at], durations_s[index])
            if size < config.utterances if config.utterances else padded_s * (size + 1) <= config.audio_s:
                break
            first += at == first
            at += 1
        else:
            batches.append([])
            longest_s.append(0.0)
        batches[at].append(index)
        longest_s[at] = max(longest_s[at], durations_s[index])
        first_of[keys[index]] = at + 1
    return batches


@dataclass
class Batch:
    """B utterances of one step: N samples in the longest, L labels in the longest transcript."""

    waveforms: Tensor  # (B, N) float32, 0 after each length
    sample_lengths: Tensor  # (B,) int64, always on the CPU
    labels: Tensor  # (B, L) int64, 0 (the blank) after each length, as ctc_loss of torch takes them
    label_lengths: Tensor  # (B,) int64, always on the CPU
    indices: Tensor  # (B,) int64, positions in the list of utterances, always on the CPU

    def to(self, device: torch.device | str) -> "Batch":
        """Return the batch with waveforms and labels on `device`; the copy from pinned memory is asynchronous."""
        waveforms, labels = (part.to(device, non_blocking=True) for part in (self.waveforms, self.labels))
        return replace(self, waveforms=waveforms, labels=labels)

    def pin_memory(self) -> "Batch":
        """Return the batch with waveforms and labels in page-locked memory; torch's DataLoader calls this."""
        return replace(self, waveforms=self.waveforms.pin_memory(), labels=self.labels.pin_memory())


class SpeechLoader:
    """Yields batches of a list of utterances, epoch after epoch, from workers that start once.

    A batch depends on the utterances, the config, the epoch and the plan alone, not on the workers. Workers are forked,
    which takes milliseconds and shares the open cache. They use numpy, the audio readers and one torch thread, not CUDA
    or threads of the parent. If one is killed, new workers make the batches that have not arrived.

    Args:
        utterances: plans index this list.
        device: of the training; for CUDA memory is pinned; `worker_count` says what -1 workers mean.
        alphabet: encodes the transcripts in the constructor; None leaves labels empty.
        seed: of the augmentation.
    Raises:
        ConfigError: an augmentation setting is wrong.
        AlphabetError: a transcript has characters outside the alphabet and `alphabet.unknown` is stop.
        AudioError: audio cannot be read.
    """

    def __init__(
        self,
        utterances: Sequence[Utterance],
        data: DataConfig,
        device: torch.device,
        alphabet: Alphabet | None = None,
        augment: AugmentConfig | None = None,
        seed: int = 0,
    ) -> None:
        self.utterances = utterances
        self.audio = open_audio(utterances, data)
        self._dataset = _BatchDataset(self.audio, alphabet, _augmentation(augment, data, self.audio, seed))
        self._on_gpu = device.type == "cuda"
        self._workers = worker_count(data.workers, on_gpu=self._on_gpu)
        self._planned = _PlannedBatches()
        self._loader: DataLoader[Batch | UserError] | None = None  # with the worker processes, once batches are read
        self._running: Iterator[Batch | UserError] | None = None

    def close(self) -> None:
        """End the worker processes; the next epoch starts new ones.

        Without it they end when this object is collected as garbage, and torch then waits 5 s for each process.
        """
        self._running = self._loader = None

    def _new_loader(self) -> DataLoader[Batch | UserError]:
        return DataLoader(
            self._dataset,
            batch_size=None,
            sampler=self._planned,
            collate_fn=lambda batch: batch,
            num_workers=self._workers,
            worker_init_fn=lambda _: init_worker(),
            multiprocessing_context="fork" if self._workers else None,
            prefetch_factor=_PREFETCH_BATCHES if self._workers else None,
            persistent_workers=self._workers > 0,
            generator=torch.Generator(),  # of worker seeds, so that the trainer's generator is not used
            pin_memory=self._on_gpu,
        )

    def epoch(self, batches: Sequence[Sequence[int]], epoch: int) -> Generator[Batch, None, None]:
        """Yield the batches of one epoch in order: `epochs` of a single one."""
        return self.epochs([(epoch, batches)])

    def epochs(self, plans: Iterable[tuple[int, Sequence[Sequence[int]]]]) -> Generator[Batch, None, None]:
        """Yield the batches of epochs in order. Only one iterator may be in use at a time.

        Workers prefetch across the end of an epoch, so that short epochs do not wait for their first batch.

        Args:
            plans: (epoch, batches) each. The epoch, from 1, selects the random augmentation. A batch is a list of
                positions, such as those of `plan_epoch(...)[step:]` for this rank (`rank_part`). Read when workers
                need it.
        Raises:
            AudioError: an utterance that is not cached cannot be read; names it.
            LoaderError: a worker was killed, and another one before any batch arrived; shared memory is full.
        """
        self._planned.start(plans)
        self._running = None
        progress = True
        while True:
            item, lost = None, ""
            try:
                if self._loader is None:
                    self._loader = self._new_loader()
                if self._running is None:
                    self._running = _iterate(self._loader)
                item = next(self._running, None)
            except RuntimeError as error:
                if not str(error).startswith(_LOST_WORKER):
                    raise
                lost = str(error)
            if lost:  # outside of `except`: the error holds the old loader, whose other workers end only without it
                if not progress:
                    raise LoaderError(self._why_lost())
                log.warning("a process that loads audio ended: new ones make its batches again (%s)", lost)
                self.close()
                progress = False
                continue
            if item is None:
                return
            self._planned.missing.popleft()
            progress = True
            if isinstance(item, UserError):
                # A new error: raising `item` makes a reference cycle of this frame and its traceback, and torch takes
                # seconds to stop each worker that is collected as part of a cycle.
                raise type(item)(str(item))
            yield item

    def _why_lost(self) -> str:
        _, positions = self._planned.missing[0]
        first = self.utterances[positions[0]]
        return (
            f"processes that load audio were killed twice before the batch of {first.place} and "
            f"{len(positions) - 1} others arrived: if memory is short, lower data.workers={self._workers}; "
            "data.workers=0 shows whether reading a file ends the process"
        )


def _iterate(loader: DataLoader[Batch | UserError]) -> Iterator[Batch | UserError]:
    """Start a loader and remove torch's handler of SIGCHLD.

    When a worker ends, that handler raises an error wherever this process is, also in the middle of a training step.
    Without it the loader raises the error itself, after it has waited 5 s for the worker.
    """
    handler = signal.getsignal(signal.SIGCHLD)
    batches = iter(loader)
    if signal.getsignal(signal.SIGCHLD) is not handler:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL if handler is None else handler)
    return batches


class _PlannedBatches(Sampler[tuple[int, list[int]]]):
    """The order of a loader's batches: (epoch, positions) of each. A new iteration repeats the missing ones first."""

    def __init__(self) -> None:
        self.missing = deque[tuple[int, list[int]]]()  # that workers know of and that have not arrived, in order
        self._rest: Iterator[tuple[int, list[int]]] = iter(())

    def start(self, plans: Iterable[tuple[int, Sequence[Sequence[int]]]]) -> None:
        """Begin with the batches of other epochs."""
        self.missing.clear()
        self._rest = ((epoch, list(batch)) for epoch, batches in plans for batch in batches)

    def __iter__(self) -> Iterator[tuple[int, list[int]]]:
        yield from list(self.missing)
        for key in self._rest:
            self.missing.append(key)
            yield key


def worker_count(workers: int, *, on_gpu: bool) -> int:
    """Return the number of loader processes for `data.workers`.

    -1 means one per usable core, at most 8, for training on a GPU, and none on a CPU: there the step needs all cores,
    and with a cache passing batches between processes costs more than making them.
    """
    if workers >= 0:
        return workers
    return min(_MAX_WORKERS, usable_cores()) if on_gpu else 0


_Augmentation = Callable[[NDArray[np.float32], int, int], NDArray[np.float32]]  # of waveform, epoch and position


def _augmentation(config: AugmentConfig | None, data: DataConfig, voices: AudioStore, seed: int) -> _Augmentation:
    if config is None:
        return lambda waveform, epoch, position: waveform
    recordings: Sequence[NDArray[np.float32]] = []
    if config.noise_probability:
        if config.noise:
            recordings = open_audio(read_manifests(config.noise), replace(data, channel=0))
        else:
            # Segments of one long recording per colour: to make noise for each utterance takes most of a worker's time.
            recordings = [coloured_noise(np.random.default_rng(0), _NOISE_SAMPLES, e) for e in config.noise_colours]

    def noise(rng: np.random.Generator, samples: int) -> NDArray[np.float32]:
        if config.babble_share and rng.random() < config.babble_share:
            return babble(voices, rng, samples, _BABBLE_VOICES)
        return random_segment(recordings, rng, samples)

    def augmented(waveform: NDArray[np.float32], epoch: int, position: int) -> NDArray[np.float32]:
        rng_of = partial(utterance_rng, seed, epoch, position)
        return augment_waveform(waveform, augment_in_epoch(config, epoch), data.sample_rate_hz, rng_of, noise)

    return augmented


class _BatchDataset(Dataset["Batch | UserError"]):
    """Maps (epoch, positions) to a batch, or to an error, which torch would change if raised."""

    def __init__(self, audio: AudioStore, alphabet: Alphabet | None, augmented: _Augmentation) -> None:
        self.audio, self.augmented = audio, augmented
        labels_of: dict[str, list[int]] = {}  # by text: `data.repeats` lists utterances many times
        for u in audio.utterances:
            try:
                if u.text not in labels_of:
                    labels_of[u.text] = [] if alphabet is None else alphabet.encode(u.text)
            except AlphabetError as error:
                raise AlphabetError(f"{u.place}: {error}") from error
        labels = [labels_of[u.text] for u in audio.utterances]
        # Flat arrays: reference counts of a list of lists would copy its pages in every forked worker.
        self.label_ends = np.cumsum([0, *map(len, labels)])
        self.labels = np.fromiter((label for row in labels for label in row), np.int64, int(self.label_ends[-1]))

    def __getitem__(self, key: tuple[int, list[int]]) -> Batch | UserError:
        epoch, positions = key
        try:
            waveforms = [torch.from_numpy(self.augmented(self.audio[p], epoch, p)) for p in positions]
        except AudioError as error:
            return error
        labels = [torch.from_numpy(self.labels[self.label_ends[p] : self.label_ends[p + 1]]) for p in positions]
        batch = Batch(*pad_rows(waveforms), *pad_rows(labels), torch.tensor(positions))
        if get_worker_info() is not None:
            try:  # here: in the thread that sends batches an error is printed, and the parent waits for ever
                for tensor in vars(batch).values():
                    tensor.share_memory_()
            except RuntimeError as error:
                return LoaderError(
                    f"a process that loads audio could not pass on a batch ({error}): give shared memory more room "
                    "(docker run --ipc=host), or take data.workers=0"
                )
        return batch


def pad_rows(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return B rows (N,), at least one, as a tensor (B, N), 0 after each, and their lengths (B,) int64."""
    return pad_sequence(rows, batch_first=True), torch.tensor([row.numel() for row in rows])


atexit.register(kill_workers)
