"""Passes over made-up audio of given lengths, to see how much of a GPU's memory they take."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from ds2.audio.augment import paces
from ds2.audio.features import Features
from ds2.config.schema import Config
from ds2.data.loader import Batch
from ds2.data.manifest import Utterance
from ds2.distributed.communicator import Communicator
from ds2.distributed.gradients import GradientReducer
from ds2.model.acoustic import AcousticModel
from ds2.text.alphabet import Alphabet
from ds2.training.inputs import InputMaker
from ds2.training.passes import Passes
from ds2.training.start import freeze

_KEPT = 0.92  # of the memory: the rest is for what the allocator cannot use between blocks of other sizes
_OPTIMIZER_TENSORS = {"sgd": 1, "adamw": 2}  # of each weight's size, made by the first step


class Trial:
    """Both passes of training on a model of its own, beside the one that is trained, whose state they leave alone.

    Args:
        config: of the run.
        utterances: of the run.
        speed: the least factor that utterances are slowed down by, at most 1.
        alphabet, features: of the run, the latter on the device.
        autocast: to bfloat16.
        padded: as steps as CUDA graphs need it.
    """

    def __init__(
        self,
        config: Config,
        utterances: Sequence[Utterance],
        alphabet: Alphabet,
        features: Features,
        *,
        autocast: bool,
        padded: bool,
    ) -> None:
        device = features.mean.device
        self._config, self._utterances, self._alphabet, self._device = config, utterances, alphabet, device
        self._slowest = min(1.0, paces(config.augment)[0])
        longest = self._samples(max(u.duration_s for u in utterances))
        self._noise = 0.01 * torch.randn(longest, generator=torch.Generator().manual_seed(0))
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated(device)
        with torch.random.fork_rng(devices=[device]):
            model = AcousticModel(config.model, features.bins, len(alphabet), config.features.step_s).to(device)
        freeze(model, config.train.freeze)
        features = copy.deepcopy(features)
        low = model.low_precision_parameters() if autocast else ()
        self._gradients = GradientReducer(
            model.parameters(), Communicator(device), int(config.comm.bucket_mib * 2**20), overlap=False, low=low
        )
        self._passes = Passes(model, features, self._gradients, config.train, autocast=autocast)
        self._inputs = InputMaker(features, model, config, device, padded=padded)
        self._own = torch.cuda.memory_allocated(device) - before
        self._later = _OPTIMIZER_TENSORS[config.optim.name] * _bytes(model.parameters())

    @property
    def room(self) -> float:
        """Bytes that a rank may take: what is free, and what torch holds for this process."""
        free, _ = torch.cuda.mem_get_info(self._device)
        return _KEPT * float(free + torch.cuda.memory_reserved(self._device))

    @property
    def most_s(self) -> float:
        """Padded audio of which no activation has 2^31 values: past that libraries have slow ways or none."""
        features = self._passes.features
        values, bins, frames_per_s = 1.0, features.bins, 1 / features.step_s
        for conv in self._config.model.convs:
            bins, frames_per_s = -(-bins // conv.stride[0]), frames_per_s / conv.stride[1]
            values = max(values, conv.channels * bins * frames_per_s)
        return 2.0**31 / max(values, features.bins / features.step_s)

    def __call__(self, indices: list[int]) -> float | None:
        """Bytes at the peak of both passes over utterances, with what training will hold besides; None: too much."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        try:
            self._gradients.start_step()
            inputs = self._inputs(self._batch(indices), 1)
            self._passes.forward(inputs, len(indices), last=True, idle=False)
            self._passes.backward()
            self._gradients.finish_step()
            torch.cuda.synchronize(self._device)
        except torch.OutOfMemoryError:
            return None
        next_inputs = inputs.waveforms.nbytes  # made while this step runs
        return torch.cuda.max_memory_allocated(self._device) - self._own + self._later + next_inputs

    def _batch(self, indices: list[int]) -> Batch:
        chosen = [self._utterances[index] for index in indices]
        lengths = torch.tensor([self._samples(u.duration_s) for u in chosen])
        waveforms = self._noise[: int(lengths.max())].to(self._device).repeat(len(chosen), 1)
        labels = [torch.tensor(self._alphabet.encode(u.text), dtype=torch.int64) for u in chosen]
        counts = torch.tensor([len(row) for row in labels])
        padded = nn.utils.rnn.pad_sequence(labels, batch_first=True)
        return Batch(waveforms, lengths, padded, counts, torch.tensor(indices))

    def _samples(self, duration_s: float) -> int:
        return int(duration_s / self._slowest * self._config.data.sample_rate_hz)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
