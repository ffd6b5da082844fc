"""LibriSpeech: SPLIT/READER/CHAPTER/READER-CHAPTER.trans.txt beside the audio."""

from __future__ import annotations

from pathlib import Path

from ds2.data.corpora.common import Entry, ImporterError, corpus_folder, read_lines, to_utterances
from ds2.data.manifest import Utterance


def import_librispeech(folder: str | Path, split: str = "", *, skip_bad: bool = False) -> list[Utterance]:
    """Import every chapter beneath a folder, ordered by utterance id; the speaker is the reader's number.

    Args:
        folder: the folder that holds the splits, or the one above it that holds `LibriSpeech`, or one split.
        split: such as "train-clean-100"; empty takes the whole folder.
        skip_bad: name, count and leave out utterances without usable audio rather than stop.
    Raises:
        ImporterError: no such split, no transcripts, a malformed line, or unusable audio.
    """
    root = libri_root(folder)
    if split:
        if not (root / split).is_dir():
            raise ImporterError(f"{root} has no part {split!r}; it has {', '.join(parts(root)) or 'no folders'}")
        root /= split
    entries = []
    for transcript in sorted(root.rglob("*.trans.txt")):
        for source, line in read_lines(transcript):
            name, _, text = line.partition(" ")
            speaker, dash, _ = name.partition("-")
            if not dash or not text:
                raise ImporterError(f"{source}: {line!r} is not 'READER-CHAPTER-NUMBER WORDS'")
            entries.append(Entry(transcript.parent / name, text.strip(), source, speaker=speaker))
    if not entries:
        raise ImporterError(f"{root}: holds no *.trans.txt; give a folder in LibriSpeech's layout")
    return to_utterances(entries, skip_bad=skip_bad)


def libri_root(folder: str | Path) -> Path:
    """Return the folder that holds the splits."""
    root = corpus_folder(folder)
    return root / "LibriSpeech" if (root / "LibriSpeech").is_dir() else root


def parts(root: Path) -> list[str]:
    """Return the names of the folders in the folder of the splits."""
    return sorted(path.name for path in root.iterdir() if path.is_dir())
