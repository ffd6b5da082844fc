"""The forward and backward passes of a batch, launch by launch."""

from __future__ import annotations

import torch
from torch import Tensor

from ds2.audio.features import Features
from ds2.audio.spec_augment import apply_masks
from ds2.audio.vocal_tract import warp
from ds2.config.schema import TrainConfig
from ds2.distributed.gradients import GradientReducer
from ds2.model.acoustic import AcousticModel
from ds2.model.pass_context import OWN_PARAMETERS, PassContext
from ds2.training.ctc import ctc_losses, divergence
from ds2.training.inputs import Inputs


class Passes:
    """Waveforms to losses and back to gradients, which the reducer gathers. Nothing is read back from the device.

    Args:
        model, features: on one device.
        gradients: of the model.
        train: weights of what is added to the CTC loss.
        autocast: to bfloat16.

    Attributes:
        usual: whether the last passes took as long as later ones of their shape will.
    """

    usual = True

    def __init__(
        self,
        model: AcousticModel,
        features: Features,
        gradients: GradientReducer,
        train: TrainConfig,
        *,
        autocast: bool,
    ) -> None:
        self.model, self.features, self.gradients, self.autocast = model, features, gradients, autocast
        self.consistency, self.intermediate_weight = train.consistency, train.intermediate_weight
        self._centres_hz = features.centres_hz.to(features.mean.device)
        self._objective: Tensor | None = None

    def losses(self, inputs: Inputs, context: PassContext = OWN_PARAMETERS) -> tuple[Tensor, Tensor]:
        """The CTC losses (B,) in nats, means over views, 0 where no alignment exists; and what to make smaller (B,).

        These differ where the config adds to the CTC loss: with intermediate classifiers, (1 - w) times it and w times
        the mean of theirs (Lee and Watanabe 2021, equation 8); with two views, a and b, of each utterance, c times
        `divergence` (CR-CTC, Yao et al. 2025, equation 5).
        """
        features = self.features.padded(inputs.waveforms, inputs.frames)
        if inputs.views > 1:
            features = features.repeat(inputs.views, 1, 1)
        features = warp(features, self._centres_hz, inputs.factors, self.features.sample_rate_hz)
        features = apply_masks(features, inputs.masks)
        frames = inputs.frames.repeat(inputs.views)
        with torch.autocast(features.device.type, torch.bfloat16, enabled=self.autocast):
            *intermediate, logits = self.model.every_logits(
                features, frames, inputs.keys, inputs.dropout_share, context
            )
        targets = (inputs.labels, inputs.label_lengths, inputs.feasible)
        given = [self.model.output_frames(frames), *(t.repeat(inputs.views, *[1] * (t.dim() - 1)) for t in targets)]

        def mean(every: Tensor) -> Tensor:
            return every.view(inputs.views, -1).mean(0)

        ctc = mean(ctc_losses(logits, *given))
        objective = ctc
        if intermediate:
            between = torch.stack([mean(ctc_losses(head, *given)) for head in intermediate]).mean(0)
            objective = torch.lerp(ctc, between, self.intermediate_weight)
        if inputs.views > 1:
            objective = objective + self.consistency * divergence(logits)
        return ctc, objective

    def forward(self, inputs: Inputs, utterances: int | Tensor, *, last: bool, idle: bool) -> Tensor:
        """Run the forward pass; returns the losses (B,), which `backward` goes back from.

        Args:
            inputs: on the device.
            utterances: of the whole step, all ranks and batches together; the mean of their losses is what counts.
            last: whether it is the last pass of its step.
            idle: whether the losses weigh nothing.
        """
        losses, objective = self.losses(inputs, self.gradients.start_pass(last=last))
        self._objective = objective.sum() * 0.0 if idle else objective.sum() / utterances
        return losses.detach()

    def backward(self) -> None:
        """Add the gradients of what `forward` did last to those of the step."""
        objective, self._objective = self._objective, None
        assert objective is not None
        torch.autograd.backward(objective)
        self.gradients.end_pass()
