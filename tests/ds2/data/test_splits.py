"""What scores are measured on, and how much of it was in the training data."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ds2.cli import main
from ds2.config.schema import AlphabetConfig, AugmentConfig, DataConfig
from ds2.data.manifest import Utterance, read_manifest, write_manifest
from ds2.data.splits import ScoredData, scored_utterances, training_utterances, warn_of_other_corpus
from ds2.text.alphabet import Alphabet


def utterance(name: str, speaker: str, *, folder: str = "/corpus", text: str = "yes") -> Utterance:
    return Utterance(Path(folder) / f"{name}.wav", 1800.0, text, speaker=speaker)


def test_utterances_and_speakers_of_the_training_data_are_counted() -> None:
    training = [utterance("a", "ann"), utterance("b", "bob"), utterance("c", "")]
    dev = [
        utterance("a", "ann", folder="/copy"),  # a copy of the corpus
        utterance("a", "cid", text="no"),  # another utterance of a common name
        utterance("d", "bob"),
        utterance("e", ""),  # speakers without a name are not one speaker
    ]
    data = ScoredData.of(["dev.jsonl"], dev, training)
    assert data == ScoredData("dev.jsonl", 4, 2.0, 1, 3, 2)
    assert data.describe() == "dev.jsonl, 4 utterances, 2.00 h"
    assert "1 of its 4 utterances and 2 of its 3 speakers are in the training data" in data.warning()
    assert "other speech;" in data.warning()
    assert "other speakers;" in ScoredData.of(["dev.jsonl"], dev[2:], training).warning()
    assert ScoredData.of(["dev.jsonl"], dev[3:], training).warning() == ""


def test_manifests_of_another_corpus_are_not_taken_for_this_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    work, old, new = (tmp_path / name for name in ("work", "old", "new"))
    new.mkdir()
    data = DataConfig(train=[f"{work}/train.jsonl"], work_dir=str(work), corpus=str(new), prepare="an4")
    warn_of_other_corpus(data, [utterance("a", "ann", folder=str(new / "wav"))])
    warn_of_other_corpus(DataConfig(train=["mine.jsonl"]), [utterance("a", "ann")])
    assert not caplog.text
    warn_of_other_corpus(data, [utterance("a", "ann", folder=str(old / "wav"))])
    assert f"lists audio outside data.corpus={new}, such as {old}/wav/a.wav" in caplog.text


def test_words_without_a_pronunciation_are_named_wherever_they_are_left_out(
    tone_manifest: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "lexicon.txt").write_text("yes Y EH S\n", encoding="utf-8")
    alphabet = Alphabet.from_config(AlphabetConfig(lexicon=str(tmp_path / "lexicon.txt"), unknown="drop"))
    texts = ("yes essy", "essy yes", "sy yes", "yes")
    write_manifest(
        tmp_path / "a.jsonl", [replace(u, text=t) for u, t in zip(read_manifest(tone_manifest), texts, strict=False)]
    )
    data = DataConfig(train=[str(tmp_path / "a.jsonl")])
    assert len(training_utterances(data, AugmentConfig(), alphabet, lambda samples: samples)) == len(texts)
    assert "dropped from training texts (`ds2 data lexicon` adds them): essy x 2, sy" in caplog.text
    caplog.clear()
    scored_utterances(data.train, alphabet)
    assert "count their phones as insertions (`ds2 data lexicon` adds them): essy x 2, sy" in caplog.text


def test_an_epoch_repeats_the_utterances_of_a_manifest(
    tone_manifest: Path, tmp_path: Path, tiny_overrides: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    tones = read_manifest(tone_manifest)
    write_manifest(tmp_path / "one.jsonl", tones[:1])
    write_manifest(tmp_path / "others.jsonl", tones[1:])
    manifests = [str(tmp_path / "one.jsonl"), str(tmp_path / "others.jsonl")]
    alphabet = Alphabet.from_config(AlphabetConfig())
    listed = training_utterances(DataConfig(train=manifests, repeats=[3, 1]), AugmentConfig(), alphabet, lambda n: n)
    assert [u.name for u in listed] == [tones[0].name] * 2 + [u.name for u in tones]
    train = ["train", *tiny_overrides, f"data.train=[{','.join(manifests)}]", "batching.utterances=1", "train.epochs=1"]
    assert main([*train, "data.repeats=[3]"]) == 2
    assert "data.repeats=[3] needs a number for each manifest of data.train" in capsys.readouterr().err
    assert main([*train, "data.repeats=[3,1]"]) == 0
    steps = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text("utf-8").splitlines()]
    assert max(line["step"] for line in steps if "step" in line) == len(tones) + 2


@pytest.mark.parametrize("command", [["train"], ["data", "check"]])
@pytest.mark.parametrize(
    ("setting", "needs"),
    [("augment.noise", "augment.noise_probability=0.5"), ("train.denominator_text", "train.objective=ctc_crf")],
)
def test_a_missing_file_is_named_with_its_setting(
    command: list[str],
    setting: str,
    needs: str,
    tiny_overrides: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for path in (tmp_path / "none", tmp_path):
        assert main([*command, *tiny_overrides, needs, f"{setting}=[{path}]"]) == 2
        assert f"ds2: {setting} names {path}, no file: it takes" in capsys.readouterr().err


def test_of_many_utterances_that_are_left_out_the_first_are_listed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    durations_s = [1.0] + [100.0] * 25
    utterances = [Utterance(tmp_path / f"{n}.wav", s, "a") for n, s in enumerate(durations_s)]
    write_manifest(tmp_path / "a.jsonl", utterances)
    data = DataConfig(train=[str(tmp_path / "a.jsonl")], on_bad_utterance="skip")
    assert len(training_utterances(data, AugmentConfig(), Alphabet(("", "a")), lambda samples: samples)) == 1
    assert "25 of 26 training utterances left out" in caplog.text
    assert caplog.text.count("is outside data.min_duration_s") == 20
    assert "... and 5 more (`ds2 data check --all` lists them)" in caplog.text
