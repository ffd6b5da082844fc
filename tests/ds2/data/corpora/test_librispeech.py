"""LibriSpeech's layout: parts, readers, and audio that cannot be read."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.corpora_cases import facts, librispeech

from ds2.data.corpora import (
    ImporterError,
    import_librispeech,
    prepare,
)
from ds2.data.manifest import read_manifest


def test_librispeech(tmp_path: Path) -> None:
    librispeech(tmp_path, "train-clean-100", "dev-clean")
    expected = [("10-7-0000.flac", 1.0, "ONE", "10"), ("10-7-0001.flac", 1.0, "TWO", "10")]
    assert facts(import_librispeech(tmp_path, "train-clean-100")) == expected
    assert facts(import_librispeech(tmp_path / "train-clean-100")) == expected
    with pytest.raises(ImporterError, match=r"no part 'test-clean'; it has dev-clean, train-clean-100"):
        import_librispeech(tmp_path, "test-clean")


def test_prepare_librispeech_takes_every_training_part_and_names_what_is_missing(tmp_path: Path) -> None:
    librispeech(
        tmp_path, "dev-clean", "test-clean", "test-other", "train-clean-100", "train-other-500", "train-clean-5"
    )
    written = prepare("librispeech", tmp_path, tmp_path / "work")
    assert {part: len(read_manifest(path)) for part, path in written.items()} == {
        "train": 4,
        "dev": 2,
        "test": 2,
        "test_other": 2,
    }
    with pytest.raises(ImporterError, match=r"expected train-clean-5 and dev or dev-clean-2, found .*dev-clean"):
        prepare("librispeech_5h", tmp_path, tmp_path / "work")


def test_unreadable_audio_is_named_and_left_out_only_on_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    librispeech(tmp_path, "dev-clean")
    (tmp_path / "dev-clean" / "10" / "7" / "10-7-0001.flac").write_bytes(b"")
    with pytest.raises(ImporterError, match=r"trans\.txt:2: .*10-7-0001\.flac: the file is empty"):
        import_librispeech(tmp_path)
    assert len(import_librispeech(tmp_path, skip_bad=True)) == 1
    assert "1 utterance left out" in caplog.text and "10-7-0001" in caplog.text
