"""ARPA files of binary models: written once, within a limit, and temporary where they cannot be kept."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path

import pytest

from ds2.lm import arpa_cache
from ds2.lm.arpa import read_arpa, write_arpa
from ds2.lm.arpa_cache import arpa_file
from ds2.lm.kneser_ney import estimate
from ds2.lm.ngram import LanguageModelError, NGram
from ds2.system import files
from ds2.system.files import cache_dir


def model(*words: str) -> NGram:
    return estimate([list(words), list(words[::-1])], 2).model


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == arpa_cache.__name__]


def convert(lm: NGram) -> Path:
    with arpa_file(lm, "model.lm") as path:
        assert read_arpa(path).vocabulary == lm.vocabulary
    return path


def test_an_equal_model_is_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    first, other = convert(model("a", "b")), convert(model("a", "c"))
    assert first != other and first.parent == other.parent == cache_dir() / "arpa"
    monkeypatch.setattr(arpa_cache, "write_arpa", None)
    assert convert(model("a", "b")) == first


def test_an_arpa_file_is_taken_as_it_is(tmp_path: Path) -> None:
    given = str(tmp_path / "words.arpa.gz")
    with arpa_file(model("a"), given) as path:
        assert str(path) == given
    assert not cache_dir().exists()


def test_the_least_recently_used_go(monkeypatch: pytest.MonkeyPatch) -> None:
    models = [model("a", letter) for letter in "bcd"]
    first, second = (convert(lm) for lm in models[:2])
    with subprocess.Popen(["true"]) as killed:
        left_by_a_kill = first.with_name(f".killed.arpa.{files._host()}.{killed.pid}.{'0' * 16}.partial")
    left_by_a_kill.mkdir()
    for age, path in enumerate((first, second)):
        os.utime(path, (age, age))
    assert convert(models[0]) == first  # used again
    monkeypatch.setattr(arpa_cache, "_KEPT_BYTES", 2 * first.stat().st_size)
    third = convert(models[2])
    assert set(third.parent.iterdir()) == {first, third}
    monkeypatch.setattr(arpa_cache, "_KEPT_BYTES", 1)
    assert convert(models[1]).exists()
    assert list(third.parent.iterdir()) == [second]


def test_a_full_disk_costs_one_line_and_a_temporary_file(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(lm: NGram, path: Path) -> None:
        if cache_dir() in path.parents:
            raise LanguageModelError(f"{path} could not be written: {os.strerror(errno.ENOSPC)}")
        write_arpa(lm, path)

    monkeypatch.setattr(arpa_cache, "write_arpa", full)
    path = convert(model("a", "b"))
    assert not path.exists() and cache_dir() not in path.parents
    [line] = said(caplog)
    assert "No space left" in line and "DS2_CACHE_DIR" in line


def test_a_folder_that_cannot_be_made_costs_the_same(caplog: pytest.LogCaptureFixture) -> None:
    cache_dir().write_text("not a folder")
    assert not convert(model("a", "b")).exists()
    [line] = said(caplog)
    assert str(cache_dir()) in line


def test_errors_of_the_decoder_are_its_own() -> None:
    with pytest.raises(OSError, match="of KenLM"), arpa_file(model("a", "b"), ""):
        raise OSError("of KenLM")
