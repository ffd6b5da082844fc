"""`ds2 align --textgrid`: what Praat reads."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ds2.cli import main
from ds2.data.manifest import read_manifest, write_manifest
from ds2.recognition.captions import Interval, text_grid

NUMBER = r"(\d+(?:\.\d+)?)"


def parse(text: str) -> tuple[float, dict[str, list[tuple[float, float, str]]]]:
    """Duration and tiers of a TextGrid in the long format, as Praat's manual describes it; every value is checked."""
    head, *items = re.split(r"    item \[\d+\]:\n", text)
    match = re.fullmatch(
        rf'File type = "ooTextFile"\nObject class = "TextGrid"\n\nxmin = 0\nxmax = {NUMBER}\ntiers\? <exists>\n'
        rf"size = (\d+)\nitem \[\]:\n",
        head,
    )
    assert match and int(match[2]) == len(items)
    duration_s, tiers = float(match[1]), {}
    for item in items:
        tier_head, *parts = re.split(r"        intervals \[\d+\]:\n", item)
        match = re.fullmatch(
            rf'        class = "IntervalTier"\n        name = "(\w+)"\n        xmin = 0\n        xmax = {NUMBER}\n'
            r"        intervals: size = (\d+)\n",
            tier_head,
        )
        assert match and float(match[2]) == duration_s and int(match[3]) == len(parts)
        intervals = []
        for part in parts:
            interval = re.fullmatch(rf' {{12}}xmin = {NUMBER}\n {{12}}xmax = {NUMBER}\n {{12}}text = "(.*)"\n', part)
            assert interval and '"' not in interval[3].replace('""', "")
            intervals.append((float(interval[1]), float(interval[2]), interval[3].replace('""', '"')))
        tiers[match[1]] = intervals
        assert intervals[0][0] == 0.0 and intervals[-1][1] == duration_s
        assert all(start < end for start, end, _ in intervals)
        assert all(a[1] == b[0] for a, b in itertools.pairwise(intervals))
    return duration_s, tiers


def test_gaps_are_empty_intervals_and_quotes_are_doubled() -> None:
    words = [Interval(0.0, 0.1 + 0.2, 'say "ü"'), Interval(0.3, 0.5, "b"), Interval(0.7, 1.0, "c")]
    duration_s, tiers = parse(text_grid({"words": words, "none": []}, 1.0))
    assert duration_s == 1.0 and tiers["none"] == [(0.0, 1.0, "")]
    assert tiers["words"] == [(0.0, 0.3, 'say "ü"'), (0.3, 0.5, "b"), (0.5, 0.7, ""), (0.7, 1.0, "c")]


def test_a_recording_has_one_textgrid_with_the_words_of_all_its_utterances(
    make_model: Callable[..., Path], tone_manifest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second, *_ = read_manifest(tone_manifest)
    half_s = round(second.duration_s / 2, 3)
    manifest = tmp_path / "some.jsonl"
    parts = [
        replace(second, offset_s=half_s, duration_s=half_s, text="b"),
        replace(second, duration_s=half_s, text="ca"),
    ]
    write_manifest(manifest, [first, *parts])
    command = ["align", str(make_model()), str(manifest), "--device", "cpu", "--textgrid", str(tmp_path / "grids")]
    assert main([*command, "--out", str(tmp_path / "words.jsonl")]) == 0
    records = [json.loads(line) for line in (tmp_path / "words.jsonl").read_text().splitlines()]
    duration_s, tiers = parse((tmp_path / "grids" / f"{second.audio_filepath.stem}.TextGrid").read_text("utf-8"))
    assert duration_s == pytest.approx(2 * half_s) and list(tiers) == ["words", "characters"]
    written = [interval for interval in tiers["words"] if interval[2]]
    assert [text for *_, text in written] == ["ca", "b"]
    expected = [r["offset"] + r["words"][0]["start_s"] for r in (records[2], records[1])]
    assert [start for start, *_ in written] == pytest.approx(expected, abs=1e-3)
    characters = [interval for interval in tiers["characters"] if interval[2]]
    assert [text for *_, text in characters] == ["c", "a", "b"]
    assert characters[0][0] == written[0][0] and characters[1][1] == written[0][1]
    assert main(command) == 2
    assert "exists already" in capsys.readouterr().err
    assert main([*command, "--overwrite"]) == 0
    write_manifest(manifest, [first, replace(parts[0], offset_s=half_s - 0.1), parts[1]])
    assert main([*command, "--overwrite"]) == 2
    assert "overlap, and a tier holds no overlaps" in capsys.readouterr().err


def test_recordings_of_one_name_have_textgrids_in_the_folders_of_their_speakers(
    make_model: Callable[..., Path], tone_manifest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tone, manifest, grids = read_manifest(tone_manifest)[0], tmp_path / "two.jsonl", tmp_path / "grids"
    copies = [tmp_path / "recordings" / speaker / "001.wav" for speaker in ("ayse", "deniz")]
    for copy in copies:
        copy.parent.mkdir(parents=True)
        copy.write_bytes(tone.audio_filepath.read_bytes())
    write_manifest(manifest, [replace(tone, audio_filepath=copy) for copy in copies])
    command = ["align", str(make_model()), str(manifest), "--device", "cpu", "--textgrid", str(grids)]
    assert main(command) == 0
    assert all((grids / speaker / "001.TextGrid").is_file() for speaker in ("ayse", "deniz"))
    assert main(command) == 2
    assert "choose another folder with --textgrid" in capsys.readouterr().err
