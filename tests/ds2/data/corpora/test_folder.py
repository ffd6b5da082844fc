"""Recordings with transcripts beside them."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile

from ds2.data.corpora import ImporterError, import_corpus
from ds2.data.manifest import write_manifest
from ds2.system import UserError


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
    assert "1 recording without a transcript" in caplog.text and "untold.wav" in caplog.text


def test_transcripts_are_found_by_all_usual_names(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("a.wav", "b.wav", "e\u0301t.wav", "c.wav", "c.flac"):  # macOS writes é as two characters
        record(tmp_path / name, None)
    for name in ("a.wav.txt", "b.TXT", "\u00e9t.txt", "c.txt"):
        (tmp_path / name).write_text(name)
    with caplog.at_level(logging.WARNING):
        entries = import_corpus("folder", tmp_path)
    assert {u.text: u.audio_filepath.name for u in entries} == {
        "a.wav.txt": "a.wav", "b.TXT": "b.wav", "\u00e9t.txt": "e\u0301t.wav", "c.txt": "c.wav",
    }  # fmt: skip
    assert "without a transcript" not in caplog.text
    assert "left out: 1 recording of another one's name, such as" in caplog.text
    assert "c.flac" in caplog.text


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
    with pytest.raises(ImporterError, match=r"d\.txt: byte 1 is not UTF-8; name its encoding: --encoding"):
        import_corpus("folder", tmp_path)


def test_hidden_files_are_ignored(tmp_path: Path) -> None:
    record(tmp_path / "a.wav", "good")
    (tmp_path / "._a.txt").write_bytes(b"\x00\x05\x16\x07")  # as macOS writes next to each file of other disks
    (tmp_path / "._a.wav").write_bytes(b"\x00\x05\x16\x07")
    assert [u.text for u in import_corpus("folder", tmp_path)] == ["good"]


def test_linked_folders_are_read_once_also_where_a_link_leads_back(tmp_path: Path) -> None:
    root = tmp_path / "recordings"
    for folder in (root / "ali", tmp_path / "disk2" / "bea"):
        folder.mkdir(parents=True)
        record(folder / "1.wav", "hello")
    (root / "bea").symlink_to("../disk2/bea")
    (root / "ali" / "again").symlink_to(root)
    assert [(u.speaker, u.audio_filepath) for u in import_corpus("folder", root)] == [
        ("ali", root / "ali" / "1.wav"),
        ("bea", root / "bea" / "1.wav"),
    ]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may list everything")
def test_a_folder_that_cannot_be_listed_is_not_left_out(tmp_path: Path) -> None:
    record(tmp_path / "1.wav", "hello")
    (tmp_path / "bea").mkdir(mode=0)
    with pytest.raises(UserError, match="bea: Permission denied"):
        import_corpus("folder", tmp_path)


def encoded(folder: Path, *texts: tuple[str, str]) -> None:
    for number, (text, encoding) in enumerate(texts):
        record(folder / f"{number}.wav", None)
        (folder / f"{number}.txt").write_bytes(text.encode(encoding))


def test_unicode_and_western_texts_are_recognised_with_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    texts = ["größer", "Grüße", "“Füße” — 3 €", "schön\r\nheiß", "früh", "weiß"]
    encodings = ["utf-8-sig", "utf-16", "utf-16-be", "cp1252", "utf-16-le", "latin-1"]
    encoded(tmp_path, *zip(texts, encodings, strict=True))
    with caplog.at_level(logging.WARNING):
        utterances = import_corpus("folder", tmp_path)
    assert [u.text for u in utterances] == [" ".join(text.split("\r\n")) for text in texts]
    assert "read 1 transcript as utf-16, such as" in caplog.text
    assert "read 2 transcripts as cp1252, such as" in caplog.text and "'schön heiß'; this is a guess" in caplog.text


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        ("güneş doğdu", "cp1254"),
        ("příliš žluťoučký kůň", "cp1250"),
        ("zażółć gęślą jaźń", "cp1250"),
        ("привет, как дела", "cp1251"),
        ("привет, как дела", "koi8_r"),
        ("καλημέρα σας", "cp1253"),
        ("こんにちは", "cp932"),
        ("我有三只猫", "gb18030"),
    ],
)
def test_other_encodings_are_named_by_the_user(tmp_path: Path, text: str, encoding: str) -> None:
    encoded(tmp_path, (text, encoding), ("größer", "utf-8"))
    with pytest.raises(ImporterError, match=r"1 of 2(.|\n)*0\.txt: byte \d+ is not UTF-8; name its encoding"):
        import_corpus("folder", tmp_path)
    assert [u.text for u in import_corpus("folder", tmp_path, skip_bad=True)] == ["größer"]
    assert [u.text for u in import_corpus("folder", tmp_path, encoding=encoding)] == [text, "größer"]


def test_encodings_that_do_not_exist_or_fit_are_refused(tmp_path: Path) -> None:
    encoded(tmp_path, ("güneş", "cp1254"))
    with pytest.raises(ImporterError, match="--encoding 'turkish' is unknown; one of Python's"):
        import_corpus("folder", tmp_path, encoding="turkish")
    with pytest.raises(ImporterError, match="is not ascii; name its encoding"):
        import_corpus("folder", tmp_path, encoding="ascii")
    with pytest.raises(ImporterError, match=r"--encoding is for folder and deepspeech_pytorch; .* csv are UTF-8"):
        import_corpus("csv", tmp_path / "x.csv", encoding="cp1254")
    (tmp_path / "0.txt").write_bytes(b"a\0\0\0b")
    with pytest.raises(ImporterError, match="holds NUL characters"):
        import_corpus("folder", tmp_path)


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
    with pytest.raises(ImporterError, match=r"1 of 2(.|\n)*f\\udcfc.*is not UTF-8(.|\n)*rename.*or set PYTHONUTF8=1"):
        import_corpus("folder", tmp_path)
    utterances = import_corpus("folder", tmp_path, skip_bad=True)
    assert r"f\udcfc" in caplog.text.encode("utf-8").decode("utf-8")
    write_manifest(tmp_path / "manifest.jsonl", utterances)
    assert [u.text for u in utterances] == ["good"]
