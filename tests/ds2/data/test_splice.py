"""Spliced speech says the labels of the text, whatever the recordings lack."""

from __future__ import annotations

import itertools
import os
import random
import re
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import soundfile
from support.fixtures import RATE_HZ, TONES_HZ, write_tones

from ds2.cli import main
from ds2.commands import data
from ds2.data import splice
from ds2.data.audio_cache import AudioStore
from ds2.data.manifest import Utterance, read_manifest
from ds2.data.shards import MANIFEST
from ds2.data.splice import LabelledRecording, SplicedText, Splicer, check_folder, write_spliced
from ds2.system import UserError
from ds2.system.files import sole_writer

LETTER_S, TONE_S = 0.23, 0.15  # of write_tones
FRAME = RATE_HZ // 50


def labels_of(text: str) -> tuple[tuple[int, ...], ...]:
    """The labels of words: 1, 2, 3 for a, b, c."""
    return tuple(tuple(ord(letter) - ord("a") + 1 for letter in word) for word in text.split())


def splicer_of(folder: Path, texts: Sequence[tuple[str, str]]) -> Splicer:
    """Recordings of tones, of (text, speaker) each, with the times of their letters."""
    rng, recordings, utterances = np.random.default_rng(0), [], []
    for position, (text, speaker) in enumerate(texts):
        path = folder / f"{position}.wav"
        duration_s = write_tones(path, text, rng)
        times_s = tuple((LETTER_S * k, LETTER_S * k + TONE_S) for k, letter in enumerate(text) if letter != " ")
        recordings.append(LabelledRecording(position, speaker, labels_of(text), times_s, duration_s))
        utterances.append(Utterance(path, duration_s, text, speaker=speaker))
    return Splicer(recordings, AudioStore(utterances, RATE_HZ))


def audible_tones(waveform: np.ndarray) -> str:
    """The letters of the tones in a waveform, by the strongest frequency of each 20 ms; of at least 60 ms each."""
    frames = np.split(waveform[: len(waveform) // FRAME * FRAME], len(waveform) // FRAME)
    letters = [
        min(TONES_HZ, key=lambda letter: abs(TONES_HZ[letter] - np.abs(np.fft.rfft(frame, RATE_HZ)).argmax()))
        if np.sqrt((frame**2).mean()) > 0.05
        else " "
        for frame in frames
    ]
    runs = [(letter, len(list(run))) for letter, run in itertools.groupby(letters)]
    return "".join(letter for letter, length in runs if letter != " " and length >= 3)


def test_the_speech_says_the_text_by_one_speaker(tmp_path: Path) -> None:
    splicer = splicer_of(tmp_path, [("abc cab", "ann"), ("bca acb", "ann"), ("aabb ccba", "ann"), ("bacbc", "bob")])
    draw = random.Random(0)
    for _ in range(20):
        text = " ".join("".join(draw.choices("abc", k=draw.randint(1, 4))) for _ in range(draw.randint(1, 4)))
        pieces = splicer.pieces(labels_of(text), "ann", draw)
        waveform = splicer.join(pieces)
        assert audible_tones(waveform) == text.replace(" ", "")
        # Each label lasts as long as in the recordings, but for what a join may move.
        letters = len(text.replace(" ", ""))
        assert len(waveform) / RATE_HZ >= LETTER_S * letters - 0.012 * len(pieces)
        assert np.abs(np.diff(waveform)).max() < 0.3 * 2 * np.pi * max(TONES_HZ.values()) / RATE_HZ + 0.1  # no clicks


def test_long_runs_of_the_recordings_stay_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    splicer = splicer_of(tmp_path, [("abccab", "ann"), ("bbb", "ann")])
    monkeypatch.setattr(splice, "_SHORTER", 0.0)
    (piece, *others) = splicer.pieces(labels_of("abccab"), "ann", random.Random(0))
    assert piece.position == 0 and len(others) == 1  # seven symbols in the first, of eight with both ends


def test_ends_of_words_are_those_of_the_text_where_a_recording_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(splice, "_SHORTER", 0.0)
    splicer = splicer_of(tmp_path, [("cabc", "ann"), ("ca bc", "ann")])
    draw = random.Random(0)
    for text, position in (("cabc", 0), ("ca bc", 1)):
        assert {piece.position for _ in range(9) for piece in splicer.pieces(labels_of(text), "ann", draw)} == {
            position
        }


@pytest.mark.parametrize("late", range(0, 41, 8))  # samples of 40, a period
def test_a_join_keeps_the_phase_and_the_loudness(tmp_path: Path, late: int) -> None:
    splicer = splicer_of(tmp_path, [("a", "ann"), ("a", "bob")])
    middle = round(TONE_S / 2 * RATE_HZ)
    waveform = splicer.join([splice.Piece(0, 0, middle), splice.Piece(1, middle + late, 2 * middle)])
    power = np.convolve(waveform[: 2 * middle - 200] ** 2, np.full(40, 1 / 40), "valid")  # over a period
    assert power.min() > 0.95 * 0.3**2 / 2


def test_what_a_speaker_lacks_comes_from_others_and_halves_of_labels_from_anywhere(tmp_path: Path) -> None:
    splicer = splicer_of(tmp_path, [("ab", "ann"), ("bcb", "bob")])
    draw = random.Random(0)
    assert {piece.position for piece in splicer.pieces(labels_of("abcb"), "ann", draw)} == {0, 1}
    for text, audible in (("cac", "cac"), ("ac ca ba", "acaba")):  # nobody says a and c, or c twice, in a row
        waveform = splicer.join(splicer.pieces(labels_of(text), "ann", draw))
        assert audible_tones(waveform) == audible
        assert len(waveform) / RATE_HZ > TONE_S * len(text.replace(" ", "")) - 0.04  # both halves of each tone
    assert splicer.pieces(((4,),), "ann", draw) == []


def test_speakers_speak_as_often_as_they_have_speech(tmp_path: Path) -> None:
    splicer = splicer_of(tmp_path, [("abc" * 6, "ann"), *[("abc", "bob")] * 2])  # two thirds of the labels are ann's
    spoken = [splicer.speak(number, [SplicedText(("a",), ((1,),))], 1)[0] for number in range(600)]
    share = sum(speech is not None and speech[1] == "ann" for speech in spoken) / 600
    of_speech = splicer.seconds["ann"] / sum(splicer.seconds.values())
    assert share == pytest.approx(of_speech, abs=0.08)  # four standard deviations


def test_files_depend_on_texts_and_seed_not_on_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    splicer = splicer_of(tmp_path, [("abc cab", "ann"), ("bca acb", "bob")])
    texts = [SplicedText((text,), labels_of(text)) for text in ("ab", "cab", "bacca", "ca")] * 20
    texts[5] = SplicedText(("d",), ((4,),))
    contents = []
    for cores, seed in ((1, 1), (2, 1), (1, 2)):
        monkeypatch.setattr(splice, "usable_cores", lambda cores=cores: cores)
        folder = tmp_path / f"{cores}-{seed}"
        written = write_spliced(splicer, iter(texts), folder, 30 / 3600, seed)
        assert [u.text for u in written] == [u.text for u in read_manifest(folder / MANIFEST)]
        assert 30 <= sum(u.duration_s for u in written) < 33 and {u.speaker for u in written} <= {"ann", "bob"}
        assert "d" not in {u.text for u in written}
        assert all(soundfile.info(u.audio_filepath).duration == pytest.approx(u.duration_s) for u in written)
        contents.append([u.audio_filepath.read_bytes() for u in written])
    assert contents[0] == contents[1] != contents[2]


def test_a_killed_process_ends_the_command_with_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    splicer = splicer_of(tmp_path, [("abc", "ann")])
    monkeypatch.setattr(Splicer, "speak", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(UserError, match="a process was killed"):
        write_spliced(splicer, iter([SplicedText(("ab",), labels_of("ab"))]), tmp_path / "out", 1, 1)
    assert not (tmp_path / "out" / MANIFEST).exists()


def test_texts_may_end_and_a_small_disk_is_named_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    splicer = splicer_of(tmp_path, [("abc", "ann")])
    few = [SplicedText(("ab",), labels_of("ab"))]
    of_a_killed_attempt = tmp_path / "few" / "000000" / "000001.wav"
    of_a_killed_attempt.parent.mkdir(parents=True)
    of_a_killed_attempt.touch()
    assert len(write_spliced(splicer, iter(few), tmp_path / "few", 1, 1)) == 1
    assert [path.name for path in of_a_killed_attempt.parent.iterdir()] == ["000000.wav"]
    with pytest.raises(UserError, match="exists already"):  # its files would say what its manifest does not
        check_folder(tmp_path / "few", 1, RATE_HZ)
    with pytest.raises(UserError, match="labels that no recording has"):
        write_spliced(splicer, iter([SplicedText(("d",), ((4,),))]), tmp_path / "none", 1, 1)
    monkeypatch.setattr(splice.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 10**9}))
    (tmp_path / "big" / "000000").mkdir(parents=True)
    with pytest.raises(UserError, match=r"100 hours take 11.52 GB in .* 0.73 GB are free"):
        check_folder(tmp_path / "big", 100, RATE_HZ)
    with (tmp_path / "big" / "000000" / "000000.wav").open("wb") as file:
        file.truncate(11 * 10**9)  # of an attempt that was killed
    check_folder(tmp_path / "big", 100, RATE_HZ)


def test_a_disk_that_fills_up_is_named(tmp_path: Path) -> None:
    splicer = splicer_of(tmp_path, [("abc", "ann")])
    (tmp_path / "out" / "000000").mkdir(parents=True)
    (tmp_path / "out" / "000000" / "000000.wav").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"No space left on device: .*000000\.wav"):
        write_spliced(splicer, iter([SplicedText(("ab",), labels_of("ab"))]), tmp_path / "out", 1, 1)


@pytest.fixture
def command(make_model: Callable[..., Path], tone_manifest: Path, tmp_path: Path) -> list[str]:
    """The command with a model that writes the tones' letters, without --text and --hours."""
    model = str(make_model())
    return ["data", "splice", str(tmp_path / "out"), str(tone_manifest), "--model", model, "--device", "cpu"]


def test_the_command_writes_speech_of_texts_that_training_reads(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(data, "_MOST_SURPRISE", 1e9)  # the model was not trained
    text = tmp_path / "text.txt"
    text.write_text("ab cab\nein wort: ungültig\nbacca ab\nabc\ncab cab\n", encoding="utf-8")
    assert main([*command, "--text", str(text), "--hours", "0.005"]) == 0
    printed = capsys.readouterr().out
    written = read_manifest(tmp_path / "out" / MANIFEST)
    assert f"{tmp_path}/out/manifest.jsonl: {len(written)} utterances, 0.01 h" in printed
    assert re.search(r"not used: \d+ of \d+ lines read, with words for which .* has no labels", printed)
    assert 18 <= sum(u.duration_s for u in written) < 20
    assert {word for u in written for word in u.text.split()} == {"ab", "cab", "bacca", "abc"}


def test_a_folder_that_another_command_writes_is_refused(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "text.txt").write_text("ab cab\n", encoding="utf-8")
    with sole_writer(tmp_path / "out"):
        assert main([*command, "--text", str(tmp_path / "text.txt"), "--hours", "0.005"]) == 2
    assert f"{tmp_path}/out is written by another process" in capsys.readouterr().err
    assert not any((tmp_path / "out").iterdir())


def test_a_model_of_phones_speaks_the_words_of_its_lexicon(
    make_model: Callable[..., Path],
    tone_manifest: Path,
    tone_lexicon: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(data, "_MOST_SURPRISE", 1e9)  # the model was not trained
    model = make_model(f"alphabet.lexicon={tone_lexicon}")
    words = [utterance.text for utterance in read_manifest(tone_manifest)]
    (tmp_path / "text.txt").write_text("\n".join([*words, "cabbac", " ".join(words)]) + "\n", encoding="utf-8")
    command = ["data", "splice", str(tmp_path / "out"), str(tone_manifest), "--model", str(model), "--device", "cpu"]
    assert main([*command, "--text", str(tmp_path / "text.txt"), "--hours", "0.005"]) == 0
    assert {word for u in read_manifest(tmp_path / "out" / MANIFEST) for word in u.text.split()} <= set(words)
    assert "recordings are not used" not in caplog.text and "writes characters" not in caplog.text


def test_a_text_shorter_than_a_recording_is_spoken_again_and_again(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "_MOST_SURPRISE", 1e9)  # the model was not trained
    (tmp_path / "text.txt").write_text("42\na\n", encoding="utf-8")
    assert main([*command, "--text", str(tmp_path / "text.txt"), "--hours", "0.001"]) == 0
    assert {u.text for u in read_manifest(tmp_path / "out" / MANIFEST)} == {"a"}


def test_texts_are_spread_over_the_lines_and_end_at_lines_without_labels(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "_MOST_SURPRISE", 1e9)  # the model was not trained
    (tmp_path / "text.txt").write_text("a\n42\n" * 500 + "b\n42\n" * 500, encoding="utf-8")
    assert main([*command, "--text", str(tmp_path / "text.txt"), "--hours", "0.001"]) == 0
    assert {u.text for u in read_manifest(tmp_path / "out" / MANIFEST)} == {"a", "b"}


def test_a_paragraph_is_spoken_to_its_end_and_a_moment_of_speech_is_a_text(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "_MOST_SURPRISE", 1e9)  # the model was not trained
    (tmp_path / "text.txt").write_text("a " * 500 + "42 " + "b " * 500, encoding="utf-8")
    assert main([*command, "--text", str(tmp_path / "text.txt"), "--hours", "0.001"]) == 0
    written = read_manifest(tmp_path / "out" / MANIFEST)
    assert {word for u in written for word in u.text.split()} == {"a", "b"}
    command[2] = str(tmp_path / "moment")
    assert main([*command, "--text", str(tmp_path / "text.txt"), "--hours", "1e-9"]) == 0
    assert len(read_manifest(tmp_path / "moment" / MANIFEST)) == 1


def test_a_line_without_spaces_is_several_texts(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "_MOST_SURPRISE", 1e9)  # the model was not trained
    (tmp_path / "text.txt").write_text("ab" * 1000, encoding="utf-8")
    assert main([*command, "--text", str(tmp_path / "text.txt"), "--hours", "0.001"]) == 0
    assert {u.text for u in read_manifest(tmp_path / "out" / MANIFEST)} == {"ab" * 25}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text", "missing.txt"], "--text: there is no file missing.txt"),
        (["--text", "{manifest}"], "no recording has labels .* train it longer"),  # the model was not trained
        (["--text", "{digits}"], "no line of .* has only words that the model has labels for"),
    ],
)
def test_errors_name_the_way_out(
    command: list[str],
    tone_manifest: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    if "{digits}" in arguments:
        monkeypatch.setattr(data, "_MOST_SURPRISE", 1e9)
    digits = tmp_path / "digits.txt"
    digits.write_text("1 2 3\n", encoding="utf-8")
    named = [argument.format(manifest=tone_manifest, digits=digits) for argument in arguments]
    assert main([*command, "--hours", "0.001", *named]) == 2
    assert re.search(message, capsys.readouterr().err)
