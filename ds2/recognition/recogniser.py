"""The public Python interface: utterances in batches, files of any length, and sources that arrive while they last.

A unidirectional model takes a file block by block, as a stream, which gives the logits of the whole. A bidirectional
model, whose backward layers start at the end, takes blocks of a minute with ten seconds of audio on either side; a file
of at most one block is taken whole.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ds2.audio.read import audio_blocks
from ds2.audio.stream import SampleBlocks
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
from ds2.inference.runner import file_block_frames, window_logits
from ds2.model.checkpoint import LoadedModel, find_model, load_model
from ds2.recognition.pipeline import Pipeline
from ds2.recognition.session import BLOCK_S, Endpoints, Live, Session
from ds2.recognition.settings import decode_settings

log = logging.getLogger(__name__)
_BATCH_AUDIO_S = {"cpu": 120.0, "cuda": 1200.0}  # padded audio a batch: fills the device, small beside training
_FILE_BLOCK_S = 60.0
_FILE_CONTEXT_S = 10.0


@dataclass(frozen=True)
class Transcript:
    """What was said in one file."""

    duration_s: float
    hypothesis: Hypothesis

    @property
    def text(self) -> str:
        """The words, separated by spaces."""
        return self.hypothesis.text

    @property
    def words(self) -> tuple[Word, ...]:
        """The words with their times and confidences."""
        return self.hypothesis.words


class Recogniser(Pipeline):
    """A model with features and a decoder: the public Python interface of recognition.

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
        """Combine a model that is loaded on `device` with the decoder that the settings name; errors as `load`."""
        decoder = make_decoder(decode, loaded.alphabet, loaded.frame_s, device)
        chosen = loaded.trained_precision if precision == "auto" and device.type == "cuda" else precision
        chosen = resolve_precision(chosen, device)
        log.info("recognising on %s in %s", device, chosen)
        return cls(loaded.model, loaded.features, loaded.alphabet, decoder, device, chosen)

    def transcribe(self, path: Path | str, *, channel: int = 0) -> Transcript:
        """Transcribe an audio file of any format and length; arguments and errors as `transcribe_file`."""
        return transcribe_file(self, path, channel=channel)

    def session(
        self, block_s: float = BLOCK_S, *, sample_rate_hz: int | None = None, hot_words: HotWords | None = None
    ) -> Session:
        """Start a session with one result; arguments and errors as `Session`."""
        return Session(self, block_s, sample_rate_hz=sample_rate_hz, hot_words=hot_words)

    def live(
        self,
        *,
        sample_rate_hz: int | None = None,
        endpoints: Endpoints | None = None,
        hot_words: HotWords | None = None,
    ) -> Live:
        """Start a session without end, whose result comes in segments; arguments and errors as `Live`."""
        return Live(self, sample_rate_hz=sample_rate_hz, endpoints=endpoints, hot_words=hot_words)

    @torch.inference_mode()
    def logits(
        self, loader: SpeechLoader, *, batch_audio_s: float | None = None, comm: Communicator | None = None
    ) -> Iterator[tuple[list[int], Tensor, Tensor]]:
        """Yield batches of utterances: their indices, logits (T', B, V), and lengths (B,) on the CPU.

        Args:
            loader: of any number of utterances, without augmentation.
            batch_audio_s: padded audio a batch, seconds; None chooses by device.
            comm: ranks that share the batches, of which this rank gets its own; None is this process alone.

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
            with self.autocast():
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
        """Recognise utterances in batches of similar duration, longest first; their texts are not used.

        Args:
            loader, batch_audio_s: as `logits`.
            comm: ranks that share the batches; each gets all hypotheses. None is this process alone.
            watch: called with every batch that `logits` yields.

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
        hypotheses: dict[int, Hypothesis] = {}
        for indices, logits, lengths in self.logits(loader, batch_audio_s=batch_audio_s, comm=comm):
            if watch is not None:
                watch(indices, logits, lengths)
            try:
                rows = decode_batch(self.decoder, logits, lengths)
            except DecodeError as error:
                named = ", ".join(utterances[indices[row]].name for row in error.rows)
                raise DecodeError(f"{named}: {error}" if named else str(error)) from error
            hypotheses.update(zip(indices, rows, strict=True))
        parts = comm.allgather(hypotheses, (Hypothesis, Word))
        hypotheses = {index: hypothesis for part in parts for index, hypothesis in part.items()}
        return [hypotheses[index] for index in range(len(utterances))]


def decode_batch(decoder: Decoder, logits: Tensor, lengths: Tensor) -> list[Hypothesis]:
    """Return the best hypothesis of each utterance of logits (T', B, V); of one without a frame it is empty."""
    nonempty = lengths.nonzero()[:, 0]
    best = [EMPTY for _ in lengths]
    if not len(nonempty):
        return best
    if len(nonempty) < len(best):
        logits, lengths = logits[:, nonempty.to(logits.device)], lengths[nonempty]
    try:
        rows = decoder.decode(logits.float().log_softmax(2), lengths)
    except DecodeError as error:
        raise DecodeError(str(error), nonempty[error.rows].tolist()) from error
    for row, hypotheses in zip(nonempty.tolist(), rows, strict=True):
        best[row] = hypotheses[0]
    return best


@torch.inference_mode()
def transcribe_file(
    pipeline: Pipeline,
    path: Path | str,
    *,
    channel: int = 0,
    block_s: float = _FILE_BLOCK_S,
    context_s: float = _FILE_CONTEXT_S,
) -> Transcript:
    """Transcribe an audio file, in memory that does not grow with its length.

    Of a truncated or damaged file what can be decoded is transcribed, with a warning; a very quiet one has a warning.

    Args:
        pipeline: model and decoder; a decoder of another package keeps the file's log-probs, some kilobytes a second.
        path: see `ds2.audio.read.read_audio` for the formats.
        channel: which channel of the file, from 1; 0 averages all.
        block_s: most audio that the model takes at once, seconds.
        context_s: audio that a bidirectional model takes on each side of a block, at most `block_s`, seconds.

    Raises:
        AudioError: the file cannot be read.
        DecodeError: the model gives NaN or infinity.
        ValueError: a block or context out of range.
    """
    path, model, frame_s = Path(path), pipeline.model, pipeline.frame_s
    block_frames, context_frames = (model.time_stride * round(seconds / frame_s) for seconds in (block_s, context_s))
    if not 0 <= context_frames <= block_frames or not block_frames:
        raise ValueError(
            f"block_s={block_s} and context_s={context_s}: need 0 <= context_s <= block_s, block_s above 0"
        )
    transcribe = _transcribe_windows if model.config.bidirectional else _transcribe_stream
    samples = audio_blocks(path, pipeline.features.sample_rate_hz, channel=channel, lenient=True)
    try:
        return transcribe(pipeline, samples, block_frames, context_frames)
    except DecodeError as error:
        raise DecodeError(f"{path}: {error}") from error


def _transcribe_stream(
    pipeline: Pipeline, waveform: Iterator[NDArray[np.float32]], block_frames: int, context_frames: int
) -> Transcript:
    block_frames = min(block_frames, file_block_frames(pipeline.model, pipeline.features.step_s))
    session = Session(pipeline, block_frames / pipeline.model.time_stride * pipeline.frame_s)
    for samples in waveform:
        session.accept_waveform(samples)
        while session.is_ready():
            session.decode()
    hypothesis = session.finish()
    return Transcript(session.duration_s, hypothesis)


def _transcribe_windows(
    pipeline: Pipeline, waveform: Iterator[NDArray[np.float32]], block_frames: int, context_frames: int
) -> Transcript:
    cut = SampleBlocks(pipeline.features, block_frames)

    def blocks() -> Iterator[Tensor]:
        for samples in waveform:
            for block in cut.accept(samples):
                yield pipeline.block_features([block])
        rest = pipeline.block_features([cut.finish()])
        if rest.shape[2]:
            yield rest

    decoding = pipeline.decoder.start()
    with pipeline.autocast():
        for logits in window_logits(pipeline.model, blocks(), context_frames):
            decoding.step(logits.float().log_softmax(2), torch.tensor([len(logits)]))
    return Transcript(cut.samples / pipeline.features.sample_rate_hz, decoding.finish()[0][0])
