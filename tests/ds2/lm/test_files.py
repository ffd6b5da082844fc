"""Compressed language models: what is rounded, the expanded copy in the cache folder, damaged files."""

from __future__ import annotations

import gzip
import json
import lzma
import os
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from support.lm_cases import zipf_text

from ds2.cli import main
from ds2.lm.files import arpa_file, load_ngram, save_ngram, write_arpa
from ds2.lm.kneser_ney import estimate
from ds2.lm.ngram import LanguageModelError, NGram
from ds2.system.files import cache_dir

ROUNDING = 1 / 32  # half a step


def make_model(order: int = 3) -> NGram:
    return estimate(zipf_text(), order, (0, 0, 1)[:order]).model


def cached_files() -> list[Path]:
    return sorted((cache_dir() / "lm").glob("*"))


@pytest.mark.parametrize("order", [1, 2, 4])
def test_a_compressed_model_is_the_model_with_rounded_numbers(order: int, tmp_path: Path) -> None:
    model = make_model(order)
    save_ngram(model, tmp_path / "m.lm.xz")
    for _ in range(2):  # the second one reads the copy
        loaded = load_ngram(tmp_path / "m.lm.xz").check()
        assert loaded.vocabulary == model.vocabulary and loaded.unit == model.unit
        assert torch.equal(loaded.keys, model.keys)
        assert torch.equal(loaded.next_state, model.next_state) and torch.equal(loaded.suffix, model.suffix)
        assert (loaded.log_prob - model.log_prob).abs().max() <= ROUNDING * (1 + 1e-6)
        assert (loaded.backoff - model.backoff).abs().max() <= ROUNDING * (1 + 1e-6)
        assert torch.equal(loaded.log_prob * 16, (loaded.log_prob * 16).round())


def test_it_is_expanded_once_and_a_damaged_copy_is_made_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    save_ngram(make_model(), tmp_path / "m.lm.xz")
    expected = load_ngram(tmp_path / "m.lm.xz")
    (copy,) = cached_files()
    os.utime(copy, (1, 1))
    load_ngram(tmp_path / "m.lm.xz")
    assert caplog.text.count("expanding") == 1 and copy.stat().st_mtime > 1  # the oldest copies are deleted first
    copy.write_bytes(copy.read_bytes()[:-8])
    again = load_ngram(tmp_path / "m.lm.xz")
    assert caplog.text.count("expanding") == 2 and "it is made anew" in caplog.text
    assert torch.equal(again.log_prob, expected.log_prob) and cached_files() == [copy]
    save_ngram(make_model(2), tmp_path / "m.lm.xz")
    assert load_ngram(tmp_path / "m.lm.xz").order == 2 and len(cached_files()) == 2  # another file of that name


def test_a_cache_that_cannot_be_written_gives_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save_ngram(make_model(), tmp_path / "m.lm.xz")
    (tmp_path / "file").touch()
    monkeypatch.setenv("DS2_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert load_ngram(tmp_path / "m.lm.xz").order == 3
    assert "expanded at every start: set DS2_CACHE_DIR" in caplog.text
    monkeypatch.delenv("DS2_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", Mock(side_effect=RuntimeError))  # as of a user without a folder
    assert load_ngram(tmp_path / "m.lm.xz").order == 3
    assert "there is no cache folder" in caplog.text


def test_damaged_compressed_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "m.lm.xz"
    save_ngram(make_model(), path)
    whole = path.read_bytes()
    header, _, columns = lzma.decompress(whole).partition(b"\n")
    fields = json.loads(header)

    def packed(**changes: object) -> bytes:
        return lzma.compress(json.dumps({**fields, **changes}).encode() + b"\n" + columns)

    sizes = fields["sizes"]
    cases = {
        "cut": whole[: len(whole) // 2],
        "flipped": whole[:200] + bytes([whole[200] ^ 1]) + whole[201:],
        "empty": b"",
        "text": b"hello\n",
        "no header": lzma.compress(b"hello\n"),
        "other kind": packed(kind="n-gram"),
        "newer": packed(format=2),
        "words": packed(vocabulary=fields["vocabulary"][1:]),
        "more n-grams": packed(sizes=[*sizes[:-1], sizes[-1] + 1]),
        "fewer n-grams": packed(sizes=[*sizes[:-1], sizes[-1] - 1]),
        "no n-grams": packed(sizes=[]),
        "more than the memory": packed(sizes=[sizes[0], 10**15, sizes[2]]),
        "a word twice": packed(vocabulary=fields["vocabulary"][:1] * sizes[0]),
        "unit": packed(unit="phrase"),
        "alphabet": packed(alphabet={"letters": "a"}),
        "negative": packed(sizes=[sizes[0], -sizes[1], sizes[2]]),
        "short": lzma.compress(header + b"\n" + columns[:-1]),
        "long": lzma.compress(header + b"\n" + columns + b"1"),
    }
    for name, content in cases.items():
        path.write_bytes(content)
        with pytest.raises(LanguageModelError, match=r"m\.lm\.xz is no compressed language model or is damaged: "):
            pytest.fail(f"{name} gave {load_ngram(path).check()}")
    assert not cached_files()


def test_what_a_file_holds_counts_not_its_name(tmp_path: Path) -> None:
    names = "m.lm", "m.lm.xz", "m.arpa"
    save_ngram(make_model(), tmp_path / names[0])
    save_ngram(make_model(), tmp_path / names[1])
    write_arpa(make_model(), tmp_path / names[2])
    binary, compressed, arpa = ((tmp_path / name).read_bytes() for name in names)
    packed = {"m.xz": lzma.compress(arpa), "m.gz": gzip.compress(arpa), "m.arpa.gz": gzip.compress(arpa)}
    for name, content in {**packed, "my.arpa.lm": binary, "renamed.lm": compressed, "a.XZ": compressed}.items():
        (tmp_path / name).write_bytes(content)
        assert load_ngram(tmp_path / name).check().order == 3
    with arpa_file(load_ngram(tmp_path / "my.arpa.lm"), str(tmp_path / "my.arpa.lm")) as path:
        assert path.read_bytes().startswith(b"\\data\\")


def test_numbers_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    model = make_model()
    with pytest.raises(LanguageModelError, match=r"m\.lm\.xz could not be written: .*: choose a name without \.xz"):
        save_ngram(replace(model, log_prob=model.log_prob - 3000), tmp_path / "m.lm.xz")
    assert not (tmp_path / "m.lm.xz").exists()


def test_commands_write_and_read_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    letters = str.maketrans("0123456789", "abcdefghij")
    text.write_text("".join(" ".join(line).translate(letters) + "\n" for line in zipf_text()))
    files = [str(tmp_path / name) for name in ("a.lm", "b.lm.xz", "c.lm.xz", "d.arpa")]
    assert main(["lm", "build", str(text), "--order", "3", "--output", files[0]]) == 0
    assert main(["lm", "build", str(text), "--order", "3", "--output", files[1]]) == 0
    assert main(["lm", "convert", files[0], files[2]]) == 0
    assert main(["lm", "convert", files[2], files[3]]) == 0
    assert Path(files[1]).read_bytes() == Path(files[2]).read_bytes()
    capsys.readouterr()
    perplexities = []
    for file in files:
        assert main(["lm", "ppl", file, str(text)]) == 0
        perplexities.append(float(capsys.readouterr().out.split("perplexity ")[1].split()[0]))
    # An n-gram of order 3 adds at most two back-offs and a log-prob, each with an error of half a step.
    assert max(perplexities) <= min(perplexities) * 2.718281828 ** (2 * 3 * ROUNDING)
    assert perplexities[1] == perplexities[2] == perplexities[3]


@pytest.mark.parametrize("suffix", [".arpa", ".arpa.gz", ".arpa.xz"])
def test_an_arpa_file_is_compressed_as_its_name_says(
    suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_ngram(make_model(), tmp_path / "m.lm")
    (tmp_path / "text").write_text("a b\nb a\n", encoding="utf-8")
    built, converted = (str(tmp_path / f"{name}{suffix}") for name in ("built", "converted"))
    assert main(["lm", "convert", str(tmp_path / "m.lm"), converted]) == 0
    assert main(["lm", "build", str(tmp_path / "text"), "--arpa", built, "--output", str(tmp_path / "t.lm")]) == 0
    for path in map(Path, (built, converted)):
        assert load_ngram(path).check().unit == "word"
        assert path.read_bytes().startswith({".gz": b"\x1f\x8b", ".xz": b"\xfd7zXZ"}.get(path.suffix, b"\\data\\"))
    assert main(["lm", "build", str(tmp_path / "text"), "--output", str(tmp_path / f"x{suffix}")]) == 2
    assert "this file is binary: call it" in capsys.readouterr().err
