"""Corpora as tar files: the same samples as from files, read in any order, and damage that is named."""

from __future__ import annotations

import json
import shutil
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from support.run_log import losses

from ds2.audio import shard as shard_module
from ds2.audio.read import AudioError, audio_info, read_audio
from ds2.audio.shard import Shard, index_file
from ds2.cli import main
from ds2.config.schema import AugmentConfig, Config, DataConfig
from ds2.data.audio_cache import AudioStore, open_audio
from ds2.data.check import probe
from ds2.data.loader import SpeechLoader
from ds2.data.manifest import Utterance, read_manifest, write_manifest
from ds2.data.shards import MANIFEST, write_shards
from ds2.training.loop import train

RATE = 16000


@pytest.fixture
def utterances(tmp_path: Path) -> list[Utterance]:
    """Eleven utterances: WAV and FLAC, other rates, two channels, segments of one file, texts in two scripts."""
    rng, made = np.random.default_rng(0), []
    for number, (suffix, rate, channels) in enumerate(
        [("wav", RATE, 1), ("flac", RATE, 1), ("wav", 44100, 2), ("mp3", 22050, 1), ("wav", 8000, 1)] * 2
    ):
        path = tmp_path / f"utt {number}.{number}.{suffix}"
        samples = rate // 2 + 317 * number
        soundfile.write(path, 0.1 * rng.standard_normal((samples, channels)), rate)
        made.append(Utterance(path, audio_info(path).duration_s, f"grüße {number} 你好", speaker=f"s{number % 2}"))
    first = made[0]
    return [
        Utterance(first.audio_filepath, 0.2, "teil", 0.1),
        *made[1:],
        Utterance(first.audio_filepath, 0.1, "b", 0.3),
    ]


def packed(utterances: list[Utterance], folder: Path, seconds: float = 1.7) -> list[Utterance]:
    return write_shards(utterances, folder, RATE, int(2 * RATE * seconds)).utterances


def test_members_hold_the_samples_that_training_reads_from_files(tmp_path: Path, utterances: list[Utterance]) -> None:
    packed(utterances, tmp_path / "shards")
    listed = read_manifest(tmp_path / "shards" / MANIFEST)
    data = DataConfig(work_dir=str(tmp_path / "work"))
    store, files = open_audio(listed, data), AudioStore(utterances, RATE)
    assert [(u.text, u.speaker) for u in listed] == [(u.text, u.speaker) for u in utterances]
    assert len(list((tmp_path / "shards").glob("*.tar"))) > 2
    for position in np.random.default_rng(1).permutation(len(listed)).tolist():
        assert np.array_equal(store[position], files[position])
        assert len(store[position]) == round(listed[position].duration_s * RATE)
    assert store.cached == 0 and not (tmp_path / "work").exists()
    report = [probe(utterance, RATE) for utterance in listed]
    assert not any(found.error for found in report) and audio_info(listed[2].audio_filepath).sample_rate_hz == RATE
    shutil.move(tmp_path / "shards", tmp_path / "elsewhere")  # the folder may be moved
    assert np.array_equal(AudioStore(read_manifest(tmp_path / "elsewhere" / MANIFEST), RATE)[3], files[3])


def test_the_layout_is_webdatasets(tmp_path: Path, utterances: list[Utterance]) -> None:
    packed(utterances, tmp_path / "shards")
    seen = []
    for shard in sorted((tmp_path / "shards").glob("*.tar")):
        with tarfile.open(shard) as tar:
            names = tar.getnames()
            assert names == [f"{name.split('.')[0]}.{kind}" for name in names[::2] for kind in ("flac", "json")]
            for name in names[1::2]:
                member = tar.extractfile(name)
                assert member is not None
                seen.append(json.load(member))
    assert [s["text"] for s in seen] == [u.text for u in utterances] and seen[1]["speaker"] == "s1"


def test_batches_are_those_from_files_on_any_rank_with_any_workers(tmp_path: Path, utterances: list[Utterance]) -> None:
    listed = packed(utterances, tmp_path / "shards")
    augment = AugmentConfig(speed=[0.9, 1.1], noise_probability=0.5)

    def batches(of: list[Utterance], workers: int) -> list[torch.Tensor]:
        data = DataConfig(work_dir=str(tmp_path / "work"), workers=workers)
        loader = SpeechLoader(of, data, torch.device("cpu"), augment=augment)
        return [batch.waveforms for batch in loader.epoch([[3, 1], [10, 0, 7], [2]], 2)]

    one, other, files = batches(listed, 0), batches(listed, 2), batches(utterances, 0)
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(one, other, files, strict=True))


def test_a_run_on_shards_resumes_exactly(
    tiny_config: Callable[..., Config], tone_manifest: Path, tmp_path: Path
) -> None:
    shards = tmp_path / "shards"
    write_shards(read_manifest(tone_manifest), shards, RATE, 60_000)

    def config(*overrides: str) -> Config:
        return tiny_config("data.dev=[]", "train.epochs=2", *overrides)

    on_shards = f"data.train=[{shards / MANIFEST}]"
    assert train(config(), tmp_path / "files") == 0
    assert train(config(on_shards), tmp_path / "whole") == 0
    assert train(config(on_shards, "train.max_steps=2"), tmp_path / "broken") == 0
    assert train(config(on_shards), tmp_path / "broken") == 0
    assert losses(tmp_path / "whole") == losses(tmp_path / "broken") == losses(tmp_path / "files")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-700])


def turned(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[1500] ^= 1
    path.write_bytes(content)


def gone(path: Path) -> None:
    path.unlink()


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def exceeded(path: Path, size: int = 10**20) -> None:
    members = f"0 {size} 0 -1 a.flac\n"
    facts = json.loads(index_file(path).read_text().split("\n")[0]) | {"crc": zlib.crc32(members.encode())}
    index_file(path).write_text(f"{json.dumps(facts)}\n{members}")


@pytest.mark.parametrize(
    ("damage", "what", "before"),
    [
        (cut, "its index states", True),
        (gone, "No such file", True),
        (emptied, "its index states", True),
        (turned, "is damaged", False),
        (lambda path: cut(index_file(path)), "not an index of a shard", True),
        (lambda path: index_file(path).write_text('{"version": 9}'), "not an index of a shard", True),
        (lambda path: index_file(path).write_bytes(b"\xff\n"), "not an index of a shard", True),
        (exceeded, "not an index of a shard", True),
        (lambda path: exceeded(path, 10**9), "a.flac does not lie within the file", True),
        (lambda path: shutil.copy(index_file(path).with_name("000001.tar.index"), index_file(path)), "000000", True),
    ],
)
def test_damaged_shards_are_named(
    damage: Callable[[Path], object], what: str, before: bool, tmp_path: Path, utterances: list[Utterance]
) -> None:
    listed = packed(utterances, tmp_path / "shards")
    bad = tmp_path / "shards" / "000000.tar"
    damage(bad)
    data = DataConfig(work_dir=str(tmp_path / "work"), workers=0)
    with pytest.raises(AudioError, match=rf"000000\.tar(.|\n)*{what}" if what != "000000" else "000000"):
        store = open_audio(listed, data)
        assert not before
        store[0]
    others = [u for u in listed if u.audio_filepath.parent != bad]
    assert len(open_audio(others, data)[0]) > 0


def test_a_member_that_is_not_there_is_named(tmp_path: Path, utterances: list[Utterance]) -> None:
    listed = packed(utterances, tmp_path / "shards")
    odd = Utterance(listed[0].audio_filepath.with_name("none.flac"), 1.0, "a")
    with pytest.raises(AudioError, match=r"000000\.tar: lacks 1 of its \d+ utterances, none\.flac first"):
        open_audio([*listed, odd], DataConfig(work_dir=str(tmp_path / "work")))
    with pytest.raises(AudioError, match=r"000000\.tar: has no member none\.flac"):
        read_audio(odd.audio_filepath)
    with pytest.raises(AudioError, match=r"none\.tar: No such file"):
        read_audio(tmp_path / "none.tar" / "a.flac")


def test_a_shards_file_stays_open_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads may open it at once: the cache keeps one file, and the other is its reader's alone."""
    monkeypatch.setattr(shard_module, "_opened", shard_module._opened.__wrapped__)
    (tmp_path / "one.txt").write_text("word")
    with tarfile.open(tmp_path / "s.tar", "w") as tar:
        tar.add(tmp_path / "one.txt", "one.txt")
    assert Shard(tmp_path / "s.tar").read("one.txt") == b"word"


def test_a_shard_without_an_index_is_looked_through(tmp_path: Path, utterances: list[Utterance]) -> None:
    tar_file = tmp_path / "others.tar"
    with tarfile.open(tar_file, "w") as tar:
        for u in utterances[1:5]:
            tar.add(u.audio_filepath, f"some/folder-{u.audio_filepath.name}"[12:])
    names = [f"{u.audio_filepath.name}" for u in utterances[1:5]]
    for u, name in zip(utterances[1:5], names, strict=True):
        assert np.array_equal(read_audio(tar_file / name), read_audio(u.audio_filepath))
    (tmp_path / "text.tar").write_text("no tar at all")
    with pytest.raises(AudioError, match=r"text\.tar: not a shard"):
        read_audio(tmp_path / "text.tar" / "a.flac")


def test_writing_goes_on_where_it_was_stopped(
    tmp_path: Path, utterances: list[Utterance], monkeypatch: pytest.MonkeyPatch
) -> None:
    from ds2.data import shards

    add, calls = shards._add, []

    def counted(tar: tarfile.TarFile, name: str, content: bytes) -> None:
        calls.append(name)
        if len(calls) == 10:
            raise KeyboardInterrupt
        add(tar, name, content)

    whole = packed(utterances, tmp_path / "whole")
    monkeypatch.setattr(shards, "_add", counted)
    with pytest.raises(KeyboardInterrupt):
        packed(utterances, tmp_path / "broken")
    assert not (tmp_path / "broken" / MANIFEST).exists() and not list((tmp_path / "broken").glob(".*"))
    assert len(packed(utterances, tmp_path / "broken")) == len(utterances)
    assert len(calls) < 10 + 2 * len(utterances)  # the first shard was kept
    for one in (tmp_path / "whole").glob("*.tar*"):
        assert one.read_bytes() == (tmp_path / "broken" / one.name).read_bytes()
    assert [u.audio_filepath.name for u in whole] == [
        u.audio_filepath.name for u in read_manifest(tmp_path / "broken" / MANIFEST)
    ]


def test_shards_of_an_earlier_command_are_named(
    tmp_path: Path, utterances: list[Utterance], caplog: pytest.LogCaptureFixture
) -> None:
    packed(utterances, tmp_path)
    assert "of an earlier command" not in caplog.text
    packed(utterances, tmp_path, 1000)
    assert "of an earlier command, such as 000001.tar, that its manifest does not list" in caplog.text


def test_the_command_names_and_leaves_out_what_cannot_be_read(
    tmp_path: Path, utterances: list[Utterance], capsys: pytest.CaptureFixture[str]
) -> None:
    utterances[1].audio_filepath.write_bytes(b"no audio")
    write_manifest(tmp_path / "m.jsonl", utterances)
    command = ["data", "shards", str(tmp_path / "m.jsonl"), str(tmp_path / "shards"), "--shard-mb", "0.06"]
    assert main(command) == 2
    assert "1 of 11 utterances cannot be read" in (said := capsys.readouterr().err) and "--skip-bad" in said
    assert main([*command, "--skip-bad"]) == 0
    shown = capsys.readouterr().out
    assert "10 utterances" in shown and "left out: " in shown and "reused" in shown
    assert len(read_manifest(tmp_path / "shards" / MANIFEST)) == 10
    with pytest.raises(SystemExit):
        main([*command, "--shard-mb", "0"])
    assert "--shard-mb: '0' is not allowed" in capsys.readouterr().err


def test_a_channel_of_the_files_is_packed(tmp_path: Path, utterances: list[Utterance]) -> None:
    stereo = [u for u in utterances if audio_info(u.audio_filepath).channels == 2]
    for channel in (1, 2):
        written = write_shards(stereo, tmp_path / str(channel), RATE, 1 << 20, channel=channel)
        for sample, u in zip(AudioStore(written.utterances, RATE), stereo, strict=True):
            expected = read_audio(u.audio_filepath, RATE, duration_s=u.duration_s, channel=channel)
            np.testing.assert_allclose(sample, expected, atol=1 / 32768)
    assert write_shards(stereo, tmp_path / "1", RATE, 1 << 20, channel=2).reused == 0
