"""The public Python interface: utterances in batches, files of any length, and live sources.

A unidirectional model runs over a file block by block, as a stream, which gives the logits of the whole. A
bidirectional model, whose backward layers start at the end, runs over blocks of a minute with ten seconds of audio on
either side; a file of at most one block is run whole.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ds2.audio.read import AudioError, audio_blocks
from ds2.audio.stream import Resampler, SampleBlocks, as_samples
from ds2.config.device import resolve_device, resolve_precision
from ds2.config.schema import BatchingConfig, ConfigError, DecodeConfig
from ds2.data.loader import SpeechLoader, plan_epoch
from ds2.data.manifest import corpus
from ds2.decoding.decoder import Decoder, Search, SearchDecoder
from ds2.decoding.hypothesis import EMPTY, DecodeError, Hypothesis, Word, clip_words
from ds2.decoding.keywords import KeywordDecoder
from ds2.decoding.methods import make_decoder
from ds2.decoding.phrase_search import PhraseDecoder
from ds2.decoding.phrases import DEFAULT_ALLOWANCE, FALSE_ALARMS, HotWords, LexiconError
from ds2.distributed.communicator import Communicator, weights
from ds2.inference.runner import file_block_frames, window_logits
from ds2.model.checkpoint import LoadedModel, find_model, load_model
from ds2.model.shipped import default_model
from ds2.recognition.open_segments import Endpoints
from ds2.recognition.session import BLOCK_S, LiveSession, Pipeline, Session
from ds2.recognition.settings import decode_settings
from ds2.system.plain import short_repr
from ds2.text.alphabet import Alphabet

log = logging.getLogger(__name__)
_BATCH_AUDIO_S = {"cpu": 120.0, "cuda": 1200.0}  # padded audio a batch: fills the device; far less than training
_FILE_BLOCK_S = 60.0
_FILE_CONTEXT_S = 10.0
_SAMPLES_AT_ONCE = 1 << 18
Audio = str | Path | NDArray[Any] | Tensor
"""A file, or samples (N,) of one channel: floats in [-1, 1], or integers of 16 or 32 bits."""
Audios = list[Any] | tuple[Any, ...]
"""Any number of `Audio`."""
HotPhrases = HotWords | Iterable[str]
"""Words and phrases, with a bonus each (natural log) or without: decode.hot_word_bonus."""


@dataclass(frozen=True)
class Transcript:
    """The transcript of one file or array."""

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
    """A model with features and a decoder: the public Python interface of recognition. Threads use it in turns.

    recogniser = ds2.load("runs/an4")
    print(recogniser.transcribe("talk.mp3").text)
    print(recogniser.transcribe(samples, 16000).words)
    """

    @classmethod
    def load(
        cls,
        path: Path | str | None = None,
        *,
        device: str = "auto",
        precision: str = "auto",
        decode: DecodeConfig | None = None,
    ) -> Self:
        """Open a model file, or the best one of a run folder.

        Args:
            path: the file or folder, or a name of `ds2 models`; None: the model that comes with ds2, named on stderr.
            device: auto, cpu, cuda, cuda:N.
            precision: fp32, bf16 or auto: on a GPU the precision of its training, on a CPU fp32.
            decode: decoder settings; None: those tuned for the model, or without them those of its config.

        Raises:
            CheckpointError: no such file, or not a ds2 model.
            ConfigError: an unknown device or precision.
            DecodeError, LanguageModelError: decoder settings that cannot work.
        """
        if not isinstance(decode, DecodeConfig | None):
            raise ConfigError(f"decode={short_repr(decode)}: give a ds2.config.schema.DecodeConfig(method='beam', ...)")
        file, chosen = find_model(default_model() if path is None else Path(path)), resolve_device(device)
        loaded = load_model(file, chosen)
        return cls.of(loaded, decode or decode_settings(file, loaded.config), chosen, precision)

    @classmethod
    def of(cls, loaded: LoadedModel, decode: DecodeConfig, device: torch.device, precision: str = "auto") -> Self:
        """Combine a model that is loaded on `device` with the decoder that the settings name; errors as `load`."""
        decoder = make_decoder(decode, loaded.alphabet, loaded.frame_s, device)
        chosen = loaded.trained_precision if precision == "auto" and device.type == "cuda" else precision
        chosen = resolve_precision(chosen, device)
        log.info("recognising on %s in %s", device, chosen)
        return cls(loaded.model, loaded.features, loaded.alphabet, decoder, device, chosen)

    @overload
    def transcribe(
        self, audio: Audio, sample_rate_hz: int | None = None, *, channel: int = 0, hot_words: HotPhrases | None = None
    ) -> Transcript: ...

    @overload
    def transcribe(
        self, audio: Audios, sample_rate_hz: int | None = None, *, channel: int = 0, hot_words: HotPhrases | None = None
    ) -> list[Transcript]: ...

    def transcribe(
        self,
        audio: Audio | Audios,
        sample_rate_hz: int | None = None,
        *,
        channel: int = 0,
        hot_words: HotPhrases | None = None,
    ) -> Transcript | list[Transcript]:
        """Transcribe a file of any format and length, an array of samples, or a list of them.

        Args:
            audio: files or arrays; of a list, a transcript each.
            sample_rate_hz: of arrays, which are resampled to the model's rate.
            channel: of files, from 1; 0 averages all.
            hot_words: words and phrases to prefer; needs decode.method=beam.

        Raises:
            AudioError: a file that cannot be read, or samples of another shape, type or scale, or without a rate.
            LexiconError: hot words that the network cannot write, or a decoder that takes none.
            DecodeError: the model gives NaN or infinity.
        """
        if isinstance(audio, list | tuple):
            return [self.transcribe(one, sample_rate_hz, channel=channel, hot_words=hot_words) for one in audio]
        phrases = _with_bonuses(hot_words)
        return transcribe_file(self, audio, sample_rate_hz=sample_rate_hz, channel=channel, hot_words=phrases)

    def log_probs(self, audio: Audio, sample_rate_hz: int | None = None) -> Tensor:
        """Return the natural log-probs of a file or array before decoding; arguments and errors as `transcribe`.

        Returns:
            (T', V) float32 on the CPU: a row every `frame_s` seconds, a column for each of `alphabet.symbols`, of which
            the first is the CTC blank.
        """
        frames = [torch.zeros(0, len(self.alphabet))]

        def record(log_probs: Tensor, lengths: Tensor) -> list[list[Hypothesis]]:
            frames.extend(log_probs[:length, row] for row, length in enumerate(lengths.tolist()))
            return [[EMPTY] for _ in lengths]

        decoder = SearchDecoder(record, self.alphabet, self.frame_s, times=False)
        transcribe_file(replace(self, decoder=decoder), audio, sample_rate_hz=sample_rate_hz)
        return torch.cat(frames)

    def with_decoder(self, decoder: Decoder | Callable[[Tensor], str]) -> Self:
        """Return the same model with another decoder.

        Args:
            decoder: one of `ds2.decoding`, or a function that gets the log-probs (T', V) float32 of an utterance on the
                CPU, pieces of 20 s of a longer one, and returns its text; word times then come from an alignment.

        Raises:
            DecodeError: it is neither; later, if the function returns no text.
        """
        if not callable(decoder) and not hasattr(decoder, "step"):
            raise DecodeError(
                f"{short_repr(decoder)} is no decoder: give one of ds2.decoding, or a function of log-probs (T', V) "
                "that returns a text; load(..., decode=DecodeConfig(method='beam')) chooses a method"
            )
        if callable(decoder):
            decoder = SearchDecoder(_searcher(decoder, self.alphabet), self.alphabet, self.frame_s, times=True)
        return replace(self, decoder=decoder)

    def only_phrases(self, phrases: Iterable[str], allowance: float | None = None) -> Self:
        """Return the same model with a decoder that writes these phrases only, in files, sessions and live.

        Args:
            phrases: texts such as `turn [the] (light|lamp) (on|off)` and `set volume to <0-100>`, see
                `ds2.decoding.phrases`; with `[unk]` among them other speech becomes the word `[unk]`, without it all
                speech becomes phrases.
            allowance: how much less probable than other speech a phrase may be, natural log a label: more finds more
                phrases and more that were not said. None: 0.7.

        Raises:
            PhraseError: phrases that cannot be read, or that the network cannot write; `allowance` is not 0 to 100.
        """
        allowed = DEFAULT_ALLOWANCE if allowance is None else allowance
        return replace(self, decoder=PhraseDecoder(phrases, self.alphabet, self.frame_s, allowed))

    def only_keywords(self, keywords: Iterable[str], false_alarms: float = FALSE_ALARMS) -> Self:
        """Return the same model with a decoder that finds these keywords among all words, in files, sessions and live.

        Args:
            keywords: words and phrases as of `only_phrases`, which the language model has; words between them become
                the word `[unk]`.
            false_alarms: keywords an hour that nobody said, of each keyword: more finds more. In speech of
                other kinds than was measured there may be more of them.

        Raises:
            PhraseError: keywords that cannot be read, or that the network cannot write.
            LexiconError: keywords that the language model lacks.
            DecodeError: the decoder is no beam search that was measured (`ds2 lm tune`), or `false_alarms` are fewer
                than can be had.
        """
        return replace(self, decoder=KeywordDecoder(self.decoder, keywords, false_alarms))

    def session(
        self, block_s: float = BLOCK_S, *, sample_rate_hz: int | None = None, hot_words: HotPhrases | None = None
    ) -> Session:
        """Start a session with one result; arguments and errors as `Session`."""
        return Session(self, block_s, sample_rate_hz=sample_rate_hz, hot_words=_with_bonuses(hot_words))

    def live(
        self,
        *,
        sample_rate_hz: int | None = None,
        endpoints: Endpoints | None = None,
        hot_words: HotPhrases | None = None,
    ) -> LiveSession:
        """Start a live session, whose result comes in segments; arguments and errors as `LiveSession`."""
        phrases = _with_bonuses(hot_words)
        return LiveSession(self, sample_rate_hz=sample_rate_hz, endpoints=endpoints, hot_words=phrases)

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
            UserError: a rank has other utterances or weights.
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
            for index, row in zip(indices, rows, strict=True):
                hypotheses[index] = replace(row, words=clip_words(row.words, utterances[index].duration_s))
        parts = comm.allgather(hypotheses, (Hypothesis, Word))
        hypotheses = {index: hypothesis for part in parts for index, hypothesis in part.items()}
        return [hypotheses[index] for index in range(len(utterances))]


def decode_batch(decoder: Decoder, logits: Tensor, lengths: Tensor) -> list[Hypothesis]:
    """Return the best hypothesis of each utterance of logits (T', B, V), an empty one for utterances without frames."""
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
    audio: Audio,
    *,
    sample_rate_hz: int | None = None,
    channel: int = 0,
    hot_words: HotWords | None = None,
    block_s: float = _FILE_BLOCK_S,
    context_s: float = _FILE_CONTEXT_S,
    watch: Callable[[float], None] = lambda read_s: None,
) -> Transcript:
    """Transcribe an audio file or array, in memory that does not grow with its length.

    A truncated or damaged file is transcribed as far as it can be decoded, with a warning; so is a very quiet one.

    Args:
        pipeline: model and decoder; an external decoder stores the log-probs of the file, some kilobytes a second.
        audio, sample_rate_hz, channel: as of `Recogniser.transcribe`.
        hot_words: words and phrases to prefer, with a bonus each.
        block_s: audio that the model runs over at once, at most, seconds.
        context_s: audio that a bidirectional model takes on each side of a block, at most `block_s`, seconds.
        watch: is called with the seconds of audio that have been read.

    Raises:
        AudioError, LexiconError, DecodeError: as `Recogniser.transcribe`.
        ValueError: a block or context out of range.
    """
    model, frame_s = pipeline.model, pipeline.frame_s
    block_frames, context_frames = (model.time_stride * round(seconds / frame_s) for seconds in (block_s, context_s))
    if not 0 <= context_frames <= block_frames or not block_frames:
        raise ValueError(
            f"block_s={block_s} and context_s={context_s}: need 0 <= context_s <= block_s, block_s above 0"
        )
    blocks = _watched(_blocks(audio, sample_rate_hz, pipeline.features.sample_rate_hz, channel), pipeline, watch)
    try:
        if model.config.bidirectional:
            return _transcribe_windows(pipeline, blocks, block_frames, context_frames, hot_words)
        return _transcribe_stream(pipeline, blocks, block_frames, hot_words)
    except LexiconError:
        raise
    except DecodeError as error:
        raise DecodeError(f"{audio}: {error}" if isinstance(audio, str | Path) else str(error)) from error


def _blocks(audio: Audio, rate_hz: int | None, model_rate_hz: int, channel: int) -> Iterator[NDArray[np.float32]]:
    """Yield samples at the model's rate."""
    if isinstance(audio, str | Path):
        if rate_hz is not None:
            raise AudioError(f"{audio}: a file has its own sample rate: leave out sample_rate_hz={rate_hz}")
        yield from audio_blocks(audio, model_rate_hz, channel=channel, lenient=True)
        return
    if channel:
        raise AudioError(f"channel={channel}: an array of samples has one channel; take samples[:, {channel - 1}]")
    samples = as_samples(audio)
    if rate_hz is None:
        raise AudioError("an array of samples has no sample rate: transcribe(samples, sample_rate_hz)")
    resampler = Resampler(rate_hz, model_rate_hz)
    for first in range(0, len(samples), _SAMPLES_AT_ONCE):
        yield resampler.accept(samples[first : first + _SAMPLES_AT_ONCE])
    yield resampler.finish()


def _watched(
    blocks: Iterator[NDArray[np.float32]], pipeline: Pipeline, watch: Callable[[float], None]
) -> Iterator[NDArray[np.float32]]:
    samples = 0
    for block in blocks:
        samples += len(block)
        watch(samples / pipeline.features.sample_rate_hz)
        yield block


def _transcribe_stream(
    pipeline: Pipeline, blocks: Iterator[NDArray[np.float32]], block_frames: int, hot_words: HotWords | None
) -> Transcript:
    block_frames = min(block_frames, file_block_frames(pipeline.model, pipeline.features.step_s))
    block_s = block_frames / pipeline.model.time_stride * pipeline.frame_s
    session = Session(pipeline, block_s, hot_words=hot_words)
    for samples in blocks:
        session.accept_waveform(samples)
        while session.is_ready():
            session.decode()
    return Transcript(session.duration_s, session.finish())


def _transcribe_windows(
    pipeline: Pipeline,
    blocks: Iterator[NDArray[np.float32]],
    block_frames: int,
    context_frames: int,
    hot_words: HotWords | None,
) -> Transcript:
    cut = SampleBlocks(pipeline.features, block_frames)

    def features() -> Iterator[Tensor]:
        for samples in blocks:
            for block in cut.accept(samples):
                yield pipeline.block_features([block])
        rest = pipeline.block_features([cut.finish()])
        if rest.shape[2]:
            yield rest

    decoder, stream = pipeline.decoder, pipeline.decoder.start(hot_words)
    with pipeline.lock:
        with pipeline.autocast():
            for logits in window_logits(pipeline.model, features(), context_frames):
                decoder.step([stream], logits.float().log_softmax(2), torch.tensor([len(logits)]))
        hypothesis = decoder.finish([stream])[0][0]
    duration_s = cut.samples / pipeline.features.sample_rate_hz
    return Transcript(duration_s, replace(hypothesis, words=clip_words(hypothesis.words, duration_s)))


def _with_bonuses(phrases: HotPhrases | None) -> HotWords | None:
    if phrases is None or isinstance(phrases, Mapping):
        return phrases
    allowed = "give a list of words and phrases, or a dict with bonuses"
    if isinstance(phrases, str):
        raise LexiconError(f"hot_words={phrases!r:.200} is one string: {allowed}")
    try:
        return dict.fromkeys(phrases)
    except TypeError as error:  # a number, or a list of lists
        raise LexiconError(f"hot_words={phrases!r:.200} is no list of texts: {allowed}") from error


def _searcher(text_of: Callable[[Tensor], str], alphabet: Alphabet) -> Search:
    """Make the search of a decoder from a function of the log-probs (T', V) of one utterance."""

    def search(log_probs: Tensor, lengths: Tensor) -> list[list[Hypothesis]]:
        texts = [text_of(log_probs[:length, row]) for row, length in enumerate(lengths.tolist())]
        for text in texts:
            if not isinstance(text, str):
                raise DecodeError(f"the function of with_decoder returned {short_repr(text)}: it must return a text")
        return [[Hypothesis(text, 0.0, tuple(alphabet.encode(text)), ())] for text in texts]

    return search
