"""Corpora in folders, in tables and of a Python program (`ds2.save_dataset`).

Folders: recordings with transcripts of the same name, CMU AN4, LibriSpeech. Tables of audio and transcript: CSV or TSV
with a header (Common Voice, Coqui), deepspeech.pytorch's manifests.
"""

import csv
import logging
import re
import unicodedata
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

from ds2.audio.read import AUDIO_SUFFIXES, AudioError, audio_info, check_rate
from ds2.audio.stream import as_samples
from ds2.data.corpora import common
from ds2.data.corpora.common import CorpusEntry, ImporterError, corpus_folder, find_audio, read_lines, to_utterances
from ds2.data.manifest import ManifestError, Utterance, write_manifest
from ds2.system import files
from ds2.system.plain import counted, parse_json

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
    joined. Recordings without a transcript, and those of a transcript's name that another one comes before (x.wav
    before x.mp3), are counted in the log and left out; hidden files (`.NAME`, as `._NAME` of macOS) are ignored.
    `encoding` is that of transcripts which are not Unicode; see `read_transcripts`.

    Raises:
        ImporterError: there are no transcripts; or, unless `skip_bad`, one is empty or not text, or audio is unusable.
    """
    root = corpus_folder(folder)
    listed = [path for path in files.files_beneath(root) if not path.name.startswith(".")]
    transcripts = sorted(path for path in listed if path.suffix.lower() == ".txt")
    texts, unread = common.read_transcripts(transcripts, encoding)
    problems = [unread.get(path) or f"{path}: the transcript is empty" for path in transcripts if not texts.get(path)]
    entries = []
    for path, text in sorted(texts.items()):
        if text:
            folders = path.relative_to(root).parts[:-1]
            entries.append(CorpusEntry(path.with_suffix(""), text, str(path), speaker=folders[0] if folders else ""))
    if not entries and not problems:
        raise ImporterError(f"{root}: holds no NAME.txt; write each transcript beside its recording: 001.wav, 001.txt")
    used = {find_audio(path.with_suffix("")) for path in transcripts}
    names = {_composed(path.with_suffix("")) for path in transcripts}
    unused = [path for path in listed if path.suffix.lower() in AUDIO_SUFFIXES and path not in used]
    second = [path for path in unused if _composed(path.with_suffix("")) in names]
    without = [path for path in unused if _composed(path.with_suffix("")) not in names]
    if without:
        log.warning("left out: %s without a transcript, such as %s", counted(len(without), "recording"), min(without))
    if second:
        log.warning("left out: %s of another one's name, such as %s", counted(len(second), "recording"), min(second))
    return to_utterances(entries, skip_bad=skip_bad, problems=problems)


def _composed(path: Path) -> str:
    return unicodedata.normalize("NFC", str(path))


def import_an4(folder: str | Path, split: str = "train", *, skip_bad: bool = False) -> list[Utterance]:
    """Import the official train (948 utterances) or test (130) part of AN4, in the order of its fileids.

    The sentence marks <s> and </s> are removed; the speaker is the folder of the audio, which may be sph or transcoded.

    Raises:
        ImporterError: a file is missing or malformed, fileids and transcription disagree, or audio is unusable.
    """
    if split not in AN4_SPLITS:
        raise ImporterError(f"AN4 has no part {split!r}; one of {', '.join(AN4_SPLITS)}")
    root = corpus_folder(folder, AN4_SOURCE)
    if (root / "an4" / "etc").is_dir():
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
        entries.append(CorpusEntry(root / "wav" / path, text, text_source, speaker=path.parent.name))
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
    for transcript in sorted(path for path in files.files_beneath(root) if path.name.endswith(".trans.txt")):
        for source, line in read_lines(transcript):
            name, _, text = line.partition(" ")
            speaker, dash, _ = name.partition("-")
            if not dash or not text:
                raise ImporterError(f"{source}: {line!r} is not 'READER-CHAPTER-NUMBER WORDS'")
            entries.append(CorpusEntry(transcript.parent / name, text.strip(), source, speaker=speaker))
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


COLUMNS = {
    "audio": ("wav_filename", "audio_filepath", "audio_path", "path", "file_name", "filename", "file", "audio"),
    "text": ("transcript", "sentence", "text", "transcription"),
    "speaker": ("client_id", "speaker_id", "speaker"),
    "lang": ("locale", "lang", "language"),
}
"""Names of columns, the most specific first."""
_TIMES = ("offset", "start", "start_s", "start_time", "begin", "end", "end_s", "end_time", "stop")
_TABLES_SHOWN = 8
_MAX_JSON_BYTES = 1 << 30


def import_csv(path: str | Path, *, skip_bad: bool = False) -> list[Utterance]:
    """Import a CSV or TSV file with a header, as of Common Voice (path, sentence) and Coqui (wav_filename, transcript).

    The audio column is looked up beside the file and in its folder `clips`. Columns are recognised by name, tabs in the
    header make it a TSV, whose fields Common Voice does not quote. A row is a whole file. The columns that are read,
    and those that are not, are logged.

    Raises:
        ImporterError: no column for audio or text, a column of times within files, a row with another number of
            fields, or unusable audio.
    """
    path = Path(path).expanduser().resolve()
    if path.is_dir():
        tables = sorted(p.name for p in path.iterdir() if p.suffix.lower() in (".csv", ".tsv"))
        named = f"one of {', '.join(tables[:_TABLES_SHOWN])}" if tables else "FILE.csv or FILE.tsv; this one holds none"
        raise ImporterError(f"{path}: is a folder; give the table in it: {named}")
    lines = [f"{line}\n" for _, line in files.read_lines(path)]  # a quoted field may hold ends of lines
    if lines and lines[0].startswith("{"):
        raise ImporterError(f"{path}: is a manifest (JSON lines), which needs no import: data.train=[{path.name}]")
    tabs = bool(lines) and "\t" in lines[0]
    reader = csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE) if tabs else csv.reader(lines, strict=True)
    try:
        header = next(reader, [])
        if not header:
            raise ImporterError(f"{path}: begins with no header; give the names of the columns, such as path,text")
        lowered = [name.strip().lower() for name in header]
        column = {
            kind: next((lowered.index(name) for name in names if name in lowered), None)
            for kind, names in COLUMNS.items()
        }
        if column["audio"] is None or column["text"] is None:
            if len(header) == 1 and ";" in header[0]:
                raise ImporterError(f"{path}:1: columns are separated by semicolons; save it with commas or tabs")
            raise ImporterError(
                f"{path}:1: columns {header} have none for audio ({', '.join(COLUMNS['audio'])}) "
                f"or none for text ({', '.join(COLUMNS['text'])}); rename them"
            )
        _log_columns(path, header, column)
        entries = []
        for row in reader:
            if not row:
                continue
            source = f"{path}:{reader.line_num}"
            if len(row) != len(header):
                raise ImporterError(f"{source}: {len(row)} fields, the header has {len(header)}")
            field = {kind: "" if index is None else row[index].strip() for kind, index in column.items()}
            audio = _find_listed(path.parent, field["audio"])
            entries.append(CorpusEntry(audio, field["text"], source, field["speaker"], field["lang"]))
    except csv.Error as error:
        raise ImporterError(f"{path}:{reader.line_num}: {error}") from error
    return to_utterances(entries, skip_bad=skip_bad)


def import_deepspeech_pytorch(path: str | Path, *, skip_bad: bool = False, encoding: str = "") -> list[Utterance]:
    """Import a manifest of deepspeech.pytorch: lines `wav,txt`, or its JSON with `root_path` and `samples`.

    Transcripts are files of their own, read by `read_transcripts`. Relative paths start at the manifest's
    folder or, as that project wrote them, at the working directory.

    Raises:
        ImporterError: the manifest is malformed, or a transcript or audio is unusable.
    """
    path = Path(path).expanduser().resolve()
    pairs = _json_pairs(path) if path.suffix == ".json" else _csv_pairs(path)
    listed = [(source, audio, _find_listed(path.parent, transcript)) for source, audio, transcript in pairs]
    texts, unread = common.read_transcripts(dict.fromkeys(transcript for _, _, transcript in listed), encoding)
    problems = [
        f"{source}: transcript {unread[transcript]}" for source, _, transcript in listed if transcript in unread
    ]
    entries = [
        CorpusEntry(_find_listed(path.parent, audio), texts[transcript], source)
        for source, audio, transcript in listed
        if transcript in texts
    ]
    return to_utterances(entries, skip_bad=skip_bad, problems=problems)


def _log_columns(path: Path, header: list[str], column: Mapping[str, int | None]) -> None:
    """Log which columns are read; raise ImporterError where a column says that a row is a part of a file."""
    times = [name for name in header if name.strip().lower() in _TIMES]
    if times:
        raise ImporterError(
            f"{path}:1: column {times[0]!r} gives a row a part of a file, but a table lists whole files: write a "
            'manifest instead, a line of {"audio_filepath": "a.wav", "offset": 1.5, "duration": 2.0, "text": "..."} '
            "for each part; or remove the column"
        )
    read = ", ".join(f"{header[index]} as {kind}" for kind, index in column.items() if index is not None)
    unread = ", ".join(name for index, name in enumerate(header) if index not in column.values())
    log.info("%s: columns %s; not used: %s", path, read, unread or "none")


def _find_listed(folder: Path, listed: str) -> Path:
    candidates = [folder / listed, folder / "clips" / listed, Path.cwd() / listed]
    return next((c for c in candidates if c.is_file() or find_audio(c)), candidates[0])


def _csv_pairs(path: Path) -> list[tuple[str, str, str]]:
    pairs = []
    for source, line in read_lines(path):
        fields = next(csv.reader([line]))
        if len(fields) != 2:
            raise ImporterError(f"{source}: {line!r} is not 'AUDIO,TRANSCRIPT'")
        pairs.append((source, fields[0].strip(), fields[1].strip()))
    return pairs


def _json_pairs(path: Path) -> list[tuple[str, str, str]]:
    try:
        stored: Any = parse_json(files.read_bytes(path, max_bytes=_MAX_JSON_BYTES))
        root = Path(stored["root_path"])
        samples = [(str(root / s["wav_path"]), str(root / s["transcript_path"])) for s in stored["samples"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ImporterError(
            f"{path}: {error!r}; expected root_path and samples, each with wav_path and transcript_path"
        ) from error
    return [(f"{path}: sample {number}", *pair) for number, pair in enumerate(samples, start=1)]


def save_dataset(
    folder: Path | str, utterances: Iterable[tuple[Any, ...]], *, sample_rate_hz: int | None = None
) -> Path:
    """Write utterances as `folder/manifest.jsonl`; see `ds2.save_dataset`.

    Raises:
        ManifestError: there is a manifest already, or a file that samples would replace; an entry has another form, or
            names the recording of an earlier one; or there are no entries.
        AudioError: audio that cannot be read, or samples of another shape, type or scale, or without a rate.
    """
    folder = Path(folder).resolve()
    manifest = folder / "manifest.jsonl"
    if manifest.exists():
        raise ManifestError(f"{manifest} exists already: choose another folder, or remove it")
    folder.mkdir(parents=True, exist_ok=True)
    made, written = list[Path](), dict[Path, Utterance]()
    try:
        for number, entry in enumerate(utterances, start=1):
            utterance = _utterance(folder, number, entry, sample_rate_hz, made)
            if utterance.audio_filepath in written:
                raise ManifestError(
                    f"utterance {number}: {utterance.audio_filepath} is an utterance already, and no manifest may list "
                    "a recording twice: give each once, parts of it as samples"
                )
            written[utterance.audio_filepath] = utterance
        if not written:
            raise ManifestError(
                f"{manifest} would hold no utterances: give (audio, text) or (audio, text, speaker) of each"
            )
        write_manifest(manifest, written.values())
    except BaseException:
        for path in made:
            path.unlink(missing_ok=True)
        raise
    return manifest


def _utterance(folder: Path, number: int, entry: tuple[Any, ...], rate_hz: int | None, made: list[Path]) -> Utterance:
    """Return the utterance of an entry; samples are written to a file, which is added to `made`."""
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
        if path.exists():
            raise ManifestError(f"utterance {number}: {path} exists already: choose another folder, or remove it")
        made.append(path)
        try:
            check_rate(rate_hz)
            soundfile.write(path, np.clip(as_samples(audio), -1.0, 1.0), int(rate_hz))
        except (AudioError, soundfile.SoundFileError) as error:
            raise AudioError(f"utterance {number}: {error}") from error
    return Utterance(path, audio_info(path).duration_s, text, speaker="".join(speaker))
