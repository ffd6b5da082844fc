"""The forward and backward passes of a batch, launch by launch."""

from __future__ import annotations

import torch
from torch import Tensor

from ds2.audio.features import Features
from ds2.audio.spec_augment import apply_masks
from ds2.distributed.gradients import GradientReducer
from ds2.model.acoustic import AcousticModel
from ds2.training.ctc import ctc_losses
from ds2.training.inputs import Inputs


class Passes:
    """Waveforms to losses and back to gradients, which the reducer gathers. Nothing is read back from the device.

    Args:
        model, features: on one device.
        gradients: of the model.
        autocast: to bfloat16.
    """

    def __init__(self, model: AcousticModel, features: Features, gradients: GradientReducer, *, autocast: bool) -> None:
        self.model, self.features, self.gradients, self.autocast = model, features, gradients, autocast
        self._objective: Tensor | None = None

    def losses(self, inputs: Inputs) -> Tensor:
        """The losses (B,) in nats, 0 where no alignment exists."""
        features = apply_masks(self.features.padded(inputs.waveforms, inputs.frames), inputs.masks)
        with torch.autocast(features.device.type, torch.bfloat16, enabled=self.autocast):
            logits, frames = self.model(features, inputs.frames, inputs.keys)
        return ctc_losses(logits, frames, inputs.labels, inputs.label_lengths, inputs.feasible)

    def forward(self, inputs: Inputs, utterances: int | Tensor, *, last: bool, idle: bool) -> Tensor:
        """Run the forward pass; returns the losses (B,), which `backward` goes back from.

        Args:
            inputs: on the device.
            utterances: of the whole step, all ranks and batches together; the mean of their losses is what counts.
            last: whether it is the last pass of its step.
            idle: whether the losses weigh nothing.
        """
        with self.gradients.passing(last=last):
            losses = self.losses(inputs)
        self._objective = losses.sum() * 0.0 if idle else losses.sum() / utterances
        return losses.detach()

    def backward(self) -> None:
        """Add the gradients of what `forward` did last to those of the step."""
        objective, self._objective = self._objective, None
        assert objective is not None
        torch.autograd.backward(objective)
