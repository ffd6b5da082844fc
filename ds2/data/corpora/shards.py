"""Tar files of other tools, WebDataset and lhotse's Shar; their audio is read in place."""

from pathlib import Path
from typing import Any

from ds2.audio.read import AUDIO_SUFFIXES
from ds2.audio.shard import Shard, ShardError, check_members
from ds2.data.corpora.common import CorpusEntry, ImporterError, corpus_folder, to_utterances
from ds2.data.corpora.layouts import COLUMNS
from ds2.data.manifest import Utterance
from ds2.system.files import files_beneath, read_byte_lines
from ds2.system.plain import parse_object, short_repr

_TEXT_SUFFIXES = ("txt", "text")


def import_webdataset(folder: str | Path, *, skip_bad: bool = False) -> list[Utterance]:
    """Import all NAME.tar beneath a folder: samples KEY.flac (or other audio) with KEY.json or KEY.txt.

    A key ends at the first dot of a member's file name, as in WebDataset. KEY.json gives text, speaker and language, by
    the names of columns in tables. The tar files must not be compressed.

    Raises:
        ImporterError: no tar files, one that is damaged, a sample without audio or text, or unusable audio.
    """
    root = corpus_folder(folder)
    entries, problems = list[CorpusEntry](), list[str]()
    for path in _find_files(root, "*.tar", "NAME.tar with samples KEY.flac and KEY.json or KEY.txt"):
        try:
            shard = Shard(path, use_index=False)  # an index lists audio alone
            for key, members in _samples(shard).items():
                try:
                    entries.append(_sample(shard, key, members))
                except ImporterError as error:
                    problems.append(str(error))
        except ShardError as error:
            problems.append(str(error))
    return _measured(entries, problems, skip_bad=skip_bad)


def import_shar(folder: str | Path, *, skip_bad: bool = False) -> list[Utterance]:
    """Import a Shar folder of lhotse: cuts.N.jsonl.gz, whose audio lies in recording.N.tar beside it.

    A cut is an utterance, the texts of its supervisions its transcript; what they share as speaker and language is
    taken. Other fields (features, custom ones) are left alone.

    Raises:
        ImporterError: no cuts, a file that is damaged, a cut without audio or text, or unusable audio.
    """
    root = corpus_folder(folder)
    entries, problems = list[CorpusEntry](), list[str]()
    for path in _find_files(root, "cuts.*.jsonl*", "cuts.N.jsonl.gz with recording.N.tar"):
        tar = path.with_name(f"recording.{path.name.split('.')[1]}.tar")
        try:
            names = _by_id(Shard(tar))
        except ShardError as error:
            problems.append(f"{path}: {error}")
            continue
        listed = set[Path]()
        for number, line in read_byte_lines(path):
            try:
                if line.strip():
                    entry = _cut(tar, names, f"{path}:{number}", line)
                    if entry.audio in listed:
                        raise ImporterError(
                            f"{entry.source}: {entry.audio.name} was listed before; remove one of the two"
                        )
                    listed.add(entry.audio)
                    entries.append(entry)
            except ImporterError as error:
                problems.append(str(error))
    return _measured(entries, problems, skip_bad=skip_bad)


def _find_files(root: Path, pattern: str, expected: str) -> list[Path]:
    files = sorted(path for path in files_beneath(root) if path.match(pattern) and path.is_file())
    if not files:
        raise ImporterError(f"{root}: holds no {expected}")
    return files


def _measured(entries: list[CorpusEntry], problems: list[str], *, skip_bad: bool) -> list[Utterance]:
    check_members(entry.audio for entry in entries)  # reads the headers of each shard once
    return to_utterances(entries, skip_bad=skip_bad, problems=problems)


def _samples(shard: Shard) -> dict[str, list[tuple[str, str]]]:
    """Return for each key what follows its dot and the names of its members, in the order in which they lie."""
    samples: dict[str, list[tuple[str, str]]] = {}
    for member in sorted(shard.members(), key=lambda member: member.offset):
        folder, slash, last = member.name.rpartition("/")
        key, _, kind = last.partition(".")
        samples.setdefault(folder + slash + key, []).append((kind.lower(), member.name))
    return samples


def _sample(shard: Shard, key: str, listed: list[tuple[str, str]]) -> CorpusEntry:
    source, members = f"{shard.path}: {key}", dict(listed)
    if len(members) < len(listed):
        raise ImporterError(f"{source}: two members of one kind among {', '.join(name for _, name in listed)}")
    audio = [name for name in members.values() if Path(name).suffix.lower() in AUDIO_SUFFIXES]
    if not audio:
        raise ImporterError(f"{source}: no audio among {', '.join(members.values())}")
    facts: dict[str, Any] = {}
    if "json" in members:
        facts = _object(shard.read(members["json"]), source)
    fields = {kind: _text(facts, names, source) for kind, names in COLUMNS.items()}
    for kind in _TEXT_SUFFIXES:
        if not fields["text"] and kind in members:
            fields["text"] = " ".join(_decoded(shard.read(members[kind]), source).split())
    if not fields["text"]:
        raise ImporterError(f"{source}: no transcript: KEY.json with one of {', '.join(COLUMNS['text'])}, or KEY.txt")
    return CorpusEntry(shard.path / audio[0], fields["text"], source, fields["speaker"], fields["lang"])


def _by_id(shard: Shard) -> dict[str, str]:
    """Names of members with audio by the cut that they belong to; ids may hold dots."""
    suffixes = {member.name: Path(member.name).suffix for member in shard.members()}
    return {name.removesuffix(end): name for name, end in suffixes.items() if end.lower() in AUDIO_SUFFIXES}


def _cut(tar: Path, names: dict[str, str], source: str, line: bytes) -> CorpusEntry:
    cut = _object(line, source)
    spoken = cut.get("supervisions")
    if not isinstance(spoken, list) or not all(isinstance(part, dict) for part in spoken):
        raise ImporterError(f"{source}: a cut without a list of supervisions")
    name, texts = _text(cut, ("id",), source), [_text(part, ("text",), source) for part in spoken]
    if name not in names:
        raise ImporterError(f"{source}: {tar} has no audio of cut {name!r}")
    if not any(texts):
        raise ImporterError(f"{source}: cut {name!r} has no text")
    shared = {key: {_text(part, (key,), source) for part in spoken} for key in ("speaker", "language")}
    speaker, language = (values.pop() if len(values) == 1 else "" for values in shared.values())
    return CorpusEntry(tar / names[name], " ".join(filter(None, texts)), source, speaker, language)


def _object(content: bytes, source: str) -> dict[str, Any]:
    try:
        return parse_object(content)
    except ValueError as error:
        raise ImporterError(f"{source}: {error}; expected an object") from error


def _text(record: dict[str, Any], keys: tuple[str, ...], source: str) -> str:
    """Return the first value that is not empty; raises ImporterError where it is neither text nor whole number."""
    for key in keys:
        value = record.get(key)
        if value is None or value == "":
            continue
        if isinstance(value, bool) or not isinstance(value, str | int):
            raise ImporterError(f"{source}: {key} is {short_repr(value)}; expected a text")
        if any("\ud800" <= character <= "\udfff" for character in str(value)):
            raise ImporterError(f"{source}: {key} is {short_repr(value)}; half of a surrogate pair is not a character")
        return str(value).strip()
    return ""


def _decoded(content: bytes, source: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ImporterError(f"{source}: byte {error.start + 1} of the transcript is not UTF-8") from error
