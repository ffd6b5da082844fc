"""AN4's own layout: its parts, lists that disagree, and the official split."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.corpora_cases import facts, write_audio, write_text
from support.paths import REAL_DATA

from ds2.data.corpora import (
    ImporterError,
    import_an4,
    prepare,
)
from ds2.data.manifest import read_manifest


def an4(folder: Path, suffix: str, speakers: int = 40) -> Path:
    ids = [f"an{n}-s{n:02d}-b" for n in range(speakers)]
    for part, clips in (("train", "an4_clstk"), ("test", "an4test_clstk")):
        fileids = [f"{clips}/s{n:02d}/{name}" for n, name in enumerate(ids)]
        for fileid in fileids:
            write_audio(folder / "wav" / f"{fileid}{suffix}")
        marks = ("<s> ", " </s>") if part == "train" else ("", "")
        write_text(folder / "etc" / f"an4_{part}.fileids", *fileids)
        lines = [f"{marks[0]}GO {n}{marks[1]} ({name})" for n, name in enumerate(ids)]
        write_text(folder / "etc" / f"an4_{part}.transcription", *lines)
    return folder


@pytest.mark.parametrize("folder", ["", "missing", "other"])
def test_the_message_of_a_missing_corpus_says_where_to_get_it(folder: str, tmp_path: Path) -> None:
    (tmp_path / "other" / "wav").mkdir(parents=True)
    with pytest.raises(ImporterError, match=r"To get .*https://\S+/an4_sphere\.tar\.gz && tar xzf an4_sphere\.tar\.gz"):
        prepare("an4", tmp_path / folder if folder else "", tmp_path / "work")
    with pytest.raises(ImporterError, match=r"To get it: https://www\.openslr\.org/12.* https://www\.openslr\.org/31"):
        prepare("librispeech_5h", tmp_path / "missing", tmp_path / "work")


@pytest.mark.parametrize("suffix", [".sph", ".opus"])
def test_an4(tmp_path: Path, suffix: str) -> None:
    an4(tmp_path, suffix, speakers=2)
    for split in ("train", "test"):
        read = facts(import_an4(tmp_path, split))
        assert read == [(f"an{n}-s{n:02d}-b{suffix}", 1.0, f"GO {n}", f"s{n:02d}") for n in range(2)]


def test_an4_lists_that_disagree_are_refused(tmp_path: Path) -> None:
    an4(tmp_path, ".sph", speakers=2)
    fileids = tmp_path / "etc" / "an4_test.fileids"
    lines = fileids.read_text().splitlines()
    write_text(fileids, lines[0])
    with pytest.raises(
        ImporterError, match=r"transcription:2: 1 transcriptions are not in an4_test\.fileids: an1-s01-b"
    ):
        import_an4(tmp_path, "test")
    write_text(fileids, *lines, "an4test_clstk/x/new")
    with pytest.raises(ImporterError, match=r"fileids:3: new has no line in an4_test\.transcription"):
        import_an4(tmp_path, "test")


def test_prepare_an4_holds_out_whole_speakers_and_keeps_the_official_test_part(tmp_path: Path) -> None:
    written = prepare("an4", an4(tmp_path / "an4", ".sph"), tmp_path / "work")
    splits = {part: read_manifest(path) for part, path in written.items()}
    assert {part: len(utterances) for part, utterances in splits.items()} == {"train": 38, "dev": 2, "test": 40}
    assert not {u.speaker for u in splits["train"]} & {u.speaker for u in splits["dev"]}
    again = prepare("an4", tmp_path / "an4", tmp_path / "again")
    assert all(facts(read_manifest(again[part])) == facts(splits[part]) for part in splits)


@pytest.mark.skipif(not (REAL_DATA / "an4").is_dir(), reason="no copy of AN4 beside the checkout")
def test_real_an4_has_its_official_parts(tmp_path: Path) -> None:
    test = import_an4(REAL_DATA / "an4", "test")
    assert len(test) == 130 and len({u.speaker for u in test}) == 10
    assert sum(len(u.text.split()) for u in test) == 773
    assert len(import_an4(REAL_DATA / "an4", "train")) == 948
