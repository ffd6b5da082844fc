"""Small corpora in their published layouts, and what importers found in them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import soundfile

from ds2.data.manifest import Utterance


def write_audio(path: Path, seconds: float = 1.0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    subtype = "OPUS" if path.suffix == ".opus" else "PCM_16"
    container = {".opus": "OGG", ".sph": "NIST", ".wav": "WAV", ".flac": "FLAC"}[path.suffix]
    soundfile.write(path, np.full(int(16000 * seconds), 0.1), 16000, format=container, subtype=subtype)
    return path


def write_text(path: Path, *lines: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def facts(utterances: Iterable[Utterance]) -> list[tuple[str, float, str, str]]:
    return [(u.audio_filepath.name, round(u.duration_s, 3), u.text, u.speaker) for u in utterances]


def librispeech(folder: Path, *parts: str) -> Path:
    for reader, part in enumerate(parts, start=10):
        chapter = folder / part / str(reader) / "7"
        for number in range(2):
            write_audio(chapter / f"{reader}-7-000{number}.flac")
        write_text(chapter / f"{reader}-7.trans.txt", f"{reader}-7-0000 ONE", f"{reader}-7-0001 TWO")
    return folder
