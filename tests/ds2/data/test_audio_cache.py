"""The audio cache: the samples of decoding, built once for any list, whole or not at all, never a reason to stop."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import soundfile

from ds2.audio.read import AudioError
from ds2.config.schema import DataConfig
from ds2.data import audio_cache
from ds2.data.audio_cache import AudioStore, open_audio
from ds2.data.manifest import Utterance
from ds2.system import files
from ds2.system.machine import thread_pool

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


def data_config(tmp_path: Path, **other: object) -> DataConfig:
    return DataConfig(work_dir=str(tmp_path / "work"), **{"cache": "disk", **other})  # type: ignore[arg-type]


def written(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "work" / "audio_cache").glob("*"))


def no_decoding(*_: object) -> None:
    raise AssertionError("audio was looked at again")


def assert_same(store: AudioStore, utterances: list[Utterance]) -> None:
    decoded = AudioStore(utterances, RATE)
    assert len(store) == len(decoded) == len(utterances)
    for position, utterance in enumerate(utterances):
        assert store[position].dtype == np.float32
        assert np.array_equal(store[position], decoded[position])
        assert len(store[position]) == round(utterance.duration_s * RATE)


def test_cached_samples_are_the_decoded_ones(tmp_path: Path, utterances: list[Utterance]) -> None:
    store = open_audio(utterances, data_config(tmp_path))
    assert store.cached == len(utterances) and [file.path for file in store.files.values()] == written(tmp_path)
    assert_same(store, utterances)
    original, _ = soundfile.read(utterances[1].audio_filepath, dtype="float32")
    assert np.array_equal(store[1], original)


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that are decoded from here on."""
    names: list[str] = []
    read = audio_cache.read_audio

    def noted(path: Path, *arguments: float) -> object:
        names.append(path.name)
        return read(path, *arguments)

    monkeypatch.setattr(audio_cache, "read_audio", noted)
    return names


def test_each_utterance_is_decoded_once_for_all_lists_and_again_when_its_file_changes(
    tmp_path: Path, utterances: list[Utterance], decoded: list[str]
) -> None:
    whole = data_config(tmp_path)
    open_audio(utterances[:2], whole)
    open_audio(utterances[::-1], whole)
    open_audio(utterances[1:3], whole)
    assert sorted(decoded) == sorted(u.audio_filepath.name for u in utterances) and len(written(tmp_path)) == 2
    os.utime(utterances[0].audio_filepath, ns=(1, 1))
    assert_same(open_audio(utterances, whole), utterances)
    assert decoded.count("utt0.wav") > 1
    count = len(decoded)
    open_audio(utterances[2:4], data_config(tmp_path, sample_rate_hz=8000))
    assert decoded[count:] == ["utt2.wav", "utt3.wav"] or decoded[count:] == ["utt3.wav", "utt2.wav"]


def test_what_is_cheap_to_read_is_looked_at_once_and_not_cached(
    tmp_path: Path, utterances: list[Utterance], decoded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, rate in (("other_rate.flac", 22050), ("lossy.mp3", RATE)):
        soundfile.write(tmp_path / name, np.full(rate, 0.1), rate)
        utterances.append(Utterance(tmp_path / name, 1.0, "c"))
    soundfile.write(tmp_path / "same_rate.flac", np.full(RATE, 0.1), RATE)
    utterances.append(Utterance(tmp_path / "same_rate.flac", 1.0, "c"))
    store = open_audio(utterances, data_config(tmp_path, cache="auto"))
    assert store.cached == 2 and sorted(decoded) == ["lossy.mp3", "other_rate.flac"]
    size = sum(path.stat().st_size for path in written(tmp_path))
    assert 4 * RATE <= size < 4 * RATE + 1000
    assert_same(store, utterances)
    monkeypatch.setattr(audio_cache, "reads_cheaply", no_decoding)
    decoded.clear()
    assert open_audio(utterances[3:], data_config(tmp_path, cache="auto")).cached == 2 and not decoded
    assert open_audio(utterances, data_config(tmp_path)).cached == len(utterances)  # the same folder, all of it cached
    assert_same(open_audio(utterances, data_config(tmp_path, cache="auto")), utterances)


def test_the_cache_is_bounded_and_what_was_used_longest_ago_goes_first(
    tmp_path: Path, utterances: list[Utterance], caplog: pytest.LogCaptureFixture
) -> None:
    seconds = [u.duration_s for u in utterances]
    bounded = data_config(tmp_path, cache_gb=(2 * RATE * sum(seconds[:3]) + 1000) / 1e9)
    for position in (0, 1, 2):
        open_audio(utterances[position : position + 1], bounded)
        (new,) = (p for p in written(tmp_path) if p.stat().st_mtime > 1000)
        os.utime(new, (position, position))
    open_audio(utterances[:1], bounded)  # used again
    assert open_audio(utterances[4:5], bounded).cached == 1 and not caplog.records
    assert open_audio(utterances[:1], bounded).cached == 1 and len(written(tmp_path)) == 3
    with caplog.at_level(logging.WARNING):
        store = open_audio(utterances, bounded)
    assert 0 < store.cached < len(utterances) and "data.cache_gb" in caplog.text
    assert sum(p.stat().st_size for p in written(tmp_path)) <= 1e9 * bounded.cache_gb
    assert_same(store, utterances)


def test_files_of_the_first_version_are_removed(tmp_path: Path, utterances: list[Utterance]) -> None:
    folder = tmp_path / "work" / "audio_cache"
    folder.mkdir(parents=True)
    (folder / "list.pcm").write_bytes(b"old")
    open_audio(utterances, data_config(tmp_path))
    assert [path.suffix for path in written(tmp_path)] == [audio_cache.SUFFIX]


def test_large_lists_make_several_files_and_a_stopped_build_keeps_those_that_are_whole(
    tmp_path: Path, utterances: list[Utterance], monkeypatch: pytest.MonkeyPatch, decoded: list[str]
) -> None:
    monkeypatch.setattr(audio_cache, "_FILE_SAMPLES", 9000)
    read = audio_cache.read_audio

    def stopped(path: Path, *arguments: float) -> object:
        if path.name == "utt3.wav":
            raise KeyboardInterrupt
        return read(path, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(audio_cache, "read_audio", stopped)
        with pytest.raises(KeyboardInterrupt):
            open_audio(utterances, data_config(tmp_path))
    assert len(written(tmp_path)) == 2 and all(path.suffix == audio_cache.SUFFIX for path in written(tmp_path))
    decoded.clear()
    assert_same_files = open_audio(utterances, data_config(tmp_path))
    assert set(decoded) == {"utt3.wav", "utt4.wav"} and len(assert_same_files.files) > 2
    assert_same(assert_same_files, utterances)


def test_an_error_waits_for_no_reader(
    tmp_path: Path, utterances: list[Utterance], monkeypatch: pytest.MonkeyPatch
) -> None:
    release, read = threading.Event(), audio_cache.read_audio

    def stuck(path: Path, *arguments: float) -> object:
        if path.name == "utt0.wav":
            assert release.wait(300)
        elif path.name == "utt1.wav":
            raise KeyboardInterrupt
        return read(path, *arguments)

    monkeypatch.setattr(audio_cache, "usable_cores", lambda: 2)
    monkeypatch.setattr(audio_cache, "thread_pool", partial(thread_pool, wait_s=0.2))
    monkeypatch.setattr(audio_cache, "read_audio", stuck)
    with pytest.raises(KeyboardInterrupt):
        open_audio(utterances, data_config(tmp_path))  # returns although utt0.wav is still being read
    assert not release.is_set() and written(tmp_path) == []
    release.set()


def test_no_cache_writes_nothing(tmp_path: Path, utterances: list[Utterance]) -> None:
    assert_same(open_audio(utterances, data_config(tmp_path, cache="none")), utterances)
    assert not (tmp_path / "work").exists()


def test_many_building_at_once_all_get_it(tmp_path: Path, utterances: list[Utterance]) -> None:
    with ThreadPoolExecutor(4) as threads:
        stores = list(threads.map(lambda _: open_audio(utterances, data_config(tmp_path)), range(4)))
    for store in stores:
        assert_same(store, utterances)
    assert [path.suffix for path in written(tmp_path)] == [audio_cache.SUFFIX]


def test_errors_that_are_collected_hold_no_samples(tmp_path: Path, utterances: list[Utterance]) -> None:
    first, broken = utterances[0], tmp_path / "broken.flac"
    broken.write_bytes(b"no audio")
    bad = {bytes(16): replace(first, audio_filepath=broken), b"2" * 16: replace(first, duration_s=1e4)}
    errors = audio_cache._write_files(tmp_path, {**bad, b"3" * 16: first}, data_config(tmp_path))
    assert len(errors) == 2
    assert all(e.__traceback__ is e.__cause__ is e.__context__ is None for e in errors)


def test_audio_that_is_not_cached_and_cannot_be_read_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "a.flac").write_bytes(b"no audio")
    store = AudioStore([Utterance(tmp_path / "a.flac", 1.0, "a", source="m.jsonl:7")], RATE)
    with pytest.raises(AudioError, match=r"a\.flac: not readable.* \(m\.jsonl:7\)\n.*`ds2 data check` names all"):
        store[0]


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

    expected = {"space": "stay free", "folder": "work", "write": "No space left"}[trouble]
    if trouble == "space":
        monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 9, 1000))
    elif trouble == "folder":
        (tmp_path / "work").write_text("a file where the folder should be")
    else:
        monkeypatch.setattr(audio_cache.CacheWriter, "add", full)
    with caplog.at_level(logging.WARNING):
        store = open_audio(utterances, data_config(tmp_path))
    assert_same(store, utterances)
    assert store.cached == 0
    assert expected in caplog.text and "data.cache=none" in caplog.text
    assert trouble == "folder" or written(tmp_path) == []


@pytest.mark.parametrize("cache", ["disk", "auto"])
def test_unreadable_utterances_are_named_and_decoded_ones_kept(
    cache: str, tmp_path: Path, utterances: list[Utterance], decoded: list[str]
) -> None:
    for number in (1, 3):
        utterances[number].audio_filepath.write_bytes(b"no audio")
    with pytest.raises(AudioError, match=r"2 of 6 utterances(.|\n)*utt1.wav(.|\n)*utt3.wav"):
        open_audio(utterances, data_config(tmp_path, cache=cache))
    decoded.clear()
    mended = [u for n, u in enumerate(utterances) if n not in (1, 3)]
    assert_same(open_audio(mended, data_config(tmp_path, cache=cache)), mended)
    assert cache == "auto" or len(decoded) == len(mended)  # by `assert_same` alone
    utterances[0].audio_filepath.unlink()
    with pytest.raises(AudioError, match=r"utt0.wav"):
        open_audio(utterances, data_config(tmp_path, cache=cache))


def test_a_list_of_which_nothing_can_be_read_leaves_nothing(tmp_path: Path, utterances: list[Utterance]) -> None:
    utterances[0].audio_filepath.write_bytes(b"no audio")
    with pytest.raises(AudioError, match=r"1 of 1 utterances(.|\n)*utt0.wav"):
        open_audio(utterances[:1], data_config(tmp_path))
    assert written(tmp_path) == []


@pytest.mark.parametrize("complete", [False, True])
def test_leftovers_of_killed_builds_are_removed(tmp_path: Path, utterances: list[Utterance], complete: bool) -> None:
    if complete:  # killed after the file has its name
        open_audio(utterances, data_config(tmp_path))
    folder = tmp_path / "work" / "audio_cache"
    folder.mkdir(parents=True, exist_ok=True)
    with subprocess.Popen(["sleep", "3600"]) as live, subprocess.Popen(["true"]) as dead:
        dead.wait()
        names = [f".a.{files.host_id()}.{process.pid}.{'0' * 16}.partial" for process in (live, dead)]
        for name in names:
            (folder / name).mkdir()
            (folder / name / "a").write_bytes(b"12")
        open_audio(utterances, data_config(tmp_path))
        live.kill()
    assert sorted(path.name for path in folder.iterdir() if path.suffix == ".partial") == names[:1]


def flipped(at: int) -> Callable[[bytes], bytes]:
    """The content with one bit of one byte turned, counted from the end where `at` is negative."""
    return lambda content: content[: at % len(content)] + bytes([content[at] ^ 4]) + content[at % len(content) + 1 :]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "header only": lambda content: content[:40],
    "half": lambda content: content[: len(content) // 2],
    "one byte short": lambda content: content[:-1],
    "longer": lambda content: content + bytes(8),
    "zeros": lambda content: bytes(len(content)),
    "without its header": lambda content: content[40:],
    "samples lost in the middle": lambda content: content[:1000] + content[1016:],
    "two blocks of samples changed places": lambda c: c[:40] + c[1040:2040] + c[40:1040] + c[2040:],
    "a hole where samples were": lambda content: content[:4096] + bytes(4096) + content[8192:],
    **{f"bit in byte {at}": flipped(at) for at in (0, 8, 12, 16, 24, 32, 36, 40, 9001, -400, -240, -24, -8, -1)},
}
"""Six utterances: the header has 40 bytes, the index behind samples and padding 240."""


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_cache_is_logged_and_built_again(
    damage: str, tmp_path: Path, utterances: list[Utterance], caplog: pytest.LogCaptureFixture
) -> None:
    open_audio(utterances, data_config(tmp_path))
    (path,) = written(tmp_path)
    whole = path.read_bytes()
    index = np.frombuffer(whole[-240:], np.int64).reshape(6, 5)
    assert sorted(index[:, 1].tolist()) == sorted(round(u.duration_s * RATE) for u in utterances)
    path.write_bytes(DAMAGES[damage](whole))
    with caplog.at_level(logging.WARNING):
        assert_same(open_audio(utterances, data_config(tmp_path)), utterances)
    assert f"audio cache {path} is damaged" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        store = open_audio(utterances, data_config(tmp_path))
        assert_same(store, utterances)
    assert not caplog.records and [file.path for file in store.files.values()] == [path]


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
            file.seek(40)
            file.write(bytes(path.stat().st_size - 40 - 240))
    with caplog.at_level(logging.WARNING):
        assert_same(store, utterances)
    assert all(f"samples of {u.name}" in caplog.text for u in utterances) and written(tmp_path) == []


def test_other_utterances_under_the_name_of_these_are_not_taken(tmp_path: Path, utterances: list[Utterance]) -> None:
    open_audio(utterances[:3], data_config(tmp_path))
    (path,) = written(tmp_path)
    open_audio(utterances[3:], data_config(tmp_path))
    (other,) = set(written(tmp_path)) - {path}
    shutil.copyfile(other, path)
    assert_same(open_audio(utterances, data_config(tmp_path)), utterances)


@pytest.mark.parametrize("cache", ["auto", "disk", "none"])
def test_the_channel_of_the_settings_is_read_and_cached_apart(tmp_path: Path, cache: str) -> None:
    channels = np.random.default_rng(0).integers(-9999, 9999, (4000, 2)).astype(np.int16)
    soundfile.write(tmp_path / "a.wav", channels, RATE)
    listed = [Utterance(tmp_path / "a.wav", 0.25, "a")]
    for channel in (1, 2, 1):
        store = open_audio(listed, data_config(tmp_path, cache=cache, channel=channel))
        assert np.array_equal(store[0], channels[:, channel - 1] / np.float32(32768))
    average = open_audio(listed, data_config(tmp_path, cache=cache))[0]
    np.testing.assert_allclose(average, channels.mean(1) / 32768, atol=1 / 32768)
    with pytest.raises(AudioError, match="has no channel 3"):
        open_audio(listed, data_config(tmp_path, cache=cache, channel=3))[0]
