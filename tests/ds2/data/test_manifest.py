"""Manifests: what is read, what is written, and that one comes back as the other."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ds2.data.manifest import ManifestError, Utterance, read_manifest, read_manifests, write_manifest

_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
_UTTERANCES = st.lists(
    st.builds(
        Utterance,
        st.from_regex(r"[a-z0-9 é]{1,12}\.wav", fullmatch=True).map(lambda name: Path("/corpus") / name),
        st.integers(0, 10**9).map(lambda n: n / 1e6),
        _TEXT,
        st.integers(0, 10**9).map(lambda n: n / 1e6),
        _TEXT,
        _TEXT,
    ),
    min_size=1,
    unique_by=lambda u: (u.audio_filepath, u.offset_s),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50, deadline=None)
@given(utterances=_UTTERANCES)
def test_what_is_written_is_read(tmp_path: Path, utterances: list[Utterance]) -> None:
    write_manifest(tmp_path / "m.jsonl", utterances)
    read = read_manifest(tmp_path / "m.jsonl")
    assert [u.source for u in read] == [f"{tmp_path / 'm.jsonl'}:{n}" for n in range(1, len(read) + 1)]
    strip = lambda u: (u.audio_filepath, u.duration_s, u.text, u.offset_s, u.speaker, u.lang)  # noqa: E731
    assert list(map(strip, read)) == list(map(strip, utterances))


def test_keys_are_those_of_nemo_and_paths_beneath_the_manifest_are_relative(tmp_path: Path) -> None:
    inside = Utterance(tmp_path / "wav" / "a.wav", 1.5, "hé", 0.25, "s1", "fr")
    outside = Utterance(Path("/elsewhere/b.wav"), 2.0, "b")
    write_manifest(tmp_path / "m.jsonl", [inside, outside])
    assert [json.loads(line) for line in (tmp_path / "m.jsonl").read_text(encoding="utf-8").splitlines()] == [
        {"audio_filepath": "wav/a.wav", "duration": 1.5, "text": "hé", "offset": 0.25, "speaker": "s1", "lang": "fr"},
        {"audio_filepath": "/elsewhere/b.wav", "duration": 2.0, "text": "b"},
    ]


def test_relative_paths_follow_the_manifest_not_the_working_directory(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    write_manifest(tmp_path / "a" / "m.jsonl", [Utterance(tmp_path / "a" / "x.wav", 1.0, "x")])
    (tmp_path / "a").rename(tmp_path / "b")
    assert read_manifest(tmp_path / "b" / "m.jsonl")[0].audio_filepath == (tmp_path / "b" / "x.wav").resolve()


def test_a_failed_write_leaves_the_old_manifest_and_no_partial_file(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    write_manifest(path, [Utterance(Path("/a.wav"), 1.0, "a")])

    def broken():
        yield Utterance(Path("/b.wav"), 1.0, "b")
        raise RuntimeError("interrupted")

    with pytest.raises(RuntimeError):
        write_manifest(path, broken())
    assert [u.text for u in read_manifest(path)] == ["a"]
    assert os.listdir(tmp_path) == ["m.jsonl"]


def test_name_tells_segments_of_a_file_apart() -> None:
    assert Utterance(Path("/x/a.wav"), 1.0, "").name == "a"
    assert Utterance(Path("/x/a.wav"), 1.0, "", 2.5).name == "a+2.5s"


def test_an_utterance_in_two_manifests_of_one_list_is_named_with_both_places(tmp_path: Path) -> None:
    for name in ("m", "n"):
        write_manifest(tmp_path / f"{name}.jsonl", [Utterance(tmp_path / "a.wav", 1.0, name)])
    with pytest.raises(ManifestError, match=r"n\.jsonl:1: a was listed before, at .*m\.jsonl:1"):
        read_manifests([tmp_path / "m.jsonl", tmp_path / "n.jsonl"])


@pytest.mark.parametrize("content", [b"hello world\nsecond line\n", bytes(range(256)) * 4], ids=["text", "binary"])
def test_a_file_that_is_no_manifest_is_called_so(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "talk").write_bytes(content)
    with pytest.raises(
        ManifestError, match=r"talk:1: .*\nNo line of .*talk is a JSON object: .*`ds2 data import`"
    ) as info:
        read_manifest(tmp_path / "talk")
    assert len(str(info.value).splitlines()) == 2
