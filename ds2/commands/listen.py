"""`ds2 listen`: live recognition of a microphone."""

import json
import queue
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import numpy as np
from ds2_ops.install import install_command
from numpy.typing import NDArray

from ds2.audio.read import AudioError
from ds2.commands.common import DECODER_SETTINGS, Parser, add_device, add_model, add_phrases, real
from ds2.commands.compose import refuse_search_settings, resolve_options
from ds2.config.device import resolve_device
from ds2.config.schema import ConfigError
from ds2.decoding.hypothesis import Word, span_record, word_record
from ds2.decoding.keywords import measured_search
from ds2.decoding.phrases import FALSE_ALARMS, OTHERS
from ds2.model.checkpoint import find_model, load_model
from ds2.model.shipped import default_model
from ds2.recognition.recogniser import Recogniser
from ds2.recognition.session import LiveSession, describe_delays
from ds2.system.signals import STOP_SIGNALS, StopHandler, handle_signals
from ds2.system.terminal import visible

_CHUNK_S = 0.1
_Samples = queue.SimpleQueue[NDArray[np.float32]]
_CLEAR = "\r\x1b[K"


def make_parser() -> Parser:
    parser = Parser(
        prog="ds2 listen",
        settings=DECODER_SETTINGS,
        usage="%(prog)s [MODEL] [decode=NAME] [decode.KEY=VALUE ...] [options]",
        description="live recognition of a microphone: a line whenever the speaker pauses; on a terminal, the "
        "open one in grey",
    )
    add_model(parser, optional=True)
    parser.add_argument("--input", default="", help="microphone, by number or part of its name (default: the system's)")
    parser.add_argument("--format", choices=["text", "json"], default="text")
    parser.add_argument(
        "--hot", action="append", default=[], metavar="PHRASE", help="a word or phrase to expect; needs decode=beam"
    )
    add_phrases(parser)
    parser.add_argument(
        "--keywords",
        action="append",
        default=[],
        metavar="PHRASE",
        help="print these phrases only, each as soon as it is certain (with --false-alarms at the next pause), and "
        "nothing of other speech; may be repeated",
    )
    parser.add_argument(
        "--false-alarms",
        type=real(0, 1e6, above=True),
        metavar="N",
        help="how often an hour each keyword may be found that nobody said: a larger value finds more (default "
        f"{FALSE_ALARMS}); needs a model whose settings have decode.keyword_alarms, and does not go with --allowance",
    )
    add_device(parser, precision=True)
    return parser


def run(arguments: Sequence[str]) -> None:
    """`ds2 listen [MODEL]`: recognise a microphone until SIGINT (Ctrl-C) or SIGTERM."""
    parser = make_parser()
    args = parser.parse_args(arguments)
    if args.allowance is not None and not (args.phrases or args.keywords):
        parser.error("--allowance needs --phrases or --keywords")
    only_keywords = args.keywords and not args.phrases and args.allowance is None
    if args.false_alarms is not None and not only_keywords:
        parser.error("--false-alarms needs --keywords, and goes with neither --phrases nor --allowance")
    if args.phrases:
        refuse_search_settings(args.overrides)
    sounddevice = _import_sounddevice()
    device = resolve_device(args.device)
    file = find_model(args.model or default_model())
    loaded = load_model(file, device)
    recogniser = Recogniser.of(loaded, resolve_options(args.overrides, file, loaded.config), device, args.precision)
    if only_keywords and (args.false_alarms is not None or measured_search(recogniser.decoder)):
        alarms = FALSE_ALARMS if args.false_alarms is None else args.false_alarms
        recogniser = recogniser.only_keywords(args.keywords, alarms)
    elif only := [*args.phrases, *args.keywords]:
        recogniser = recogniser.only_phrases([*only, OTHERS], args.allowance)
    hot_words = dict.fromkeys(args.hot)
    printer, stop = _Printer(args.format == "json", bool(args.keywords)), StopHandler()
    with handle_signals(STOP_SIGNALS, stop):
        with _microphone(sounddevice, args.input, recogniser.features.sample_rate_hz) as (rate_hz, recorded):
            live = recogniser.live(sample_rate_hz=rate_hz, hot_words=hot_words)
            print(f"listening; Ctrl-C ends; {describe_delays(loaded.config)}", file=sys.stderr, flush=True)
            for samples in stop.until_stopped(recorded.get):
                live.accept_waveform(samples)
                while live.is_ready():
                    live.decode()
                printer.update(live)
        while not recorded.empty():  # spoken before the signal
            live.accept_waveform(recorded.get())
        live.flush()
        printer.update(live)


class _Printer:
    """Prints final segments to standard output and, on a terminal, the open segment in grey on the line below."""

    def __init__(self, as_json: bool, keywords: bool) -> None:
        self.as_json, self.keywords, self.partials = as_json, keywords, sys.stderr.isatty() and not keywords
        self.words_done = 0  # of the open segment: words that were printed or are no keywords

    def update(self, live: LiveSession) -> None:
        """Print what is new."""
        if self.keywords:
            self._print_keywords(live)
            return
        if self.partials:
            print(_CLEAR, end="", file=sys.stderr, flush=True)
        while live.segments:
            segment = live.segments.popleft()
            self._print(segment.start_s, segment.end_s, segment.hypothesis.text, segment.hypothesis.words)
        if self.partials:
            print(f"\x1b[90m{visible(live.result().text)[-70:]}\x1b[0m", end="", file=sys.stderr, flush=True)

    def _print_keywords(self, live: LiveSession) -> None:
        """Print keywords of final segments, and those of the open one that other speech follows and nothing changes."""
        while live.segments:
            self._print_phrases(live.segments.popleft().hypothesis.words[self.words_done :])
            self.words_done = 0
        result = live.result()
        certain = [word.text for word in result.words[: result.fixed_words]]
        done = max((n for n, text in enumerate(certain, 1) if text == OTHERS), default=0)
        self._print_phrases(live.in_source(result.words[self.words_done : done]))
        self.words_done = max(self.words_done, done)

    def _print_phrases(self, words: Iterable[Word]) -> None:
        for other, group in groupby(words, key=lambda word: word.text == OTHERS):
            if other:
                continue
            phrase = list(group)
            text = " ".join(word.text for word in phrase)
            self._print(phrase[0].start_s, phrase[-1].end_s, text, phrase)

    def _print(self, start_s: float, end_s: float, text: str, words: Iterable[Word]) -> None:
        record = span_record(start_s, end_s) | {"text": text, "words": [word_record(word) for word in words]}
        print(json.dumps(record, ensure_ascii=False) if self.as_json else text, flush=True)


def _import_sounddevice() -> Any:
    """Import what records from microphones; raises ConfigError where it, or its library PortAudio, is not installed."""
    try:
        import sounddevice
    except ImportError as error:
        raise ConfigError(f"ds2 listen needs sounddevice: {install_command('listen')}") from error
    except OSError as error:  # PortAudio
        raise ConfigError(
            f"ds2 listen: {error}: install it, on Debian and Ubuntu `apt install libportaudio2`"
        ) from error
    return sounddevice


@contextmanager
def _microphone(sounddevice: Any, name: str, wanted_hz: int) -> Iterator[tuple[int, _Samples]]:
    """Open a microphone: its sample rate, and a queue of its samples; raises AudioError where it cannot be opened."""
    recorded = _Samples()

    def record(samples: NDArray[np.float32], frames: int, time: Any, status: Any) -> None:
        recorded.put(samples[:, 0].copy())

    chosen: str | int | None = int(name) if name.isdecimal() else name or None
    try:
        rate_hz = wanted_hz
        try:
            sounddevice.check_input_settings(device=chosen, channels=1, samplerate=rate_hz)
        except sounddevice.PortAudioError:  # its own rate then, which is resampled
            rate_hz = round(sounddevice.query_devices(chosen, "input")["default_samplerate"])
        block = round(_CHUNK_S * rate_hz)
        stream = sounddevice.InputStream(
            samplerate=rate_hz, blocksize=block, device=chosen, channels=1, dtype="float32", callback=record
        )
    except (sounddevice.PortAudioError, ValueError) as error:
        inputs = ", ".join(f"{d['index']}: {d['name']}" for d in sounddevice.query_devices() if d["max_input_channels"])
        raise AudioError(
            f"no microphone {name or 'by default'}: {error}; inputs of this machine: {inputs or 'none'}"
        ) from error
    with stream:
        yield rate_hz, recorded
