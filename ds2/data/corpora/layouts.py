"""Corpora in folders: recordings with transcripts of the same name, CMU AN4, LibriSpeech."""

from __future__ import annotations

import logging
import re
from pathlib import Path

from ds2.audio.read import AUDIO_SUFFIXES
from ds2.data.corpora.common import Entry, ImporterError, corpus_folder, read_lines, read_transcripts, to_utterances
from ds2.data.manifest import Utterance

log = logging.getLogger(__name__)

AN4_URL = "https://dldata-public.s3.us-east-2.amazonaws.com/an4_sphere.tar.gz"  # NeMo's copy; CMU's page is gone
AN4_SOURCE = f"curl -O {AN4_URL} && tar xzf an4_sphere.tar.gz (64 MB; makes the folder an4)"
LIBRISPEECH_SOURCE = (
    "https://www.openslr.org/12, or https://www.openslr.org/31 for mini LibriSpeech (recipe librispeech_5h)"
)
AN4_SPLITS = ("train", "test")
_AN4_LINE = re.compile(r"^(?:<s>)?(?P<text>.*?)(?:</s>)?\s*\((?P<id>[^()\s]+)\)$")


def import_folder(folder: str | Path, *, skip_bad: bool = False, encoding: str = "") -> list[Utterance]:
    """Import every NAME.txt beneath a folder with the audio of its name, in order of their paths.

    The first sub-folder of a path is the speaker; files in the folder itself have none. Lines of a transcript are
    joined. Recordings without a transcript are counted in the log and left out; hidden files (`.NAME`, as `._NAME` of
    macOS) are ignored. `encoding` is that of transcripts which are not Unicode; see `read_transcripts`.

    Raises:
        ImporterError: there are no transcripts; or, unless `skip_bad`, one is empty or not text, or audio is unusable.
    """
    root = corpus_folder(folder)
    transcripts = sorted(path for path in root.rglob("*.txt") if not path.name.startswith("."))
    texts, unread = read_transcripts(transcripts, encoding)
    problems = [unread.get(path) or f"{path}: the transcript is empty" for path in transcripts if not texts.get(path)]
    entries = []
    for path, text in sorted(texts.items()):
        if text:
            folders = path.relative_to(root).parts[:-1]
            entries.append(Entry(path.with_suffix(""), text, str(path), speaker=folders[0] if folders else ""))
    if not entries and not problems:
        raise ImporterError(f"{root}: holds no NAME.txt; write each transcript beside its recording: 001.wav, 001.txt")
    transcribed = {path.with_suffix("") for path in transcripts}
    recordings = (p for p in root.rglob("*") if p.suffix.lower() in AUDIO_SUFFIXES and not p.name.startswith("."))
    without = [path for path in recordings if path.with_suffix("") not in transcribed]
    if without:
        log.warning("%d recordings without a transcript are left out, such as %s", len(without), min(without))
    return to_utterances(entries, skip_bad=skip_bad, problems=problems)


def import_an4(folder: str | Path, split: str = "train", *, skip_bad: bool = False) -> list[Utterance]:
    """Import the official train (948 utterances) or test (130) part of AN4, in the order of its fileids.

    The sentence marks <s> and </s> are removed; the speaker is the folder of the audio, which may be sph or transcoded.

    Raises:
        ImporterError: a file is missing or malformed, fileids and transcription disagree, or audio is unusable.
    """
    if split not in AN4_SPLITS:
        raise ImporterError(f"AN4 has no part {split!r}; one of {', '.join(AN4_SPLITS)}")
    root = corpus_folder(folder, AN4_SOURCE)
    if not (root / "etc").is_dir() and (root / "an4" / "etc").is_dir():
        root /= "an4"
    if not (root / "etc").is_dir():
        raise ImporterError(f"{root} is not AN4, as it has no folder etc. To get AN4: {AN4_SOURCE}")
    texts: dict[str, tuple[str, str]] = {}
    for source, line in read_lines(root / "etc" / f"an4_{split}.transcription"):
        match = _AN4_LINE.match(line)
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
    root = corpus_folder(folder, LIBRISPEECH_SOURCE)
    return root / "LibriSpeech" if (root / "LibriSpeech").is_dir() else root


def parts(root: Path) -> list[str]:
    """Return the names of the folders in the folder of the splits."""
    return sorted(path.name for path in root.iterdir() if path.is_dir())
