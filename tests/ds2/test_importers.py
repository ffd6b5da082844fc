"""Importers on small corpora in each layout, also with the audio transcoded; and on real ones where they lie beside."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import soundfile

from ds2.data.corpora import (
    FORMATS,
    ImporterError,
    export_kaldi,
    import_an4,
    import_corpus,
    import_csv,
    import_deepspeech_pytorch,
    import_kaldi,
    import_librispeech,
    prepare,
)
from ds2.data.corpora.synthetic import WORDS, Voice, make_corpus, speak
from ds2.data.manifest import Utterance, read_manifest

REAL = Path(__file__).resolve().parents[3] / "shared" / "data"


def write_audio(path: Path, seconds: float = 1.0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    subtype = "OPUS" if path.suffix == ".opus" else "PCM_16"
    container = {".opus": "OGG", ".sph": "NIST", ".wav": "WAV", ".flac": "FLAC"}[path.suffix]
    soundfile.write(path, np.full(int(16000 * seconds), 0.1), 16000, format=container, subtype=subtype)
    return path


def write_text(path: Path, *lines: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def facts(utterances: Iterable[Utterance]) -> list[tuple[str, float, str, str]]:
    return [(u.audio_filepath.name, round(u.duration_s, 3), u.text, u.speaker) for u in utterances]


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


def librispeech(folder: Path, *parts: str) -> Path:
    for reader, part in enumerate(parts, start=10):
        chapter = folder / part / str(reader) / "7"
        for number in range(2):
            write_audio(chapter / f"{reader}-7-000{number}.flac")
        write_text(chapter / f"{reader}-7.trans.txt", f"{reader}-7-0000 ONE", f"{reader}-7-0001 TWO")
    return folder


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


def test_kaldi_with_segments_pipes_and_transcoded_audio(tmp_path: Path) -> None:
    write_audio(tmp_path / "audio" / "rec1.opus", 4.0)
    write_audio(tmp_path / "audio" / "rec2.wav", 2.0)
    data = tmp_path / "data"
    write_text(data / "wav.scp", "rec1 flac -c -d -s audio/rec1.flac |", f"rec2 {tmp_path}/audio/rec2.wav")
    write_text(data / "segments", "a-1 rec1 0.5 2.0", "a-2 rec1 2.0 -1", "b-1 rec2 0 2")
    write_text(data / "text", "a-1 ONE", "a-2 TWO", "b-1")
    write_text(data / "utt2spk", "a-1 a", "a-2 a", "b-1 b-1")
    read = import_kaldi(data)
    assert facts(read) == [("rec1.opus", 1.5, "ONE", "a"), ("rec1.opus", 2.0, "TWO", "a"), ("rec2.wav", 2.0, "", "")]
    assert [u.offset_s for u in read] == [0.5, 2.0, 0.0]


def test_kaldi_executes_nothing(tmp_path: Path) -> None:
    write_text(tmp_path / "text", "a ONE")
    for command in ("touch pwned |", "sox a.wav -t wav - | cat b.wav |", "cat a.wav b.wav |", "flac 'a |"):
        write_text(tmp_path / "wav.scp", f"a {command}")
        with pytest.raises(ImporterError, match=r"wav\.scp:1: the command .* is not understood"):
            import_kaldi(tmp_path)


def test_kaldi_folders_that_disagree_are_named_or_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_audio(tmp_path / "a.wav")
    write_text(tmp_path / "wav.scp", "a a.wav", "c a.wav")
    write_text(tmp_path / "text", "a ONE", "b TWO")
    with pytest.raises(ImporterError, match="2 of 3 utterances cannot be imported"):
        import_kaldi(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert [u.text for u in import_kaldi(tmp_path, skip_bad=True)] == ["ONE"]
    assert "2 utterances left out" in caplog.text
    assert "text:2: recording b" in caplog.text and "wav.scp:2: c has no line in text" in caplog.text


def test_export_to_kaldi_comes_back(tmp_path: Path) -> None:
    opus, wav = write_audio(tmp_path / "my audio" / "r 1.opus", 4.0), write_audio(tmp_path / "r2.wav", 2.0)
    utterances = [
        Utterance(opus, 1.5, "ONE", 0.5, "z", "en"),
        Utterance(opus, 2.0, "TWO", 2.0, "z"),
        Utterance(wav, 2.0, "three  four", speaker="a"),
        Utterance(wav.with_name("r2.wav"), 1.0, "no speaker", 1.0),
    ]
    export_kaldi(utterances, tmp_path / "data")
    back = {
        (u.audio_filepath, u.offset_s, u.duration_s, u.text, u.speaker, u.lang) for u in import_kaldi(tmp_path / "data")
    }
    assert back == {
        (u.audio_filepath, u.offset_s, u.duration_s, " ".join(u.text.split()), u.speaker, u.lang) for u in utterances
    }
    for table in ("text", "utt2spk", "segments", "wav.scp", "spk2utt"):
        keys = [line.split()[0] for line in (tmp_path / "data" / table).read_text().splitlines()]
        assert keys == sorted(set(keys)), table
    speakers = [line.split() for line in (tmp_path / "data" / "utt2spk").read_text().splitlines()]
    assert all(name.startswith(speaker) for name, speaker in speakers)


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


@pytest.mark.parametrize(
    "lines, reason",
    [
        (["name,words", "a,b"], r"t\.csv:1: columns \['name', 'words'\] have none for audio"),
        (["path,sentence", "a,b,c"], r"t\.csv:2: 3 fields, the header has 2"),
        (["path,sentence", 'a,"b'], r"t\.csv:2: unexpected end of data"),
        (["path,sentence", "gone.wav,b"], r"t\.csv:2: no audio at .*gone\.wav nor under another extension"),
        ([], "columns"),
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


def test_unreadable_audio_is_named_and_left_out_only_on_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    librispeech(tmp_path, "dev-clean")
    (tmp_path / "dev-clean" / "10" / "7" / "10-7-0001.flac").write_bytes(b"")
    with pytest.raises(ImporterError, match=r"trans\.txt:2: .*10-7-0001\.flac: the file is empty"):
        import_librispeech(tmp_path)
    assert len(import_librispeech(tmp_path, skip_bad=True)) == 1
    assert "1 utterances left out" in caplog.text and "10-7-0001" in caplog.text


@pytest.mark.parametrize("format", FORMATS)
def test_a_missing_corpus_is_named(tmp_path: Path, format: str) -> None:
    with pytest.raises(ImporterError, match="nowhere"):
        import_corpus(format, tmp_path / "nowhere")


def test_wrong_names_list_the_right_ones(tmp_path: Path) -> None:
    with pytest.raises(ImporterError, match="one of librispeech, an4, kaldi"):
        import_corpus("timit", tmp_path)
    with pytest.raises(ImporterError, match="has no parts"):
        import_corpus("kaldi", tmp_path, "train")
    with pytest.raises(ImporterError, match="none of an4, librispeech, librispeech_5h, synthetic"):
        prepare("timit", tmp_path, tmp_path)


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


@pytest.mark.skipif(not (REAL / "an4").is_dir(), reason="no copy of AN4 beside the checkout")
def test_real_an4_has_its_official_parts(tmp_path: Path) -> None:
    test = import_an4(REAL / "an4", "test")
    assert len(test) == 130 and len({u.speaker for u in test}) == 10
    assert sum(len(u.text.split()) for u in test) == 773
    assert len(import_an4(REAL / "an4", "train")) == 948
