"""`ds2 data check` names each planted fault, once, by file and line, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import soundfile

from ds2.commands.data import run_check
from ds2.config.schema import Config
from ds2.data import check as data_check
from ds2.data.check import CheckReport, check
from ds2.data.manifest import Utterance, read_manifest, write_manifest
from ds2.text.alphabet import Alphabet

RATE_HZ = 16000
TEXT = "a plain transcript"


def frames_at_25_hz(samples: int) -> int:
    return samples // 640


def write(path: Path, samples: np.ndarray, rate_hz: int = RATE_HZ) -> Path:
    soundfile.write(path, samples, rate_hz, subtype="PCM_16")
    return path


def noise(seed: int, seconds: float = 2.0, rate_hz: int = RATE_HZ) -> np.ndarray:
    return 0.1 * np.random.default_rng(seed).standard_normal(int(seconds * rate_hz))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Good utterances of one corpus, a manifest each for train and test."""
    for part, seeds in (("train", range(8)), ("test", range(8, 12))):
        utterances = [Utterance(write(tmp_path / f"{part}{s}.wav", noise(s)), 2.0, TEXT, speaker=part) for s in seeds]
        write_manifest(tmp_path / f"{part}.jsonl", utterances)
    return tmp_path


def checked(folder: Path, *planted: Utterance, split: str = "train", config: Config | None = None) -> CheckReport:
    splits = {part: read_manifest(folder / f"{part}.jsonl") for part in ("train", "test")}
    if planted:
        write_manifest(folder / f"{split}.jsonl", [*splits[split], *planted])
        splits[split] = read_manifest(folder / f"{split}.jsonl")
    config = config or Config(run_dir="x")
    return check(splits, config.data, config.augment, Alphabet.from_config(config.alphabet), frames_at_25_hz)


def test_a_good_corpus_has_no_findings(folder: Path) -> None:
    report = checked(folder)
    assert report.findings == [] and report.may_start and report.utterances == 12
    assert report.notes == ["4 of 4 texts of test also occur in train"]
    assert report.format().endswith(f"\nnote: {report.notes[0]}\ntraining may start")


def clipped(folder: Path) -> Path:
    return write(folder / "x.wav", np.clip(20 * noise(50), -1, 1))


def truncated(folder: Path) -> Path:
    content = write(folder / "x.wav", noise(50)).read_bytes()
    (folder / "x.wav").write_bytes(content[: len(content) // 2])
    return folder / "x.wav"


def empty(folder: Path) -> Path:
    (folder / "x.wav").write_bytes(b"")
    return folder / "x.wav"


def copy_of_more_bits(folder: Path) -> Path:
    samples, _ = soundfile.read(folder / "train0.wav")
    soundfile.write(folder / "x.wav", samples - 1e-6, RATE_HZ, subtype="FLOAT")  # some round to -0.0
    return folder / "x.wav"


AUDIO_FAULTS: dict[str, tuple[Callable[[Path], Path], str, str]] = {
    "missing": (lambda folder: folder / "x.wav", "error", "unreadable"),
    "truncated": (truncated, "error", "unreadable"),
    "empty": (empty, "error", "empty"),
    "no samples": (lambda folder: write(folder / "x.wav", np.zeros(0)), "error", "empty"),
    "silent": (lambda folder: write(folder / "x.wav", np.zeros(2 * RATE_HZ)), "error", "silent"),
    "nearly silent": (lambda folder: write(folder / "x.wav", 1e-3 * noise(50)), "error", "silent"),
    "quiet": (lambda folder: write(folder / "x.wav", 5e-3 * noise(50)), "warning", "quiet"),
    "clipped": (clipped, "warning", "clipped"),
    "telephone": (lambda folder: write(folder / "x.wav", noise(50, rate_hz=8000), 8000), "warning", "low_rate"),
    "studio": (lambda folder: write(folder / "x.wav", noise(50, rate_hz=48000), 48000), "warning", "rate"),
    "shorter than its manifest says": (lambda folder: write(folder / "x.wav", noise(50, 1.0)), "error", "duration"),
    "longer than its manifest says": (lambda folder: write(folder / "x.wav", noise(50, 3.0)), "warning", "duration"),
    "copy in another part": (lambda folder: write(folder / "x.wav", noise(8)), "error", "duplicate"),
    "copy in its part": (lambda folder: write(folder / "x.wav", noise(0)), "warning", "duplicate"),
    "copy of more bits": (copy_of_more_bits, "warning", "duplicate"),
}


def test_channels_that_cancel_each_other_are_named(folder: Path) -> None:
    voice = noise(50)
    planted, config = Utterance(write(folder / "x.wav", np.stack([voice, -voice], 1)), 2.0, TEXT), Config(run_dir="x")
    (finding,) = checked(folder, planted, config=config).findings
    assert finding.kind == "silent" and finding.message.endswith("channels may cancel each other: try data.channel=1")
    config.data.channel = 1
    assert checked(folder, config=config).findings == []


@pytest.mark.parametrize("fault", AUDIO_FAULTS)
def test_an_audio_fault_is_named_by_kind_file_and_line(folder: Path, fault: str) -> None:
    make, severity, kind = AUDIO_FAULTS[fault]
    report = checked(folder, Utterance(make(folder), 2.0, TEXT))
    (finding,) = report.findings
    assert (finding.severity, finding.kind) == (severity, kind)
    if fault == "copy in another part":  # the later part is the one to blame
        assert finding.source.endswith("test.jsonl:1") and "the same audio as x in train" in finding.message
    else:
        assert (finding.source, finding.name) == (f"{folder / 'train.jsonl'}:9", "x")
    assert report.may_start == (severity == "warning")
    assert f"{finding.source}: {finding.name}: {kind}" in report.format()


@pytest.mark.parametrize(
    "text, duration_s, kind, message",
    [
        ("a plain café", 2.0, "characters", "'é' U+00E9"),
        ("  ", 2.0, "no_transcript", "has no labels"),
        ("a" * 26, 2.0, "too_short", "2.00 s make 50 output frames, CTC needs 51 for 26 labels"),
        ("ab" * 25 + "a", 2.0, "too_short", "CTC needs 51 for 51 labels"),
        ("a", 0.05, "duration_limits", "0.05 s is outside data.min_duration_s=0.1"),
        ("a" * 20, 50.0, "duration_limits", "50.00 s is outside"),
    ],
)
@pytest.mark.parametrize("split, severity", [("train", "error"), ("test", "warning")])
def test_a_transcript_fault_stops_training_but_not_testing(
    folder: Path, text: str, duration_s: float, kind: str, message: str, split: str, severity: str
) -> None:
    path = write(folder / "x.wav", noise(50, duration_s))
    report = checked(folder, Utterance(path, duration_s, text), split=split)
    (finding,) = report.findings
    assert (finding.severity, finding.kind, finding.split) == (severity, kind, split)
    assert message in finding.message
    assert report.may_start == (severity == "warning")


def test_what_just_fits_passes_but_speeding_it_up_is_warned_of(folder: Path) -> None:
    just = Utterance(write(folder / "x.wav", noise(50)), 2.0, "ab" * 25)
    assert checked(folder, just).findings == []
    config = Config(run_dir="x")
    config.augment.speed = [0.9, 1.1]
    (finding,) = checked(folder, config=config).findings
    assert (finding.severity, finding.kind) == ("warning", "too_short_when_fast")


def test_dropping_unknown_characters_turns_the_error_into_a_warning(folder: Path) -> None:
    config = Config(run_dir="x")
    config.alphabet.unknown = "drop"
    report = checked(folder, Utterance(write(folder / "x.wav", noise(50)), 2.0, "a café"), config=config)
    assert [(f.severity, f.kind) for f in report.findings] == [("warning", "characters")]


def test_a_pace_unlike_the_corpus_is_an_outlier(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_check, "_MIN_UTTERANCES_FOR_PACE", 10)
    report = checked(folder, Utterance(write(folder / "x.wav", noise(50, 20.0)), 20.0, TEXT))
    assert [(f.severity, f.kind, f.name) for f in report.findings] == [("warning", "pace", "x")]


def test_the_shortest_duration_of_all_is_an_outlier_too(tmp_path: Path) -> None:
    spoken = [Utterance(tmp_path / f"{number}.wav", 2.0, TEXT) for number in range(60)]
    config = Config(run_dir="x")
    splits = {"train": [*spoken, Utterance(tmp_path / "x.wav", 5e-324, TEXT)]}
    report = check(splits, config.data, config.augment, Alphabet.from_config(config.alphabet), frames_at_25_hz)
    assert [f.name for f in report.findings if f.kind == "pace"] == ["x"]


def test_segments_of_one_file_are_neither_duplicates_nor_too_long(folder: Path) -> None:
    path = write(folder / "x.wav", noise(50, 4.0))
    assert checked(folder, Utterance(path, 2.0, TEXT), Utterance(path, 2.0, TEXT, 2.0)).findings == []


def test_processes_find_what_one_process_finds(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planted = [Utterance(empty(folder), 2.0, TEXT), Utterance(folder / "gone.wav", 2.0, TEXT)]
    alone = checked(folder, *planted)
    monkeypatch.setattr(data_check, "_MAX_IN_PROCESS", 0)
    assert checked(folder) == alone and len(alone.findings) == 2


def test_the_command_returns_a_status_and_writes_json(
    tmp_path: Path, tiny_config: Callable[..., Config], capsys: pytest.CaptureFixture[str]
) -> None:
    train = [Utterance(write(tmp_path / f"{n}.wav", noise(n)), 2.0, "abc") for n in range(3)]
    write_manifest(tmp_path / "train.jsonl", train)
    config = tiny_config(f"data.train=[{tmp_path / 'train.jsonl'}]")
    assert run_check(config) == 0
    write_manifest(tmp_path / "train.jsonl", [*train, Utterance(tmp_path / "gone.wav", 2.0, "abz")])
    assert run_check(config, tmp_path / "reports" / "check.json") == 1
    assert "training may not start" in capsys.readouterr().out
    stored = json.loads((tmp_path / "reports" / "check.json").read_text())
    assert not stored["may_start"]
    assert {f["kind"] for f in stored["findings"] if f["severity"] == "error"} == {"unreadable", "characters"}


def test_the_report_begins_with_counts_and_shows_the_worst_of_each_kind(tmp_path: Path) -> None:
    spoken = [Utterance(tmp_path / f"{number}.wav", 2.0, TEXT) for number in range(60)]
    slow = [Utterance(tmp_path / f"slow{number}.wav", 2.0 * number, TEXT) for number in range(5, 9)]
    config = Config(run_dir="x")
    splits = {"train": [*spoken, *slow]}
    report = check(splits, config.data, config.augment, Alphabet.from_config(config.alphabet), frames_at_25_hz)
    lines = report.format(shown=2).splitlines()
    assert lines[:3] == ["64 utterances, 0.05 h", "      64 errors: unreadable", "       4 warnings: pace"]
    assert [line.split(": ")[2] for line in lines if line.startswith("warning: ") and "pace" in line] == [
        "slow8",
        "slow7",
    ]
    assert sum(line.startswith("error: ") for line in lines) == 2
    assert "  ... and 62 more errors: unreadable (--all prints them, --json has them)" in lines
    assert sum(line.startswith("error: ") for line in report.format().splitlines()) == 64


def test_characters_that_do_not_fit_end_in_a_table_and_an_alphabet(folder: Path) -> None:
    report = checked(folder, Utterance(write(folder / "x.wav", noise(60)), 2.0, "schöne Grüße"))
    shown = report.format()
    assert "       1  ß  U+00DF LATIN SMALL LETTER SHARP S" in shown
    assert 'symbols: " \'abcdefghijklmnopqrstuvwxyzßöü"' in shown and shown.endswith("correct the errors above")
    fitting = Config(run_dir="x")
    fitting.alphabet.symbols += "ßöü"
    assert "alphabet:" not in checked(folder, config=fitting).format()


@pytest.mark.parametrize(("cache", "when"), [("auto", "once, for the audio cache"), ("none", "at each reading, since")])
def test_another_rate_says_when_it_is_resampled(folder: Path, cache: str, when: str) -> None:
    config = Config(run_dir="x")
    config.data.cache = cache
    planted = Utterance(write(folder / "x.wav", noise(70, rate_hz=48000), 48000), 2.0, TEXT)
    assert f"48000 Hz, is resampled to 16000 Hz {when}" in checked(folder, planted, config=config).findings[0].message


def test_numbers_without_a_sure_reading_are_an_error_of_their_own(folder: Path) -> None:
    config = Config(run_dir="x")
    config.alphabet.numbers = "en"
    config.alphabet.punctuation = "drop"
    planted = [
        Utterance(write(folder / f"{n}.wav", noise(n)), 2.0, text)
        for n, text in ((50, "in 1995 at 50% off"), (51, "open 24/7 ñ"))
    ]
    report = checked(folder, *planted, config=config)
    assert [(f.severity, f.kind, f.name) for f in report.findings] == [
        ("error", "numbers", "51"), ("error", "characters", "51")
    ]  # fmt: skip
    assert "numbers=en has no sure reading of '24/7': write it in the transcript" in report.findings[0].message
    assert "'ñ'" in report.findings[1].message and "'2'" not in report.findings[1].message


def test_the_proposed_numbers_are_of_the_transcripts_language(folder: Path) -> None:
    text = "der Zug nach Berlin war um 3 Stunden zu spät und alle mussten lange auf ihn warten"
    planted = Utterance(write(folder / "60.wav", noise(60, 6.0)), 6.0, text)
    german = [
        Utterance(u.audio_filepath, u.duration_s, "das ist ein Satz") for u in read_manifest(folder / "train.jsonl")
    ]
    write_manifest(folder / "train.jsonl", german)
    write_manifest(folder / "test.jsonl", read_manifest(folder / "test.jsonl")[:1])
    assert "numbers: de  # digits to words" in checked(folder, planted).format()
