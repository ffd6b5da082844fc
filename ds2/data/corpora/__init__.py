"""Importers of corpora, one function per layout, and the prepare step of each recipe."""

import logging
import random
from collections import Counter
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

from ds2.data.corpora import layouts
from ds2.data.corpora.common import ImporterError
from ds2.data.corpora.kaldi import import_kaldi
from ds2.data.corpora.layouts import import_an4, import_librispeech
from ds2.data.corpora.shards import import_shar, import_webdataset
from ds2.data.corpora.synthetic import make_corpus
from ds2.data.manifest import Utterance, amount, read_manifest, write_manifest
from ds2.system.plain import counted

log = logging.getLogger(__name__)

_DEV_FRACTION = 0.05
_DEV_SEED = 1
_LEARNERS_HELD_OUT, _LJSPEECH_HELD_OUT = 25, 60  # speakers and utterances that recipe=english tests with
FORMATS: dict[str, tuple[Callable[..., list[Utterance]], str]] = {
    "folder": (layouts.import_folder, "encoding"),
    "csv": (layouts.import_csv, ""),
    "kaldi": (import_kaldi, ""),
    "librispeech": (import_librispeech, "split"),
    "an4": (import_an4, "split"),
    "deepspeech_pytorch": (layouts.import_deepspeech_pytorch, "encoding"),
    "webdataset": (import_webdataset, ""),
    "shar": (import_shar, ""),
}
"""The importer of each layout, and the argument that it has besides `folder` and `skip_bad`."""


def import_corpus(
    format: str, folder: str | Path, split: str = "", *, skip_bad: bool = False, encoding: str = ""
) -> list[Utterance]:
    """Import a corpus of a named layout.

    Args:
        format: one of FORMATS.
        folder: of the corpus; for csv and deepspeech_pytorch the table itself.
        split: the part of LibriSpeech (empty: all beneath the folder) or AN4 (empty: train); other layouts have none.
        skip_bad: leave out utterances without usable audio, with a warning.
        encoding: of transcripts in files of their own (folder, deepspeech_pytorch) that are not Unicode.
    Raises:
        ImporterError: a split or encoding of a layout that has none, or an error of the importer.
    """
    importer, argument = FORMATS[format]
    if encoding and argument != "encoding":
        encoded = " and ".join(name for name, (_, own) in FORMATS.items() if own == "encoding")
        raise ImporterError(f"--encoding is for {encoded}; texts of format {format} are UTF-8")
    if split and argument != "split":
        raise ImporterError(
            f"format {format} has no parts, so --split {split!r} is not allowed; give the folder of the part"
        )
    value = split or encoding
    return importer(folder, skip_bad=skip_bad, **({argument: value} if value else {}))


def prepare(name: str, corpus: str | Path, work_dir: str | Path) -> dict[str, Path]:
    """Write the manifests of a recipe into `work_dir` and return their paths by part: train, dev, mostly test.

    - an4: the official train and test parts; dev is 5 % of train by whole speakers, drawn by seed. Like those of the
      test part, its speakers do not occur in train; its texts may.
    - english: what the shipped model learns from, in a folder of corpora: LibriSpeech/train-clean-5, the train parts of
      speechocean762 and AN4, ljspeech_part/manifest.jsonl. Dev is LibriSpeech/train-clean-100-part. The tests are
      LibriSpeech/dev, AN4's, 25 learners of speechocean762 and the last 60 utterances of ljspeech_part.
    - librispeech: all train-* parts except the mini one, dev-clean and test-clean; dev-other and test-other if present.
    - librispeech_5h: train-clean-5, and `dev` or mini LibriSpeech's `dev-clean-2` as dev.
    - synthetic: a generated corpus, audio included; `corpus` is not read.

    Raises:
        ImporterError: an unknown recipe, the corpus is not at `corpus`, or it cannot be imported.
    """
    if name not in RECIPES:
        raise ImporterError(
            f"data.prepare={name!r} is not one of {', '.join(RECIPES)}: choose a recipe (recipe=an4), or write "
            "manifests with `ds2 data import` and set data.train"
        )
    work_dir = Path(work_dir)
    splits = RECIPES[name](work_dir / "audio" if name == "synthetic" else corpus)
    written = {}
    for part, utterances in splits.items():
        written[part] = work_dir / f"{part}.jsonl"
        write_manifest(written[part], utterances)
        speakers = counted(len({u.speaker for u in utterances}), "speaker")
        log.info("%s: %s, %s", written[part], amount(utterances), speakers)
    return written


def _an4(corpus: str | Path) -> dict[str, list[Utterance]]:
    utterances = import_an4(corpus, "train")
    sizes = Counter(u.speaker for u in utterances)
    order = sorted(sizes)
    random.Random(_DEV_SEED).shuffle(order)
    before = accumulate((sizes[speaker] for speaker in order), initial=0)
    wanted = _DEV_FRACTION * len(utterances)
    dev_speakers = {speaker for speaker, count in zip(order, before, strict=False) if count < wanted}
    return {
        "train": [u for u in utterances if u.speaker not in dev_speakers],
        "dev": [u for u in utterances if u.speaker in dev_speakers],
        "test": import_an4(corpus, "test"),
    }


def _english(corpus: str | Path) -> dict[str, list[Utterance]]:
    root = Path(corpus)
    learners = import_kaldi(root / "speechocean762" / "train")
    held_out = set(random.Random(_DEV_SEED).sample(sorted({u.speaker for u in learners}), _LEARNERS_HELD_OUT))
    reader = read_manifest(root / "ljspeech_part" / "manifest.jsonl")
    libri = root / "LibriSpeech"
    return {
        "train": [
            *import_librispeech(libri, "train-clean-5"),
            *(u for u in learners if u.speaker not in held_out),
            *reader[:-_LJSPEECH_HELD_OUT],
            *import_an4(root / "an4", "train"),
        ],
        "dev": import_librispeech(libri, "train-clean-100-part"),
        "librispeech": import_librispeech(libri, "dev"),
        "an4": import_an4(root / "an4", "test"),
        "learners": [u for u in learners if u.speaker in held_out],
        "ljspeech": reader[-_LJSPEECH_HELD_OUT:],
    }


def _librispeech(corpus: str | Path) -> dict[str, list[Utterance]]:
    root = layouts.libri_root(corpus)
    present = layouts.parts(root)
    train = [part for part in present if part.startswith("train-") and part != "train-clean-5"]
    if not train or "dev-clean" not in present or "test-clean" not in present:
        raise ImporterError(
            f"{root}: expected train-*, dev-clean and test-clean, found {', '.join(present) or 'no folders'}"
        )
    splits = {"train": [u for part in train for u in import_librispeech(root, part)]}
    names = {"dev": "dev-clean", "test": "test-clean", "dev_other": "dev-other", "test_other": "test-other"}
    return splits | {name: import_librispeech(root, part) for name, part in names.items() if part in present}


def _librispeech_5h(corpus: str | Path) -> dict[str, list[Utterance]]:
    root = layouts.libri_root(corpus)
    present = layouts.parts(root)
    dev = next((part for part in ("dev", "dev-clean-2") if part in present), None)
    if "train-clean-5" not in present or dev is None:
        raise ImporterError(
            f"{root}: expected train-clean-5 and dev or dev-clean-2, found {', '.join(present) or 'no folders'}"
        )
    return {"train": import_librispeech(root, "train-clean-5"), "dev": import_librispeech(root, dev)}


RECIPES: dict[str, Callable[[str | Path], dict[str, list[Utterance]]]] = {
    "an4": _an4,
    "english": _english,
    "librispeech": _librispeech,
    "librispeech_5h": _librispeech_5h,
    "synthetic": make_corpus,
}
"""The parts of each recipe's corpus, by its folder; of `synthetic` by the folder for its audio."""
