"""What recognition is made of, together on one device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ds2.audio.features import Features
from ds2.decoding.decoder import Decoder
from ds2.model.acoustic import AcousticModel
from ds2.text.alphabet import Alphabet


@dataclass(frozen=True)
class Parts:
    """A model, in evaluation mode, and a decoder on one device; `precision` is fp32 or bf16."""

    model: AcousticModel
    features: Features
    alphabet: Alphabet
    decoder: Decoder
    device: torch.device
    precision: str = "fp32"

    @property
    def frame_s(self) -> float:
        """Seconds from one output frame to the next."""
        return self.features.step_s * self.model.time_stride

    def running(self) -> torch.autocast:
        """The context in which the model runs in this precision."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16")
