"""Tables of audio and transcript: CSV or TSV with a header (Common Voice, Coqui), deepspeech.pytorch's manifests."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from ds2.data.corpora.common import Entry, ImporterError, find_audio, read_lines, read_transcripts, to_utterances
from ds2.data.manifest import Utterance
from ds2.system import text_files
from ds2.system.plain import parse_json

COLUMNS = {
    "audio": ("wav_filename", "audio_filepath", "audio_path", "path", "file_name", "filename", "file", "audio"),
    "text": ("transcript", "sentence", "text", "transcription"),
    "speaker": ("client_id", "speaker_id", "speaker"),
    "lang": ("locale", "lang", "language"),
}
"""Names of columns, the most specific first."""
_TABLES_SHOWN = 8
_MAX_JSON_BYTES = 1 << 30


def import_csv(path: str | Path, *, skip_bad: bool = False) -> list[Utterance]:
    """Import a CSV or TSV file with a header, as of Common Voice (path, sentence) and Coqui (wav_filename, transcript).

    The audio column is looked up beside the file and in its folder `clips`. Columns are recognised by name, tabs in the
    header make it a TSV, whose fields Common Voice does not quote.

    Raises:
        ImporterError: no column for audio or text, a row with another number of fields, or unusable audio.
    """
    path = Path(path).expanduser().resolve()
    if path.is_dir():
        tables = sorted(p.name for p in path.iterdir() if p.suffix.lower() in (".csv", ".tsv"))
        named = f"one of {', '.join(tables[:_TABLES_SHOWN])}" if tables else "FILE.csv or FILE.tsv; this one holds none"
        raise ImporterError(f"{path}: is a folder; give the table in it: {named}")
    lines = [f"{line}\n" for _, line in text_files.read_lines(path)]  # a quoted field may hold ends of lines
    if lines and lines[0].startswith("{"):
        raise ImporterError(f"{path}: is a manifest (JSON lines), which needs no import: data.train=[{path.name}]")
    tabs = bool(lines) and "\t" in lines[0]
    reader = csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE) if tabs else csv.reader(lines, strict=True)
    try:
        header = next(reader, [])
        column = {kind: _column(header, names) for kind, names in COLUMNS.items()}
        if column["audio"] is None or column["text"] is None:
            if len(header) == 1 and ";" in header[0]:
                raise ImporterError(f"{path}:1: columns are separated by semicolons; save it with commas or tabs")
            raise ImporterError(
                f"{path}:1: columns {header} have none for audio ({', '.join(COLUMNS['audio'])}) "
                f"or none for text ({', '.join(COLUMNS['text'])}); rename them"
            )
        entries = []
        for row in reader:
            if not row:
                continue
            source = f"{path}:{reader.line_num}"
            if len(row) != len(header):
                raise ImporterError(f"{source}: {len(row)} fields, the header has {len(header)}")
            field = {kind: "" if index is None else row[index].strip() for kind, index in column.items()}
            audio = _find_listed(path.parent, field["audio"])
            entries.append(Entry(audio, field["text"], source, field["speaker"], field["lang"]))
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
    texts, unread = read_transcripts(dict.fromkeys(transcript for _, _, transcript in listed), encoding)
    problems = [
        f"{source}: transcript {unread[transcript]}" for source, _, transcript in listed if transcript in unread
    ]
    entries = [
        Entry(_find_listed(path.parent, audio), texts[transcript], source)
        for source, audio, transcript in listed
        if transcript in texts
    ]
    return to_utterances(entries, skip_bad=skip_bad, problems=problems)


def _column(header: list[str], names: tuple[str, ...]) -> int | None:
    lowered = [name.strip().lower() for name in header]
    return next((lowered.index(name) for name in names if name in lowered), None)


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
        stored: Any = parse_json(text_files.read_bytes(path, max_bytes=_MAX_JSON_BYTES))
        root = Path(stored["root_path"])
        samples = [(str(root / s["wav_path"]), str(root / s["transcript_path"])) for s in stored["samples"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ImporterError(
            f"{path}: {error!r}; expected root_path and samples, each with wav_path and transcript_path"
        ) from error
    return [(f"{path}: sample {number}", *pair) for number, pair in enumerate(samples, start=1)]
