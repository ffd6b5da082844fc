"""When words of a stream are shown and stay: worked cases, and the command on a model whose texts are known."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ds2.cli import main
from ds2.config.schema import ConfigError, DecodeConfig
from ds2.data.manifest import read_manifest, write_manifest
from ds2.model.checkpoint import load_model
from ds2.model.structure import lookahead_parts_ms
from ds2.recognition.evaluate import recognition_loader
from ds2.recognition.latency import aligned_ends, measure_latency, read_ends, word_delays
from ds2.recognition.recogniser import Recogniser
from ds2.recognition.session import BLOCK_S
from ds2.system import UserError

CPU = torch.device("cpu")


def test_a_word_that_comes_goes_and_comes_back_stays_since_the_last_time() -> None:
    history = [
        (0.2, []),
        (0.4, ["one"]),
        (0.6, ["on"]),
        (0.8, ["one", "tow"]),
        (1.0, ["oh", "one", "two"]),
        (1.2, ["one", "two"]),
    ]
    ends = [("one", 0.3), ("two", 0.7)]
    assert list(word_delays(["one", "two"], ends, history)) == [(0.4, 0.8, 0.3), (1.0, 1.0, 0.7)]


def test_only_right_words_with_a_known_end_count() -> None:
    history = [(0.5, ["a", "x", "c", "d"])]
    assert list(word_delays(["a", "b", "c"], [("a", 0.1), ("c", 0.3)], history)) == [(0.5, 0.5, 0.1), (0.5, 0.5, 0.3)]
    assert not list(word_delays(["a"], [], history)) and not list(word_delays([], [], [(0.0, [])]))


@pytest.mark.parametrize(
    ("own", "unit"), [(True, "characters"), (False, "characters"), (True, "pieces"), (True, "phones")]
)
def test_the_command_reports_delays_of_all_words_that_are_right(
    make_model: Callable[..., Path],
    tone_manifest: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    own: bool,
    unit: str,
) -> None:
    overrides = []
    if unit == "pieces":
        overrides = [f"alphabet.pieces_file={tmp_path / 'tones.pieces'}"]
        base = [f"data.train=[{tone_manifest}]", "alphabet.symbols='abc '"]
        assert main(["data", "pieces", str(tmp_path / "tones.pieces"), *base, "--count", "7"]) == 0
    if unit == "phones":
        (tmp_path / "lexicon.txt").write_text("aa AA\nbb BB\nkk KK\n")
        overrides = [f"alphabet.lexicon={tmp_path / 'lexicon.txt'}"]
    model = make_model(*overrides)
    loaded = load_model(model, CPU)
    recogniser = Recogniser.of(loaded, DecodeConfig(), CPU)
    utterances = read_manifest(tone_manifest)
    hypotheses = recogniser.recognise(recognition_loader(utterances, loaded.config.data, CPU, 0))
    manifest, times = tmp_path / "written.jsonl", tmp_path / "times.jsonl"
    pairs = [(u, h) for u, h in zip(utterances, hypotheses, strict=True) if h.text.strip()]
    assert pairs, "the model writes nothing"
    write_manifest(manifest, [replace(u, text=h.text.lower()) for u, h in pairs])
    (tmp_path / "tensorboard").mkdir()
    assert main(["align", str(model), str(manifest), "--out", str(times), "--device", "cpu"]) == 0
    command = ["evaluate", str(model), str(manifest), "--latency", "--workers", "0", "--device", "cpu"]
    extra = [] if own else ["--word-times", str(times)]
    assert main([*command, *extra, "--out", str(tmp_path / "out")]) == 0
    report = json.loads((tmp_path / "out" / "written" / "report.json").read_text())
    words = sum(len(h.text.split()) for _, h in pairs)
    assert report["wer"] == 0 and report["latency_words"] == report["latency_of_words"] == words
    assert report["latency_first_median_s"] <= report["latency_final_median_s"] <= report["latency_final_p95_s"]
    assert "latency_final_p95_s: " in (tmp_path / "out" / "written" / "report.txt").read_text()
    assert f"{words} of {words} words" in capsys.readouterr().out
    assert list((tmp_path / "tensorboard").iterdir())


def test_a_word_is_shown_within_lookahead_and_block_of_its_last_label(
    make_model: Callable[..., Path], tone_manifest: Path
) -> None:
    loaded = load_model(make_model(), CPU)
    recogniser = Recogniser.of(loaded, DecodeConfig(), CPU)
    data = loaded.config.data
    utterances = read_manifest(tone_manifest)
    hypotheses = recogniser.recognise(recognition_loader(utterances, data, CPU, 0))
    utterances = [replace(u, text=h.text) for u, h in zip(utterances, hypotheses, strict=True)]
    ends = aligned_ends(recogniser, recognition_loader(utterances, data, CPU, 0))
    latency = measure_latency(recogniser, utterances, [u.text.split() for u in utterances], ends, data)
    config = loaded.config
    ahead_s = sum(lookahead_parts_ms(config.model, config.features.step_s).values()) / 1000
    overlap_s = config.features.window_s - config.features.step_s
    assert latency.first_s.max() <= ahead_s + overlap_s + BLOCK_S + recogniser.frame_s


def test_word_times_are_read_before_recognition(
    make_model: Callable[..., Path], tone_manifest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ds2.commands.evaluate.evaluate", lambda *_, **__: pytest.fail("recognises first"))
    (tmp_path / "times.jsonl").write_text("{}\n")
    command = ["evaluate", str(make_model()), str(tone_manifest), "--latency", "--device", "cpu"]
    assert main([*command, "--word-times", str(tmp_path / "times.jsonl")]) == 2


def test_options_and_files_that_do_not_fit_are_refused(
    make_model: Callable[..., Path], tone_manifest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for extra, message in (
        (["--word-times", "x"], "--word-times needs --latency"),
        (["--latency", "--robustness", "5"], "give one of them"),
        (["--keywords", "a", "--robustness", "5"], "give one of them"),
        (["--false-alarms", "5"], "--false-alarms needs --keywords"),
    ):
        with pytest.raises(SystemExit):
            main(["evaluate", "m", *extra])
        assert message in capsys.readouterr().err
    both = make_model("model.bidirectional=true", "model.max_lookahead_ms=0", "model.row_convs=0")
    assert main(["evaluate", str(both), str(tone_manifest), "--latency", "--device", "cpu"]) != 0
    assert "bidirectional" in capsys.readouterr().err
    times = tmp_path / "times.jsonl"
    utterance = '{"audio_filepath": "a", "offset": 0, "words": [{"text": "a", "end_s": %s}]}\n'
    for line in ("{}\n", "[" * 10**5 + "\n", utterance % ("1" * 400)):
        times.write_text(line)
        with pytest.raises(ConfigError, match=r"times\.jsonl, line 1: .*ds2 align"):
            read_ends(times)
    times.write_text("")
    with pytest.raises(ConfigError, match="has no words of"):
        read_ends(times).of(read_manifest(tone_manifest))
    with pytest.raises(UserError, match=r"none\.jsonl: No such file"):
        read_ends(tmp_path / "none.jsonl")


def test_word_times_are_read_once(tmp_path: Path, tone_manifest: Path) -> None:
    """A file may be a pipe, and that of a large corpus takes a while."""
    utterances, times = read_manifest(tone_manifest), tmp_path / "times.jsonl"
    records = [
        {"audio_filepath": str(u.audio_filepath), "offset": u.offset_s, "words": [{"text": u.text, "end_s": 1.0}]}
        for u in utterances
    ]
    times.write_text("".join(json.dumps(record) + "\n" for record in records))
    ends = read_ends(times)
    times.unlink()
    for part in (utterances[:3], utterances):  # manifests
        assert ends.of(part) == [[(u.text, 1.0)] for u in part]
