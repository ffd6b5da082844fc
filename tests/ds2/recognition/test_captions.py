"""Captions by hand."""

from __future__ import annotations

from ds2.decoding.hypothesis import Word
from ds2.recognition.captions import Cue, cues, paragraphs, srt, vtt


def words(*spoken: tuple[str, float, float]) -> list[Word]:
    return [Word(text, start_s, end_s, 1.0) for text, start_s, end_s in spoken]


def test_cues_part_at_pauses_and_where_they_would_be_too_long() -> None:
    assert cues([]) == []
    spoken = words(("one", 0.5, 0.9), ("two", 1.0, 1.5), ("three", 2.6, 3.0))
    assert cues(spoken) == [Cue(0.5, 1.5, ("one two",)), Cue(2.6, 3.0, ("three",))]
    slow = words(*((f"w{second}", second, second + 0.8) for second in range(9)))
    assert [cue.text for cue in cues(slow)] == ["w0 w1 w2 w3 w4 w5 w6", "w7 w8"]
    wide = words(*(("x" * 30, 0.1 * at, 0.1 * at + 0.1) for at in range(5)))
    assert [[len(line) for line in cue.lines] for cue in cues(wide)] == [[30, 30], [30, 30], [30]]


def test_a_cue_has_two_lines_of_42_characters_at_most_and_loses_no_word() -> None:
    spoken = [
        "it",
        "is",
        "a",
        "truth",
        "universally",
        "acknowledged",
        "that",
        "a",
        "single",
        "man",
        "in",
        "possession",
        "of",
        "a",
        "good",
        "fortune",
    ]
    shown = cues(words(*((text, 0.2 * at, 0.2 * at + 0.2) for at, text in enumerate(spoken))))
    assert all(len(cue.lines) <= 2 and max(map(len, cue.lines)) <= 42 for cue in shown)
    assert " ".join(cue.text for cue in shown).split() == spoken
    assert srt(shown).splitlines()[2:4] == [
        "it is a truth universally acknowledged",
        "that a single man in possession of a good",
    ]
    long = "x" * 50
    assert [cue.lines for cue in cues(words(("a", 0.0, 0.1), (long, 0.1, 0.2), ("b", 0.2, 0.3)))] == [
        ("a",),
        (long,),
        ("b",),
    ]


def test_paragraphs_end_at_pauses_and_long_ones_at_shorter_pauses() -> None:
    assert paragraphs([]) == []
    spoken = words(
        ("a", 0.0, 1.0),
        ("b", 1.9, 2.0),
        ("c", 3.0, 30.0),
        ("d", 32.9, 33.0),
        ("e", 33.3, 60.0),
        ("f", 60.9, 63.0),
        ("g", 63.5, 64.0),
    )
    assert [[w.text for w in group] for group in paragraphs(spoken)] == [["a", "b"], ["c"], ["d", "e", "f"], ["g"]]


def test_files_by_hand() -> None:
    shown = [Cue(0.0, 1.2345, ("one < two", "& so")), Cue(3661.0, 3662.9996, ("on",))]
    assert srt(shown) == ("1\n00:00:00,000 --> 00:00:01,234\none < two\n& so\n\n2\n01:01:01,000 --> 01:01:03,000\non\n")
    assert vtt(shown) == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:01.234\none &lt; two\n&amp; so\n\n01:01:01.000 --> 01:01:03.000\non\n"
    )
    assert (srt([]), vtt([])) == ("", "WEBVTT\n")
