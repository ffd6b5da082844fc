"""`ds2 transcribe`: audio files, folders of them or standard input to text, JSON or captions."""

import argparse
import io
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from ds2.audio.ffmpeg import FFMPEG_SUFFIXES
from ds2.audio.read import AUDIO_SUFFIXES, RATES_HZ, AudioError, EmptyAudioError, audio_blocks, audio_info
from ds2.audio.stream import Pcm
from ds2.commands.common import DECODER_SETTINGS, Parser, add_channel, add_device, add_phrases, whole
from ds2.commands.compose import refuse_search_settings, resolve_options
from ds2.config.device import resolve_device
from ds2.config.schema import ConfigError
from ds2.decoding.hypothesis import DecodeError, Hypothesis, span_record, word_record
from ds2.decoding.phrases import OTHERS
from ds2.model.checkpoint import find_model, load_model
from ds2.model.shipped import DEFAULT, default_model, looks_like_model
from ds2.recognition.captions import cues, paragraphs, srt, vtt
from ds2.recognition.recogniser import Recogniser, Transcript, transcribe_file
from ds2.system.files import check_writable, files_beneath, temporary_folder, write_text
from ds2.system.signals import STOP_SIGNALS, StopHandler, Stopped, handle_signals
from ds2.system.terminal import ProgressBar, visible

_STDIN = "-"
_HEADERS = (b"RIFF", b"fLaC", b"OggS", b"ID3", b"FORM", b"caff", b"NIST_1A", b"\x1a\x45\xdf\xa3")  # of audio files
_CAPTIONS = {"srt": srt, "vtt": vtt}
_SUFFIXES = {"text": ".txt", "json": ".json", "srt": ".srt", "vtt": ".vtt"}  # of files, by format


def make_parser() -> Parser:
    parser = Parser(
        prog="ds2 transcribe",
        settings=DECODER_SETTINGS,
        usage="%(prog)s [MODEL] FILE ... [decode=NAME] [decode.KEY=VALUE ...] [options]",
        description="audio files to text; decode=beam decode.lm=FILE recognises with a language model",
    )
    parser.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help="audio file, folder of them, or - for standard input; the first may be the model: a model file, a run "
        f"folder or a name of `ds2 models` (default: {DEFAULT})",
    )
    parser.add_argument(
        "--format",
        choices=list(_SUFFIXES),
        default="text",
        help="text (a paragraph a line; on standard output with several files a file a line, after its name and a "
        "tab), one JSON object per file, or captions (on standard output; of several files next to each)",
    )
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER",
        help="write one file for each audio file, in this folder; files of a folder keep their places below it",
    )  # fmt: skip
    parser.add_argument("--overwrite", action="store_true", help="replace existing files; without it they are an error")
    parser.add_argument(
        "--stream",
        action="store_true",
        help="as live recognition: a line or JSON object for each segment as soon as its speaker pauses; - is then "
        "headerless 16-bit little-endian mono, such as arecord -t raw -f S16_LE -r 16000 writes",
    )
    parser.add_argument(
        "--rate", type=whole(*RATES_HZ), help="samples a second of - with --stream; default: the model's"
    )
    add_phrases(parser)
    add_channel(parser)
    add_device(parser, precision=True)
    return parser


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = make_parser()
    args = parser.parse_args(arguments)
    args.model, args.files = _split_model(args.files)
    if args.allowance is not None and not args.phrases:
        parser.error("--allowance needs --phrases")
    if args.stream and args.format in _CAPTIONS:
        parser.error(f"--stream writes text or json, not {args.format}")
    if args.stream and args.out is not None:
        parser.error("--stream writes to standard output: leave out --out, or redirect it with > FILE")
    if args.stream and args.channel and _STDIN in args.files:
        parser.error("--channel is of files: - with --stream is mono")
    if args.rate is not None and not (args.stream and _STDIN in args.files):
        parser.error("--rate is the rate of headerless samples: it needs --stream and -")
    return args


def _split_model(words: Sequence[str]) -> tuple[Path | None, list[str]]:
    """Return the model, if the first word names one, and the audio files.

    Where the first of several words names nothing, it is a model that is missing, unless it has a suffix of audio.

    Raises:
        ConfigError: a model without audio, or a model that is not the first.
    """
    first, *others = words
    missing = first != _STDIN and not Path(first).exists() and Path(first).suffix.lower() not in AUDIO_SUFFIXES
    is_model = looks_like_model(first) or (missing and bool(others))
    files = others if is_model else list(words)
    if not files:
        raise ConfigError(f"{first} is a model, not audio: ds2 transcribe {first} talk.mp3")
    for word in files:
        if word != _STDIN and looks_like_model(word):
            raise ConfigError(f"{word} is a model, not audio: the model comes first, ds2 transcribe {word} talk.mp3")
    return Path(first) if is_model else None, files


def run(arguments: Sequence[str]) -> int:
    """`ds2 transcribe [MODEL] FILE...`: transcribe all files; return 1 if any of them failed."""
    args = _parse(arguments)
    if args.phrases:
        refuse_search_settings(args.overrides)
    device = resolve_device(args.device)
    files = list(audio_files(args.files))
    outputs: Sequence[Path | None] = [None] * len(files)  # None: standard output
    if args.out is not None or (args.format in _CAPTIONS and len(files) > 1):
        outputs = output_files(files, _SUFFIXES[args.format], args.out, overwrite=args.overwrite)
    elif args.overwrite:
        raise ConfigError("--overwrite replaces files, but this command prints: name a folder with --out FOLDER")
    file = find_model(args.model or default_model())
    loaded = load_model(file, device)
    options = resolve_options(args.overrides, file, loaded.config)
    if args.format in _CAPTIONS and not options.times:
        raise DecodeError(f"--format {args.format} needs word times: take decode.times=true")
    recogniser = Recogniser.of(loaded, options, device, args.precision)
    if args.phrases:
        recogniser = recogniser.only_phrases([*args.phrases, OTHERS], args.allowance)
    failed, alone = 0, len(files) == 1
    with _progress(files, shown=not args.stream) as progress:
        for done, ((name, _), output) in enumerate(zip(files, outputs, strict=True)):
            try:
                if args.stream:
                    _write_segments(recogniser, name, args, alone=alone)
                else:
                    watch = progress.update if alone else partial(_show_part, progress, name, done)
                    with _readable(name) as path:
                        transcript = transcribe_file(recogniser, path, channel=args.channel, watch=watch)
                    progress.clear()
                    _write_transcript(transcript, name, output, args.format, alone=alone)
            except (AudioError, DecodeError) as error:
                progress.clear()
                print(visible(f"ds2 transcribe: {error}"), file=sys.stderr)
                failed += 1
    if failed and len(files) > 1:
        print(f"ds2 transcribe: {failed} of {len(files)} files failed", file=sys.stderr)
    return 1 if failed else 0


def audio_files(arguments: Sequence[str]) -> Iterator[tuple[str, Path]]:
    """Yield the files that arguments name: a folder stands for the audio files in and below it, in order of name.

    Yields:
        The file, and the path of its output relative to the folder of outputs, still with the suffix of the audio.

    Raises:
        AudioError: a folder without audio.
    """
    for argument in arguments:
        folder = Path(argument)
        if argument == _STDIN:
            yield argument, Path("stdin.audio")
        elif not folder.is_dir():
            yield argument, Path(folder.name)
        else:
            files = sorted(p for p in files_beneath(folder) if p.suffix.lower() in AUDIO_SUFFIXES and p.is_file())
            if not files:
                raise AudioError(f"{argument}: no audio files in or below this folder ({', '.join(AUDIO_SUFFIXES)})")
            yield from ((str(file), file.relative_to(folder)) for file in files)


def output_files(
    files: Sequence[tuple[str, Path]], suffix: str, out: Path | None, *, overwrite: bool, option: str = "--out"
) -> list[Path]:
    """Return the file in which each transcript is written: in the folder `out`, or without one next to the audio.

    Args:
        files: as `audio_files` yields them.
        out: folder, which need not exist.
        overwrite: existing files may be replaced, but not the audio itself.
        option: the one that named `out`, for messages.

    Raises:
        ConfigError: two files have the same output, or an output exists already.
        UserError: an output cannot be written.
    """
    sources: dict[Path, str] = {}
    inputs = {Path(name).resolve() for name, _ in files if name != _STDIN}
    outputs = []
    for name, relative in files:
        default = relative if name == _STDIN else Path(name)
        output = (default if out is None else out / relative).with_suffix(suffix)
        real = output.resolve()
        if real in sources:
            raise ConfigError(
                f"{sources[real]} and {name} would both be written to {output}: take separate commands, "
                f"each with its own {option} FOLDER"
            )
        if real in inputs:
            raise ConfigError(
                f"the transcript of {name} would replace the input {output}: choose another {option} FOLDER"
            )
        sources[real] = name
        outputs.append(output)
    existing = [str(output) for output in outputs if output.exists()]
    if existing and not overwrite:
        others = f", and {len(existing) - 1} more outputs do" if len(existing) > 1 else ""
        raise ConfigError(
            f"{existing[0]} exists already{others}: choose another folder with {option}, or replace them with "
            "--overwrite"
        )
    check_writable(*outputs)
    return outputs


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


def _progress(files: Sequence[tuple[str, Path]], *, shown: bool) -> ProgressBar:
    """Count the files, or of a single one the seconds of its audio."""
    if len(files) > 1:
        return ProgressBar("transcribing", len(files), "files", shown=shown)
    name, duration_s = files[0][0], None
    if name != _STDIN and Path(name).suffix.lower() not in FFMPEG_SUFFIXES:  # these are decoded for their length
        with suppress(AudioError):
            duration_s = audio_info(name).duration_s
    return ProgressBar(f"transcribing {name}", duration_s, "s of audio", shown=shown)


def _show_part(progress: ProgressBar, name: str, done: int, read_s: float) -> None:
    """Show how much of one of several files was read, after `done` files."""
    progress.what = f"transcribing {Path(name).name}, {read_s:.0f} s of it"
    progress.update(done)


def _write_transcript(transcript: Transcript, name: str, output: Path | None, form: str, *, alone: bool) -> None:
    """Write the transcript of a file to `output` and print both names, or print it if `output` is None."""
    if form in _CAPTIONS:
        written = _CAPTIONS[form](cues(transcript.words))
    elif form == "json":
        written = json.dumps(_record(name, transcript), ensure_ascii=False) + "\n"
    elif alone or output is not None:
        written = "".join(f"{text}\n" for text in _paragraph_texts(transcript))
    else:
        written = transcript.text + "\n"
    if output is not None:
        write_text(output, written)
        print(f"{name}\t{output}", flush=True)
    else:
        print(f"{name}\t{written}" if form == "text" and not alone else written, end="", flush=True)


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
                record = {"audio_filepath": name, **span_record(segment.start_s, segment.end_s)}
                print(json.dumps(record | _result(segment.hypothesis), ensure_ascii=False), flush=True)
            else:
                text = segment.hypothesis.text
                print(text if alone else f"{name}\t{text}", flush=True)

    rate_hz, stop = recogniser.features.sample_rate_hz, StopHandler()
    with handle_signals(STOP_SIGNALS if name == _STDIN else (), stop):
        blocks = audio_blocks(name, rate_hz, channel=args.channel, lenient=True)
        for samples in _raw_samples(stop) if name == _STDIN else blocks:
            live.accept_waveform(samples)
            while live.is_ready():
                live.decode()
                print_final()
        live.flush()
        print_final()
    if stop.number:
        raise Stopped(stop.number)


def _raw_samples(stop: StopHandler) -> Iterator[NDArray[np.float32]]:
    """Yield headerless 16-bit little-endian mono samples of standard input until its end or a signal.

    Raises:
        AudioError: there are none, or an audio file begins there, whose header would become noise.
    """
    samples, source, is_first = Pcm(), cast(io.BufferedReader, sys.stdin.buffer), True
    for chunk in stop.until_stopped(source.read1):
        if is_first and not chunk:
            raise EmptyAudioError("standard input: holds no samples")
        if is_first and chunk.startswith(_HEADERS):
            raise AudioError(
                "standard input: begins as an audio file does, but - with --stream is headerless samples: send these "
                "(ffmpeg -f s16le -ac 1 -ar 16000), or leave --stream out"
            )
        if not chunk:
            return
        is_first = False
        yield samples.accept(chunk)


def _record(name: str, transcript: Transcript) -> dict[str, Any]:
    record = {"audio_filepath": name, "duration": round(transcript.duration_s, 3)}
    segments = [
        {**span_record(words[0].start_s, words[-1].end_s), "text": " ".join(word.text for word in words)}
        for words in paragraphs(transcript.words)
    ]
    return record | _result(transcript.hypothesis) | {"segments": segments}


def _paragraph_texts(transcript: Transcript) -> list[str]:
    """Return the text in paragraphs; in one where words have no times."""
    texts = [" ".join(word.text for word in words) for words in paragraphs(transcript.words)]
    return texts if " ".join(texts) == transcript.text else [transcript.text]


def _result(hypothesis: Hypothesis) -> dict[str, Any]:
    words = [word_record(word) for word in hypothesis.words]
    return {"text": hypothesis.text, "score": hypothesis.score, "words": words}
