"""Audio files of any format and length to text, in memory that does not grow with the audio.

A unidirectional model hears the file as a stream, which gives the logits of the whole. A bidirectional model, whose
backward layers start at the end, hears blocks of a minute with ten seconds of what lies before and after them; a file
of at most one block is heard whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ds2.audio.read import audio_blocks
from ds2.audio.stream import SampleBlocks
from ds2.decoding.hypothesis import DecodeError, Hypothesis, Word
from ds2.recognition.graphed import GraphedBlocks
from ds2.recognition.parts import Parts
from ds2.recognition.stream import Session, step, windowed

_BLOCK_S = 60.0
_CONTEXT_S = 10.0


@dataclass(frozen=True)
class Transcript:
    """What was heard in one file."""

    duration_s: float
    hypothesis: Hypothesis

    @property
    def text(self) -> str:
        """The words, parted by spaces."""
        return self.hypothesis.text

    @property
    def words(self) -> tuple[Word, ...]:
        """The words with their times and confidences."""
        return self.hypothesis.words


@torch.inference_mode()
def transcribe_file(
    parts: Parts, path: Path | str, *, block_s: float = _BLOCK_S, context_s: float = _CONTEXT_S
) -> Transcript:
    """Transcribe one file.

    Args:
        parts: the model and its decoder; one of another package holds the file's log-probs, some kilobytes a second.
        path: see `ds2.audio.read.read_audio` for the formats.
        block_s: audio given to the model at once, seconds; a model that is heard in blocks of one shape takes less.
        context_s: audio that a bidirectional model hears on each side of a block, at most `block_s`, seconds.

    Raises:
        AudioError: the file cannot be read.
        DecodeError: the model gives NaN or infinity.
        ValueError: a block or context out of range.
    """
    path, model, frame_s = Path(path), parts.model, parts.frame_s
    block_frames, context_frames = (model.time_stride * round(seconds / frame_s) for seconds in (block_s, context_s))
    if not 0 <= context_frames <= block_frames or not block_frames:
        raise ValueError(
            f"block_s={block_s} and context_s={context_s}: need 0 <= context_s <= block_s, block_s above 0"
        )
    hear = _hear_windows if model.config.bidirectional else _hear_stream
    try:
        return hear(parts, path, block_frames, context_frames)
    except DecodeError as error:
        raise DecodeError(f"{path}: {error}") from error


def _hear_stream(parts: Parts, path: Path, block_frames: int, context_frames: int) -> Transcript:
    block_frames = min(block_frames, GraphedBlocks.file_frames(parts) or block_frames)
    session = Session(parts, block_frames / parts.model.time_stride * parts.frame_s)
    for samples in audio_blocks(path, parts.features.sample_rate_hz):
        session.accept(samples)
        while session.ready():
            step([session])
    hypothesis = session.finish()
    return Transcript(session.duration_s, hypothesis)


def _hear_windows(parts: Parts, path: Path, block_frames: int, context_frames: int) -> Transcript:
    cut = SampleBlocks(parts.features, block_frames)

    def blocks() -> Iterator[Tensor]:
        for samples in audio_blocks(path, parts.features.sample_rate_hz):
            for block in cut.accept(samples):
                yield parts.heard([block])
        rest = parts.heard([cut.finish()])
        if rest.shape[2]:
            yield rest

    decoding = parts.decoder.start()
    with parts.running():
        for logits in windowed(parts.model, blocks(), context_frames):
            decoding.step(logits.float().log_softmax(2), torch.tensor([len(logits)]))
    return Transcript(cut.samples / parts.features.sample_rate_hz, decoding.finish()[0][0])
