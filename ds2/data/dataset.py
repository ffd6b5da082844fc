"""Utterances of a Python program as a manifest."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

from ds2.audio.read import AudioError, audio_info
from ds2.audio.stream import as_samples
from ds2.data.manifest import ManifestError, Utterance, write_manifest


def save_dataset(
    folder: Path | str, utterances: Iterable[tuple[Any, ...]], *, sample_rate_hz: int | None = None
) -> Path:
    """Write utterances as `folder/manifest.jsonl`; see `ds2.save_dataset`.

    Raises:
        ManifestError: there is a manifest already, an entry has another form, or there are no entries.
        AudioError: audio that cannot be read, or samples of another shape, type or scale, or without a rate.
    """
    folder = Path(folder).resolve()
    manifest = folder / "manifest.jsonl"
    if manifest.exists():
        raise ManifestError(f"{manifest} exists already: choose another folder, or remove it")
    folder.mkdir(parents=True, exist_ok=True)
    written = [_utterance(folder, number, entry, sample_rate_hz) for number, entry in enumerate(utterances, start=1)]
    if not written:
        raise ManifestError(
            f"{manifest} would hold no utterances: give (audio, text) or (audio, text, speaker) of each"
        )
    write_manifest(manifest, written)
    return manifest


def _utterance(folder: Path, number: int, entry: tuple[Any, ...], rate_hz: int | None) -> Utterance:
    if not (isinstance(entry, tuple | list) and len(entry) in (2, 3) and all(isinstance(t, str) for t in entry[1:])):
        raise ManifestError(
            f"utterance {number}: expected (audio, text) or (audio, text, speaker), text and speaker as str"
        )
    audio, text, *speaker = entry
    if isinstance(audio, str | Path):
        path = Path(audio).resolve()
    else:
        if rate_hz is None:
            raise AudioError(f"utterance {number}: samples need a rate: save_dataset(..., sample_rate_hz=16000)")
        path = folder / f"{number:06d}.flac"
        soundfile.write(path, np.clip(as_samples(audio), -1.0, 1.0), rate_hz)
    return Utterance(path, audio_info(path).duration_s, text, speaker="".join(speaker))
