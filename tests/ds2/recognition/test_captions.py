"""Captions by hand."""

from __future__ import annotations

from ds2.decoding.hypothesis import Word
from ds2.recognition.captions import Cue, cues, srt, vtt


def words(*said: tuple[str, float, float]) -> list[Word]:
    return [Word(text, start_s, end_s, 1.0) for text, start_s, end_s in said]


def test_cues_part_at_pauses_and_where_they_would_be_too_long() -> None:
    assert cues([]) == []
    said = words(("one", 0.5, 0.9), ("two", 1.0, 1.5), ("three", 2.6, 3.0))
    assert cues(said) == [Cue(0.5, 1.5, "one two"), Cue(2.6, 3.0, "three")]
    slow = words(*((f"w{second}", second, second + 0.8) for second in range(9)))
    assert [cue.text for cue in cues(slow)] == ["w0 w1 w2 w3 w4 w5 w6", "w7 w8"]
    wide = words(*(("x" * 30, 0.1 * at, 0.1 * at + 0.1) for at in range(5)))
    assert [len(cue.text) for cue in cues(wide)] == [61, 61, 30]


def test_files_by_hand() -> None:
    shown = [Cue(0.0, 1.2345, "one < two & so"), Cue(3661.0, 3662.9996, "on")]
    assert srt(shown) == ("1\n00:00:00,000 --> 00:00:01,234\none < two & so\n\n2\n01:01:01,000 --> 01:01:03,000\non\n")
    assert vtt(shown) == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:01.234\none &lt; two &amp; so\n\n01:01:01.000 --> 01:01:03.000\non\n"
    )
    assert (srt([]), vtt([])) == ("", "WEBVTT\n")
