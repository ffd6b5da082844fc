"""Transcription: blocks equal the whole, memory stays bounded, and what cannot be read does not stop the rest."""

from __future__ import annotations

import io
import json
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import soundfile
import torch

from ds2.audio.features import Features
from ds2.audio.read import AudioError, read_audio
from ds2.cli import main
from ds2.config.schema import DecodeConfig
from ds2.decoding.greedy import GreedyDecoder
from ds2.decoding.hypothesis import DecodeError, Hypothesis
from ds2.model.acoustic import AcousticModel
from ds2.model.checkpoint import LoadedModel, load_model
from ds2.recognition.recogniser import Recogniser, transcribe_file

RATE_HZ = 16000


def greedy(loaded: LoadedModel) -> Recogniser:
    return Recogniser.of(loaded, DecodeConfig(), torch.device("cpu"))


def whole(loaded: LoadedModel, path: Path) -> Hypothesis:
    """The file through the model at once."""
    waveform = torch.from_numpy(read_audio(path))[None]
    with torch.no_grad():
        logits, lengths = loaded.model(*loaded.features(waveform, torch.tensor([waveform.shape[1]])))
    decoder = GreedyDecoder(loaded.alphabet, 0.01 * loaded.model.time_stride)
    return decoder.decode(logits.log_softmax(2), lengths)[0][0]


@pytest.mark.parametrize("block_s", [0.1, 0.7, 60.0])
def test_a_unidirectional_model_gives_for_blocks_what_it_gives_for_the_whole(
    make_model: Callable[..., Path], recording: Path, block_s: float
) -> None:
    loaded = load_model(make_model())
    expected = whole(loaded, recording)
    transcript = transcribe_file(greedy(loaded), recording, block_s=block_s, context_s=0.0)
    assert len(expected.labels) > 5
    assert transcript.hypothesis.labels == expected.labels
    words, wanted = ([(w.text, w.start_s, w.end_s) for w in h.words] for h in (transcript.hypothesis, expected))
    assert words == wanted
    assert transcript.hypothesis.score == pytest.approx(expected.score, abs=1e-3)
    assert transcript.duration_s == 3.0


BIDIRECTIONAL = ("model.bidirectional=true", "model.max_lookahead_ms=0", "model.row_convs=0")


@pytest.mark.parametrize(("block_s", "context_s"), [(60.0, 10.0), (1.5, 1.5)])
def test_a_bidirectional_model_with_enough_context_gives_what_it_gives_for_the_whole(
    make_model: Callable[..., Path], recording: Path, block_s: float, context_s: float
) -> None:
    loaded = load_model(make_model(*BIDIRECTIONAL))
    transcript = transcribe_file(greedy(loaded), recording, block_s=block_s, context_s=context_s)
    assert transcript.hypothesis.labels == whole(loaded, recording).labels


@pytest.mark.parametrize("overrides", [(), BIDIRECTIONAL])
def test_the_model_never_gets_more_than_a_block_and_its_context(
    make_model: Callable[..., Path], recording: Path, monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...]
) -> None:
    loaded = load_model(make_model(*overrides))
    frames: list[int] = []

    class Spy(Features):
        def of_windows(self, waveforms: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            frames.append(int(lengths.max()))
            return super().of_windows(waveforms, lengths)

    loaded.features.__class__ = Spy
    windows: list[int] = []
    forward = AcousticModel.forward
    monkeypatch.setattr(
        AcousticModel, "forward", lambda self, x, lengths: windows.append(x.shape[2]) or forward(self, x, lengths)
    )
    transcribe_file(greedy(loaded), recording, block_s=0.5, context_s=0.2)
    assert max(frames) == 50
    assert sum(frames) == loaded.features.frames(3 * RATE_HZ)
    assert max(windows, default=0) == (90 if overrides else 0)


def test_audio_of_another_rate_and_of_less_than_a_frame(make_model: Callable[..., Path], tmp_path: Path) -> None:
    loaded = load_model(make_model())
    soundfile.write(tmp_path / "slow.flac", 0.1 * np.ones(8000), 8000)
    assert transcribe_file(greedy(loaded), tmp_path / "slow.flac").duration_s == pytest.approx(1.0, abs=1e-3)
    soundfile.write(tmp_path / "short.wav", np.zeros(100), RATE_HZ)
    assert transcribe_file(greedy(loaded), tmp_path / "short.wav").hypothesis == Hypothesis("", 0.0, (), ())


def test_errors_by_name(make_model: Callable[..., Path], recording: Path, tmp_path: Path) -> None:
    loaded = load_model(make_model())
    with pytest.raises(AudioError, match=r"none\.wav"):
        transcribe_file(greedy(loaded), tmp_path / "none.wav")
    with pytest.raises(ValueError, match="context_s <= block_s"):
        transcribe_file(greedy(loaded), recording, block_s=1.0, context_s=2.0)
    with torch.no_grad():
        loaded.model.classifier.bias[0] = float("nan")
    with pytest.raises(DecodeError, match=r"recording\.wav"):
        transcribe_file(greedy(loaded), recording)


def test_command_goes_on_after_a_bad_file_and_says_so_in_its_status(
    make_model: Callable[..., Path], recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(make_model())
    (tmp_path / "bad.wav").write_bytes(b"not audio")
    text = whole(load_model(model), recording).text
    assert main(["transcribe", model, str(tmp_path / "bad.wav"), str(recording), "--device", "cpu"]) == 1
    captured = capsys.readouterr()
    assert captured.out == f"{recording}\t{text}\n"
    assert "bad.wav" in captured.err
    assert "1 of 2 files failed" in captured.err
    assert main(["transcribe", model, str(recording), "--device", "cpu"]) == 0
    assert capsys.readouterr().out == f"{text}\n"


def test_json_has_times_and_a_folder_stands_for_its_audio(
    make_model: Callable[..., Path], recording: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_model()
    assert main(["transcribe", str(model), str(recording.parent), "--format", "json", "--device", "cpu"]) == 0
    [record] = map(json.loads, capsys.readouterr().out.splitlines())
    assert record["audio_filepath"] == str(recording)
    assert record["duration"] == 3.0
    assert " ".join(word["text"] for word in record["words"]) == record["text"]
    assert all(word["start_s"] < word["end_s"] and 0 < word["confidence"] <= 1 for word in record["words"])


def test_an_empty_folder_is_a_mistake(
    make_model: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    assert main(["transcribe", str(make_model()), str(tmp_path / "empty"), "--device", "cpu"]) == 2
    assert "no audio files" in capsys.readouterr().err


def test_standard_input(
    make_model: Callable[..., Path],
    recording: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = str(make_model())
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(recording.read_bytes())))
    assert main(["transcribe", model, "-", "--device", "cpu"]) == 0
    assert capsys.readouterr().out == f"{whole(load_model(model), recording).text}\n"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"no audio")))
    assert main(["transcribe", model, "-", "--device", "cpu"]) == 1
    assert "standard input" in capsys.readouterr().err


@pytest.mark.parametrize("form", ["srt", "vtt"])
def test_captions_of_one_file_are_printed_and_of_several_written_next_to_them(
    make_model: Callable[..., Path], recording: Path, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    model = str(make_model())
    assert main(["transcribe", model, str(recording), "--format", form, "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith({"srt": "1\n00:00:0", "vtt": "WEBVTT\n\n00:00:0"}[form])
    shown = " ".join(line for line in printed.splitlines()[1:] if "-->" not in line and not line.isdigit())
    assert shown.split() == whole(load_model(model), recording).text.split()
    assert main(["transcribe", model, str(recording), "--format", form, "--device", "cpu", "--overwrite"]) == 2
    assert "but this command prints: name a folder with --out" in capsys.readouterr().err
    another = recording.with_name("another.wav")
    another.write_bytes(recording.read_bytes())
    assert main(["transcribe", model, str(recording), str(another), "--format", form, "--device", "cpu"]) == 0
    assert another.with_suffix(f".{form}").read_text(encoding="utf-8") == printed
    assert capsys.readouterr().out.splitlines()[1] == f"{another}\t{another.with_suffix(f'.{form}')}"


def test_an_existing_file_is_replaced_only_with_overwrite(
    make_model: Callable[..., Path], recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refusals come before the model is opened: they hold for one that does not exist."""
    absent, another, out = str(tmp_path / "absent"), recording.with_suffix(".flac"), tmp_path / "out"
    captions = ["--format", "srt", "--device", "cpu"]
    soundfile.write(another, *soundfile.read(recording))
    for destination in ([], ["--out", str(out)]):
        assert main(["transcribe", absent, str(recording), str(another), *captions, *destination]) == 2
        message = capsys.readouterr().err
        assert f"{recording} and {another} would both be written to" in message and "--out FOLDER" in message
    other = recording.with_name("other.wav")
    other.write_bytes(recording.read_bytes())
    corrected = recording.with_suffix(".srt")
    corrected.write_text("corrected by hand", encoding="utf-8")
    for model, *overwrite in ([absent], [str(make_model()), "--overwrite"]):
        status = main(["transcribe", model, str(recording), str(other), *captions, *overwrite])
        captured = capsys.readouterr()
        if overwrite:
            assert status == 0 and corrected.read_text(encoding="utf-8") == other.with_suffix(".srt").read_text("utf-8")
        else:
            assert status == 2 and f"{corrected} exists already" in captured.err and "--overwrite" in captured.err
            assert corrected.read_text(encoding="utf-8") == "corrected by hand"


@pytest.mark.parametrize(("form", "suffix"), [("text", ".txt"), ("json", ".json"), ("vtt", ".vtt")])
def test_a_folder_of_outputs_has_the_places_of_the_audio(
    make_model: Callable[..., Path],
    recording: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    form: str,
    suffix: str,
) -> None:
    model, out, folder = str(make_model()), tmp_path / "new" / "out", tmp_path / "corpus"
    for place in ("a/1.wav", "b/1.wav"):
        (folder / place).parent.mkdir(parents=True)
        (folder / place).write_bytes(recording.read_bytes())
    one = ["transcribe", model, str(folder / "a/1.wav"), "--format", form, "--device", "cpu"]
    assert main(one) == 0
    printed = capsys.readouterr().out
    assert main(["transcribe", model, str(folder), "--format", form, "--out", str(out), "--device", "cpu"]) == 0
    assert (out / "a/1").with_suffix(suffix).read_text(encoding="utf-8") == printed
    assert (out / "b/1").with_suffix(suffix).is_file()
    assert main([*one, "--out", str(out / "a")]) == 2


def test_an_input_is_never_an_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "audio.txt").write_bytes(b"RIFF")
    audio = str(tmp_path / "audio.txt")
    assert main(["transcribe", "absent", audio, "--out", str(tmp_path), "--overwrite", "--device", "cpu"]) == 2
    assert "would replace the input" in capsys.readouterr().err


def test_samples_of_standard_input_are_decoded_as_they_come(
    make_model: Callable[..., Path],
    recording: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model, samples = str(make_model()), soundfile.read(recording, dtype="int16")[0]
    assert main(["transcribe", model, str(recording), "--stream", "--format", "json", "--device", "cpu"]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert " ".join(r["text"] for r in records) == whole(load_model(model), recording).text
    assert [w for r in records for w in r["words"]] == sorted(
        (w for r in records for w in r["words"]), key=lambda w: w["start_s"]
    )
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(samples.tobytes())))
    assert main(["transcribe", model, "-", "--stream", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.splitlines() == [r["text"] for r in records]
    for begin, message in ((recording.read_bytes(), "begins as an audio file does"), (b"", "holds no samples")):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(begin)))
        assert main(["transcribe", model, "-", "--stream", "--device", "cpu"]) == 1
        assert f"standard input: {message}" in capsys.readouterr().err


@pytest.mark.parametrize(("number", "signal_name"), [(signal.SIGINT, "SIGINT"), (signal.SIGTERM, "SIGTERM")])
def test_a_signal_ends_a_stream_and_its_last_words_are_printed(
    make_model: Callable[..., Path],
    recording: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: int,
    signal_name: str,
) -> None:
    """As Ctrl-C does to `arecord ... | ds2 transcribe --stream MODEL -`."""
    model, samples = str(make_model()), soundfile.read(recording, dtype="int16")[0]
    chunks = [samples.tobytes()]

    def read1() -> bytes:
        if not chunks:
            signal.raise_signal(number)
        return chunks.pop()

    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=SimpleNamespace(read1=read1)))
    assert main(["transcribe", model, "-", "--stream", "--device", "cpu"]) == 128 + number
    printed = capsys.readouterr()
    assert " ".join(printed.out.split()) == whole(load_model(model), recording).text != ""
    assert f"stopped by {signal_name}" in printed.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--stream", "--format", "srt"], "text or json"),
        (["--stream", "--out", "."], "standard output"),
        (["--rate", "8000"], "--stream and -"),
    ],
)
def test_options_that_do_not_go_together(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["transcribe", "model", "file.wav", *arguments])
    assert message in capsys.readouterr().err


def test_a_truncated_file_is_transcribed_as_far_as_it_goes(
    make_model: Callable[..., Path], recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    loaded, content = load_model(make_model()), recording.read_bytes()
    cut, part = tmp_path / "cut.wav", tmp_path / "part.wav"
    cut.write_bytes(content[: len(content) // 2])
    soundfile.write(part, greedy_samples := read_audio(recording)[: (len(content) // 2 - 44) // 2], RATE_HZ)
    assert len(greedy_samples) < 2 * RATE_HZ
    expected = greedy(loaded).transcribe(part).text
    assert main(["transcribe", str(make_model()), str(cut), "--device", "cpu"]) == 0
    assert capsys.readouterr().out.strip() == expected != ""
    assert "cut.wav: truncated" in caplog.text
    with pytest.raises(AudioError, match="truncated"):
        read_audio(cut)


def test_the_chosen_channel_is_transcribed(
    make_model: Callable[..., Path], recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = read_audio(recording)
    soundfile.write(tmp_path / "two.wav", np.stack([0 * samples, samples], 1), RATE_HZ)
    model = make_model()
    expected = Recogniser.load(model).transcribe(recording).text
    assert Recogniser.load(model).transcribe(tmp_path / "two.wav", channel=2).text == expected != ""
    for stream in ([], ["--stream"]):
        assert main(["transcribe", str(model), str(tmp_path / "two.wav"), "--channel", "2", *stream]) == 0
        assert capsys.readouterr().out.split() == expected.split()
    assert main(["transcribe", str(model), str(tmp_path / "two.wav"), "--channel", "3"]) == 1
    assert "has no channel 3" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["transcribe", str(model), "-", "--stream", "--channel", "2"])
    assert "- with --stream is mono" in capsys.readouterr().err


def test_the_command_writes_listed_phrases_only(
    make_model: Callable[..., Path], recording: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(make_model())
    command = ["transcribe", model, str(recording), "--device", "cpu"]
    assert main([*command, "--phrases", "a [b]", "--phrases", "c"]) == 0
    assert capsys.readouterr().out.split() == ["[unk]"]
    assert main([*command, "--phrases", "(a"]) == 2
    assert "is not closed by ')'" in capsys.readouterr().err
    assert main([*command, "--phrases", "a", "decode=greedy", "decode.times=true"]) == 2
    assert "--phrases has a search of its own, without decode=greedy: leave" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*command, "--allowance", "1"])
    assert "--allowance needs --phrases" in capsys.readouterr().err
