"""A source that is heard chunk by chunk: what live audio and files of any length have in common."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ds2.audio.stream import Resampler, SampleBlocks
from ds2.decoding.decoder import Decoder
from ds2.decoding.hypothesis import Hypothesis
from ds2.decoding.lexicon import HotWords
from ds2.model.acoustic import AcousticModel
from ds2.recognition.hearing import hearing
from ds2.recognition.parts import Parts

BLOCK_S = 0.2  # audio that the model hears at once: what a result is late beside the model's lookahead


class Session:
    """One source on its way through a recogniser; any number of them share batches by `step`.

    The model hears blocks of a fixed length, so its logits do not depend on how the samples were cut.

    Args:
        parts: with a unidirectional model.
        block_s: audio that the model hears at once, seconds.
        sample_rate_hz: of the samples; None is the model's own. Others are resampled as a stream.
        decoder: another than that of `parts`.
        hot_words: words and phrases that are likelier here, and what each is worth (natural log; 10 is much; None:
            decode.hot_word_bonus).

    Raises:
        LexiconError: hot words that the network cannot write, or a decoder that takes none.
        ConfigError: a bidirectional model, which needs the end of a source first.
        AudioError: a rate that is no audio's.
        ValueError: blocks of less than one output frame.
    """

    def __init__(
        self,
        parts: Parts,
        block_s: float = BLOCK_S,
        *,
        sample_rate_hz: int | None = None,
        decoder: Decoder | None = None,
        hot_words: HotWords | None = None,
    ) -> None:
        self.parts, self.decoder, self.hot_words = parts, decoder or parts.decoder, hot_words
        self.sample_rate_hz = sample_rate_hz or parts.features.sample_rate_hz
        self._frames = parts.model.time_stride * round(block_s / parts.frame_s)
        if self._frames < 1:
            raise ValueError(f"block_s={block_s} is less than an output frame of {parts.frame_s:g} s")
        self.decoding = self.decoder.start(1, hot_words)
        self.blocks: deque[NDArray[np.float32]] = deque()  # samples that the model has not heard
        self.hearing = hearing(parts, self._frames)
        self._begin()

    def _begin(self) -> None:
        """Let samples, features and model begin anew."""
        features = self.parts.features
        self.stream = self.hearing.start()
        self._resampler = Resampler(self.sample_rate_hz, features.sample_rate_hz)
        self._samples = SampleBlocks(features, self._frames, partial(self.hearing.room, self.stream))

    @property
    def duration_s(self) -> float:
        """Audio heard so far, seconds; of a source that is resampled, all of it only after `finish`."""
        return self._samples.samples / self.parts.features.sample_rate_hz

    def accept(self, samples: NDArray[np.float32]) -> None:
        """Take the next samples (N,) in [-1, 1], any number; what is over full scale is clipped.

        Raises:
            AudioError: NaN or infinite samples; none of them are taken.
        """
        self.blocks.extend(self._samples.accept(self._resampler.accept(samples)))

    def ready(self) -> bool:
        """Whether `step` has something to do for this session."""
        return bool(self.blocks)

    def best(self) -> Hypothesis:
        """The best hypothesis of what was heard so far, of a search without words: see `Decoding.best`."""
        return self.decoding.best()[0]

    def notice(self, frames: int, quiet: int) -> bool:
        """Whether the hypothesis is to end after the next frames, of which the last `quiet` were quiet."""
        return False

    def end(self, found: Hypothesis) -> None:
        """Take the hypothesis that `notice` wanted to end."""

    def drain(self) -> None:
        """Take no more samples: all that were accepted wait for `step`, to the last frame that waits for its future."""
        self.blocks.extend(self._samples.accept(self._resampler.finish()))
        self.blocks.extend(self.hearing.last(self.stream, self._samples.finish(), len(self.blocks)))

    def finish(self) -> Hypothesis:
        """Hear what is left and end: the best hypothesis of the whole source.

        Raises:
            DecodeError: the model gives NaN or infinity.
        """
        self.drain()
        while self.ready():
            step([self])
        return ended([self])[0]


def step(sessions: Sequence[Session]) -> None:
    """Let sessions of one recogniser hear their next block, those that are ready and hear alike in one batch."""
    alike: dict[int, list[Session]] = {}
    for session in sessions:
        if session.ready():
            alike.setdefault(id(session.hearing), []).append(session)
    for group in alike.values():
        blocks = [session.blocks.popleft() for session in group]
        for said in group[0].hearing.step([session.stream for session in group], blocks):
            hear([group[row] for row in said.rows], said.logits, said.lengths)


@torch.inference_mode()
def hear(sessions: Sequence[Session], logits: Tensor, lengths: Sequence[int]) -> None:
    """Decode what the model says of sessions' next frames, logits (T', B, V), those of one decoder in one batch.

    A frame is quiet whose likeliest label is the blank or white space.
    """
    if not len(logits):
        return
    log_probs, frames = logits.float().log_softmax(2), torch.tensor(lengths)
    of_decoder: dict[int, list[int]] = {}
    for row, session in enumerate(sessions):
        of_decoder.setdefault(id(session.decoder), []).append(row)
    for rows in of_decoder.values():
        some = log_probs if len(rows) == len(sessions) else log_probs[:, rows]
        sessions[rows[0]].decoder.step([sessions[row].decoding for row in rows], some, frames[rows])
    pauses = sessions[0].parts.pauses[logits.argmax(2)].cpu().numpy()
    quiet = quiet_at_end(pauses, np.array(lengths)).tolist()
    done = [s for s, length, last in zip(sessions, lengths, quiet, strict=True) if s.notice(length, last)]
    for session, found in zip(done, ended(done), strict=True):
        session.end(found)


def quiet_at_end(quiet: NDArray[np.bool_], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """(B,) how many of the last frames of each of (T', B) are quiet."""
    loud = ~quiet & (np.arange(len(quiet))[:, None] < lengths)
    past = len(quiet) - lengths
    found: NDArray[np.int64] = np.where(loud.any(0), loud[::-1].argmax(0) - past, lengths)
    return found


def best(sessions: Sequence[Session]) -> list[Hypothesis]:
    """`Session.best` of each, in one batch."""
    return _each(sessions, lambda decoder, decodings: [row[0] for row in decoder.best(decodings)])


def ended(sessions: Sequence[Session]) -> list[Hypothesis]:
    """The best hypothesis of each, words and all, as if its source ended with what was heard, in one batch."""
    return _each(sessions, lambda decoder, decodings: [row[0][0] for row in decoder.finish(decodings)])


def _each(sessions: Sequence[Session], read: Callable[[Decoder, Sequence[Any]], list[Hypothesis]]) -> list[Hypothesis]:
    """What is read of each session, those of one decoder in one batch."""
    of_decoder: dict[int, list[Session]] = {}
    for session in sessions:
        of_decoder.setdefault(id(session.decoder), []).append(session)
    found: dict[int, Hypothesis] = {}
    for alike in of_decoder.values():
        decodings = [session.decoding for session in alike]
        found.update(zip(map(id, alike), read(alike[0].decoder, decodings), strict=True))
    return [found[id(session)] for session in sessions]


def windowed(model: AcousticModel, blocks: Iterator[Tensor], context_frames: int) -> Iterator[Tensor]:
    """Logits (T', 1, V) of each block, computed with its context; all starts are multiples of the model's stride."""
    block = next(blocks, None)
    before = None if block is None else block[:, :, :0]
    while block is not None and before is not None:
        following = next(blocks, None)
        after = block[:, :, :0] if following is None else following[:, :, :context_frames]
        window = torch.cat([before, block, after], dim=2)
        logits, _ = model(window, torch.tensor([window.shape[2]]))
        first = model.output_frames(before.shape[2])
        yield logits[first : first + model.output_frames(block.shape[2])]
        before = block[:, :, block.shape[2] - context_frames :]
        block = following
