"""A folder of recordings with their transcripts beside them: NAME.txt says what is heard in NAME.wav, NAME.m4a, ..."""

from __future__ import annotations

import logging
from pathlib import Path

from ds2.audio.read import AUDIO_SUFFIXES
from ds2.data.corpora.common import Entry, ImporterError, corpus_folder, read_lines, to_utterances
from ds2.data.manifest import Utterance
from ds2.system.text_files import TextError

log = logging.getLogger(__name__)


def import_folder(folder: str | Path, *, skip_bad: bool = False) -> list[Utterance]:
    """Import every NAME.txt beneath a folder with the audio of its name, in order of their paths.

    The first folder on the way down is the speaker; files that lie in the folder itself have none. Lines of a
    transcript are joined. Audio without a transcript is counted in the log and left out.

    Raises:
        ImporterError: no transcripts, an empty one, one that is not UTF-8, or unusable audio.
    """
    root = corpus_folder(folder)
    entries, problems = [], []
    transcripts = sorted(root.rglob("*.txt"))
    for path in transcripts:
        try:
            text = " ".join(line for _, line in read_lines(path))
        except TextError as error:
            problems.append(str(error))
            continue
        inside = path.relative_to(root).parts
        if text:
            entries.append(Entry(path.with_suffix(""), text, str(path), speaker=inside[0] if len(inside) > 1 else ""))
        else:
            problems.append(f"{path}: the transcript is empty")
    if not entries and not problems:
        raise ImporterError(f"{root}: holds no NAME.txt; write each transcript beside its recording: 001.wav, 001.txt")
    told = {path.with_suffix("") for path in transcripts}
    untold = [p for p in root.rglob("*") if p.suffix.lower() in AUDIO_SUFFIXES and p.with_suffix("") not in told]
    if untold:
        log.warning("%d recordings have no transcript and are left out, %s first", len(untold), min(untold))
    return to_utterances(entries, skip_bad=skip_bad, problems=problems)
