"""Audio files of any format and length to text, in memory that does not grow with the audio.

A unidirectional model hears the file as a stream, which gives the logits of the whole. A bidirectional model, whose
backward layers start at the end, hears blocks of a minute with ten seconds of what lies before and after them; a file
of at most one block is heard whole.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ds2.audio.read import AudioError
from ds2.decode_options import resolve_options, split_overrides
from ds2.decoding.confidence import calibrated
from ds2.decoding.decoder import Decoder, decode_long
from ds2.decoding.greedy import best_path, collapse
from ds2.decoding.hypothesis import DecodeError, Hypothesis
from ds2.decoding.methods import make_decoder
from ds2.model.checkpoint import LoadedModel, find_model, load_model
from ds2.recognition.stream import _FeatureReader, _streamed, _windowed
from ds2.text.alphabet import Alphabet

_BLOCK_S = 60.0
_CONTEXT_S = 10.0
_STDIN = "-"
_SUFFIXES = {
    ".wav",
    ".flac",
    ".mp3",
    ".ogg",
    ".oga",
    ".opus",
    ".sph",
    ".aif",
    ".aiff",
    ".au",
    ".caf",
    ".w64",
    ".raw",
    ".pcm",
}


@dataclass(frozen=True)
class Transcript:
    """What was heard in one file."""

    duration_s: float
    hypothesis: Hypothesis


def transcribe_file(
    loaded: LoadedModel,
    path: Path,
    device: torch.device | str = "cpu",
    *,
    precision: str = "fp32",
    block_s: float = _BLOCK_S,
    context_s: float = _CONTEXT_S,
    decoder: Decoder | None = None,
) -> Transcript:
    """Transcribe one file, greedily or by a decoder.

    Args:
        loaded: the model, on `device`.
        path: see `ds2.audio.read_audio` for the formats.
        device: where the model runs.
        precision: fp32 or bf16.
        block_s: audio given to the model at once, seconds.
        context_s: audio that a bidirectional model hears on each side of a block, at most `block_s`, seconds.
        decoder: None is greedy; any other holds the file's log-probs, some kilobytes a second, until its end.

    Raises:
        AudioError: the file cannot be read.
        DecodeError: the model gives NaN or infinity.
        ValueError: a block or context out of range.
    """
    model, features, frame_s = loaded.model, loaded.features, loaded.frame_s
    block_frames, context_frames = (model.time_stride * round(seconds / frame_s) for seconds in (block_s, context_s))
    if not 0 <= context_frames <= block_frames or not block_frames:
        raise ValueError(
            f"block_s={block_s} and context_s={context_s}: need 0 <= context_s <= block_s, block_s above 0"
        )
    reader = _FeatureReader(loaded, path, torch.device(device), block_frames)
    pieces = (
        _windowed(model, reader.blocks(), context_frames)
        if model.config.bidirectional
        else _streamed(model, reader.blocks())
    )
    with torch.inference_mode(), torch.autocast(reader.device.type, torch.bfloat16, enabled=precision == "bf16"):
        try:
            hypothesis = _hear(pieces, loaded.alphabet, frame_s, decoder)
        except DecodeError as error:
            raise DecodeError(f"{path}: {error}") from error
    return Transcript(reader.samples / features.sample_rate_hz, hypothesis)


def _hear(pieces: Iterable[Tensor], alphabet: Alphabet, frame_s: float, decoder: Decoder | None) -> Hypothesis:
    """Words of logits (T', 1, V) that come piece by piece; greedy ones leave two numbers a frame behind."""
    if decoder is not None:
        heard = [logits[:, 0].float().log_softmax(1) for logits in pieces if len(logits)]
        return decode_long(decoder, torch.cat(heard), alphabet, frame_s) if heard else Hypothesis("", 0.0, (), ())
    labels, log_probs = [np.empty(0, np.int64)], [np.empty(0, np.float32)]
    for logits in pieces:
        try:
            [(path_labels, path_log_probs)] = best_path(logits, torch.tensor([len(logits)]))
        except DecodeError as error:
            raise DecodeError("the model gives NaN or infinite logits: its weights are broken") from error
        labels.append(path_labels)
        log_probs.append(path_log_probs)
    return collapse(np.concatenate(labels), np.concatenate(log_probs), alphabet, frame_s)


def audio_files(arguments: Sequence[str]) -> Iterator[str]:
    """Yield the files meant by arguments: a folder stands for the audio files in and below it, in order of name.

    Raises:
        AudioError: a folder without audio.
    """
    for argument in arguments:
        if argument == _STDIN or not Path(argument).is_dir():
            yield argument
            continue
        found = sorted(p for p in Path(argument).rglob("*") if p.suffix.lower() in _SUFFIXES and p.is_file())
        if not found:
            raise AudioError(f"{argument}: no audio files in or below this folder ({', '.join(sorted(_SUFFIXES))})")
        yield from map(str, found)


@contextmanager
def _readable(name: str) -> Iterator[Path]:
    """The path of a file; standard input is copied to a temporary one first, as most formats need to seek."""
    if name != _STDIN:
        yield Path(name)
        return
    with tempfile.NamedTemporaryFile(prefix="ds2-stdin-", suffix=".audio") as copy:
        shutil.copyfileobj(sys.stdin.buffer, copy)
        copy.flush()
        try:
            yield Path(copy.name)
        except AudioError as error:
            raise AudioError(str(error).replace(copy.name, "standard input")) from error


def run(arguments: Sequence[str]) -> int:
    """`ds2 transcribe MODEL FILE...`: 1 where a file could not be transcribed, after all others are done."""
    from ds2.config.device import resolve_device, resolve_precision

    decode, arguments = split_overrides(arguments)
    parser = argparse.ArgumentParser(
        prog="ds2 transcribe",
        usage="%(prog)s MODEL FILE ... [decode=NAME] [decode.KEY=VALUE ...] [options]",
        description="audio files to text; decode=beam decode.lm=FILE recognises with a language model",
    )
    parser.add_argument("model", type=Path, help="model file or run folder")
    parser.add_argument("files", nargs="+", metavar="FILE", help="audio file, folder of them, or - for standard input")
    parser.add_argument(
        "--format",
        choices=["text", "json"],
        default="text",
        help="text (after the file's name and a tab where there are several files), or one JSON object a file",
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N")
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16", "auto"])
    given = parser.parse_args(arguments)
    device = resolve_device(given.device)
    precision = resolve_precision(given.precision, device)
    files = list(audio_files(given.files))
    loaded = load_model(given.model, device)
    options = resolve_options(decode, find_model(given.model), loaded.config)
    decoder = None if options.method == "greedy" else make_decoder(options, loaded.alphabet, loaded.frame_s, device)
    failed = 0
    for name in files:
        try:
            with _readable(name) as path:
                transcript = transcribe_file(loaded, path, device, precision=precision, decoder=decoder)
        except (AudioError, DecodeError) as error:
            print(f"ds2 transcribe: {error}", file=sys.stderr)
            failed += 1
            continue
        hypothesis = transcript.hypothesis
        if decoder is None:
            hypothesis = calibrated(hypothesis, options.confidence)
        if given.format == "json":
            words = [asdict(word) for word in hypothesis.words]
            record = {"audio_filepath": name, "duration": transcript.duration_s, "text": hypothesis.text}
            print(json.dumps({**record, "score": hypothesis.score, "words": words}, ensure_ascii=False), flush=True)
        else:
            print(hypothesis.text if len(files) == 1 else f"{name}\t{hypothesis.text}", flush=True)
    if failed and len(files) > 1:
        print(f"ds2 transcribe: {failed} of {len(files)} files failed", file=sys.stderr)
    return 1 if failed else 0
