"""A resumed run says what changed in its corpus: also audio of the same length, also inside shards."""

from __future__ import annotations

import os
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile

from ds2.data.manifest import Utterance
from ds2.data.splits import report_changes

RATE = 16000


@pytest.fixture
def utterances(tmp_path: Path) -> list[Utterance]:
    rng, made = np.random.default_rng(0), []
    for number in range(5):
        path = tmp_path / "corpus" / f"{number}.wav"
        path.parent.mkdir(exist_ok=True)
        soundfile.write(path, 0.1 * rng.standard_normal(RATE), RATE)
        made.append(Utterance(path, 1.0, f"text {number}"))
    return made


def describe_changes(record: Path, utterances: list[Utterance]) -> str:
    lines: list[str] = []
    report_changes(record, utterances, lines.append)
    return "".join(lines)


def rewrite(path: Path, content: bytes, *, same_time: bool) -> None:
    stat = path.stat()
    path.write_bytes(content)
    later = 0 if same_time else 10**9
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + later))


def reverse(path: Path, *, same_time: bool) -> None:
    content = path.read_bytes()
    rewrite(path, content[:44] + content[:43:-1], same_time=same_time)


def test_the_first_start_has_nothing_to_compare_with_and_the_second_finds_the_same(
    tmp_path: Path, utterances: list[Utterance]
) -> None:
    record = tmp_path / "record.json"
    assert describe_changes(record, utterances) == ""
    assert "unchanged (5 utterances, and the content of 5 recordings)" in describe_changes(record, utterances)
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    (tmp_path / "corpus").rename(moved / "corpus")
    there = [replace(u, audio_filepath=moved / "corpus" / u.audio_filepath.name) for u in utterances]
    assert "unchanged" in describe_changes(record, there[::-1])
    record.write_bytes(b"damaged")
    assert "cannot be read" in describe_changes(record, there)


@pytest.mark.parametrize("same_time", [False, True])
def test_audio_reversed_in_place_is_noticed(tmp_path: Path, utterances: list[Utterance], same_time: bool) -> None:
    record = tmp_path / "record.json"
    describe_changes(record, utterances)
    for u in utterances[:3]:
        reverse(u.audio_filepath, same_time=same_time)
    line = describe_changes(record, utterances)
    assert "3 of 5 sampled recordings have other content" in line
    assert f"0 utterances added, 0 removed, {0 if same_time else 3} changed (" in line
    assert ("such as corpus/0.wav at 0.0 s" in line) != same_time
    assert "unchanged" in describe_changes(record, utterances)  # since the start before


def test_changes_that_a_killed_process_did_not_report_are_those_of_the_next_start(
    tmp_path: Path, utterances: list[Utterance]
) -> None:
    record = tmp_path / "record.json"
    describe_changes(record, utterances)
    reverse(utterances[0].audio_filepath, same_time=True)

    def killed(line: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        report_changes(record, utterances, killed)
    assert "1 of 5 sampled recordings have other content" in describe_changes(record, utterances)


def test_files_texts_and_sizes_are_counted(tmp_path: Path, utterances: list[Utterance]) -> None:
    record = tmp_path / "record.json"
    describe_changes(record, utterances[:4])
    rewrite(utterances[1].audio_filepath, b"RIFF", same_time=True)
    line = describe_changes(record, utterances[1:])
    assert "1 utterance added, 1 removed, 1 changed (" in line and "such as corpus/1.wav" in line
    assert "1 of 3 sampled recordings have other content" in line
    other = [*utterances[1:-1], replace(utterances[-1], text="corrected")]
    assert "0 utterances added, 0 removed, 1 changed (" in describe_changes(record, other)


def test_a_member_of_a_shard_that_was_exchanged_is_noticed(tmp_path: Path, utterances: list[Utterance]) -> None:
    shard, record = tmp_path / "a.tar", tmp_path / "record.json"

    def pack() -> None:
        with tarfile.open(shard, "w") as tar:
            for u in utterances:
                tar.add(u.audio_filepath, u.audio_filepath.name)

    pack()
    members = [replace(u, audio_filepath=shard / u.audio_filepath.name) for u in utterances]
    describe_changes(record, members)
    reverse(utterances[2].audio_filepath, same_time=True)
    pack()
    stat = shard.stat()
    os.utime(shard, ns=(stat.st_atime_ns, stat.st_mtime_ns + 10**9))
    line = describe_changes(record, members)
    assert "0 removed, 5 changed (" in line and "1 of 5 sampled recordings have other content" in line


def test_what_is_read_does_not_grow_with_the_corpus(tmp_path: Path, utterances: list[Utterance]) -> None:
    many = [replace(utterances[0], audio_filepath=tmp_path / f"{n}.wav") for n in range(1000)]
    for u in many:
        u.audio_filepath.write_bytes(bytes(3 * RATE))
    assert not describe_changes(tmp_path / "record.json", many)
    assert "1000 utterances, and the content of 256 recordings" in describe_changes(tmp_path / "record.json", many)
