"""CMU AN4: etc/an4_{train,test}.{fileids,transcription} and wav/."""

from __future__ import annotations

import re
from pathlib import Path

from ds2.data.corpora.common import Entry, ImporterError, corpus_folder, read_lines, to_utterances
from ds2.data.manifest import Utterance

SPLITS = ("train", "test")
_LINE = re.compile(r"^(?:<s>)?(?P<text>.*?)(?:</s>)?\s*\((?P<id>[^()\s]+)\)$")


def import_an4(folder: str | Path, split: str = "train", *, skip_bad: bool = False) -> list[Utterance]:
    """Import the official train (948 utterances) or test (130) part of AN4, in the order of its fileids.

    The sentence marks <s> and </s> are removed; the speaker is the folder of the audio, which may be sph or transcoded.

    Raises:
        ImporterError: a file is missing or malformed, fileids and transcription disagree, or audio is unusable.
    """
    if split not in SPLITS:
        raise ImporterError(f"AN4 has no part {split!r}; one of {', '.join(SPLITS)}")
    root = corpus_folder(folder)
    if not (root / "etc").is_dir() and (root / "an4" / "etc").is_dir():
        root /= "an4"
    texts: dict[str, tuple[str, str]] = {}
    for source, line in read_lines(root / "etc" / f"an4_{split}.transcription"):
        match = _LINE.match(line)
        if match is None or match["id"] in texts:
            raise ImporterError(f"{source}: {line!r} is not 'WORDS (id)' with an id of its own")
        texts[match["id"]] = (source, match["text"].strip())
    entries = []
    for source, fileid in read_lines(root / "etc" / f"an4_{split}.fileids"):
        path = Path(fileid)
        if path.name not in texts:
            raise ImporterError(f"{source}: {path.name} has no line in an4_{split}.transcription")
        text_source, text = texts.pop(path.name)
        entries.append(Entry(root / "wav" / path, text, text_source, speaker=path.parent.name))
    if texts:
        source, _ = next(iter(texts.values()))
        raise ImporterError(f"{source}: {len(texts)} transcriptions are not in an4_{split}.fileids: {', '.join(texts)}")
    return to_utterances(entries, skip_bad=skip_bad)
