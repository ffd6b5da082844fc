"""Tables of utterances: Common Voice, Coqui, deepspeech.pytorch."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from support.corpora_cases import facts, write_audio, write_text

from ds2.data.corpora import ImporterError
from ds2.data.corpora.layouts import import_csv, import_deepspeech_pytorch
from ds2.data.manifest import read_manifest, write_manifest


def test_common_voice_and_coqui(tmp_path: Path) -> None:
    write_audio(tmp_path / "clips" / "x.wav")
    header = "client_id\tpath\tsentence\tup_votes\tlocale"
    table = write_text(tmp_path / "train.tsv", header, 'c1\tx.mp3\t"Oh", he said\t2\ten')
    (read,) = import_csv(table)
    assert (read.text, read.speaker, read.lang, read.duration_s) == ('"Oh", he said', "c1", "en", 1.0)
    assert read.audio_filepath == tmp_path.resolve() / "clips" / "x.wav"
    assert read.source.endswith("train.tsv:2")
    table = write_text(tmp_path / "c.csv", "wav_filename,wav_filesize,transcript", 'clips/x.wav,32044,"one, two"')
    assert facts(import_csv(table)) == [("x.wav", 1.0, "one, two", "")]


def test_a_file_is_imported_once_and_columns_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("x.wav", "y.wav"):
        write_audio(tmp_path / name)
    table = write_text(tmp_path / "t.csv", "path,sentence,transcript", "x.wav,A,a", "y.wav,B,b", "x.wav,C,c")
    with pytest.raises(ImporterError, match=r"1 of 3 (.|\n)*t\.csv:4: .*x\.wav was listed before, at .*t\.csv:2"):
        import_csv(table)
    with caplog.at_level(logging.INFO):
        utterances = import_csv(table, skip_bad=True)
    assert [(u.audio_filepath.name, u.text) for u in utterances] == [("x.wav", "a"), ("y.wav", "b")]
    assert "columns path as audio, transcript as text; not used: sentence" in caplog.text
    write_manifest(tmp_path / "t.jsonl", utterances)
    assert len(read_manifest(tmp_path / "t.jsonl")) == 2


def test_what_is_no_table_is_named_with_the_way_out(tmp_path: Path) -> None:
    for name, said in (("empty", "this one holds none"), ("voice", "one of dev.tsv, train.tsv$")):
        (tmp_path / name).mkdir()
        for table in ("train.tsv", "dev.tsv") if name == "voice" else ():
            (tmp_path / name / table).touch()
        with pytest.raises(ImporterError, match=f"is a folder; give the table in it: .*{said}"):
            import_csv(tmp_path / name)
    manifest = write_text(tmp_path / "m.jsonl", '{"audio_filepath": "x.wav", "duration": 1.0, "text": "a, b"}')
    with pytest.raises(ImporterError, match=r"is a manifest .* needs no import"):
        import_csv(manifest)
    with pytest.raises(ImporterError, match="separated by semicolons"):
        import_csv(write_text(tmp_path / "t.csv", "path;text", "x.wav;a"))


@pytest.mark.parametrize(
    "lines, reason",
    [
        (["name,words", "a,b"], r"t\.csv:1: columns \['name', 'words'\] have none for audio"),
        (["path,sentence", "a,b,c"], r"t\.csv:2: 3 fields, the header has 2"),
        (["path,sentence", 'a,"b'], r"t\.csv:2: unexpected end of data"),
        (["path,sentence", "gone.wav,b"], r"t\.csv:2: no audio at .*gone\.wav, nor with another extension"),
        ([], "begins with no header"),
        (["path,start,text", "x.wav,1.5,a"], r"t\.csv:1: column 'start' gives a row a part of a file"),
    ],
)
def test_a_broken_table_is_named(tmp_path: Path, lines: list[str], reason: str) -> None:
    with pytest.raises(ImporterError, match=reason):
        import_csv(write_text(tmp_path / "t.csv", *lines))


def test_deepspeech_pytorch(tmp_path: Path) -> None:
    write_audio(tmp_path / "wav" / "x.wav")
    write_text(tmp_path / "txt" / "x.txt", "HELLO", "THERE")
    table = write_text(tmp_path / "m.csv", "wav/x.wav,txt/x.txt")
    sample = {"wav_path": "wav/x.wav", "transcript_path": "txt/x.txt"}
    stored = write_text(tmp_path / "m.json", json.dumps({"root_path": str(tmp_path), "samples": [sample]}))
    for path in (table, stored):
        assert facts(import_deepspeech_pytorch(path)) == [("x.wav", 1.0, "HELLO THERE", "")]
    write_text(tmp_path / "m.csv", "wav/x.wav,txt/x.txt", "wav/x.wav,txt/gone.txt")
    with pytest.raises(ImporterError, match=r"m\.csv:2: transcript .*gone\.txt: No such file"):
        import_deepspeech_pytorch(table)
    with pytest.raises(ImporterError, match="expected root_path and samples"):
        import_deepspeech_pytorch(write_text(tmp_path / "n.json", "{}"))


@pytest.mark.parametrize("content", ["[" * 100_000, "1" * 5000, '{"root_path": 3, "samples": []}', "[]", ""])
def test_damaged_json_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "m.json").write_text(content)
    with pytest.raises(ImporterError, match="expected root_path and samples"):
        import_deepspeech_pytorch(tmp_path / "m.json")
