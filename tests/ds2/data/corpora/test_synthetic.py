"""The synthetic corpus: the same each time, of many voices."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ds2.data.corpora import (
    prepare,
)
from ds2.data.corpora.synthetic import WORDS, Voice, make_corpus, speak
from ds2.data.manifest import read_manifest


@pytest.fixture
def small_synthetic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ds2.data.corpora.synthetic.UTTERANCES", {"train": 6, "dev": 4, "test": 4})


@pytest.mark.usefixtures("small_synthetic")
def test_the_synthetic_corpus_is_the_same_each_time_and_no_speaker_is_in_two_parts(tmp_path: Path) -> None:
    written = prepare("synthetic", "", tmp_path)
    splits = {part: read_manifest(path) for part, path in written.items()}
    assert {part: len(utterances) for part, utterances in splits.items()} == {"train": 6, "dev": 4, "test": 4}
    speakers = [u.speaker for part in splits.values() for u in {u.speaker: u for u in part}.values()]
    assert len(speakers) == len(set(speakers))
    again = make_corpus(tmp_path / "again")
    for first, second in zip(splits["train"], again["train"], strict=True):
        assert first.audio_filepath.read_bytes() == second.audio_filepath.read_bytes()
        assert set(first.text.split()) <= set(WORDS)


def test_synthetic_speech_is_loud_but_not_clipped() -> None:
    rng = np.random.default_rng(3)
    for _ in range(3):
        waveform = speak(list(WORDS), Voice.draw(rng), rng)
        assert 0.15 < np.abs(waveform).max() < 0.9
