"""`ds2 listen` with a microphone that is not there, and with one that plays a recording."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ds2_ops.install import install_command
from numpy.typing import NDArray
from support.serving import WAIT_S, printed_port, start_server, vosk

from ds2.audio.read import read_audio
from ds2.cli import main
from ds2.config.schema import DecodeConfig
from ds2.recognition.recogniser import Recogniser
from ds2.recognition.settings import save_settings, tuned_file


class PortAudioError(Exception):
    pass


def fake(samples: Any, rates_hz: tuple[int, ...]) -> SimpleNamespace:
    """A sounddevice that hears samples, then Ctrl-C."""

    class InputStream:
        def __init__(self, samplerate: int, blocksize: int, callback: Callable[..., None], **others: Any) -> None:
            if not rates_hz:
                raise PortAudioError("Error querying device -1")
            self.rate_hz, self.size, self.take = samplerate, blocksize, callback

        def __enter__(self) -> None:
            for start in range(0, len(samples), self.size):
                self.take(samples[start : start + self.size, None], self.size, None, None)

        def __exit__(self, *error: Any) -> None:
            pass

    def check(samplerate: int, **others: Any) -> None:
        if samplerate not in rates_hz:
            raise PortAudioError("Invalid sample rate")

    def devices(device: Any = None, kind: str | None = None) -> Any:
        if kind and not rates_hz:
            raise PortAudioError("Error querying device -1")
        return {"default_samplerate": float(rates_hz[0])} if kind else []

    return SimpleNamespace(
        InputStream=InputStream, check_input_settings=check, query_devices=devices, PortAudioError=PortAudioError
    )


def end_before_all_is_decoded(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    class Queue(list[Any]):
        put = list.append
        signals = 1

        def get(self) -> Any:
            if len(self) == 2 and self.signals:  # some wait still
                self.signals = 0
                signal.raise_signal(number)
            return self.pop(0)

        def empty(self) -> bool:
            return not self

    monkeypatch.setattr("ds2.commands.listen._Samples", Queue)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("rates_hz", [(16000,), (48000,)])
def test_what_is_spoken_is_printed(
    make_model: Callable[..., Path],
    recording: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    rates_hz: tuple[int, ...],
    number: int,
) -> None:
    model, samples = make_model(), read_audio(recording)
    monkeypatch.setitem(sys.modules, "sounddevice", fake(samples, rates_hz))
    end_before_all_is_decoded(monkeypatch, number)
    assert main(["listen", str(model), "--device", "cpu", "--format", "json"]) == 0
    printed = capsys.readouterr()
    assert "listening; Ctrl-C ends; a word appears up to" in printed.err
    records = [json.loads(line) for line in printed.out.splitlines()]
    live = Recogniser.load(model, device="cpu", decode=DecodeConfig()).live(sample_rate_hz=rates_hz[0])
    live.accept_waveform(samples)
    live.flush()
    assert [record["text"] for record in records] == [segment.hypothesis.text for segment in live.segments] != []


def test_what_is_missing_is_named(
    make_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(make_model())
    monkeypatch.setitem(sys.modules, "sounddevice", None)
    assert main(["listen", model]) == 2
    assert install_command("listen") in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "sounddevice", fake([], ()))
    for options in ([], ["--input", "\u00b2"]):  # str.isdigit takes the second for a number
        assert main(["listen", model, "--device", "cpu", *options]) == 2
        assert "no microphone" in capsys.readouterr().err


def times_of(word: str, recogniser: Recogniser, samples: NDArray[np.float32]) -> list[tuple[str, float]]:
    """A word each time that a live session writes it, with its start in seconds; at least once."""
    live = recogniser.live(sample_rate_hz=16000)
    live.accept_waveform(samples)
    live.flush()
    times = [
        (word, round(w.start_s, 3)) for segment in live.segments for w in segment.hypothesis.words if w.text == word
    ]
    assert times
    return times


def served(model: Path, samples: NDArray[np.float32], config: dict[str, Any]) -> list[tuple[str, float]]:
    """The keywords that `ds2 serve` sends of the same audio, with their starts in seconds."""
    server = start_server(str(model), "--workers", "1")  # keywords go to another process
    try:
        url, data = f"ws://127.0.0.1:{printed_port(server)}/", (samples * 32768).astype("<i2").tobytes()
        answers = asyncio.run(vosk(url, data, config=config))
    finally:
        server.terminate()
        server.communicate(timeout=WAIT_S)
    words = [word for answer in answers for word in answer.get("result", [])]
    return [(word["word"], word["start"]) for word in words if word["word"] != "[unk]"]


def printed(capsys: pytest.CaptureFixture[str]) -> list[tuple[str, float]]:
    """The words that `ds2 listen --format json` has printed, with their starts in seconds."""
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return [(w["text"], w["start_s"]) for record in records for w in record["words"]]


def test_keywords_are_printed_once_and_nothing_else_is(
    make_model: Callable[..., Path],
    recording: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model, samples = make_model(), read_audio(recording)
    recogniser = Recogniser.load(model, device="cpu", decode=DecodeConfig())
    word = min(recogniser.transcribe(recording).text.split(), key=len)
    monkeypatch.setitem(sys.modules, "sounddevice", fake(samples, (16000,)))
    end_before_all_is_decoded(monkeypatch, signal.SIGINT)
    command = ["listen", str(model), "--device", "cpu", "--format", "json"]
    assert main([*command, "--keywords", word, "--allowance", "3"]) == 0
    assert printed(capsys) == times_of(word, recogniser.only_phrases([word, "[unk]"], 3.0), samples)
    with pytest.raises(SystemExit):
        main([*command, "--allowance", "3"])
    assert "--allowance needs --phrases" in capsys.readouterr().err
    assert main([*command, "--phrases", word, "decode.beam=4"]) == 2
    assert "--phrases has a search of its own, without decode.beam=4" in capsys.readouterr().err


def test_keywords_for_a_number_of_false_alarms_are_those_of_the_search(
    make_model: Callable[..., Path],
    recording: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model, samples = make_model(), read_audio(recording)
    measured = DecodeConfig(method="beam", beam=8, keyword_alarms=[0.1, 0.2, 0.5, 2.0, 9.0])
    save_settings(measured, tuned_file(model))
    recogniser = Recogniser.load(model, device="cpu")
    word = min(recogniser.transcribe(recording).text.split(), key=len)
    monkeypatch.setitem(sys.modules, "sounddevice", fake(samples, (16000,)))
    end_before_all_is_decoded(monkeypatch, signal.SIGINT)
    command = ["listen", str(model), "--device", "cpu", "--format", "json"]
    assert main([*command, "--keywords", word, "--false-alarms", "2"]) == 0
    times = times_of(word, recogniser.only_keywords([word], 2.0), samples)
    assert printed(capsys) == times == served(model, samples, {"only_keywords": [word], "false_alarms": 2})
    assert main([*command, "--keywords", word, "--false-alarms", "0.01"]) == 2
    assert "allow 0.1 or more" in capsys.readouterr().err
    assert main([*command, "--keywords", word, "--false-alarms", "2", "decode=greedy"]) == 2
    assert "`ds2 lm tune` measures" in capsys.readouterr().err
    for others in (["--phrases", word], ["--keywords", word, "--allowance", "1"], []):
        with pytest.raises(SystemExit):
            main([*command, "--false-alarms", "2", *others])
        assert "--false-alarms needs --keywords" in capsys.readouterr().err
