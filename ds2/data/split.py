"""Splits a list of utterances into parts without common speakers; the same seed gives the same parts."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from ds2.data.manifest import Utterance
from ds2.system.errors import UserError


class SplitError(UserError):
    """Parts that cannot be made; the message says why and the way out."""


_KEYS: dict[str, Callable[[Utterance], str]] = {
    "speaker": lambda u: u.speaker,
    "recording": lambda u: str(u.audio_filepath),
    "utterance": lambda u: f"{u.audio_filepath}+{u.offset_s}",
}
UNITS = tuple(_KEYS)
"""Units that `split` does not divide: `--by` of the command."""


def split(
    utterances: Sequence[Utterance], shares: Mapping[str, float], *, by: str = "speaker", seed: int = 1
) -> dict[str, list[Utterance]]:
    """Split utterances by duration, whole speakers (or recordings) at a time; their order stays.

    Groups are shuffled by the seed. Each goes to the part that has the least of its share so far, so every part gets at
    least one; a part may differ from its share by about the length of one group.

    Args:
        utterances: to split.
        shares: of the audio, by part; positive numbers, of which only the proportions count.
        by: speaker, recording (file) or utterance: unit that is not divided.
        seed: of the shuffle.

    Raises:
        SplitError: unknown `by`, shares that are not positive, utterances without a speaker, or fewer groups than
            parts.
    """
    if by not in _KEYS:
        raise SplitError(f"--by {by!r} is not one of {', '.join(UNITS)}")
    if len(shares) < 2 or not all(0 < share < float("inf") for share in shares.values()):
        raise SplitError(f"shares {dict(shares)}: two parts or more, each with a share above 0: train=0.9 dev=0.1")
    groups: dict[str, list[int]] = defaultdict(list)
    for index, utterance in enumerate(utterances):
        groups[_KEYS[by](utterance)].append(index)
    if by == "speaker" and "" in groups:
        raise SplitError(
            f"{len(groups[''])} of {len(utterances)} utterances have no speaker: write one into the manifest, or "
            "split with --by recording or --by utterance (people who speak in two parts make the WER look better)"
        )
    if len(groups) < len(shares):
        raise SplitError(
            f"{len(groups)} {by}s cannot make {len(shares)} parts: "
            + ("ask for fewer parts" if by == "utterance" else "split with --by utterance, or ask for fewer parts")
        )
    order = sorted(groups)
    random.Random(seed).shuffle(order)
    durations_s = dict.fromkeys(shares, 0.0)
    part_of: dict[int, str] = {}
    for key in order:
        part = min(shares, key=lambda name: durations_s[name] / shares[name])
        durations_s[part] += sum(utterances[index].duration_s for index in groups[key])
        part_of.update(dict.fromkeys(groups[key], part))
    return {name: [u for index, u in enumerate(utterances) if part_of[index] == name] for name in shares}
