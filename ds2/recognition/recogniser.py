"""A model with all it needs to hear: utterances in batches, files of any length, and sources chunk by chunk."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ds2.config.device import resolve_device, resolve_precision
from ds2.config.schema import BatchingConfig, DecodeConfig
from ds2.data.batching import plan_epoch
from ds2.data.loader import SpeechLoader
from ds2.data.manifest import corpus
from ds2.decoding.decoder import Decoder
from ds2.decoding.hypothesis import EMPTY, DecodeError, Hypothesis, Word
from ds2.decoding.lexicon import HotWords
from ds2.decoding.methods import make_decoder
from ds2.distributed.agreement import weights
from ds2.distributed.communicator import Communicator
from ds2.model.checkpoint import LoadedModel, find_model, load_model
from ds2.recognition.live import Endpoints, Live
from ds2.recognition.parts import Parts
from ds2.recognition.settings import decode_settings
from ds2.recognition.stream import BLOCK_S, Session
from ds2.recognition.transcribe import Transcript, transcribe_file

log = logging.getLogger(__name__)
_BATCH_AUDIO_S = {"cpu": 120.0, "cuda": 1200.0}  # padded audio a batch: fills the device, small beside training


class Recogniser(Parts):
    """A model with all it needs to hear: the public Python interface of recognition.

    recogniser = Recogniser.load("runs/an4")
    print(recogniser.transcribe("talk.mp3").text)
    """

    @classmethod
    def load(
        cls,
        path: Path | str,
        *,
        device: str = "auto",
        precision: str = "auto",
        decode: DecodeConfig | None = None,
    ) -> Recogniser:
        """Open a model file, or the best one of a run folder.

        Args:
            path: the file or folder.
            device: auto, cpu, cuda, cuda:N.
            precision: fp32, bf16 or auto: on a GPU the precision of its training, on a CPU fp32.
            decode: decoder settings; None takes those tuned for the model, else those of its own config.

        Raises:
            CheckpointError: no such file, or not a ds2 model.
            ConfigError: an unknown device or precision.
            DecodeError, LanguageModelError: decoder settings that cannot work.
        """
        file, chosen = find_model(Path(path)), resolve_device(device)
        loaded = load_model(file, chosen)
        return cls.of(loaded, decode or decode_settings(file, loaded.config), chosen, precision)

    @classmethod
    def of(cls, loaded: LoadedModel, decode: DecodeConfig, device: torch.device, precision: str = "auto") -> Recogniser:
        """Put a model that is loaded on `device` together with the decoder that settings name; errors as `load`."""
        decoder = make_decoder(decode, loaded.alphabet, loaded.frame_s, device)
        chosen = loaded.trained_precision if precision == "auto" and device.type == "cuda" else precision
        chosen = resolve_precision(chosen, device)
        log.info("recognising on %s in %s", device, chosen)
        return cls(loaded.model, loaded.features, loaded.alphabet, decoder, device, chosen)

    def transcribe(self, path: Path | str) -> Transcript:
        """Transcribe an audio file of any format and length; errors as `transcribe_file`."""
        return transcribe_file(self, path)

    def session(
        self, block_s: float = BLOCK_S, *, sample_rate_hz: int | None = None, hot_words: HotWords | None = None
    ) -> Session:
        """Begin to hear a source chunk by chunk; arguments and errors as `Session`."""
        return Session(self, block_s, sample_rate_hz=sample_rate_hz, hot_words=hot_words)

    def live(
        self,
        *,
        sample_rate_hz: int | None = None,
        endpoints: Endpoints | None = None,
        hot_words: HotWords | None = None,
    ) -> Live:
        """Begin to hear a source without end, that comes in segments; arguments and errors as `Live`."""
        return Live(self, sample_rate_hz=sample_rate_hz, endpoints=endpoints, hot_words=hot_words)

    @torch.inference_mode()
    def logits(
        self, loader: SpeechLoader, *, batch_audio_s: float | None = None, comm: Communicator | None = None
    ) -> Iterator[tuple[list[int], Tensor, Tensor]]:
        """Yield what the model says of utterances: their places, logits (T', B, V), lengths (B,) on the CPU.

        Args:
            loader: of any number of utterances, without augmentation.
            batch_audio_s: budget of padded audio a batch, seconds; None chooses by device.
            comm: ranks that share the batches out, of which this rank's come; None is this process alone.

        Raises:
            AudioError: audio cannot be read.
            RuntimeError: the model is in training mode.
        """
        if self.model.training:
            raise RuntimeError("recognition needs running statistics: call model.eval() first")
        if not loader.utterances:
            return
        audio_s = batch_audio_s or _BATCH_AUDIO_S[self.device.type]
        budget = BatchingConfig(utterances=0, audio_s=audio_s, sortagrad=True)
        plan = plan_epoch(np.array([u.duration_s for u in loader.utterances]), budget, epoch=1, seed=0)[::-1]
        if comm is not None:
            plan = plan[comm.rank :: comm.world]
        for batch in loader.epoch(plan, epoch=1):
            with self.running():
                waveforms = batch.waveforms.to(self.device, non_blocking=True)
                logits, lengths = self.model(*self.features(waveforms, batch.sample_lengths))
            yield batch.indices.tolist(), logits, lengths

    @torch.inference_mode()
    def recognise(
        self,
        loader: SpeechLoader,
        *,
        batch_audio_s: float | None = None,
        comm: Communicator | None = None,
        watch: Callable[[list[int], Tensor, Tensor], None] | None = None,
    ) -> list[Hypothesis]:
        """Recognise utterances, in batches of like duration, longest first; their texts are not looked at.

        Args:
            loader, batch_audio_s: as `logits`.
            comm: ranks that share the batches out and all get all hypotheses; None is this process alone.
            watch: is given what `logits` yields, too.

        Returns:
            Hypotheses in the order of the utterances.

        Raises:
            DecodeError: the model gives NaN or infinity; names the utterances.
            AudioError, RuntimeError: as `logits`.
            DisagreementError: a rank has other utterances or weights.
        """
        comm, utterances = comm or Communicator(self.device), loader.utterances
        if comm.world > 1:
            comm.agree(corpus("to recognise", utterances), "give all hosts the same manifests")
            comm.agree(weights(self.model), "give all hosts the same model; in training, run on GPUs of one kind")
        found: dict[int, Hypothesis] = {}
        for indices, logits, lengths in self.logits(loader, batch_audio_s=batch_audio_s, comm=comm):
            if watch is not None:
                watch(indices, logits, lengths)
            try:
                rows = decode_batch(self.decoder, logits, lengths)
            except DecodeError as error:
                named = ", ".join(utterances[indices[row]].name for row in error.rows)
                raise DecodeError(f"{named}: {error}" if named else str(error)) from error
            found.update(zip(indices, rows, strict=True))
        parts = comm.allgather(found, (Hypothesis, Word))
        found = {index: hypothesis for part in parts for index, hypothesis in part.items()}
        return [found[index] for index in range(len(utterances))]


def decode_batch(decoder: Decoder, logits: Tensor, lengths: Tensor) -> list[Hypothesis]:
    """Return the best hypothesis of each utterance of logits (T', B, V); too short for a frame, it is empty."""
    heard = lengths.nonzero()[:, 0]
    best = [EMPTY for _ in lengths]
    if not len(heard):
        return best
    if len(heard) < len(best):
        logits, lengths = logits[:, heard.to(logits.device)], lengths[heard]
    try:
        rows = decoder.decode(logits.float().log_softmax(2), lengths)
    except DecodeError as error:
        raise DecodeError(str(error), heard[error.rows].tolist()) from error
    for row, found in zip(heard.tolist(), rows, strict=True):
        best[row] = found[0]
    return best
