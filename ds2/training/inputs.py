"""The inputs of a pass: a batch in two tensors on the device, whose shapes may be padded so that few shapes occur.

The loader's workers prepare batches of the epochs to come, and their inputs are made while a step runs.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, islice

import torch
import torch.nn.functional as F
from torch import Tensor

from ds2.audio.augment import utterance_rngs
from ds2.audio.features import Features
from ds2.audio.spec_augment import frequency_factors, spectrogram_masks, time_warps
from ds2.config.schema import Config
from ds2.data.loader import Batch, SpeechLoader, pad_rows, rank_part
from ds2.data.manifest import Utterance
from ds2.distributed.communicator import Communicator
from ds2.model.acoustic import AcousticModel
from ds2.text.alphabet import Alphabet, AlphabetError
from ds2.training.ctc import feasible_rows

log = logging.getLogger(__name__)
FRAMES_MULTIPLE = 32  # step of padded shapes; on average half of it is padding
# Short of a multiple: at 16 n frames after the first stride, cuDNN takes 1.16 ms instead of 0.19 for the first
# convolution's weight gradient (B 4, 352 frames, H200).
_FRAMES_SHORT = 4


@dataclass(frozen=True)
class Inputs:
    """The inputs of the passes of a batch, on the device: B utterances of up to N samples and L labels."""

    waveforms: Tensor  # (B, N) float32; samples after an utterance's frames are ignored
    numbers: Tensor  # (B, K) int64: all other inputs, which take one copy to the device
    columns: Mapping[str, slice]  # of `numbers`, by the name of an input
    views: int  # V, copies of each utterance in the batch, each with its own masks and dropout
    delay_penalty: float  # of the epoch, `train.delay_penalty` or 0
    frequency_masks: int  # of SpecAugment, for each utterance
    infeasible: int  # utterances with fewer frames than their labels need

    @property
    def frames(self) -> Tensor:
        """(B,) int64, frames of the features."""
        return self._table("frames")[:, 0]

    @property
    def label_lengths(self) -> Tensor:
        """(B,) int64."""
        return self._table("label_lengths")[:, 0]

    @property
    def feasible(self) -> Tensor:
        """(B,) bool: whether there are enough frames for the labels."""
        return self._table("feasible")[:, 0] > 0

    @property
    def labels(self) -> Tensor:
        """(B, L) int64."""
        return self._table("labels")

    @property
    def label_log_probs(self) -> Tensor:
        """(B,) float64, the log-prob of the labels under the model of CTC-CRF; 0 without one."""
        return self.numbers.view(torch.float64)[:, self.columns["label_log_probs"].start]

    @property
    def phone_targets(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """Phones (B, L) int64, their numbers (B,) int64, and whether there are enough frames for them, (B,) bool.

        None where intermediate classifiers learn labels (without `train.intermediate_lexicon`).
        """
        if "phones" not in self.columns:
            return None
        return self._table("phones"), self._table("phone_lengths")[:, 0], self._table("phones_feasible")[:, 0] > 0

    @property
    def time_warps(self) -> Tensor | None:
        """(B, 2) int64: the frame that moves and where to, None where the config has no time warping."""
        return self._table("time_warps") if "time_warps" in self.columns else None

    @property
    def dropout_keys(self) -> Tensor:
        """(V B,) int64, from which the dropout of each view of an utterance follows."""
        return self._table_of_views("dropout_keys")[:, 0]

    @property
    def frequency_factors(self) -> Tensor | None:
        """(V B,) int64: factors of the frequencies in millionths, None where the config has none."""
        return self._table_of_views("frequency_factors")[:, 0] if "frequency_factors" in self.columns else None

    @property
    def masks(self) -> Tensor:
        """(V B, masks, 2) int64: the masks of SpecAugment, those of frequencies first."""
        table = self._table_of_views("masks")
        return table.reshape(len(table), table.shape[1] // 2, 2)

    def _table(self, name: str) -> Tensor:
        """(B, K) int64: the columns of a name."""
        return self.numbers[:, self.columns[name]]

    def _table_of_views(self, name: str) -> Tensor:
        """(V B, K) int64: all utterances in one view, then all in the next."""
        table = self._table(name)
        return table.reshape(len(table), self.views, table.shape[1] // self.views).transpose(0, 1).flatten(0, 1)

    @property
    def shape(self) -> tuple[int, ...]:
        """What kernel launches depend on: the shapes, and whether late labels cost more; lengths do not matter."""
        return (*self.waveforms.shape, self.numbers.shape[1], int(self.delay_penalty > 0))

    def copy_to(self, waveforms: Tensor, numbers: Tensor) -> "Inputs":
        """Copy to the beginning of flat (N,) float32 waveforms and (M,) int64 numbers and return the copy."""
        copy = replace(
            self,
            waveforms=waveforms[: self.waveforms.numel()].view_as(self.waveforms),
            numbers=numbers[: self.numbers.numel()].view_as(self.numbers),
        )
        copy.waveforms.copy_(self.waveforms)
        copy.numbers.copy_(self.numbers)
        return copy


class InputMaker:
    """Makes the inputs of batches: draws masks, finds infeasible utterances, pads, copies to the device.

    Args:
        features, model: which give the numbers of frames and output frames; the inputs go to the device of `features`.
        padded: pad waveforms to 28, 60, 92, ... frames, and labels to the frames that come out, so that
            the shape depends on the number of utterances and of these frames alone.
        label_log_probs: (U,) float64 of the transcript of each utterance, for CTC-CRF.
        phones: of each utterance, see `phones_of`; empty without `train.intermediate_lexicon`.
    """

    def __init__(
        self,
        features: Features,
        model: AcousticModel,
        config: Config,
        *,
        padded: bool,
        label_log_probs: Tensor | None = None,
        phones: Sequence[Tensor] = (),
    ) -> None:
        self.features, self.model, self.config = features, model, config
        self._label_log_probs, self._phones = label_log_probs, phones
        self.device, self.padded = features.mean.device, padded
        # Kernels run during the copy of a batch: 29 MB, 64 utterances of 7 s, take half a millisecond.
        self._copy_stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def __call__(self, batch: Batch, epoch: int) -> Inputs:
        """Make the inputs of a batch of an epoch."""
        config, indices = self.config, batch.indices.tolist()
        frames, labels = self.features.frames(batch.sample_lengths), batch.labels
        output_frames = self.model.output_frames(frames)
        feasible = feasible_rows(output_frames, labels, batch.label_lengths)
        columns = {"frames": frames, "label_lengths": batch.label_lengths, "feasible": feasible, "labels": labels}
        if self._phones:
            phones, lengths = pad_rows([self._phones[index] for index in indices])
            enough = feasible_rows(output_frames, phones, lengths)
            columns |= {"phones": phones, "phone_lengths": lengths, "phones_feasible": enough}
        longest = max(int(frames.max()), 1)
        label_columns = max(columns[name].shape[1] for name in ("labels", "phones") if name in columns)
        if self.padded:
            longest += -(longest + _FRAMES_SHORT) % FRAMES_MULTIPLE
            label_columns = self.model.output_frames(longest)  # more labels than that are not feasible
        for name in columns.keys() & {"labels", "phones"}:
            columns[name] = F.pad(columns[name], (0, label_columns - columns[name].shape[1]))
        scores = torch.zeros_like(frames) if self._label_log_probs is None else self._label_log_probs[batch.indices]
        columns["label_log_probs"] = scores.double().view(torch.int64)
        rngs_of = partial(utterance_rngs, config.train.seed, epoch, indices, 0)
        warps = time_warps(frames, config.augment, config.features.step_s, rngs_of)
        if warps is not None:
            columns["time_warps"] = warps
        views = [self._draw_view(frames, indices, epoch, view) for view in range(2 if config.train.consistency else 1)]
        columns |= {name: torch.cat([view[name] for view in views], 1) for name in views[0]}
        tables = [column if column.ndim == 2 else column[:, None] for column in columns.values()]
        ends = list(accumulate(table.shape[1] for table in tables))
        numbers = torch.empty(len(frames), ends[-1], dtype=torch.int64, pin_memory=self.device.type == "cuda")
        torch.cat(tables, 1, out=numbers)
        samples = self.features.samples(longest)
        waveforms, numbers = self._to_device(batch.waveforms, numbers)
        if samples != waveforms.shape[1]:
            waveforms = F.pad(waveforms, (0, samples - waveforms.shape[1]))
        return Inputs(
            waveforms,
            numbers,
            dict(zip(columns, map(slice, [0, *ends], ends), strict=True)),
            views=len(views),
            delay_penalty=config.train.delay_penalty if epoch > config.train.delay_penalty_after_epochs else 0.0,
            frequency_masks=config.augment.frequency_masks,
            infeasible=int((~feasible).sum()),
        )

    def _draw_view(self, frames: Tensor, indices: Sequence[int], epoch: int, view: int) -> dict[str, Tensor]:
        """Draw for one view of each utterance key, frequency warp and masks: (B, K) int64 each."""
        augment, rngs_of = self.config.augment, partial(utterance_rngs, self.config.train.seed, epoch, indices, view)
        keys = [0] * len(indices)
        if self.config.model.dropout:
            keys = [int(rng.integers(2**62)) for rng in rngs_of("dropout")]
        drawn, factors = {"dropout_keys": torch.tensor(keys)[:, None]}, frequency_factors(augment, rngs_of)
        if factors is not None:
            drawn["frequency_factors"] = factors
        masks = spectrogram_masks(frames, self.features.bins, augment, self.config.features.step_s, rngs_of)
        return {**drawn, "masks": masks.flatten(1)}

    def _to_device(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors on the device, ready for its current stream."""
        if self._copy_stream is None:
            return tuple(tensor.to(self.device) for tensor in tensors)
        current = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self._copy_stream):
            copies = tuple(tensor.to(self.device, non_blocking=True) for tensor in tensors)
        current.wait_stream(self._copy_stream)
        for tensor in copies:
            tensor.record_stream(current)
        return copies


def phones_of(config: Config, alphabet: Alphabet, utterances: Sequence[Utterance]) -> list[Tensor]:
    """Return the phones of each utterance, labels of `model.intermediate_phones`: of each word the first pronunciation.

    Returns:
        int32 tensors of one dimension; an empty list without such phones.

    Raises:
        AlphabetError: words of the transcripts have no pronunciation, and `alphabet.unknown` is stop.
    """
    if not config.model.intermediate_phones:
        return []
    lexicon = config.train.intermediate_lexicon
    try:
        phones = Alphabet.from_config(replace(config.alphabet, lexicon=lexicon, pieces=[]))
    except AlphabetError as error:
        raise AlphabetError(f"train.intermediate_lexicon={lexicon}, read as alphabet.lexicon: {error}") from error
    texts = [alphabet.written(utterance.text) for utterance in utterances]
    if missing := phones.unpronounced(texts):
        what = f"train.intermediate_lexicon={lexicon} lacks words of training texts: {missing}"
        if alphabet.unknown == "stop":
            raise AlphabetError(
                f"{what}; add them with `ds2 data lexicon`, or leave them out with alphabet.unknown=drop"
            )
        log.warning("%s. Intermediate classifiers do without them (`ds2 data lexicon` adds them)", what)
    return [torch.tensor(phones.encode(text), dtype=torch.int32) for text in texts]


Plan = list[list[int]]


class EpochBatches:
    """This rank's parts of the batches of epochs; the loader's workers continue from one epoch to the next.

    `plan` returns the whole batches of an epoch, by its number.
    """

    def __init__(self, loader: SpeechLoader, plan: Callable[[int], Plan], last_epoch: int, comm: Communicator) -> None:
        self._loader, self._plan, self._last_epoch, self._comm = loader, plan, last_epoch, comm
        self._next: tuple[int, int] | None = None  # epoch and batch that `_batches` yields next
        self._batches: Iterator[Batch] = iter(())

    def remaining(self, epoch: int, batch: int, count: int) -> Iterator[Batch]:
        """Yield the `count` batches of an epoch from its batch number `batch` on."""
        if self._next != (epoch, batch):
            self._batches = self._loader.epochs(self._parts(epoch, batch))
        self._next = None  # set again when the epoch is complete; after an early stop workers start anew
        yield from islice(self._batches, count)
        self._next = epoch + 1, 0

    def _parts(self, epoch: int, batch: int) -> Iterator[tuple[int, Plan]]:
        for number in range(epoch, max(epoch, self._last_epoch) + 1):
            yield number, [rank_part(whole, self._comm.rank, self._comm.world) for whole in self._plan(number)[batch:]]
            batch = 0


class PreparedBatches(Iterator[tuple[Batch, Inputs]]):
    """A rank's batches with their inputs; `prepare_next` makes the next ones while the device is busy with the last."""

    def __init__(self, batches: Iterator[Batch], make_inputs: Callable[[Batch], Inputs]) -> None:
        self._batches, self._make_inputs = batches, make_inputs
        self._next: tuple[Batch, Inputs] | None = None

    def __next__(self) -> tuple[Batch, Inputs]:
        """Return the next batch and its inputs."""
        self.prepare_next()
        prepared, self._next = self._next, None
        if prepared is None:
            raise StopIteration
        return prepared

    def prepare_next(self) -> None:
        """Make the next inputs, unless they are made or no batch is left."""
        if self._next is None and (batch := next(self._batches, None)) is not None:
            self._next = batch, self._make_inputs(batch)
