"""Evaluation: order, independence of batches, report files, and models and manifests that cannot be evaluated."""

from __future__ import annotations

import base64
import functools
import io
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

from ds2.audio.features import Features
from ds2.audio.read import read_audio
from ds2.cli import main
from ds2.config.schema import CODECS, AlphabetConfig, Config, DataConfig, DecodeConfig
from ds2.data.manifest import Utterance, read_manifest, write_manifest
from ds2.decoding.decoder import ChangedDecoder
from ds2.decoding.greedy import GreedyDecoder
from ds2.decoding.hypothesis import DecodeError, Hypothesis, Word
from ds2.decoding.phrases import OTHERS, PhraseGraph
from ds2.model.acoustic import AcousticModel
from ds2.model.checkpoint import LoadedModel, load_model, prepare_model
from ds2.recognition.evaluate import (
    Evaluation,
    conditions,
    keyword_table,
    recognition_loader,
    score,
    score_words,
    worst_recordings,
)
from ds2.recognition.recogniser import Recogniser
from ds2.recognition.session import Pipeline
from ds2.scoring.wer import corpus_report
from ds2.text.alphabet import Alphabet

CPU = torch.device("cpu")
RATE_HZ = 16000


@pytest.fixture
def model_file(tiny_config: Callable[..., Config], tone_manifest: Path, tmp_path: Path) -> Path:
    """A run folder's model that was never trained but writes letters: its classifier is made decisive."""
    config = tiny_config(f"data.test=[{tone_manifest}]")
    torch.manual_seed(3)
    features = Features(config.features, config.data.sample_rate_hz)
    alphabet = Alphabet.from_config(config.alphabet)
    model = AcousticModel(config.model, features.bins, len(alphabet), config.features.step_s)
    with torch.no_grad():
        model.classifier.weight.mul_(20)
    path = tmp_path / "run" / "best.safetensors"
    prepare_model(path, model, features, alphabet, config, {})()
    return path


def recognise(loaded: LoadedModel, manifest: Path, **settings: float) -> list[str]:
    """Texts of a manifest's utterances."""
    recogniser = Recogniser.of(loaded, DecodeConfig(), CPU)
    loader = recognition_loader(read_manifest(manifest), loaded.config.data, CPU)
    return [hypothesis.text for hypothesis in recogniser.recognise(loader, **settings)]


def test_texts_keep_the_order_whatever_the_batches(model_file: Path, tone_manifest: Path, tmp_path: Path) -> None:
    loaded = load_model(model_file)
    alone = recognise(loaded, tone_manifest, batch_audio_s=0.01)
    assert len(set(alone)) > 3
    assert recognise(loaded, tone_manifest, batch_audio_s=3.0) == alone
    assert recognise(loaded, tone_manifest) == alone
    write_manifest(tmp_path / "reversed.jsonl", read_manifest(tone_manifest)[::-1])
    assert recognise(loaded, tmp_path / "reversed.jsonl") == alone[::-1]


def test_no_utterances_give_no_hypotheses(model_file: Path) -> None:
    loaded = load_model(model_file)
    recogniser = Recogniser.of(loaded, DecodeConfig(), CPU)
    assert recogniser.recognise(recognition_loader([], loaded.config.data, CPU)) == []


def test_a_model_in_training_mode_is_refused(model_file: Path, tone_manifest: Path) -> None:
    loaded = load_model(model_file)
    loaded.model.train()
    with pytest.raises(RuntimeError, match=r"eval\(\)"):
        recognise(loaded, tone_manifest)


def test_broken_weights_are_named_by_utterance(model_file: Path, tone_manifest: Path) -> None:
    loaded = load_model(model_file)
    with torch.no_grad():
        loaded.model.classifier.bias[0] = float("nan")
    with pytest.raises(DecodeError, match="tones9"):
        recognise(loaded, tone_manifest)


def test_command_writes_a_report_next_to_the_model(
    model_file: Path, tone_manifest: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", str(model_file.parent), "--device", "cpu", "--workers", "0"]) == 0
    printed = capsys.readouterr().out
    folder = model_file.parent / "best-evaluation" / tone_manifest.stem
    names = {"hypotheses.jsonl", "report.txt", "report.json", "errors.txt", "errors.html"}
    assert {path.name for path in folder.iterdir()} == names
    record = json.loads((folder / "report.json").read_text())
    assert f"%WER {100 * record['wer']:.2f} [ {record['words']['errors']} / 10, " in printed
    assert record["utterances"] == 10
    assert set(record["by_speaker"]) == {"s0", "s1"}
    lines = [json.loads(line) for line in (folder / "hypotheses.jsonl").read_text().splitlines()]
    assert [line["text"] for line in lines] == [u.text for u in read_manifest(tone_manifest)]
    assert [line["pred_text"] for line in lines] == recognise(load_model(model_file), tone_manifest)
    times = [(word["start_s"], word["end_s"], line["duration"]) for line in lines for word in line["words"]]
    assert times
    assert all(0 <= start_s < end_s <= duration_s + 0.1 for start_s, end_s, duration_s in times)


def recordings_of(folder: Path) -> dict[str, bytes]:
    text = (folder / "errors.html").read_text(encoding="utf-8")
    data = re.search(r'id="data">(.*?)</script>', text, re.DOTALL)
    assert data is not None
    return {index: base64.b64decode(encoded) for index, encoded in json.loads(data[1])["recordings"].items()}


def test_the_page_plays_the_utterances_with_most_errors(
    model_file: Path, tone_manifest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["evaluate", str(model_file), "--device", "cpu", "--workers", "0", "--out"]
    assert main([*command, str(tmp_path / "some"), "--recordings", "3"]) == 0
    recordings = recordings_of(tmp_path / "some" / tone_manifest.stem)
    utterances = read_manifest(tone_manifest)
    assert len(recordings) == 3
    for index, recording in recordings.items():
        utterance = utterances[int(index)]
        samples, rate_hz = soundfile.read(io.BytesIO(recording), dtype="float32")
        original = read_audio(utterance.audio_filepath, rate_hz)
        assert len(samples) / rate_hz == pytest.approx(utterance.duration_s, abs=0.2)  # MP3 pads
        likeness = np.correlate(samples, original, "full").max() / np.linalg.norm(samples) / np.linalg.norm(original)
        assert likeness > 0.9
    assert main([*command, str(tmp_path / "none"), "--recordings", "0"]) == 0
    assert recordings_of(tmp_path / "none" / tone_manifest.stem) == {}


def test_recordings_are_bounded(
    model_file: Path, tone_manifest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ds2.recognition.evaluate.RECORDINGS_BYTES", 512 << 10)
    noise = 0.1 * np.random.default_rng(0).standard_normal(int(121 * RATE_HZ)).astype(np.float32)
    utterances = []
    for number, duration_s in enumerate([121.0, *[14.0] * 13]):  # 42 kB each; the first is longer than two minutes
        path = tmp_path / f"{number}.flac"
        soundfile.write(path, noise[: int(duration_s * RATE_HZ)], RATE_HZ)
        utterances.append(Utterance(path, duration_s, "one two"))
    hypotheses = [Hypothesis("", 0.0, [], [])] * len(utterances)
    report = score(utterances, hypotheses, load_model(model_file).alphabet)
    evaluation = Evaluation(tone_manifest, utterances, hypotheses, report)
    recordings = worst_recordings(evaluation, DataConfig(), 20)
    assert list(recordings) == list(range(1, 13)) and 480 << 10 < sum(map(len, recordings.values())) <= 512 << 10
    (tmp_path / "1.flac").unlink()
    assert worst_recordings(evaluation, DataConfig(), 20) == {}


def test_characters_outside_the_alphabet_count_as_errors(model_file: Path, tone_manifest: Path, tmp_path: Path) -> None:
    utterances = [replace(u, text="ü" + u.text) for u in read_manifest(tone_manifest)]
    write_manifest(tmp_path / "odd.jsonl", utterances)
    command = ["evaluate", str(model_file), str(tmp_path / "odd.jsonl"), "--device", "cpu", "--workers", "0"]
    assert main([*command, "--out", str(tmp_path / "out")]) == 0
    record = json.loads((tmp_path / "out" / "odd" / "report.json").read_text())
    assert record["words"]["correct"] == 0
    assert record["characters"]["reference_length"] == sum(len(u.text) for u in utterances)


def test_mistakes_of_the_user_are_named(
    model_file: Path, tone_manifest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", str(tmp_path / "none.safetensors")]) == 2
    assert "there is no checkpoint" in capsys.readouterr().err
    assert main(["evaluate", str(tone_manifest)]) == 2
    assert "is not a model of ds2: give a run folder" in capsys.readouterr().err
    twice = [str(tone_manifest), str(tone_manifest)]
    assert main(["evaluate", str(model_file), *twice, "--device", "cpu"]) == 2
    assert "--out" in capsys.readouterr().err
    assert main(["evaluate", str(model_file), str(tmp_path / "none.jsonl"), "--device", "cpu"]) == 2
    assert "none.jsonl" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["evaluate", str(model_file), "--batch-audio-s", "0"])


@pytest.mark.parametrize(
    ("noted", "configured", "precision", "chosen"),
    [
        ({"precision": "fp32"}, "auto", "auto", "fp32"),
        ({"precision": "bf16"}, "auto", "auto", "bf16"),
        ({}, "auto", "auto", "bf16"),  # files of before: what `auto` is on a GPU
        ({}, "fp32", "auto", "fp32"),
        ({"precision": "bf16"}, "auto", "fp32", "fp32"),
    ],
)
def test_a_gpu_recognises_in_the_precision_of_training_and_a_cpu_in_fp32(
    model_file: Path, noted: dict[str, str], configured: str, precision: str, chosen: str
) -> None:
    loaded = load_model(model_file)
    loaded.metadata["metrics"] = noted
    loaded.config.train.precision = configured
    assert Recogniser.of(loaded, DecodeConfig(), torch.device("cuda", 0), precision).precision == chosen
    assert Recogniser.of(loaded, DecodeConfig(), CPU).precision == "fp32"


def test_a_network_that_writes_case_and_punctuation_is_scored_both_ways() -> None:
    references, hypotheses = ["Hello, Mr. Smith.", "It\u2019s me!"], ["Hello mr. Smith", "it's me"]
    cased = Alphabet(("", *" !',.HIMSehilmorst"), case="keep")
    utterances = [Utterance(Path(f"{i}.wav"), 1.0, text) for i, text in enumerate(references)]
    report = score(utterances, [Hypothesis(text, 0.0, (), ()) for text in hypotheses], cased)
    assert report.words.errors == 5
    words_only = score_words(report, cased)
    assert words_only is not None and words_only.words.errors == 0
    assert score_words(report, Alphabet(("", *" 'ehilm"))) is None


def test_the_report_of_a_bare_model_file_lies_in_the_current_folder(
    model_file: Path, tone_manifest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare, folder = tmp_path / "elsewhere" / "mine.safetensors", tmp_path / "here"
    bare.parent.mkdir()
    folder.mkdir()
    bare.write_bytes(model_file.read_bytes())
    monkeypatch.chdir(folder)
    assert main(["evaluate", str(bare), str(tone_manifest), "--device", "cpu", "--workers", "0"]) == 0
    line = (folder / "mine-evaluation" / tone_manifest.stem / "hypotheses.jsonl").read_text().splitlines()[0]
    words = json.loads(line)["words"]
    assert words and all(round(word["start_s"], 3) == word["start_s"] for word in words)


def test_every_kind_of_noise_comes_at_every_ratio() -> None:
    degradations = conditions([20.0, 5.0])
    assert next(iter(degradations)) == "clean"
    assert len(degradations) == 1 + 2 * 4 + 2 + len(CODECS)
    assert degradations["babble of 4, 5 dB"].noise_snr_db == [5.0, 5.0]


def test_the_table_has_a_row_a_condition_and_repeats(
    make_model: Callable[..., Path], tone_manifest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = []
    for name in ("one", "other"):
        command = ["evaluate", str(make_model()), str(tone_manifest), "--robustness", "10", "--workers", "0"]
        assert main([*command, "--device", "cpu", "--out", str(tmp_path / name)]) == 0
        texts.append((tmp_path / name / "tones" / "robustness.md").read_text())
    assert texts[0] == texts[1] and texts[0] in capsys.readouterr().out.replace("\nreport:", "report:")
    rows = [line.split("|")[1].strip() for line in texts[0].splitlines() if line.startswith("| ")]
    assert rows == ["condition", *conditions([10.0])]
    assert "| clean |" in texts[0] and texts[0].count("| 1.00 |") >= 1


def test_keywords_are_counted_by_utterance(tmp_path: Path) -> None:
    texts = ["yes no yes", "turn on no", "maybe"]
    spotted = [["yes", OTHERS, "turn on"], ["turn on"], ["yes", OTHERS, "yes"]]
    utterances = [Utterance(Path(f"{n}.wav"), 1200.0, text) for n, text in enumerate(texts)]
    hypotheses = [Hypothesis("", 0.0, (), tuple(Word(text, 0.0, 1.0, 1.0) for text in row)) for row in spotted]
    evaluation = Evaluation(Path("m.jsonl"), utterances, hypotheses, corpus_report(texts, [""] * 3))
    assert keyword_table(evaluation, {"yes", "turn on", "turn off"}).splitlines()[2:] == [
        "| turn off | 0 | 0 | 0 | 0 |",
        "| turn on | 1 | 1 (100.0 %) | 1 | 1 |",  # in an hour of speech
        "| yes | 2 | 1 (50.0 %) | 2 | 2 |",
        "| all 3; an hour of each | 3 | 2 (66.7 %) | 3 | 1 |",
    ]


def test_the_command_reports_keywords_alone_and_compiles_them_once(
    model_file: Path,
    tone_manifest: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graphs, make = list[PhraseGraph](), PhraseGraph.__init__

    def count(graph: PhraseGraph, *parts: Any) -> None:
        graphs.append(graph)
        make(graph, *parts)

    monkeypatch.setattr(PhraseGraph, "__init__", count)
    words = [word for utterance in read_manifest(tone_manifest) for word in utterance.text.split()]
    grams = [f"-1 {word}" for word in ("<s>", "</s>", "<unk>", *dict.fromkeys(words))]
    lm = tmp_path / "words.arpa"
    lm.write_text("\n".join(["\\data\\", f"ngram 1={len(grams)}", "", "\\1-grams:", *grams, "", "\\end\\", ""]))
    search = ["decode.method=beam", f"decode.lm={lm}", "decode.keyword_alarms=[0.1,0.2,0.5,2,9]"]
    command = ["evaluate", str(model_file), str(tone_manifest), "--keywords", words[0], "--workers", "0"]
    assert main([*command, *search, "--device", "cpu", "--out", str(tmp_path / "out")]) == 0
    table = (tmp_path / "out" / tone_manifest.stem / "keywords.md").read_text()
    assert table in capsys.readouterr().out.replace("\nreport:", "report:")
    assert f"| {words[0]} | {words.count(words[0])} | " in table and len(graphs) == 1
    assert not (tmp_path / "out" / tone_manifest.stem / "report.txt").exists()


def test_a_search_for_keywords_writes_words_though_the_network_writes_phones(tmp_path: Path) -> None:
    (tmp_path / "lexicon.txt").write_text("yes Y EH S\n")
    alphabet = Alphabet.from_config(AlphabetConfig(lexicon=str(tmp_path / "lexicon.txt")))
    search: Any = SimpleNamespace(hot_characters=frozenset("yes"))
    pipeline: Any = functools.partial(Pipeline, None, None, alphabet)
    assert not pipeline(ChangedDecoder(search, lambda hypothesis: hypothesis, {"yes": 1.0}), CPU).writes_phones
    assert pipeline(GreedyDecoder(alphabet, 0.04), CPU).writes_phones
