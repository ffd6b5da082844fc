"""Kaldi data folders, in and out: wav.scp, segments, text, utt2spk, utt2lang."""

import math
import re
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from ds2.audio.read import AUDIO_SUFFIXES, END_TOLERANCE_S, AudioError, audio_info
from ds2.audio.shard import member_of
from ds2.data.corpora.common import CorpusEntry, ImporterError, corpus_folder, find_audio, read_lines, to_utterances
from ds2.data.manifest import Utterance
from ds2.system.files import write_text

# Programs that decode a file, with their options that take one channel or a part of it.
_DECODERS = {
    "cat": "",
    "ffmpeg": r"-(ss|sseof|t|to|map|map_channel|af|filter\S*)",
    "flac": r"--(skip|until)(=.*)?",
    "sph2pipe": r"-[cst]\S*",
}
_ONE_CHANNEL = (
    "ds2 reads whole files, and one channel of all (data.channel). Write each channel or part to a file of its own "
    "and list these in wav.scp; where the files have one channel, leave it out"
)
_LEVELS_UP = 3


def import_kaldi(folder: str | Path, *, skip_bad: bool = False) -> list[Utterance]:
    """Import a Kaldi data folder, in the order of `text`.

    Relative paths in wav.scp are looked up from the folder, from the three above it and from the working directory. Of
    commands (`flac -c -d -s x.flac |`) only cat, ffmpeg, flac and sph2pipe with one audio file are understood, by
    reading that file; nothing is executed, and options for a channel or a part of the file are refused, as channels in
    segments are. A speaker equal to the utterance id means that there is none, as in Kaldi.

    Raises:
        ImporterError: a file is missing or malformed, or `text` and audio disagree or audio is unusable (unless
            skip_bad).
    """
    root = corpus_folder(folder)
    recordings = {key: (source, value) for source, key, value in _table(root / "wav.scp")}
    segments = {key: (source, value) for source, key, value in _optional(root / "segments")}
    speakers = {key: value for _, key, value in _optional(root / "utt2spk")}
    languages = {key: value for _, key, value in _optional(root / "utt2lang")}
    entries, problems, used = [], [], set()
    for source, name, text in _table(root / "text"):
        recording, offset_s, end_s = name, 0.0, None
        if segments:
            if name not in segments:
                problems.append(f"{source}: {name} is not in segments")
                continue
            recording, offset_s, end_s = _segment(*segments[name])
        if recording not in recordings:
            problems.append(f"{source}: recording {recording} of {name} is not in wav.scp")
            continue
        used.add(name)
        audio = _audio_path(root, *recordings[recording])
        speaker = "" if speakers.get(name) == name else speakers.get(name, "")
        entries.append(CorpusEntry(audio, text, source, speaker, languages.get(name, ""), offset_s, end_s))
    listed = segments or recordings
    problems += [f"{listed[name][0]}: {name} has no line in text" for name in listed if name not in used]
    return to_utterances(entries, skip_bad=skip_bad, problems=problems)


def export_kaldi(utterances: Sequence[Utterance], folder: str | Path) -> None:
    """Write a Kaldi data folder: wav.scp, segments, text, utt2spk, spk2utt, utt2dur and utt2lang, sorted as LC_ALL=C.

    Utterance ids start with the speaker, as Kaldi requires; without speaker the utterance is its own. Every utterance
    has a segment where one is a part of its file. Audio other than wav is decoded by ffmpeg in wav.scp.
    """
    root = Path(folder)
    root.mkdir(parents=True, exist_ok=True)
    # Two speakers may differ in blanks only, and Kaldi's names have none.
    speakers = list(dict.fromkeys(u.speaker.strip() for u in utterances))
    speaker_of = dict(zip(speakers, _unique([_clean(speaker) for speaker in speakers]), strict=True))
    names = _unique([_identifier(u, speaker_of[u.speaker.strip()]) for u in utterances])
    per_file = Counter(u.audio_filepath for u in utterances)
    segmented = len(per_file) < len(utterances) or any(u.offset_s or _goes_on(u) for u in utterances)
    files = list(per_file)
    by_file = dict(zip(files, _unique([_clean(f.stem) for f in files]), strict=True))
    tables: dict[str, dict[str, str]] = defaultdict(dict)
    by_speaker: dict[str, list[str]] = defaultdict(list)
    for name, u in zip(names, utterances, strict=True):
        recording = by_file[u.audio_filepath] if segmented else name
        tables["wav.scp"][recording] = _wav_entry(u.audio_filepath)
        tables["text"][name] = " ".join(u.text.split())
        tables["utt2spk"][name] = speaker_of[u.speaker.strip()] or name
        tables["utt2dur"][name] = f"{u.duration_s:.6f}"
        by_speaker[tables["utt2spk"][name]].append(name)
        if segmented:
            tables["segments"][name] = f"{recording} {u.offset_s:.6f} {u.offset_s + u.duration_s:.6f}"
        if u.lang:
            tables["utt2lang"][name] = u.lang
    tables["spk2utt"] = {speaker: " ".join(sorted(members)) for speaker, members in by_speaker.items()}
    for stale in ("segments", "utt2lang"):
        (root / stale).unlink(missing_ok=True)
    for table, rows in tables.items():
        lines = sorted(f"{key} {value}".rstrip() + "\n" for key, value in rows.items())
        write_text(root / table, "".join(lines))


def _table(path: Path) -> Iterable[tuple[str, str, str]]:
    seen: set[str] = set()
    for source, line in read_lines(path):
        key, *value = line.split(maxsplit=1)
        if key in seen:
            raise ImporterError(f"{source}: {key} was listed before")
        seen.add(key)
        yield source, key, value[0] if value else ""


def _optional(path: Path) -> Iterable[tuple[str, str, str]]:
    return _table(path) if path.is_file() else ()


def _segment(source: str, value: str) -> tuple[str, float, float | None]:
    try:
        recording, start, end, *channel = value.split()
        offset_s, end_s = float(start), float(end)
    except ValueError:
        raise ImporterError(f"{source}: {value!r} is not 'RECORDING START END' in seconds") from None
    if channel not in ([], ["-1"]):
        raise ImporterError(f"{source}: the segment is of channel {' '.join(channel)}: {_ONE_CHANNEL}")
    if end_s == -1:
        return recording, offset_s, None  # Kaldi: to the end of the recording
    if not (0 <= offset_s < end_s < math.inf):
        raise ImporterError(f"{source}: the segment from {offset_s} s to {end_s} s holds no audio")
    return recording, offset_s, end_s


def _audio_path(root: Path, source: str, value: str) -> Path:
    if value.endswith("|"):
        value = _piped_file(source, value)
    path = Path(value)
    if path.is_absolute():
        return path
    bases = [root, *root.parents[:_LEVELS_UP], Path.cwd()]
    return next((base / path for base in bases if find_audio(base / path)), root / path)


def _piped_file(source: str, command: str) -> str:
    try:
        words = shlex.split(command[:-1])
    except ValueError:
        words = []
    files = [word for word in words[1:] if Path(word).suffix.lower() in AUDIO_SUFFIXES]
    if len(files) != 1 or Path(words[0]).name not in _DECODERS or "|" in command[:-1]:
        raise ImporterError(
            f"{source}: the command {command!r} is not understood; allowed are {', '.join(_DECODERS)} with one audio "
            "file. Or run it yourself and list its output in wav.scp"
        )
    part = next((word for word in words[1:] if re.fullmatch(_DECODERS[Path(words[0]).name], word)), "")
    if part:
        raise ImporterError(f"{source}: {part} in {command!r} takes a channel or a part of the file: {_ONE_CHANNEL}")
    return files[0]


def _wav_entry(path: Path) -> str:
    if len(str(path).splitlines()) > 1:
        raise ImporterError(f"{str(path)!r} has a line break, which wav.scp cannot hold: rename the file")
    if member_of(path):
        raise ImporterError(f"{path} is in a shard, which Kaldi cannot read: export the manifest that it was made from")
    if path.suffix.lower() == ".wav" and not re.search(r"\s", str(path)):
        return str(path)
    return f"ffmpeg -nostdin -v error -i {shlex.quote(str(path))} -f wav - |"


def _goes_on(u: Utterance) -> bool:
    """Whether the file, if it is there, goes on after the utterance."""
    with suppress(AudioError):
        return audio_info(u.audio_filepath).duration_s > u.offset_s + u.duration_s + END_TOLERANCE_S
    return False


def _identifier(u: Utterance, speaker: str) -> str:
    stem = _clean(u.audio_filepath.stem)
    if u.offset_s:
        stem += f"-{round(u.offset_s * 1000):07d}"
    return stem if not speaker or stem.startswith(f"{speaker}-") else f"{speaker}-{stem}"


def _clean(name: str) -> str:
    return re.sub(r"\s+", "_", name.strip())


def _unique(names: Sequence[str]) -> list[str]:
    taken: set[str] = set()
    result = []
    for name in names:
        candidate, count = name, 1
        while candidate in taken:
            count += 1
            candidate = f"{name}-{count}"
        taken.add(candidate)
        result.append(candidate)
    return result
