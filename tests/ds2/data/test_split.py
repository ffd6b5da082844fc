"""Parts of a corpus: nobody in two of them, near their shares, the same for the same seed."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds2.data.manifest import ManifestError, Utterance, split


def utterances(speakers: int, each: int = 5) -> list[Utterance]:
    return [
        Utterance(Path(f"/x/s{s}-{i}.wav"), 1.0 + i, "a", speaker=f"s{s}") for s in range(speakers) for i in range(each)
    ]


def test_nobody_is_in_two_parts_and_nothing_is_lost() -> None:
    everything = utterances(30)
    parts = split(everything, {"train": 0.8, "dev": 0.1, "test": 0.1})
    speakers = [{u.speaker for u in part} for part in parts.values()]
    assert sum(map(len, speakers)) == 30 == len(set.union(*speakers))
    assert sorted(map(id, everything)) == sorted(id(u) for part in parts.values() for u in part)
    held = [sum(u.duration_s for u in part) for part in parts.values()]
    one_speaker = 15.0
    assert all(abs(h - share * sum(held)) <= one_speaker for h, share in zip(held, (0.8, 0.1, 0.1), strict=True))


def test_the_seed_decides_and_the_order_stays() -> None:
    everything = utterances(12)
    shares = {"train": 3, "dev": 1}
    assert split(everything, shares, seed=7) == split(everything, shares, seed=7)
    assert split(everything, shares, seed=7) != split(everything, shares, seed=8)
    place = {id(u): i for i, u in enumerate(everything)}
    for part in split(everything, shares).values():
        assert [place[id(u)] for u in part] == sorted(place[id(u)] for u in part)


def test_every_part_gets_something_however_small_its_share() -> None:
    assert len(split(utterances(2), {"train": 0.999, "dev": 0.001})["dev"]) == 5


def test_segments_of_a_recording_stay_together() -> None:
    cut = [Utterance(Path(f"/x/{f}.wav"), 2.0, "a", offset_s=2.0 * i) for f in range(8) for i in range(4)]
    parts = split(cut, {"train": 0.75, "dev": 0.25}, by="recording")
    assert not {u.audio_filepath for u in parts["train"]} & {u.audio_filepath for u in parts["dev"]}


@pytest.mark.parametrize(
    ("speakers", "shares", "by", "message"),
    [
        (1, {"train": 0.9, "dev": 0.1}, "speaker", "1 speaker cannot make 2 parts: split with --by utterance"),
        (3, {"train": 0.9, "dev": 0.0}, "speaker", "share above 0"),
        (3, {"train": 1.0}, "speaker", "two parts or more"),
    ],
)
def test_parts_that_cannot_be_made_name_the_way_out(
    speakers: int, shares: dict[str, float], by: str, message: str
) -> None:
    with pytest.raises(ManifestError, match=message):
        split(utterances(speakers), shares, by=by)


def test_utterances_without_a_speaker_are_counted() -> None:
    mixed = [*utterances(3), Utterance(Path("/x/y.wav"), 1.0, "a")]
    with pytest.raises(ManifestError, match=r"1 of 16 utterances have no speaker.*--by recording"):
        split(mixed, {"train": 0.9, "dev": 0.1})
