"""`ds2 listen`: what a microphone hears, as it is spoken."""

from __future__ import annotations

import argparse
import json
import queue
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds2.audio.read import AudioError
from ds2.commands.common import Parser, add_where
from ds2.commands.decode_options import resolve_options, split_overrides
from ds2.config.device import resolve_device
from ds2.config.schema import ConfigError
from ds2.decoding.hypothesis import word_record
from ds2.model.checkpoint import find_model, load_model
from ds2.recognition.recogniser import Recogniser
from ds2.recognition.session import Live
from ds2.system.signals import STOP_SIGNALS, StopHandler, handle_signals
from ds2.system.terminal import visible

_CHUNK_S = 0.1
_Samples = queue.SimpleQueue[NDArray[np.float32]]
_CLEAR = "\r\x1b[K"


def run(arguments: Sequence[str]) -> int:
    """`ds2 listen MODEL`: hear until SIGINT (Ctrl-C) or SIGTERM; 0."""
    decode, arguments = split_overrides(arguments)
    given = _parse(arguments)
    sounds = _sounddevice()
    device = resolve_device(given.device)
    file = find_model(given.model)
    loaded = load_model(file, device)
    recogniser = Recogniser.of(loaded, resolve_options(decode, file, loaded.config), device, given.precision)
    hot_words = dict.fromkeys(given.hot)
    show, ends = _Shown(given.format == "json"), StopHandler()
    with handle_signals(STOP_SIGNALS, ends):
        with _microphone(sounds, given.input, recogniser.features.sample_rate_hz) as (rate_hz, heard):
            live = recogniser.live(sample_rate_hz=rate_hz, hot_words=hot_words)
            print("listening; Ctrl-C ends", file=sys.stderr, flush=True)
            for samples in ends.until_stopped(heard.get):
                live.accept_waveform(samples)
                while live.is_ready():
                    live.decode()
                show(live)
        while not heard.empty():  # spoken before the signal
            live.accept_waveform(heard.get())
        live.flush()
        show(live)
    return 0


class _Shown:
    """Prints what is final on standard output, and on a terminal what is not yet, in grey, on the line below."""

    def __init__(self, as_json: bool) -> None:
        self.as_json, self.partials = as_json, sys.stderr.isatty()

    def __call__(self, live: Live) -> None:
        if self.partials:
            print(_CLEAR, end="", file=sys.stderr, flush=True)
        while live.segments:
            segment = live.segments.popleft()
            times = {"start_s": round(segment.start_s, 3), "end_s": round(segment.end_s, 3)}
            words = [word_record(word) for word in segment.hypothesis.words]
            record = times | {"text": segment.hypothesis.text, "words": words}
            print(json.dumps(record, ensure_ascii=False) if self.as_json else segment.hypothesis.text, flush=True)
        if self.partials:
            print(f"\x1b[90m{visible(live.result().text)[-70:]}\x1b[0m", end="", file=sys.stderr, flush=True)


def _sounddevice() -> Any:
    """The package that reaches the microphone.

    Raises:
        ConfigError: it, or the library below it, is not installed.
    """
    try:
        import sounddevice
    except ImportError as error:
        raise ConfigError("ds2 listen needs sounddevice: pip install 'ds2-speech[listen]'") from error
    except OSError as error:  # PortAudio
        raise ConfigError(
            f"ds2 listen: {error}: install it, on Debian and Ubuntu `apt install libportaudio2`"
        ) from error
    return sounddevice


@contextmanager
def _microphone(sounds: Any, name: str, wanted_hz: int) -> Iterator[tuple[int, _Samples]]:
    """Samples a second of a microphone, and its samples as they come.

    Raises:
        AudioError: there is none, or it cannot be opened.
    """
    heard = _Samples()

    def take(samples: NDArray[np.float32], frames: int, time: Any, status: Any) -> None:
        heard.put(samples[:, 0].copy())

    chosen: str | int | None = int(name) if name.isdigit() else name or None
    try:
        rate_hz = wanted_hz
        try:
            sounds.check_input_settings(device=chosen, channels=1, samplerate=rate_hz)
        except sounds.PortAudioError:  # its own rate then, which is resampled
            rate_hz = round(sounds.query_devices(chosen, "input")["default_samplerate"])
        stream = sounds.InputStream(
            samplerate=rate_hz,
            blocksize=round(_CHUNK_S * rate_hz),
            device=chosen,
            channels=1,
            dtype="float32",
            callback=take,
        )
    except (sounds.PortAudioError, ValueError) as error:
        found = ", ".join(f"{d['index']}: {d['name']}" for d in sounds.query_devices() if d["max_input_channels"])
        raise AudioError(f"no microphone {name or 'by default'}: {error}; inputs here: {found or 'none'}") from error
    with stream:
        yield rate_hz, heard


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="ds2 listen",
        usage="%(prog)s MODEL [decode=NAME] [decode.KEY=VALUE ...] [options]",
        description="what a microphone hears: a line whenever the speaker pauses; on a terminal, the rest in grey",
    )
    parser.add_argument("model", type=Path, help="model file or run folder, of a unidirectional model")
    parser.add_argument("--input", default="", help="microphone, by number or part of its name (default: the system's)")
    parser.add_argument("--format", choices=["text", "json"], default="text")
    parser.add_argument("--hot", action="append", default=[], metavar="PHRASE", help="expect it; needs decode=beam")
    add_where(parser)
    return parser.parse_args(arguments)
