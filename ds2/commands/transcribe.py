"""`ds2 transcribe`: audio files, folders of them or standard input to text or JSON."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ds2.audio.read import AUDIO_SUFFIXES, AudioError
from ds2.commands.common import add_where
from ds2.commands.decode_options import resolve_options, split_overrides
from ds2.config.device import resolve_device
from ds2.decoding.hypothesis import DecodeError, word_record
from ds2.model.checkpoint import find_model, load_model
from ds2.recognition.recogniser import Recogniser
from ds2.recognition.transcribe import Transcript
from ds2.system.files import own_folder

_STDIN = "-"


def audio_files(arguments: Sequence[str]) -> Iterator[str]:
    """Yield the files meant by arguments: a folder stands for the audio files in and below it, in order of name.

    Raises:
        AudioError: a folder without audio.
    """
    for argument in arguments:
        if argument == _STDIN or not Path(argument).is_dir():
            yield argument
            continue
        found = sorted(p for p in Path(argument).rglob("*") if p.suffix.lower() in AUDIO_SUFFIXES and p.is_file())
        if not found:
            raise AudioError(f"{argument}: no audio files in or below this folder ({', '.join(AUDIO_SUFFIXES)})")
        yield from map(str, found)


@contextmanager
def _readable(name: str) -> Iterator[Path]:
    """The path of a file; standard input is copied to a temporary one first, as most formats need to seek."""
    if name != _STDIN:
        yield Path(name)
        return
    with own_folder(Path(tempfile.gettempdir()), "ds2-stdin") as folder:
        copy = folder / "stdin.audio"
        with copy.open("wb") as out:
            shutil.copyfileobj(sys.stdin.buffer, out)
        try:
            yield copy
        except AudioError as error:
            raise AudioError(str(error).replace(str(copy), "standard input")) from error


def run(arguments: Sequence[str]) -> int:
    """`ds2 transcribe MODEL FILE...`: 1 where a file could not be transcribed, after all others are done."""
    decode, arguments = split_overrides(arguments)
    given = _parse(arguments)
    device = resolve_device(given.device)
    files = list(audio_files(given.files))
    file = find_model(given.model)
    loaded = load_model(file, device)
    recogniser = Recogniser.of(loaded, resolve_options(decode, file, loaded.config), device, given.precision)
    failed = 0
    for name in files:
        try:
            with _readable(name) as path:
                transcript = recogniser.transcribe(path)
        except (AudioError, DecodeError) as error:
            print(f"ds2 transcribe: {error}", file=sys.stderr)
            failed += 1
            continue
        if given.format == "json":
            print(json.dumps(_record(name, transcript), ensure_ascii=False), flush=True)
        else:
            print(transcript.text if len(files) == 1 else f"{name}\t{transcript.text}", flush=True)
    if failed and len(files) > 1:
        print(f"ds2 transcribe: {failed} of {len(files)} files failed", file=sys.stderr)
    return 1 if failed else 0


def _record(name: str, transcript: Transcript) -> dict[str, Any]:
    return {
        "audio_filepath": name,
        "duration": round(transcript.duration_s, 3),
        "text": transcript.text,
        "score": transcript.hypothesis.score,
        "words": [word_record(word) for word in transcript.words],
    }


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
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
    add_where(parser)
    return parser.parse_args(arguments)
