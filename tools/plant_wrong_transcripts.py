"""How well `ds2 align` finds wrong transcripts: some are planted in a corpus, and those listed are counted.

    python tools/plant_wrong_transcripts.py MODEL MANIFEST... --share 0.05 --kinds swap cut --seeds 1 2 3

swap: the chosen utterances exchange their transcripts. cut: they lose the last third of their words.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ds2.config.device import resolve_device
from ds2.data.manifest import Utterance
from ds2.data.splits import scored_utterances
from ds2.model.checkpoint import load_model
from ds2.recognition.transcripts import align_utterances, suspicious

KINDS = ("swap", "cut")


def plant(utterances: Sequence[Utterance], kind: str, share: float, seed: int) -> dict[int, Utterance]:
    """Return the chosen utterances by place, with transcripts that are wrong."""
    chosen = random.Random(seed).sample(range(len(utterances)), round(share * len(utterances)))
    wrong = {}
    for place, donor in zip(chosen, [*chosen[1:], *chosen[:1]], strict=True):
        words = utterances[place].text.split()
        text = utterances[donor].text if kind == "swap" else " ".join(words[: len(words) - len(words) // 3])
        if text != utterances[place].text:
            wrong[place] = replace(utterances[place], text=text)
    return wrong


def main() -> None:
    """Align the corpus once, then the planted transcripts of each kind and seed, and print precision and recall."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("manifests", nargs="+")
    parser.add_argument("--share", type=float, default=0.05, help="of the utterances that get a wrong transcript")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--device", default="auto")
    arguments = parser.parse_args()
    device = resolve_device(arguments.device)
    loaded = load_model(arguments.model, device)
    utterances = scored_utterances(arguments.manifests, loaded.alphabet)
    surprises = [aligned.surprise for aligned in align_utterances(loaded, utterances, device)]
    print(f"{len(utterances)} utterances; listed as they are: {len(suspicious(surprises))}")
    for kind in arguments.kinds:
        for seed in arguments.seeds:
            wrong = plant(utterances, kind, arguments.share, seed)
            mixed = list(surprises)
            for place, aligned in zip(wrong, align_utterances(loaded, list(wrong.values()), device), strict=True):
                mixed[place] = aligned.surprise
            listed = suspicious(mixed)
            hits = len(wrong.keys() & set(listed))
            print(
                f"{kind} seed {seed}: {len(wrong)} planted, {len(listed)} listed, "
                f"precision {hits / max(1, len(listed)):.3f}, recall {hits / max(1, len(wrong)):.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
