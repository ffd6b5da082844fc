"""What a model says of many utterances: batches of logits, of a loader that keeps no cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ds2.audio.features import Features
from ds2.config.schema import BatchingConfig
from ds2.data.batching import plan_epoch
from ds2.data.loader import SpeechLoader
from ds2.data.manifest import Utterance
from ds2.distributed.communicator import Communicator
from ds2.model.acoustic import AcousticModel
from ds2.model.checkpoint import LoadedModel

_BATCH_AUDIO_S = {
    "cpu": 120.0,
    "cuda": 1200.0,
}  # padded audio a batch: enough to fill the device, small beside training


@torch.inference_mode()
def logit_batches(
    model: AcousticModel,
    features: Features,
    loader: SpeechLoader,
    *,
    device: torch.device,
    precision: str = "fp32",
    batch_audio_s: float | None = None,
    comm: Communicator | None = None,
) -> Iterator[tuple[list[int], Tensor, Tensor]]:
    """Yield what the model says of utterances: their places, logits (T', B, V), lengths (B,) on the CPU.

    Arguments and errors are those of :func:`transcribe_utterances`; with `comm`, this rank's batches.
    """
    if model.training:
        raise RuntimeError("recognition needs running statistics: call model.eval() first")
    if not loader.utterances:
        return
    budget = BatchingConfig(utterances=0, audio_s=batch_audio_s or _BATCH_AUDIO_S[device.type], sortagrad=True)
    plan = plan_epoch(np.array([u.duration_s for u in loader.utterances]), budget, epoch=1, seed=0)[::-1]
    if comm is not None:
        plan = plan[comm.rank :: comm.world]
    for batch in loader.epoch(plan, epoch=1):
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
            logits, lengths = model(*features(batch.waveforms.to(device, non_blocking=True), batch.sample_lengths))
        yield batch.indices.tolist(), logits, lengths


def recognition_loader(
    loaded: LoadedModel, utterances: Sequence[Utterance], device: torch.device, workers: int = -1
) -> SpeechLoader:
    """Return a loader of audio that is read once, for which no cache is written; -1 workers chooses by device."""
    data = replace(loaded.config.data, cache="none", workers=workers)
    return SpeechLoader(utterances, replace(loaded.config, data=data, device=str(device)), None, training=False)
