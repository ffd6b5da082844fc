"""ARPA files: round trips, the habits of other tools, and broken files named by line."""

from __future__ import annotations

import errno
import gzip
import lzma
import math
import os
import subprocess
from pathlib import Path

import pytest
import torch
from support.lm_cases import zipf_text

from ds2.lm import files as lm_files
from ds2.lm.files import arpa_file, load_ngram, read_arpa, write_arpa
from ds2.lm.kneser_ney import estimate
from ds2.lm.ngram import TENSORS, LanguageModelError, NGram, to_levels
from ds2.system import UserError, files
from ds2.system.files import cache_dir

SMALL = """\
made by hand

\\data\\
ngram 1=5
ngram 2=3
ngram 3=2

\\1-grams:
-99\t<s>\t-0.5
-1.0\t</s>
-0.7\ta\t-0.2
-0.8\tb\t-0.3
-2.0\t<UNK>

\\2-grams:
-0.4\t<s> a\t-0.1
-0.6\ta b\t-0.25
-0.9\tb b\t0

\\3-grams:
-0.3\t<s> a b
-0.2\ta b <UNK>

\\end\\
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "m.arpa"
    path.write_text(text)
    return path


def log10(path: Path, sentence: str) -> list[float]:
    return [score / math.log(10) for score in read_arpa(path).sentence(sentence.split())]


def test_a_written_model_reads_back(tmp_path: Path) -> None:
    for order in (1, 3):
        model = estimate(zipf_text(), order, (0, 0, 1)[:order]).model
        write_arpa(model, tmp_path / "m.arpa")
        back = read_arpa(tmp_path / "m.arpa")
        assert back.vocabulary == model.vocabulary
        for found, wanted in zip(to_levels(back), to_levels(model), strict=True):
            assert (found.prefix == wanted.prefix).all() and (found.word == wanted.word).all()
            torch.testing.assert_close(torch.from_numpy(found.log_prob), torch.from_numpy(wanted.log_prob))
            torch.testing.assert_close(torch.from_numpy(found.backoff), torch.from_numpy(wanted.backoff))
    assert [path.name for path in tmp_path.iterdir()] == ["m.arpa"]


def test_hand_worked_back_offs(tmp_path: Path) -> None:
    path = write(tmp_path, SMALL)
    # <s> a b | then c is <unk> after "a b" | </s> after <unk>: no history
    assert log10(path, "a b c") == pytest.approx([-0.4, -0.3, -0.2, -1.0], abs=1e-6)
    # b after <s>: back off <s> | "b b" | a after "b b": weights of "b b" and b | </s>: of a
    assert log10(path, "b b a") == pytest.approx([-0.5 - 0.8, -0.9, 0.0 - 0.3 - 0.7, -0.2 - 1.0], abs=1e-6)


def test_habits_of_other_tools(tmp_path: Path) -> None:
    (tmp_path / "m.gz").write_bytes(gzip.compress(SMALL.encode()))
    spaces = write(tmp_path, SMALL.replace("\t", " "))
    packed = load_ngram(spaces)
    assert packed.sentence(["a", "b"]) == read_arpa(tmp_path / "m.gz").sentence(["a", "b"])
    unknown_free = SMALL.replace("1=5", "1=4").replace("-2.0\t<UNK>\n", "").replace("a b <UNK>", "a b b")
    assert log10(write(tmp_path, unknown_free), "z")[0] == pytest.approx(-100.5, abs=1e-4)
    no_suffix = SMALL.replace("2=3", "2=2").replace("-0.6\ta b\t-0.25\n", "").replace("-0.2\ta b <UNK>", "-0.2\tb b a")
    assert log10(write(tmp_path, no_suffix), "a b a") == pytest.approx([-0.4, -0.3, -0.3 - 0.7, -0.2 - 1.0], abs=1e-6)
    never = write(tmp_path, SMALL.replace("-99\t<s>", "-inf\t<s>"))
    assert log10(never, "a")[0] == pytest.approx(-0.4, abs=1e-6)


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        ("\\end\\\n", "", r":22: the file ends where \\end\\ is expected: it is truncated"),
        ("-0.2\ta b <UNK>\n\n\\end\\\n", "", ":21: the file ends 1 or more 3-grams early"),
        ("3=2", "3=3", r"m.arpa:24: .* is no 3-gram: 1 fields instead of 4"),
        ("3=2", "3=1", r":22: .* instead of \\end\\: "),
        ("2=3", "2=0", "an order is empty"),
        ("ngram 2=3\n", "", "is not 'ngram 2=COUNT'"),
        ("-0.6\ta b", "-0.x\ta b", "m.arpa:17: '-0.x a b -0.25' is no 2-gram: could not convert"),
        ("-0.6\ta b", "-0.6\ta", ":17: .*-0.25 is not among the unigrams"),
        ("-0.6\ta b", "-0.6\ta q", ":17: .*q is not among the unigrams"),
        ("-0.6\ta b", "0.6\ta b", "log-prob above 0"),
        ("-0.6\ta b", "nan\ta b", "not finite"),
        ("-0.6\ta b", "-1e300\ta b", "beyond"),
        ("-0.6\ta b", "-0.6\t<s> a", "listed twice"),
        ("-0.8\tb", "-0.8\ta", "a is listed twice"),
        ("-0.2\ta b <UNK>", "-0.2\tb a b", "the prefix of 'b a b' is not listed"),
        ("-1.0\t</s>", "-1.0\tc", "no unigram </s>"),
        ("\\data\\", "data", r"the file ends where \\data\\ is expected"),
    ],
)
def test_broken_files_are_named(old: str, new: str, match: str, tmp_path: Path) -> None:
    assert old in SMALL
    with pytest.raises(LanguageModelError, match=match):
        read_arpa(write(tmp_path, SMALL.replace(old, new, 1)))


@pytest.mark.parametrize("count", ["99999999999", "100", "9" * 5000, "\u00b2"])
@pytest.mark.parametrize("packed", [False, True])
def test_a_count_that_the_file_cannot_hold_is_refused(count: str, packed: bool, tmp_path: Path) -> None:
    text = SMALL.replace("ngram 1=5", f"ngram 1={count}")
    path = write(tmp_path, text)
    if packed:
        path = tmp_path / "m.arpa.gz"
        path.write_bytes(gzip.compress(text.encode()))
    with pytest.raises(LanguageModelError, match=r"m\.arpa.*:\d+: .*(1=COUNT|the file has|is no 1-gram)"):
        load_ngram(path)


def test_wrong_encodings_and_folders_are_named(tmp_path: Path) -> None:
    path = tmp_path / "m.arpa"
    path.write_bytes(SMALL.replace("b", "\u00e9").encode("latin-1"))
    with pytest.raises(UserError, match=r"m\.arpa:\d+: byte \d+ is not UTF-8"):
        read_arpa(path)
    with pytest.raises(LanguageModelError, match="could not be written"):
        write_arpa(estimate([["a"]], 1).model, path / "under" / "a.arpa")


def test_a_byte_order_mark_and_blank_lines_change_nothing(tmp_path: Path) -> None:
    model = estimate(zipf_text(), 3).model
    write_arpa(model, tmp_path / "plain.arpa")
    text = (tmp_path / "plain.arpa").read_text()
    blanks = text.replace("-grams:\n", "-grams: \n\n").replace("\n-1", "\n \t\n-1", 3)
    (tmp_path / "blanks.arpa").write_text("\ufeff\r\n" + blanks)
    a, b = read_arpa(tmp_path / "plain.arpa"), read_arpa(tmp_path / "blanks.arpa")
    assert all(torch.equal(getattr(a, name), getattr(b, name)) for name in TENSORS)
    with arpa_file(b, str(tmp_path / "blanks.arpa")) as taken:  # KenLM takes a mark for text
        assert not taken.read_bytes().startswith(b"\xef\xbb\xbf")
    (tmp_path / "words.arpa").write_text(f"made by hand\n{text}")  # nor words before the first section
    with arpa_file(read_arpa(tmp_path / "words.arpa"), str(tmp_path / "words.arpa")) as taken:
        assert taken.read_bytes().lstrip().startswith(b"\\data\\")
    lines = blanks.splitlines()
    wrong = next(number for number, line in enumerate(lines) if line.count("\t") == 2 and line.strip())
    lines[wrong] = "x" + lines[wrong]
    (tmp_path / "wrong.arpa").write_text("\n".join(lines))
    with pytest.raises(LanguageModelError, match=rf"wrong\.arpa:{wrong + 1}: "):
        read_arpa(tmp_path / "wrong.arpa")


def model(*words: str) -> NGram:
    return estimate([list(words), list(words[::-1])], 2).model


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == lm_files.__name__]


def convert(lm: NGram) -> Path:
    with arpa_file(lm, "model.lm") as path:
        assert read_arpa(path).vocabulary == lm.vocabulary
    return path


def test_an_equal_model_is_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    first, other = convert(model("a", "b")), convert(model("a", "c"))
    assert first != other and first.parent == other.parent == cache_dir() / "arpa"
    monkeypatch.setattr(lm_files, "write_arpa", None)
    assert convert(model("a", "b")) == first


@pytest.mark.parametrize("name", ["words.arpa", "words.arpa.gz"])
def test_an_arpa_file_needs_no_copy(name: str, tmp_path: Path) -> None:
    write_arpa(model("a"), tmp_path / name)
    with arpa_file(model("a"), str(tmp_path / name)) as path:
        assert path == tmp_path / name
    assert not cache_dir().exists()


@pytest.mark.parametrize("name", ["words.arpa.gz", "words.arpa.xz"])
@pytest.mark.parametrize("head", ["", "\ufeff", "made by hand\n"])
def test_a_compressed_arpa_file_that_kenlm_cannot_read_is_copied(name: str, head: str, tmp_path: Path) -> None:
    write_arpa(model("a"), tmp_path / "plain.arpa")
    text = head + (tmp_path / "plain.arpa").read_text(encoding="utf-8")
    (tmp_path / name).write_bytes({".gz": gzip, ".xz": lzma}[Path(name).suffix].compress(text.encode()))
    with arpa_file(read_arpa(tmp_path / name), str(tmp_path / name)) as path:
        taken_as_it_is = name.endswith(".gz") and not head
        assert (path == tmp_path / name) == taken_as_it_is
        assert taken_as_it_is or path.read_bytes().startswith(b"\\data\\")


def test_the_least_recently_used_files_are_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    models = [model("a", letter) for letter in "bcd"]
    first, second = (convert(lm) for lm in models[:2])
    with subprocess.Popen(["true"]) as killed:
        left_by_a_kill = first.with_name(f".killed.arpa.{files.host_id()}.{killed.pid}.{'0' * 16}.partial")
    left_by_a_kill.mkdir()
    for age, path in enumerate((first, second)):
        os.utime(path, (age, age))
    assert convert(models[0]) == first  # used again
    monkeypatch.setattr(lm_files, "CACHE_LIMIT_BYTES", 2 * first.stat().st_size)
    third = convert(models[2])
    assert set(third.parent.iterdir()) == {first, third}
    monkeypatch.setattr(lm_files, "CACHE_LIMIT_BYTES", 1)
    assert convert(models[1]).exists()
    assert list(third.parent.iterdir()) == [second]


def test_a_full_disk_gives_a_warning_and_a_temporary_file(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(lm: NGram, path: Path) -> None:
        if cache_dir() in path.parents:
            raise LanguageModelError(f"{path} could not be written: {os.strerror(errno.ENOSPC)}")
        write_arpa(lm, path)

    monkeypatch.setattr(lm_files, "write_arpa", full)
    path = convert(model("a", "b"))
    assert not path.exists() and cache_dir() not in path.parents
    [line] = warnings_of(caplog)
    assert "No space left" in line and "DS2_CACHE_DIR" in line


def test_a_cache_folder_that_cannot_be_created_gives_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    cache_dir().write_text("not a folder")
    assert not convert(model("a", "b")).exists()
    [line] = warnings_of(caplog)
    assert str(cache_dir()) in line


def test_errors_inside_the_block_are_not_changed() -> None:
    with pytest.raises(OSError, match="of KenLM"), arpa_file(model("a", "b"), ""):
        raise OSError("of KenLM")
