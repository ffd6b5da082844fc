"""The audio cache: same samples as decoding, built once, whole or not at all, and never a reason to stop."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import soundfile

from ds2.audio.read import AudioError
from ds2.config.schema import DataConfig
from ds2.data import audio_cache
from ds2.data.audio_cache import AudioStore, open_audio
from ds2.data.manifest import Utterance

RATE = 16000


@pytest.fixture
def utterances(tmp_path: Path) -> list[Utterance]:
    """Five files of 16-bit noise, 0.2 to 0.6 s, odd lengths; the last one twice as two segments."""
    rng = np.random.default_rng(0)
    records = []
    for number in range(5):
        path = tmp_path / f"utt{number}.wav"
        samples = 3201 + 1600 * number
        soundfile.write(path, 0.1 * rng.standard_normal(samples), RATE, subtype="PCM_16")
        records.append(Utterance(path, samples / RATE, "a b"))
    return [*records[:4], Utterance(path, 0.1, "a", offset_s=0.0), Utterance(path, 0.2, "b", offset_s=0.3)]


def data_config(tmp_path: Path, **other: str) -> DataConfig:
    return DataConfig(work_dir=str(tmp_path / "work"), **other)  # type: ignore[arg-type]


def written(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "work" / "audio_cache").glob("*"))


def no_decoding(*_: object) -> None:
    raise AssertionError("audio was decoded again")


def assert_same(store: AudioStore, utterances: list[Utterance]) -> None:
    decoded = AudioStore(utterances, RATE)
    assert len(store) == len(decoded) == len(utterances)
    for position, utterance in enumerate(utterances):
        assert store[position].dtype == np.float32
        assert np.array_equal(store[position], decoded[position])
        assert len(store[position]) == round(utterance.duration_s * RATE)


def test_cached_samples_are_the_decoded_ones(tmp_path: Path, utterances: list[Utterance]) -> None:
    store = open_audio(utterances, data_config(tmp_path))
    assert store.cache is not None and store.cache.path in written(tmp_path)
    assert_same(store, utterances)
    original, _ = soundfile.read(utterances[1].audio_filepath, dtype="float32")
    assert np.array_equal(store[1], original)


def test_it_is_built_once_and_again_when_a_file_changes(
    tmp_path: Path, utterances: list[Utterance], monkeypatch: pytest.MonkeyPatch
) -> None:
    open_audio(utterances, data_config(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(audio_cache, "read_audio", no_decoding)
        open_audio(utterances, data_config(tmp_path))
    os.utime(utterances[0].audio_filepath, ns=(1, 1))
    open_audio(utterances, data_config(tmp_path))
    open_audio(utterances[:3], data_config(tmp_path))
    open_audio(utterances, DataConfig(work_dir=str(tmp_path / "work"), sample_rate_hz=8000))
    assert len(written(tmp_path)) == 4


def test_no_cache_writes_nothing(tmp_path: Path, utterances: list[Utterance]) -> None:
    assert_same(open_audio(utterances, data_config(tmp_path, cache="none")), utterances)
    assert not (tmp_path / "work").exists()


def test_many_building_at_once_all_get_it(tmp_path: Path, utterances: list[Utterance]) -> None:
    with ThreadPoolExecutor(4) as threads:
        stores = list(threads.map(lambda _: open_audio(utterances, data_config(tmp_path)), range(4)))
    for store in stores:
        assert_same(store, utterances)
    assert [path.suffix for path in written(tmp_path)] == [".pcm"]


@pytest.mark.parametrize("trouble", ["space", "folder", "write"])
def test_a_cache_that_cannot_be_written_is_a_warning(
    trouble: str,
    tmp_path: Path,
    utterances: list[Utterance],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    expected = {"space": "to spare", "folder": "work", "write": "No space left"}[trouble]
    if trouble == "space":
        monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 9, 1000))
    elif trouble == "folder":
        (tmp_path / "work").write_text("a file where the folder should be")
    else:
        monkeypatch.setattr(os, "pwrite", full)
    with caplog.at_level(logging.WARNING):
        store = open_audio(utterances, data_config(tmp_path))
    assert_same(store, utterances)
    assert store.cache is None
    assert expected in caplog.text and "data.cache=none" in caplog.text
    assert trouble == "folder" or written(tmp_path) == []


def test_unreadable_utterances_are_named_and_nothing_is_published(tmp_path: Path, utterances: list[Utterance]) -> None:
    for number in (1, 3):
        utterances[number].audio_filepath.write_bytes(b"no audio")
    with pytest.raises(AudioError, match=r"2 of 6 utterances(.|\n)*utt1.wav(.|\n)*utt3.wav"):
        open_audio(utterances, data_config(tmp_path))
    assert written(tmp_path) == []
    utterances[0].audio_filepath.unlink()
    with pytest.raises(AudioError, match=r"utt0.wav"):
        open_audio(utterances, data_config(tmp_path))


def test_leftovers_of_killed_builds_are_removed(tmp_path: Path, utterances: list[Utterance]) -> None:
    folder = tmp_path / "work" / "audio_cache"
    folder.mkdir(parents=True)
    (folder / "old.partial").write_bytes(b"12")
    os.utime(folder / "old.partial", (0, 0))
    (folder / "live.partial").write_bytes(b"12")
    open_audio(utterances, data_config(tmp_path))
    assert [path.name for path in written(tmp_path) if path.suffix == ".partial"] == ["live.partial"]


def flipped(at: int) -> Callable[[bytes], bytes]:
    """The content with one bit of one byte turned, counted from the end where `at` is negative."""
    return lambda content: content[: at % len(content)] + bytes([content[at] ^ 4]) + content[at % len(content) + 1 :]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "header only": lambda content: content[:72],
    "half": lambda content: content[: len(content) // 2],
    "one byte short": lambda content: content[:-1],
    "longer": lambda content: content + bytes(8),
    "zeros": lambda content: bytes(len(content)),
    "without its header": lambda content: content[72:],
    "samples lost in the middle": lambda content: content[:1000] + content[1016:],
    "two blocks of samples changed places": lambda c: c[:72] + c[1072:2072] + c[72:1072] + c[2072:],
    "a hole where samples were": lambda content: content[:4096] + bytes(4096) + content[8192:],
    **{f"bit in byte {at}": flipped(at) for at in (0, 8, 12, 16, 24, 32, 64, 68, 72, 9001, -300, -144, -24, -8, -1)},
}
"""Six utterances: the header has 72 bytes, the index behind samples and padding 144."""


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_cache_is_said_and_built_again(
    damage: str, tmp_path: Path, utterances: list[Utterance], caplog: pytest.LogCaptureFixture
) -> None:
    open_audio(utterances, data_config(tmp_path))
    (path,) = written(tmp_path)
    whole = path.read_bytes()
    index = np.frombuffer(whole[-144:], np.int64).reshape(6, 3)
    assert index[:, 1].tolist() == [round(u.duration_s * RATE) for u in utterances]
    path.write_bytes(DAMAGES[damage](whole))
    with caplog.at_level(logging.WARNING):
        assert_same(open_audio(utterances, data_config(tmp_path)), utterances)
    assert f"audio cache {path} is damaged" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        store = open_audio(utterances, data_config(tmp_path))
        assert_same(store, utterances)
    assert not caplog.records and store.cache is not None and store.cache.path == path


@pytest.mark.parametrize("cut", [True, False])
def test_a_cache_that_is_damaged_under_a_run_gives_no_wrong_sample(
    cut: bool, tmp_path: Path, utterances: list[Utterance], caplog: pytest.LogCaptureFixture
) -> None:
    store = open_audio(utterances, data_config(tmp_path))
    (path,) = written(tmp_path)
    if cut:
        os.truncate(path, 1000)
    else:
        with path.open("rb+") as file:
            file.seek(72)
            file.write(bytes(path.stat().st_size - 72 - 144))
    with caplog.at_level(logging.WARNING):
        assert_same(store, utterances)
    assert all(f"the samples of {u.name}" in caplog.text for u in utterances) and written(tmp_path) == []


def test_another_corpus_under_the_name_of_this_one_is_not_taken(tmp_path: Path, utterances: list[Utterance]) -> None:
    open_audio(utterances, data_config(tmp_path))
    (path,) = written(tmp_path)
    open_audio(utterances[::-1], data_config(tmp_path))
    (other,) = set(written(tmp_path)) - {path}
    shutil.copyfile(other, path)
    assert_same(open_audio(utterances, data_config(tmp_path)), utterances)
