"""The corpora of the shipped model: what it learns from, and what it is tuned and tested on."""

from __future__ import annotations

from pathlib import Path

from support.corpora_cases import librispeech, write_audio, write_text

from ds2.data.corpora import prepare
from ds2.data.manifest import Utterance, read_manifest, write_manifest
from tests.ds2.data.corpora.test_an4 import an4


def corpora(root: Path) -> Path:
    librispeech(root / "LibriSpeech", "train-clean-5", "train-clean-100-part", "dev")
    an4(root / "an4", ".sph", speakers=3)
    learners = {f"{n:03d}-{k}": f"{n:03d}" for n in range(30) for k in range(2)}
    files = {name: write_audio(root / "speechocean762" / "audio" / f"{name}.wav") for name in learners}
    folder = root / "speechocean762" / "train"
    write_text(folder / "wav.scp", *(f"{name} {file}" for name, file in files.items()))
    write_text(folder / "text", *(f"{name} WE CALL IT BEAR" for name in learners))
    write_text(folder / "utt2spk", *(f"{name} {speaker}" for name, speaker in learners.items()))
    readings = [write_audio(root / "ljspeech_part" / f"LJ{n:03d}.wav") for n in range(70)]
    write_manifest(
        root / "ljspeech_part" / "manifest.jsonl", [Utterance(f, 1.0, "Printing,", speaker="LJ") for f in readings]
    )
    return root


def test_no_utterance_and_no_learner_is_in_two_parts(tmp_path: Path) -> None:
    root = corpora(tmp_path / "english")
    parts = {part: read_manifest(path) for part, path in prepare("english", root, tmp_path / "work").items()}
    sizes = {part: len(utterances) for part, utterances in parts.items()}
    assert sizes == {"train": 2 + 10 + 10 + 3, "dev": 2, "librispeech": 2, "an4": 3, "learners": 50, "ljspeech": 60}
    files = [u.audio_filepath for utterances in parts.values() for u in utterances]
    assert len(set(files)) == len(files)
    assert not {u.speaker for u in parts["learners"]} & {u.speaker for u in parts["train"]}
    assert {u.audio_filepath.parts[-4] for u in parts["dev"]} == {"train-clean-100-part"}
    assert [u.audio_filepath.stem for u in parts["ljspeech"]] == [f"LJ{n:03d}" for n in range(10, 70)]
    again = {part: read_manifest(path) for part, path in prepare("english", root, tmp_path / "again").items()}
    assert [u.audio_filepath for u in again["learners"]] == [u.audio_filepath for u in parts["learners"]]
