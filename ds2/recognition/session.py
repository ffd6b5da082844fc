"""A model with features and decoder, and sessions: sources that it recognises while they arrive.

A session has one result, a live session has segments.

The methods have the names of sherpa-onnx: `accept_waveform`, `is_ready`, `decode`, `result`, `is_endpoint`, `reset`.
"""

import math
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NoReturn, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ds2.audio.features import Features
from ds2.audio.stream import Resampler, SampleBlocks, as_samples
from ds2.config.schema import Config
from ds2.decoding.decoder import Decoder, start_copy, unwrapped
from ds2.decoding.hypothesis import EMPTY, Hypothesis, Word, clip_words
from ds2.decoding.phrases import HotWords
from ds2.inference.runner import BlockRunner
from ds2.model.acoustic import AcousticModel
from ds2.model.structure import lookahead_parts_ms
from ds2.recognition.open_segments import PAUSE_S, Endpoints, OpenSegments, Segment
from ds2.system import UserError
from ds2.system.plain import grouped
from ds2.text.alphabet import Alphabet

BLOCK_S = 0.2  # audio of a block: a result comes later than its audio by this and the model's lookahead
MAX_BLOCK_S = 600.0  # longer ones would take gigabytes
Item = TypeVar("Item")
OnError = Callable[[Any, Exception], object]  # called with a session and its error


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
    # Held while the network or the decoder runs: all sessions share their tables.
    lock: threading.RLock = field(default_factory=threading.RLock, repr=False, compare=False)

    @cached_property
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
        return self.alphabet.pronunciations is not None and not unwrapped(self.decoder)[1].hot_characters

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


class Session:
    """One source and the state of its recognition; `decode_sessions` runs any number of them in one batch.

    The model takes blocks of a fixed length, so its logits do not depend on how the samples were cut.

    Args:
        pipeline: with a unidirectional model.
        block_s: audio that the model takes at once, seconds.
        sample_rate_hz: of the samples, which are resampled to the model's rate; None: they have the model's rate.
        hot_words: words and phrases that are likelier in this source, with a bonus each (natural log; 10 is much;
            None: decode.hot_word_bonus).

    Raises:
        LexiconError: hot words that the network cannot write, or a decoder that takes none.
        ConfigError: a bidirectional model, which needs the end of a source first.
        AudioError: a sample rate outside the allowed range.
        ValueError: blocks of less than one output frame, or of more than 10 minutes.
    """

    wants_words = False  # whether `results` has words with times, which cost a beam search an alignment each time
    partial: Hypothesis | None = None  # what `results` returns, where the last step of the decoder made it

    def __init__(
        self,
        pipeline: Pipeline,
        block_s: float = BLOCK_S,
        *,
        sample_rate_hz: int | None = None,
        hot_words: HotWords | None = None,
    ) -> None:
        self.pipeline, self.decoder, self.hot_words = pipeline, pipeline.decoder, hot_words
        self.batch_key = unwrapped(self.decoder)
        self.sample_rate_hz = pipeline.features.sample_rate_hz if sample_rate_hz is None else sample_rate_hz
        if not 0 < block_s <= MAX_BLOCK_S or round(block_s / pipeline.frame_s) < 1:
            raise ValueError(
                f"block_s={block_s}: give seconds from {pipeline.frame_s:g}, an output frame, to {MAX_BLOCK_S:g}"
            )
        self.block_frames = pipeline.model.time_stride * round(block_s / pipeline.frame_s)
        self.decoding = self.decoder.start(hot_words)
        self.blocks: deque[NDArray[np.float32]] = deque()  # samples of blocks that `decode` runs next
        self.runner = pipeline.block_runner(self.block_frames)
        self._start_stream()

    def _start_stream(self) -> None:
        """Start a new stream: resampler, blocks and the model's state."""
        features = self.pipeline.features
        self.slot = self.runner.start_stream()
        self._resampler = Resampler(self.sample_rate_hz, features.sample_rate_hz)
        self._samples = SampleBlocks(features, self.block_frames, partial(self.runner.input_buffer, self.slot))
        self._ended = False

    @property
    def duration_s(self) -> float:
        """Audio accepted so far, seconds."""
        return self._resampler.samples / self.sample_rate_hz

    @property
    def end_s(self) -> float:
        """Where the audio ends, in seconds as `result` counts them; infinity while it goes on."""
        return self._samples.samples / self.pipeline.features.sample_rate_hz if self._ended else math.inf

    def accept_waveform(self, samples: NDArray[Any] | Tensor, *, has_16_bits: bool = False) -> None:
        """Take the next samples (N,), any number: integers of 16 or 32 bits, or floats, which are clipped to [-1, 1].

        Args:
            has_16_bits: see `Resampler.accept`.

        Raises:
            AudioError: samples of another shape, type or scale, or NaN; none of them are taken.
            ValueError: the source has ended; `reset` starts another.
        """
        if self._ended:
            raise ValueError("samples after the end of a source: reset() starts another one")
        floats = cast("NDArray[np.float32]", samples) if has_16_bits or not len(samples) else as_samples(samples)
        self.blocks.extend(self._samples.accept(self._resampler.accept(floats, has_16_bits=has_16_bits)))

    def is_ready(self) -> bool:
        """Whether a block waits for `decode`."""
        return bool(self.blocks)

    def decode(self) -> None:
        """Run model and decoder on the next block; `decode_sessions` does so for many sessions in one batch."""
        decode_sessions([self])

    def result(self) -> Hypothesis:
        """The best hypothesis so far; `Decoder.best` says what it lacks."""
        with self.pipeline.lock:
            return self.decoder.best([self.decoding])[0]

    def is_endpoint(self) -> bool:
        """Whether a segment has ended: never in a session that is one segment."""
        return False

    def reset(self) -> None:
        """Start again as a new source; samples that were not decoded are dropped."""
        self.decoding = self.decoder.start(self.hot_words)
        self.blocks.clear()
        self._start_stream()

    def input_finished(self) -> None:
        """End the source: its last blocks, lookahead included, are then ready for `decode`; twice does no harm."""
        if self._ended:
            return
        self._ended = True
        self.blocks.extend(self._samples.accept(self._resampler.finish()))
        self.blocks.extend(self.runner.final_blocks(self.slot, self._samples.finish(), len(self.blocks)))

    def finish(self) -> Hypothesis:
        """End the source, decode the rest, and return the best hypothesis of all of it.

        Raises:
            DecodeError: the model gives NaN or infinity.
        """
        self.input_finished()
        while self.is_ready():
            self.decode()
        return final_results([self])[0]


def describe_delays(config: Config) -> str:
    """Describe the delay of a word's text, and of final text after the last word, without the time to compute them.

    The model is unidirectional, and the default rules end segments.
    """
    pause_s = Endpoints().after_speech_s
    overlap_s = config.features.window_s - config.features.step_s
    ahead_s = sum(lookahead_parts_ms(config.model, config.features.step_s).values()) / 1000 + overlap_s
    silent_s, noisy_s = max(pause_s, PAUSE_S + ahead_s) + BLOCK_S, pause_s + ahead_s + BLOCK_S
    return (
        f"a word appears up to {ahead_s + BLOCK_S:.2f} s after it is said, final text up to {silent_s:.2f} s after the "
        f"last word ({noisy_s:.2f} s in noise): pause {pause_s:g} s, lookahead {ahead_s:.2f} s, blocks {BLOCK_S:g} s"
    )


class LiveSession(Session):
    """A live session: segments become final one by one; `result` is the hypothesis of the open segment.

    At an endpoint the decoder and its language model start again; the model keeps its state. Where a segment ends
    does not depend on how the samples were cut. Arguments and errors are as of `Session`, besides `endpoints`.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        sample_rate_hz: int | None = None,
        endpoints: Endpoints | None = None,
        hot_words: HotWords | None = None,
    ) -> None:
        super().__init__(pipeline, sample_rate_hz=sample_rate_hz, hot_words=hot_words)
        self.endpoints = endpoints or Endpoints()
        self.segments: deque[Segment] = deque()  # final ones, oldest first; the user removes those that were read
        self._stream_start_s = 0.0  # where in the source the model's state was last reset
        self.row = pipeline.open_segments.take()
        weakref.finalize(self, pipeline.open_segments.free.append, self.row)

    def is_endpoint(self) -> bool:
        """Whether `segments` holds a segment."""
        return bool(self.segments)

    @property
    def speech_start_s(self) -> float | None:
        """The start of the first word of the open segment, seconds of the source; None before it."""
        frames = self._open_segment("speech_start")
        return None if frames < 0 else self._stream_start_s + frames * self.pipeline.frame_s

    @property
    def segment_start_s(self) -> float:
        """The start of the open segment, seconds of the source; times of `result` count from there."""
        return self._stream_start_s + self._open_segment("start") * self.pipeline.frame_s

    @property
    def end_s(self) -> float:
        return super().end_s - self._open_segment("start") * self.pipeline.frame_s

    def _open_segment(self, name: str) -> int:
        return int(self.pipeline.open_segments.rows[name][self.row])

    def end_segment(self, hypothesis: Hypothesis) -> None:
        """Make the open segment final, with its hypothesis, and open the next one."""
        frame_s = self.pipeline.frame_s
        if hypothesis.text:
            decoded_s = self._stream_start_s + self._open_segment("frames") * frame_s
            end_s = min(decoded_s, self.segment_start_s + self.end_s)
            words = tuple(self.in_source(hypothesis.words))
            self.segments.append(Segment(self.segment_start_s, end_s, replace(hypothesis, words=words)))
        self.decoding, self.partial = self.decoder.start(self.hot_words), None
        self.pipeline.open_segments.start_segment(self.row)

    def in_source(self, words: Sequence[Word]) -> list[Word]:
        """Return words of the open segment with times from the start of the source."""
        start_s = self.segment_start_s
        return [replace(word, start_s=word.start_s + start_s, end_s=word.end_s + start_s) for word in words]

    def flush(self) -> None:
        """Make all accepted audio final, to its last sample; the model's state is reset after it."""
        self.input_finished()
        while self.is_ready():
            self.decode()
        finish_segments([self])

    def reset(self) -> None:
        """Drop the open segment and start again; times still count from the source's start."""
        self.restart_stream()
        self.decoding, self.partial = self.decoder.start(self.hot_words), None
        self.blocks.clear()

    def restart_stream(self) -> None:
        """Reset the model's state: the next samples follow silence, but keep their times."""
        self._stream_start_s = self.duration_s
        self.pipeline.open_segments.restart(self.row)
        self._start_stream()

    @property
    def duration_s(self) -> float:
        """Audio accepted so far, seconds."""
        return self._stream_start_s + super().duration_s


Block = tuple[Session, NDArray[np.float32]]
"""A session, and samples (N,) that the model runs next."""


def raise_failure(session: Any, error: Exception) -> None:
    """Raise the error of a session: the default of `on_error` in `decode_sessions` and the other functions."""
    raise error


def decode_sessions(sessions: Sequence[Session], on_error: OnError = raise_failure) -> None:
    """Run the next block of each session that is ready; those of one pipeline and block length share a batch.

    Args:
        on_error: called with each session whose block raises, and with its error; the others of its batch go on as
            without it.
    """
    failures: list[tuple[Session, Exception]] = []
    ready = [session for session in sessions if session.is_ready()]
    for group in grouped(ready, lambda session: id(session.runner)).values():
        max_batch = group[0].runner.max_batch
        for first in range(0, len(group), max_batch):
            batch = [(session, session.blocks.popleft()) for session in group[first : first + max_batch]]
            add_levels(batch)
            _run_blocks(batch, lambda session, error: failures.append((session, error)))
    for session, error in failures:  # at the end, as `on_error` may raise
        on_error(session, error)


def add_levels(blocks: Sequence[Block]) -> None:
    """Add the levels of blocks that the model runs next to the open segments of live sessions of one pipeline."""
    lives = [(session, block) for session, block in blocks if isinstance(session, LiveSession)]
    if not lives:
        return
    live, pipeline = lives[0][0], lives[0][0].pipeline
    stride = pipeline.model.time_stride
    step, max_frames = pipeline.features.step_samples * stride, live.block_frames // stride
    counts = [min(len(block) // step, max_frames) for _, block in lives]
    frames = np.concatenate([block[: count * step] for (_, block), count in zip(lives, counts, strict=True)])
    frames = frames.reshape(-1, step)
    levels = np.einsum("ij,ij->i", frames, frames) / step
    pipeline.open_segments.add_levels(np.array([live.row for live, _ in lives]), np.array(counts), levels)


def run_contained(
    items: Sequence[Item], run: Callable[[Sequence[Item]], None], on_error: Callable[[Item, Exception], object]
) -> None:
    """Run a batch; if it raises, run its halves, and so on, until items that fail are alone.

    Args:
        run: raises before it changes any of the items that it is called with.
        on_error: called with each item that fails alone, and with its error.
    """
    if not items:
        return
    try:
        run(items)
    except Exception as error:
        if len(items) == 1:
            on_error(items[0], error)
            return
        middle = len(items) // 2
        run_contained(items[:middle], run, on_error)
        run_contained(items[middle:], run, on_error)


def _run_blocks(blocks: Sequence[Block], on_error: OnError) -> None:
    """Run model and decoder on one block of each session."""

    def run(part: Sequence[Block]) -> None:
        slots = [session.slot for session, _ in part]
        output = part[0][0].runner.step(slots, [block for _, block in part])
        sessions = [part[row][0] for row in output.rows]
        try:
            decode_logits(sessions, output.logits, output.lengths, on_error)
        except Exception as error:  # not of one session; the model must not run on these blocks again
            for session in sessions:
                on_error(session, error)

    with blocks[0][0].pipeline.lock:
        run_contained(blocks, run, lambda item, error: on_error(item[0], error))


@torch.inference_mode()
def decode_logits(
    sessions: Sequence[Session], logits: Tensor, lengths: Sequence[int], on_error: OnError = raise_failure
) -> None:
    """Decode the next frames of sessions of one pipeline; those with the same `batch_key` share a batch.

    A frame is quiet if its likeliest label is the blank or white space.

    Args:
        sessions: B sessions.
        logits: (T', B, V).
        lengths: frames of each session.
    """
    if not len(logits):
        return
    log_probs, frames = logits.float().log_softmax(2), np.array(lengths)
    quiet_copy = start_copy(sessions[0].pipeline.quiet_labels[logits.argmax(2)])  # while the search runs
    broken: set[int] = set()

    def fail(row: int, error: Exception) -> None:
        broken.add(row)
        on_error(sessions[row], error)

    def step(rows: Sequence[int]) -> None:
        selected = log_probs if len(rows) == len(sessions) else log_probs[:, rows]
        own = [sessions[row] for row in rows]
        wanted = [at for at, s in enumerate(own) if isinstance(s, LiveSession) and not s.blocks and not s.wants_words]
        for session in own:
            session.partial = None
        best = own[0].decoder.step_and_best(
            [session.decoding for session in own], selected, torch.from_numpy(frames[rows]), wanted
        )
        for at, hypothesis in zip(wanted, best or [], strict=best is not None):
            own[at].partial = hypothesis

    for rows in grouped(range(len(sessions)), lambda row: sessions[row].batch_key).values():
        run_contained(rows, step, fail)
    [quiet] = quiet_copy()
    quiet_before, quiet_after = quiet_at_ends(quiet, frames)
    ended: list[LiveSession] = []

    def update(part: Sequence[tuple[int, LiveSession]]) -> None:
        rows, lives = [row for row, _ in part], [live for _, live in part]
        rules = [(r.silence_s, r.after_speech_s, r.longest_s) for r in (live.endpoints for live in lives)]
        where, pipeline = np.array([live.row for live in lives]), lives[0].pipeline
        ends = pipeline.open_segments.update(
            where, frames[rows], quiet_before[rows], quiet_after[rows], np.array(rules, float), pipeline.frame_s
        )
        ended.extend(live for live, end in zip(lives, ends.tolist(), strict=True) if end)

    live_rows = [(row, s) for row, s in enumerate(sessions) if isinstance(s, LiveSession) and row not in broken]
    run_contained(live_rows, update, lambda item, error: fail(item[0], error))
    hypotheses = _by_decoder(ended, _final, on_error)
    for session in ended:
        if id(session) in hypotheses:
            session.end_segment(hypotheses[id(session)])


def quiet_at_ends(quiet: NDArray[np.bool_], lengths: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Count the quiet frames at the start and at the end of each column of (T', B); the first `lengths` are valid."""
    frames = np.arange(len(quiet))[:, None]
    loud = ~quiet & (frames < lengths)
    return np.where(loud, frames, lengths).min(0), lengths - 1 - np.where(loud, frames, -1).max(0)


def results(sessions: Sequence[Session], on_error: OnError = raise_failure) -> list[Hypothesis]:
    """Return `Session.result` of each session, in one batch; empty if it failed (`on_error`: see `decode_sessions`).

    Sessions with `wants_words` get words too; their times count from the start of the open segment.
    """
    hypotheses = {id(s): s.partial for s in sessions if s.partial is not None and not s.wants_words}
    wanting = [session for session in sessions if session.wants_words]
    hypotheses |= _by_decoder(wanting, lambda decoder, streams: decoder.best(streams, words=True), on_error)
    others = [session for session in sessions if not session.wants_words and session.partial is None]
    hypotheses |= _by_decoder(others, lambda decoder, streams: decoder.best(streams), on_error)
    return [hypotheses.get(id(session), EMPTY) for session in sessions]


def final_results(sessions: Sequence[Session]) -> list[Hypothesis]:
    """The best hypothesis of each session, as if its source ended with what was decoded, in one batch."""
    hypotheses = _by_decoder(sessions, _final, raise_failure)
    return [hypotheses[id(session)] for session in sessions]


def finish_segments(sessions: Sequence[LiveSession], on_error: OnError = raise_failure) -> None:
    """Make the open segments of live sessions final, after `input_finished` and all blocks; sources may go on.

    `on_error`: as for `decode_sessions`.
    """
    hypotheses = _by_decoder(sessions, _final, on_error)
    for live in sessions:
        if id(live) in hypotheses:
            live.end_segment(hypotheses[id(live)])
            live.restart_stream()


def _final(decoder: Decoder, streams: Sequence[Any]) -> list[Hypothesis]:
    return [row[0] for row in decoder.finish(streams)]


def _by_decoder(
    sessions: Sequence[Session], read: Callable[[Decoder, Sequence[Any]], list[Hypothesis]], on_error: OnError
) -> dict[int, Hypothesis]:
    """Return the hypothesis of each session that does not fail, by id; those with one `batch_key` share a batch."""
    hypotheses: dict[int, Hypothesis] = {}

    def run(group: Sequence[Session]) -> None:
        decodings = [session.decoding for session in group]
        for session, hypothesis in zip(group, read(group[0].decoder, decodings), strict=True):
            words = clip_words(hypothesis.words, session.end_s)
            hypotheses[id(session)] = replace(hypothesis, words=words) if words else hypothesis

    for group in grouped(sessions, lambda session: session.batch_key).values():
        with group[0].pipeline.lock:
            run_contained(group, run, on_error)
    return hypotheses
