"""Texts are regular files or standard input, their lines are bounded, and errors name file and line."""

from __future__ import annotations

import gzip
import io
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ds2.commands.wer import read_texts
from ds2.data.corpora import import_corpus
from ds2.data.manifest import read_manifest
from ds2.lm.sentences import SentenceReader
from ds2.system import UserError
from ds2.system.files import MAX_LINE_BYTES, read_byte_lines, read_bytes, read_lines, read_log

READERS: dict[str, Callable[[Path], object]] = {
    "lines": lambda path: list(read_lines(path)),
    "manifest": read_manifest,
    "references": lambda path: read_texts(path, ids=False, hypotheses=False),
    "csv": lambda path: import_corpus("csv", path),
    "deepspeech.pytorch": lambda path: import_corpus("deepspeech_pytorch", path),
    "language model text": lambda path: list(SentenceReader([path])),
}


@pytest.mark.parametrize("reader", READERS)
def test_pipes_devices_and_folders_are_refused_at_once(tmp_path: Path, reader: str) -> None:
    fifo = tmp_path / "a.txt"
    os.mkfifo(fifo)
    for path in (fifo, Path("/dev/zero")):
        with pytest.raises(UserError, match=rf"{path}: is a pipe or device.* give a regular file, or - for standard"):
            READERS[reader](path)


def test_a_pipe_in_a_corpus_folder_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.txt")
    with pytest.raises(Exception, match=r"a\.txt: is a pipe or device"):
        import_corpus("folder", tmp_path)


def test_standard_input_is_named_by_a_dash(monkeypatch: pytest.MonkeyPatch) -> None:
    line = b'{"audio_filepath": "/a.wav", "duration": 1, "text": "one"}\n'
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(line)))
    assert [u.text for u in read_manifest("-")] == ["one"]


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_a_line_has_a_greatest_length(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    path = tmp_path / ("a.gz" if pack is gzip.compress else "a")
    path.write_bytes(pack(b"x\n" + b"a" * (MAX_LINE_BYTES - 1) + b"\n"))
    assert [len(line) for _, line in read_byte_lines(path)] == [1, MAX_LINE_BYTES - 1]
    path.write_bytes(pack(b"x\n" + b"a" * (MAX_LINE_BYTES + 1)))
    with pytest.raises(UserError, match=r":2: is longer than 16 MiB"):
        list(read_byte_lines(path))


def test_a_small_file_has_a_greatest_size(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    assert read_bytes(tmp_path / "a", max_bytes=5) == b"12345"
    with pytest.raises(UserError, match="longer than 4 bytes"):
        read_bytes(tmp_path / "a", max_bytes=4)


def test_marks_and_ends_of_lines(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"\xef\xbb\xbfone\r\n\ntwo")
    assert list(read_lines(tmp_path / "a")) == [(1, "one\r"), (2, ""), (3, "two")]
    (tmp_path / "a").write_bytes("one\n".encode("utf-16"))
    with pytest.raises(UserError, match="a:1: is not UTF-8 but UTF-16"):
        list(read_lines(tmp_path / "a"))
    (tmp_path / "a").write_bytes(b"one\ntw\xff")
    with pytest.raises(UserError, match="a:2: byte 3 is not UTF-8"):
        list(read_lines(tmp_path / "a"))


def test_a_log_is_read_without_what_a_kill_cut_off(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    assert read_log(log) == []
    log.write_bytes(b'{"step": 1}\n[1]\n{"step": 2}\n{"step": \xff')
    assert read_log(log) == [{"step": 1}, {"step": 2}]
