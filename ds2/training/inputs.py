"""A batch as the device takes it: two tensors, whose shapes may be padded so that few of them occur."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ds2.audio.features import Features
from ds2.audio.spec_augment import SpectrogramMasks, spectrogram_masks
from ds2.config.schema import AugmentConfig, FeaturesConfig
from ds2.data.loader import Batch
from ds2.model.acoustic import AcousticModel
from ds2.training.ctc import feasible_rows

FRAMES_MULTIPLE = 32  # of padded shapes; on average half of it is wasted
_FIXED = 4  # columns of `Inputs.numbers` that every batch has


@dataclass(frozen=True)
class Inputs:
    """What the passes of a batch read on the device: B utterances of up to N samples and L labels.

    Attributes:
        waveforms: (B, N) float32; what lies past an utterance's frames is ignored.
        numbers: (B, K) int64: frames, labels, feasible or not, utterances of the step, L labels, the masks.
        label_columns: L.
        frequency_masks, time_masks: masks of SpecAugment an utterance.
        infeasible: utterances whose frames cannot carry their labels.
    """

    waveforms: Tensor
    numbers: Tensor
    label_columns: int
    frequency_masks: int
    time_masks: int
    infeasible: int

    @property
    def frames(self) -> Tensor:
        """(B,) int64, frames of the features."""
        return self.numbers[:, 0]

    @property
    def label_lengths(self) -> Tensor:
        """(B,) int64."""
        return self.numbers[:, 1]

    @property
    def feasible(self) -> Tensor:
        """(B,) bool: whether the frames can carry the labels."""
        return self.numbers[:, 2] > 0

    @property
    def utterances(self) -> Tensor:
        """Utterances of the whole step, all ranks and batches together: a scalar, int64."""
        return self.numbers[0, 3]

    @property
    def labels(self) -> Tensor:
        """(B, L) int64."""
        return self.numbers[:, _FIXED : _FIXED + self.label_columns]

    @property
    def masks(self) -> SpectrogramMasks | None:
        """The masks of SpecAugment, None where the config has none."""
        if self.frequency_masks + self.time_masks == 0:
            return None
        drawn = self.numbers[:, _FIXED + self.label_columns :]
        masks = drawn.reshape(len(drawn), -1, 2)
        return SpectrogramMasks(masks[:, : self.frequency_masks], masks[:, self.frequency_masks :])

    @property
    def shape(self) -> tuple[int, ...]:
        """What a launch depends on; lengths are not part of it."""
        return (*self.waveforms.shape, self.numbers.shape[1])

    def into(self, waveforms: Tensor, numbers: Tensor) -> Inputs:
        """Copy to the beginning of two flat tensors and return the copy."""
        copy = replace(
            self,
            waveforms=waveforms[: self.waveforms.numel()].view_as(self.waveforms),
            numbers=numbers[: self.numbers.numel()].view_as(self.numbers),
        )
        copy.waveforms.copy_(self.waveforms)
        copy.numbers.copy_(self.numbers)
        return copy


class InputMaker:
    """Makes the inputs of batches: draws masks, decides what is feasible, pads, sends to the device.

    Args:
        features, model: whose frames and output frames count.
        augment, config, seed: of the masks of SpecAugment.
        device: of the passes.
        padded: pad waveforms to a multiple of 32 frames and labels to the frames that come out, so that the shape
            depends on the number of utterances and on that multiple alone.
    """

    def __init__(
        self,
        features: Features,
        model: AcousticModel,
        augment: AugmentConfig,
        config: FeaturesConfig,
        seed: int,
        device: torch.device,
        *,
        padded: bool,
    ) -> None:
        self.features, self.model = features, model
        self.augment, self.config, self.seed = augment, config, seed
        self.device, self.padded = device, padded

    def __call__(self, batch: Batch, epoch: int, utterances: int) -> Inputs:
        """Make the inputs of a batch of a step of so many utterances."""
        frames, labels = self.features.frames(batch.sample_lengths), batch.labels
        longest = max(int(frames.max()), 1)
        samples = (longest - 1) * self.features.step_samples + self.features.window_samples
        feasible = feasible_rows(self.model.output_frames(frames), labels, batch.label_lengths)
        if self.padded:
            longest += -longest % FRAMES_MULTIPLE
            samples = (longest - 1) * self.features.step_samples + self.features.window_samples
            columns = self.model.output_frames(longest)  # more labels than that are not feasible
            labels = F.pad(labels, (0, columns - labels.shape[1]))
        bins = self.features.bins
        masks = spectrogram_masks(frames, bins, self.augment, self.config, self.seed, epoch, batch.indices.tolist())
        fixed = [frames, batch.label_lengths, feasible.long(), torch.full_like(frames, utterances)]
        drawn = [] if masks is None else [masks.frequency.flatten(1), masks.time.flatten(1)]
        numbers = torch.cat([torch.stack(fixed, 1), labels, *drawn], 1)
        waveforms = batch.waveforms.to(self.device, non_blocking=True)
        if samples != waveforms.shape[1]:
            waveforms = F.pad(waveforms, (0, samples - waveforms.shape[1]))
        if self.device.type == "cuda":
            numbers = numbers.pin_memory()
        return Inputs(
            waveforms,
            numbers.to(self.device, non_blocking=True),
            labels.shape[1],
            self.augment.frequency_masks,
            self.augment.time_masks,
            int((~feasible).sum()),
        )
