"""Recordings with transcripts beside them."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile

from ds2.data.corpora import ImporterError, import_corpus
from ds2.data.manifest import write_manifest


def record(path: Path, text: str | None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, np.full(8000, 0.1), 16000)
    if text is not None:
        path.with_suffix(".txt").write_text(text, encoding="utf-8")


def test_pairs_become_utterances_and_folders_speakers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    record(tmp_path / "ann" / "day 1" / "1.5.wav", "Grüße\n\nan alle\n")
    record(tmp_path / "bob" / "1.flac", "\ufeffhello")
    record(tmp_path / "alone.wav", "nobody")
    record(tmp_path / "bob" / "untold.wav", None)
    with caplog.at_level(logging.WARNING):
        found = import_corpus("folder", tmp_path)
    assert [(u.audio_filepath.name, u.text, u.speaker) for u in found] == [
        ("alone.wav", "nobody", ""), ("1.5.wav", "Grüße an alle", "ann"), ("1.flac", "hello", "bob"),
    ]  # fmt: skip
    assert "1 recordings without a transcript" in caplog.text and "untold.wav" in caplog.text


def test_what_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(ImporterError, match=r"holds no NAME\.txt"):
        import_corpus("folder", tmp_path)
    record(tmp_path / "a.wav", "  \n")
    (tmp_path / "b.txt").write_text("no audio")
    record(tmp_path / "c.wav", "good")
    with pytest.raises(ImporterError, match=r"2 of 3(.|\n)*a\.txt: the transcript is empty(.|\n)*b\.txt: no audio"):
        import_corpus("folder", tmp_path)
    assert [u.text for u in import_corpus("folder", tmp_path, skip_bad=True)] == ["good"]
    (tmp_path / "d.txt").write_bytes(b"\xff")
    with pytest.raises(ImporterError, match=r"d\.txt:1: byte 1 is not UTF-8"):
        import_corpus("folder", tmp_path)


def test_hidden_files_are_ignored_and_texts_that_are_not_utf_8_skipped(tmp_path: Path) -> None:
    record(tmp_path / "a.wav", "good")
    record(tmp_path / "b.wav", None)
    (tmp_path / "b.txt").write_bytes("größer".encode("latin-1"))
    record(tmp_path / "c.wav", None)
    (tmp_path / "c.txt").write_bytes("größer".encode("utf-16"))
    (tmp_path / "._a.txt").write_bytes(b"\x00\x05\x16\x07")  # as macOS writes next to each file of other disks
    (tmp_path / "._a.wav").write_bytes(b"\x00\x05\x16\x07")
    with pytest.raises(ImporterError, match=r"2 of 3(.|\n)*b\.txt:1: byte 3 is not UTF-8(.|\n)*c\.txt:1: .*UTF-16"):
        import_corpus("folder", tmp_path)
    assert [u.text for u in import_corpus("folder", tmp_path, skip_bad=True)] == ["good"]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such names")
@pytest.mark.parametrize("name", ["f\udcfc.wav", "f\udcfcr/1.wav"])
def test_names_that_are_not_utf_8_are_reported_since_no_manifest_can_hold_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    record(tmp_path / "a.wav", "good")
    record(tmp_path / "b.wav", "bad name")
    (tmp_path / name).parent.mkdir(exist_ok=True)
    for suffix in (".wav", ".txt"):
        (tmp_path / "b.wav").with_suffix(suffix).rename((tmp_path / name).with_suffix(suffix))
    with pytest.raises(ImporterError, match=r"1 of 2(.|\n)*f\\udcfc.*is not UTF-8(.|\n)*rename"):
        import_corpus("folder", tmp_path)
    utterances = import_corpus("folder", tmp_path, skip_bad=True)
    assert r"f\udcfc" in caplog.text.encode("utf-8").decode("utf-8")
    write_manifest(tmp_path / "manifest.jsonl", utterances)
    assert [u.text for u in utterances] == ["good"]
