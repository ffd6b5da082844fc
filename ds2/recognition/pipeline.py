"""Features, model and decoder together on one device."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ds2.audio.features import Features
from ds2.decoding.decoder import Decoder, inner_decoder
from ds2.inference.runner import BlockRunner
from ds2.model.acoustic import AcousticModel
from ds2.recognition.open_segments import OpenSegments
from ds2.system import UserError
from ds2.text.alphabet import Alphabet


@dataclass(frozen=True)
class Pipeline:
    """A model in evaluation mode, its features and a decoder on one device; `precision` is fp32 or bf16."""

    model: AcousticModel
    features: Features
    alphabet: Alphabet
    decoder: Decoder
    device: torch.device
    precision: str = "fp32"
    runners: dict[int, BlockRunner] = field(default_factory=dict, repr=False, compare=False)  # by feature frames
    open_segments: OpenSegments = field(default_factory=OpenSegments, repr=False, compare=False)  # of live sessions

    @property
    def frame_s(self) -> float:
        """Seconds from one output frame to the next."""
        return self.features.step_s * self.model.time_stride

    @cached_property
    def quiet_labels(self) -> Tensor:
        """(V,) bool on the device: labels without a sound: the blank and white space."""
        return torch.tensor([not symbol.strip() for symbol in self.alphabet.symbols], device=self.device)

    @property
    def writes_phones(self) -> bool:
        """Whether results are phones instead of words: of a network of phones without a search for words."""
        return self.alphabet.pronunciations is not None and not inner_decoder(self.decoder).hot_characters

    def __reduce__(self) -> NoReturn:
        """Refuse pickle and copy: decoders have tables that grow, memory of a GPU, or objects of C++."""
        raise UserError(
            "a recogniser cannot be pickled or copied: threads can share it; another process must open its own by "
            "ds2.load(...), such as in the initializer of a multiprocessing.Pool, and get files or samples only"
        )

    def autocast(self) -> torch.autocast:
        """The context in which the model computes in `precision`."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16")

    def block_runner(self, block_frames: int) -> BlockRunner:
        """The runner that sessions with blocks of this length share; raises ConfigError for a bidirectional model."""
        if block_frames not in self.runners:
            dtype = torch.bfloat16 if self.precision == "bf16" else torch.float32
            self.runners[block_frames] = BlockRunner(self.model, self.features, block_frames, dtype)
        return self.runners[block_frames]

    def block_features(self, blocks: Sequence[NDArray[np.float32]]) -> Tensor:
        """Return features (B, F, T) on the device; the blocks are samples (N,) of one length."""
        waveforms = torch.from_numpy(np.stack(blocks)).to(self.device)
        windows = self.features.windows(waveforms.shape[1])
        if windows == 0:
            return waveforms.new_zeros((len(blocks), self.features.bins, 0))
        return self.features.of_windows(waveforms, torch.full((len(blocks),), windows, device=self.device))
