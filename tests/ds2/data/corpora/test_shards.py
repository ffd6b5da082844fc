"""WebDatasets and Shar folders, laid out as webdataset 1.0.2 and lhotse 1.33.0 write them, are read where they lie."""

from __future__ import annotations

import gzip
import io
import json
import os
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from support.corpora_cases import facts

from ds2.audio.read import read_audio
from ds2.config.schema import DataConfig
from ds2.data.audio_cache import open_audio
from ds2.data.corpora import ImporterError, import_corpus
from ds2.data.manifest import Utterance, read_manifest, write_manifest
from ds2.data.shards import write_shards
from ds2.system import UserError

SECONDS = {"a": 0.5, "b": 0.6, "c": 0.7}


def sound(seconds: float, container: str = "FLAC") -> bytes:
    buffer = io.BytesIO()
    samples = 0.1 * np.sin(np.arange(int(16000 * seconds)) * seconds)
    soundfile.write(buffer, samples, 16000, format=container, subtype="PCM_16")
    return buffer.getvalue()


def tar(path: Path, members: Mapping[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as file:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            file.addfile(info, io.BytesIO(content))
    return path


def cut(name: str, text: str | None, **more: Any) -> dict[str, Any]:
    spoken = {"id": "s", "recording_id": "r", "start": 0.0, "duration": 0.5, "channel": 0, "language": "English"}
    placeholder = {"id": "r", "sources": [{"type": "shar", "channels": [0], "source": ""}], "sampling_rate": 16000}
    supervisions = [{**spoken, "text": text, "speaker": "anna"}]
    head = {"id": name, "start": 0, "duration": 0.5, "channel": 0, "supervisions": supervisions}
    return {**head, "recording": placeholder, "type": "MonoCut", **more}


def shar(folder: Path, cuts: list[dict[str, Any]], members: Mapping[str, bytes]) -> Path:
    tar(folder / "recording.000000.tar", members)
    lines = "".join(json.dumps(line) + "\n" for line in cuts).encode()
    (folder / "cuts.000000.jsonl.gz").write_bytes(gzip.compress(lines))
    return folder


def test_samples_of_a_webdataset(tmp_path: Path) -> None:
    tar(
        tmp_path / "wds" / "part-000000.tar",
        {
            "b.flac": sound(0.6),
            "b.json": json.dumps({"text": "two words", "speaker_id": 7, "duration": 9}).encode(),
            "./a.wav": sound(0.5, "WAV"),
            "./a.txt": "\ufeffone\n word\n".encode(),
        },
    )
    tar(tmp_path / "wds" / "more" / "part-000001.tar", {"sub.dir/c.flac": sound(0.7), "sub.dir/c.txt": b"three"})
    found = import_corpus("webdataset", tmp_path / "wds")
    assert facts(found) == [
        ("c.flac", 0.7, "three", ""),
        ("b.flac", 0.6, "two words", "7"),
        ("a.wav", 0.5, "one word", ""),
    ]
    write_manifest(tmp_path / "m.jsonl", found)
    listed = read_manifest(tmp_path / "m.jsonl")
    for utterance, samples in zip(listed, open_audio(listed, DataConfig(work_dir=str(tmp_path / "work"))), strict=True):
        (tmp_path / "alone").write_bytes(sound(utterance.duration_s, utterance.audio_filepath.suffix[1:].upper()))
        assert np.array_equal(samples, read_audio(tmp_path / "alone"))


def test_shards_of_ds2_are_a_webdataset(tmp_path: Path) -> None:
    for name, seconds in (("a", 0.5), ("b", 0.7)):
        (tmp_path / f"{name}.wav").write_bytes(sound(seconds, "WAV"))
    recordings = [Utterance(tmp_path / "a.wav", 0.5, "one", speaker="anna"), Utterance(tmp_path / "b.wav", 0.7, "two")]
    written = write_shards(recordings, tmp_path / "shards", 16000, 1_000_000)
    utterances = import_corpus("webdataset", tmp_path / "shards")
    assert facts(utterances) == facts(written.utterances)


def test_cuts_of_a_shar_folder(tmp_path: Path) -> None:
    two = [{"text": "first", "speaker": "anna"}, {"text": "second", "speaker": "ben"}]
    cuts = [cut("a.b-1", "one"), cut("x/c", None, supervisions=two)]
    folder = shar(
        tmp_path, cuts, {"x/c.flac": sound(0.7), "x/c.json": b"{}", "a.b-1.flac": sound(0.5), "a.b-1.json": b"{}"}
    )
    assert facts(import_corpus("shar", folder)) == [
        ("a.b-1.flac", 0.5, "one", "anna"),
        ("c.flac", 0.7, "first second", ""),
    ]


def test_a_folder_that_is_called_like_a_shard_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / "corpus.tar" / "wav").mkdir(parents=True)
    for path in (tmp_path / "corpus.tar" / "a.wav", tmp_path / "corpus.tar" / "wav" / "a.wav"):
        path.write_bytes(sound(0.5, "WAV"))
        assert len(read_audio(path)) == 8000


@pytest.mark.parametrize(
    ("members", "told"),
    [
        ({"a.json": b'{"text": "one"}'}, "a: no audio among a.json"),
        ({"a.flac": b"", "a.cls": b"1"}, "a: no transcript: KEY.json with one of"),
        ({"a.flac": b"", "a.txt": b"\xff\xfe"}, "a: byte 1 of the transcript is not UTF-8"),
        ({"a.flac": b"", "a.json": b"{"}, "a: not JSON"),
        ({"a.flac": b"", "a.json": b"[" * 100_000}, "a: not JSON"),
        ({"a.flac": b"", "a.json": b"[1]"}, "a: a JSON list; expected an object"),
        ({"a.flac": b"", "a.json": b'{"text": ["one"]}'}, r"text is \['one'\]; expected a text"),
        ({"a.flac": b"no audio", "a.txt": b"one"}, "a.flac"),
    ],
)
def test_samples_that_cannot_be_taken_are_named_or_left_out(
    members: dict[str, bytes], told: str, tmp_path: Path
) -> None:
    tar(tmp_path / "a.tar", {**members, "z.flac": sound(0.5), "z.txt": b"good"})
    with pytest.raises(ImporterError, match=f"1 of 2 utterances cannot be imported:\n  .*{told}"):
        import_corpus("webdataset", tmp_path)
    assert facts(import_corpus("webdataset", tmp_path, skip_bad=True)) == [("z.flac", 0.5, "good", "")]


def test_damaged_tar_files_and_cuts_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(gzip.compress(tar(tmp_path / "whole", {"a.flac": sound(0.5)}).read_bytes()))
    with pytest.raises(ImporterError, match=r"a\.tar: not a shard"):
        import_corpus("webdataset", tmp_path)
    folder = shar(tmp_path / "shar", [cut("a", "one"), cut("b", "two")], {"a.flac": sound(0.5)})
    with pytest.raises(
        ImporterError, match=r"cuts\.000000\.jsonl\.gz:2: .*recording\.000000\.tar has no audio of cut 'b'"
    ):
        import_corpus("shar", folder)
    cuts = folder / "cuts.000000.jsonl.gz"
    whole = cuts.read_bytes()
    lines = (b"[]", b'{"id": "a"}', b'{"id": "a", "supervisions": [1]}', json.dumps(cut("a", "")).encode())
    for damaged in (whole[:-9], b"no gzip", *map(gzip.compress, lines), gzip.compress(b" " * (1 << 25), 1)):
        cuts.write_bytes(damaged)
        with pytest.raises((ImporterError, UserError), match=r"cuts\.000000\.jsonl\.gz"):
            import_corpus("shar", folder)
    cuts.write_bytes(whole)
    (folder / "recording.000000.tar").unlink()
    with pytest.raises(ImporterError, match=r"recording\.000000\.tar: No such file"):
        import_corpus("shar", folder)


@pytest.mark.parametrize("name", ["../../out", "/etc/out", "x/../a"])
def test_names_that_leave_the_shard_are_refused(tmp_path: Path, name: str) -> None:
    """As `SHARD.tar/NAME` in a manifest they would be the path of another file or member."""
    shar(tmp_path, [cut(name, "one")], {f"{name}.flac": sound(0.5)})
    with pytest.raises(ImporterError, match=r"recording\.000000\.tar: the name .* leaves the shard"):
        import_corpus("shar", tmp_path)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (b'{"id": "a", "supervisions": [{"text": "\\ud800"}]}', r":1: text is '\\ud800'; half of a surrogate pair"),
        (2 * (json.dumps(cut("a", "one")).encode() + b"\n"), r":2: a\.flac was listed before; remove one"),
        ((b" " * 65535 + b"\n") * 1024, r"unpacks to more than 100 times its \d+ bytes"),
    ],
)
def test_hostile_cuts_are_named(tmp_path: Path, lines: bytes, message: str) -> None:
    folder = shar(tmp_path, [], {"a.flac": sound(0.5)})
    (folder / "cuts.000000.jsonl.gz").write_bytes(gzip.compress(lines))
    with pytest.raises((ImporterError, UserError), match=r"cuts\.000000\.jsonl\.gz.*" + message):
        import_corpus("shar", folder)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes in folders")
def test_a_pipe_called_like_a_shard_is_not_waited_for(tmp_path: Path) -> None:
    folder = shar(tmp_path, [cut("a", "one")], {})
    (folder / "recording.000000.tar").unlink()
    os.mkfifo(folder / "recording.000000.tar")
    with pytest.raises(ImporterError, match="is a pipe or device, not a shard"):
        import_corpus("shar", folder)


def test_headers_of_sizes_that_no_file_has_and_sparse_members_are_named(tmp_path: Path) -> None:
    for number, size in enumerate((1 << 80, -1, 10**400)):
        folder = tmp_path / str(number)
        whole = tar(folder / "a.tar", {"a.flac": sound(0.5), "a.txt": b"one"}).read_bytes()
        with tarfile.open(folder / "a.tar", "w", format=tarfile.PAX_FORMAT) as file:
            file.addfile(tarfile.TarInfo("a.flac"))
            header = tarfile.TarInfo("b.flac")
            header.pax_headers = {"size": str(size)}
            file.addfile(header)
        assert (folder / "a.tar").read_bytes() != whole
        with pytest.raises(ImporterError, match=r"a\.tar: "):
            import_corpus("webdataset", folder)
    sparse = tarfile.TarInfo("a.flac")
    sparse.type = tarfile.GNUTYPE_SPARSE
    content = sparse.tobuf(tarfile.GNU_FORMAT) + bytes(1024)
    (tmp_path / "sparse").mkdir()
    (tmp_path / "sparse" / "a.tar").write_bytes(content)
    with pytest.raises(ImporterError, match=r"a\.tar: not a shard \(a\.flac is a sparse file"):
        import_corpus("webdataset", tmp_path / "sparse")


@pytest.mark.parametrize("name", ["a\udcff.flac", "a" * 2000 + ".flac"])
def test_names_that_no_file_can_have_are_refused(tmp_path: Path, name: str) -> None:
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.GNU_FORMAT, errors="surrogateescape") as file:
        file.addfile(tarfile.TarInfo(name))
    with pytest.raises(ImporterError, match=r"a\.tar: the name"):
        import_corpus("webdataset", tmp_path)


def test_two_members_of_one_name_or_kind_are_named(tmp_path: Path) -> None:
    path = tar(tmp_path / "name" / "a.tar", {"./a.flac": sound(0.5), "a.txt": b"one", "a.flac": sound(0.6)})
    with pytest.raises(ImporterError, match=rf"{path}: holds two members named a\.flac"):
        import_corpus("webdataset", path.parent)
    path = tar(tmp_path / "kind" / "a.tar", {"a.flac": sound(0.5), "a.txt": b"one", "a.FLAC": sound(0.6)})
    with pytest.raises(ImporterError, match=rf"{path}: a: two members of one kind among a\.flac, a\.txt, a\.FLAC"):
        import_corpus("webdataset", path.parent)
    path = tar(tmp_path / "recording.000000.tar", {"a.flac": sound(0.5), "./a.flac": sound(0.6)})
    (tmp_path / "cuts.000000.jsonl.gz").write_bytes(gzip.compress(json.dumps(cut("a", "one")).encode()))
    with pytest.raises(ImporterError, match=r"holds two members named a\.flac"):
        import_corpus("shar", tmp_path)
