"""Kaldi data folders, in and out; nothing in them is executed."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from support.corpora_cases import facts, write_audio, write_text

from ds2.data.corpora.common import ImporterError
from ds2.data.corpora.kaldi import export_kaldi, import_kaldi
from ds2.data.manifest import Utterance


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


@pytest.mark.parametrize(
    "audio, segment, reason",
    [
        ("sph2pipe -f wav -p -c 2 a.sph |", "", r"wav\.scp:1: -c in .* takes a channel or a part of the file"),
        ("ffmpeg -ss 3 -i a.wav -f wav - |", "", r"wav\.scp:1: -ss in .* takes a channel"),
        ("flac -c -d -s --skip=100 a.flac |", "", r"wav\.scp:1: --skip=100 in .* takes a channel"),
        ("a.wav", "a a 0 1 B", r"segments:1: the segment is of channel B: ds2 reads whole files"),
    ],
)
def test_kaldi_channels_and_parts_of_files_are_refused(tmp_path: Path, audio: str, segment: str, reason: str) -> None:
    write_audio(tmp_path / "a.wav")
    write_text(tmp_path / "wav.scp", f"a {audio}")
    write_text(tmp_path / "text", "a ONE")
    if segment:
        write_text(tmp_path / "segments", segment)
    with pytest.raises(ImporterError, match=reason):
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


def test_export_to_kaldi_ends_an_utterance_before_its_file(tmp_path: Path) -> None:
    paths = [write_audio(tmp_path / name, 2.0) for name in ("a.wav", "b.wav")]
    for name, last_s in (("parts", 1.5), ("whole", 1.95)):  # as manifests round
        utterances = [Utterance(path, duration_s, "A") for path, duration_s in zip(paths, (2.0, last_s), strict=True)]
        export_kaldi(utterances, tmp_path / name)
        assert (tmp_path / name / "segments").is_file() == (name == "parts")
    assert [u.duration_s for u in import_kaldi(tmp_path / "parts")] == [2.0, 1.5]


def test_export_to_kaldi_keeps_speakers_apart(tmp_path: Path) -> None:
    speakers = ["a b", "a_b", "a\tb", " ", "a b"]
    utterances = [Utterance(tmp_path / f"{n}.wav", 1.0, "A", speaker=speaker) for n, speaker in enumerate(speakers)]
    export_kaldi(utterances, tmp_path / "data")
    lines = (tmp_path / "data" / "utt2spk").read_text().splitlines()
    assert lines == ["3 3", "a_b-0 a_b", "a_b-2-1 a_b-2", "a_b-3-2 a_b-3", "a_b-4 a_b"]


@pytest.mark.parametrize(
    ("name", "message"),
    [("a\nb.wav", "has a line break"), ("0.tar/a.flac", "export the manifest that it was made from")],
)
def test_export_to_kaldi_refuses_what_it_cannot_name(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(ImporterError, match=message):
        export_kaldi([Utterance(tmp_path / name, 1.0, "a")], tmp_path / "kaldi")
