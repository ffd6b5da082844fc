"""`ds2 transcribe`: audio files, folders of them or standard input to text, JSON or captions."""

from __future__ import annotations

import argparse
import io
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from ds2.audio.read import AUDIO_SUFFIXES, RATES_HZ, AudioError, audio_blocks
from ds2.audio.stream import Pcm16
from ds2.commands.common import Parser, add_where, whole
from ds2.commands.decode_options import resolve_options, split_overrides
from ds2.config.device import resolve_device
from ds2.decoding.hypothesis import DecodeError, Hypothesis, word_record
from ds2.model.checkpoint import find_model, load_model
from ds2.recognition.captions import cues, srt, vtt
from ds2.recognition.recogniser import Recogniser, Transcript
from ds2.system.files import temporary_folder, write_text
from ds2.system.signals import STOP_SIGNALS, StopHandler, Stopped, handle_signals
from ds2.system.terminal import visible

_STDIN = "-"
_CAPTIONS = {"srt": srt, "vtt": vtt}


def audio_files(arguments: Sequence[str]) -> Iterator[str]:
    """Yield the files that arguments name: a folder stands for the audio files in and below it, in order of name.

    Raises:
        AudioError: a folder without audio.
    """
    for argument in arguments:
        if argument == _STDIN or not Path(argument).is_dir():
            yield argument
            continue
        files = sorted(p for p in Path(argument).rglob("*") if p.suffix.lower() in AUDIO_SUFFIXES and p.is_file())
        if not files:
            raise AudioError(f"{argument}: no audio files in or below this folder ({', '.join(AUDIO_SUFFIXES)})")
        yield from map(str, files)


@contextmanager
def _readable(name: str) -> Iterator[Path]:
    """Yield the path of a file; standard input is copied to a temporary file, as most formats need to seek."""
    if name != _STDIN:
        yield Path(name)
        return
    with temporary_folder(Path(tempfile.gettempdir()), "ds2-stdin") as folder:
        copy = folder / "stdin.audio"
        with copy.open("wb") as out:
            shutil.copyfileobj(sys.stdin.buffer, out)
        try:
            yield copy
        except AudioError as error:
            raise AudioError(str(error).replace(str(copy), "standard input")) from error


def run(arguments: Sequence[str]) -> int:
    """`ds2 transcribe MODEL FILE...`: transcribe all files; return 1 if any of them failed."""
    decode, arguments = split_overrides(arguments)
    args = _parse(arguments)
    device = resolve_device(args.device)
    files = list(audio_files(args.files))
    file = find_model(args.model)
    loaded = load_model(file, device)
    options = resolve_options(decode, file, loaded.config)
    if args.format in _CAPTIONS and not options.times:
        raise DecodeError(f"--format {args.format} needs word times: take decode.times=true")
    recogniser = Recogniser.of(loaded, options, device, args.precision)
    write = _write_segments if args.stream else _write_whole
    failed = 0
    for name in files:
        try:
            write(recogniser, name, args, alone=len(files) == 1)
        except (AudioError, DecodeError) as error:
            print(visible(f"ds2 transcribe: {error}"), file=sys.stderr)
            failed += 1
    if failed and len(files) > 1:
        print(f"ds2 transcribe: {failed} of {len(files)} files failed", file=sys.stderr)
    return 1 if failed else 0


def _write_whole(recogniser: Recogniser, name: str, args: argparse.Namespace, *, alone: bool) -> None:
    """Transcribe a file and print it."""
    with _readable(name) as path:
        transcript = recogniser.transcribe(path)
    if args.format in _CAPTIONS:
        written = _CAPTIONS[args.format](cues(transcript.words))
        if alone:
            print(written, end="", flush=True)
        else:
            target = Path(name).with_suffix(f".{args.format}")
            write_text(target, written)
            print(f"{name}\t{target}", flush=True)
    elif args.format == "json":
        print(json.dumps(_record(name, transcript), ensure_ascii=False), flush=True)
    else:
        print(transcript.text if alone else f"{name}\t{transcript.text}", flush=True)


def _write_segments(recogniser: Recogniser, name: str, args: argparse.Namespace, *, alone: bool) -> None:
    """Transcribe a file, or samples from standard input, and print each segment when its speaker pauses.

    Raises:
        Stopped: a signal ended the reading of standard input; the last words are printed.
    """
    live = recogniser.live(sample_rate_hz=args.rate if name == _STDIN else None)

    def print_final() -> None:
        while live.segments:
            segment = live.segments.popleft()
            if args.format == "json":
                record = {
                    "audio_filepath": name,
                    "start_s": round(segment.start_s, 3),
                    "end_s": round(segment.end_s, 3),
                }
                print(json.dumps(record | _result(segment.hypothesis), ensure_ascii=False), flush=True)
            else:
                text = segment.hypothesis.text
                print(text if alone else f"{name}\t{text}", flush=True)

    rate_hz, stop = recogniser.features.sample_rate_hz, StopHandler()
    with handle_signals(STOP_SIGNALS if name == _STDIN else (), stop):
        for samples in _raw_samples(stop) if name == _STDIN else audio_blocks(name, rate_hz):
            live.accept_waveform(samples)
            while live.is_ready():
                live.decode()
                print_final()
        live.flush()
        print_final()
    if stop.number:
        raise Stopped(stop.number)


def _raw_samples(stop: StopHandler) -> Iterator[NDArray[np.float32]]:
    """Yield headerless 16-bit little-endian mono samples of standard input until its end or a signal."""
    samples, source = Pcm16(), cast(io.BufferedReader, sys.stdin.buffer)
    for chunk in stop.until_stopped(source.read1):
        if not chunk:
            return
        yield samples.accept(chunk)


def _record(name: str, transcript: Transcript) -> dict[str, Any]:
    record = {"audio_filepath": name, "duration": round(transcript.duration_s, 3)}
    return record | _result(transcript.hypothesis)


def _result(hypothesis: Hypothesis) -> dict[str, Any]:
    words = [word_record(word) for word in hypothesis.words]
    return {"text": hypothesis.text, "score": hypothesis.score, "words": words}


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="ds2 transcribe",
        usage="%(prog)s MODEL FILE ... [decode=NAME] [decode.KEY=VALUE ...] [options]",
        description="audio files to text; decode=beam decode.lm=FILE recognises with a language model",
    )
    parser.add_argument("model", type=Path, help="model file or run folder")
    parser.add_argument("files", nargs="+", metavar="FILE", help="audio file, folder of them, or - for standard input")
    parser.add_argument(
        "--format",
        choices=["text", "json", *_CAPTIONS],
        default="text",
        help="text (with several files after the file name and a tab), one JSON object per file, or captions "
        "(on standard output; of several files next to each)",
    )
    parser.add_argument(
        "--stream",
        action="store_true",
        help="as live recognition: a line or JSON object for each segment as soon as its speaker pauses; - is then "
        "headerless 16-bit little-endian mono, such as arecord -t raw -f S16_LE -r 16000 writes",
    )
    parser.add_argument(
        "--rate", type=whole(*RATES_HZ), help="samples a second of - with --stream; default: the model's"
    )
    add_where(parser)
    args = parser.parse_args(arguments)
    if args.stream and args.format in _CAPTIONS:
        parser.error(f"--stream writes text or json, not {args.format}")
    if args.rate is not None and not (args.stream and _STDIN in args.files):
        parser.error("--rate is the rate of headerless samples: it needs --stream and -")
    return args
