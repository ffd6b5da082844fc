"""Utterances for training, dev and test of a run, and what changed in their files since it last started.

Manifests are prepared where missing, read and checked. A run records its corpus to find changes: text and times of each
utterance, size and modification time of its file (a shard of many utterances is one file), and a digest of some content
of 256 sampled recordings. So a start costs one `stat` a file and reads at most 16 MiB, whatever the size of the corpus.
"""

import hashlib
import json
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ds2.audio.augment import speed_range
from ds2.audio.shard import ShardError, member_of, open_member
from ds2.config.schema import AugmentConfig, Config, ConfigError, DataConfig
from ds2.data.check import transcript_problems
from ds2.data.corpora import prepare
from ds2.data.manifest import ManifestError, Utterance, hours, read_manifest, read_manifests
from ds2.system.files import write_text
from ds2.system.plain import counted, first_of, from_plain, parse_json
from ds2.text.alphabet import Alphabet, describe
from ds2.text.unknown_characters import count_unknown, propose_alphabet

log = logging.getLogger(__name__)
_MAX_SHOWN = 20


def ensure_manifests(data: DataConfig) -> None:
    """Run the recipe's prepare step where one of its manifests is missing.

    Raises:
        ConfigError: a manifest is missing and the recipe has no prepare step, or no training manifest is named.
    """
    if not data.train:
        raise ConfigError(
            "data.train names no manifest: choose a recipe (recipe=an4) or set data.train=[my/train.jsonl]"
        )
    missing = [p for p in (*data.train, *data.dev, *data.test) if not Path(p).is_file()]
    if not missing:
        return
    if not data.prepare:
        raise ConfigError(f"manifests not found: {', '.join(missing)}; write them with `ds2 data import`")
    log.info("preparing %s: %s do not exist yet", data.prepare, ", ".join(missing))
    written = prepare(data.prepare, data.corpus, data.work_dir)
    not_written = [p for p in missing if not Path(p).is_file()]
    if not_written:
        raise ConfigError(
            f"data.prepare={data.prepare} wrote {', '.join(str(p) for p in written.values())}, "
            f"but the config names {', '.join(not_written)}: `ds2 data import` and `ds2 data splice` write manifests"
        )


def require_files(config: Config) -> None:
    """Raise ConfigError where a setting of training names a file that does not exist, or a folder."""
    for key, paths, used in (
        ("augment.noise", config.augment.noise, config.augment.noise_probability > 0),
        ("train.denominator_text", config.train.denominator_text, config.train.objective == "ctc_crf"),
    ):
        if used and (missing := [path for path in paths if not Path(path).is_file()]):
            what = "manifests of recordings" if key == "augment.noise" else "text files and manifests"
            raise ConfigError(f"{key} names {', '.join(missing)}, no file: it takes {what}")


def warn_of_other_corpus(data: DataConfig, utterances: Sequence[Utterance]) -> None:
    """Warn where the training utterances were prepared from another folder than `data.corpus` now names."""
    manifest, corpus = Path(data.train[0]), Path(data.corpus).resolve()
    prepared = bool(data.prepare and data.corpus) and manifest.parent.resolve() == Path(data.work_dir).resolve()
    if prepared and corpus.is_dir() and not utterances[0].audio_filepath.is_relative_to(corpus):
        log.warning(
            "%s was prepared before and lists audio outside data.corpus=%s, such as %s. That audio is used; "
            "`ds2 data prepare` with the same settings writes the manifest anew",
            manifest, data.corpus, utterances[0].audio_filepath,
        )  # fmt: skip


def training_utterances(
    data: DataConfig, augment: AugmentConfig, alphabet: Alphabet, output_frames: Callable[[int], int]
) -> list[Utterance]:
    """Return the utterances of `data.train` that training can use, with their `data.repeats`.

    The others are logged and counted.

    Raises:
        ManifestError: some cannot be used and `data.on_bad_utterance` is `stop`, or no utterance is left.
    """
    seen: dict[tuple[Path, float], str] = {}
    manifests = [read_manifest(path, seen) for path in data.train]
    utterances = [u for listed in manifests for u in listed]
    warn_of_other_corpus(data, utterances)
    speeds = speed_range(augment)
    checked = [transcript_problems(u, data, alphabet, output_frames, speeds=speeds) for u in utterances]
    reasons = ["; ".join(text for severity, _, text in problems if severity == "error") for problems in checked]
    refused = [(u, reason) for u, reason in zip(utterances, reasons, strict=True) if reason]
    repeats = [n for n, listed in zip(data.repeats or [1] * len(manifests), manifests, strict=True) for _ in listed]
    usable = [(u, n) for u, n, reason in zip(utterances, repeats, reasons, strict=True) if not reason]
    unfit = count_unknown((u.text for u in utterances), alphabet)
    if alphabet.unknown == "drop" and unfit:
        log.warning("characters outside the alphabet dropped from training texts: %s", describe(unfit))
    if words := alphabet.unpronounced(u.text for u, _ in usable):
        log.warning(
            "words without a pronunciation dropped from training texts (`ds2 data lexicon` adds them): %s", words
        )
    if refused:
        problems = [f"{u.place}: {u.name}: {reason}" for u, reason in refused]
        shown = "\n  ".join(["", *first_of(problems, _MAX_SHOWN, " (`ds2 data check --all` lists them)")])
        if data.on_bad_utterance == "stop":
            proposal = ""
            if alphabet.unknown == "stop" and unfit:
                proposal = f"\n\n{propose_alphabet(unfit, alphabet, (u.text for u in utterances))}"
            raise ManifestError(
                f"{len(refused)} of {len(utterances)} training utterances cannot be used:{shown}\n"
                "Correct the manifest, or leave them out with data.on_bad_utterance=skip" + proposal
            )
        log.warning("%d of %d training utterances left out:%s", len(refused), len(utterances), shown)
    if not usable:
        raise ManifestError(f"no training utterance is left of {len(utterances)} in {', '.join(data.train)}")
    return [u for u, n in usable for _ in range(n)]


def scored_utterances(manifests: Sequence[str | Path], alphabet: Alphabet) -> list[Utterance]:
    """Return all utterances of dev or test manifests. Characters outside the alphabet are logged and count as errors.

    They are never dropped, so that the WER is comparable between systems.
    """
    utterances = read_manifests(manifests)
    unknown = count_unknown((u.text for u in utterances), alphabet)
    if unknown:
        log.warning("references hold characters outside the alphabet, which count as errors: %s", describe(unknown))
    if words := alphabet.unpronounced(u.text for u in utterances):
        log.warning(
            "words without a pronunciation get no times, and phone error rates count their phones as insertions (`ds2 "
            "data lexicon` adds them): %s", words,
        )  # fmt: skip
    return utterances


@dataclass(frozen=True)
class ScoredData:
    """The data that error rates were measured on, and how much of it the model was trained on."""

    manifests: str  # names, separated by commas
    utterances: int
    hours: float
    trained_utterances: int  # that are in the training data
    speakers: int  # that the manifests name
    trained_speakers: int  # of them

    @classmethod
    def of(
        cls, manifests: Sequence[str | Path], scored: Sequence[Utterance], training: Sequence[Utterance]
    ) -> "ScoredData":
        """Compare scored utterances with training data.

        Utterances are equal whose file names (without folders), times and texts are, so that copies of a corpus are.
        """
        trained, trained_speakers = set(map(_identity, training)), {u.speaker for u in training}
        speakers = {u.speaker for u in scored} - {""}
        return cls(
            ", ".join(str(path) for path in manifests),
            len(scored),
            round(hours(scored), 4),
            sum(_identity(u) in trained for u in scored),
            len(speakers),
            len(speakers & trained_speakers),
        )

    def describe(self) -> str:
        """The data in one line: name, utterances, hours."""
        return f"{self.manifests}, {counted(self.utterances, 'utterance')}, {self.hours:.2f} h"

    def warning(self) -> str:
        """Why the error rates promise too much for other speech; empty where nothing is in the training data."""
        parts = []
        if self.trained_utterances:
            parts.append(f"{self.trained_utterances} of its {counted(self.utterances, 'utterance')}")
        if self.trained_speakers:
            parts.append(f"{self.trained_speakers} of its {counted(self.speakers, 'speaker')}")
        if not parts:
            return ""
        return (
            f"{self.manifests}: {' and '.join(parts)} are in the training data, so error rates on it say little about "
            f"{'other speech' if self.trained_utterances else 'other speakers'}; `ds2 data split` separates speakers"
        )


def _identity(utterance: Utterance) -> tuple[str, float, float, str]:
    return utterance.audio_filepath.name, utterance.offset_s, utterance.duration_s, utterance.text


_SAMPLED = 256  # files or members of shards
_BLOCK_BYTES, _BLOCKS = 16384, 4  # read of each
_Record = dict[str, dict[str, str]]  # "utterances" and "content", of sampled recordings: a digest by name


def report_changes(path: Path, utterances: Sequence[Utterance], report: Callable[[str], object]) -> None:
    """Compare a corpus with its record of the last start, and write the new record.

    Args:
        path: of the record, JSON; it need not exist.
        report: takes one line: what changed, that nothing changed, or that the record is damaged; not called where
            there is none. Called before the record is written: a process that is killed between the two leaves it to
            the next start.

    Raises:
        OSError: the record cannot be written.
    """
    now = _record(utterances)
    try:
        before = from_plain(_Record, parse_json(path.read_bytes()), path.name)
    except FileNotFoundError:
        pass  # the first start
    except (OSError, ValueError):
        report(f"corpus: {path}, its record of the last start, cannot be read, so changes since then are unknown")
    else:
        report(f"corpus since the last start: {_difference(before, now)}")
    write_text(path, json.dumps(now))


def _record(utterances: Sequence[Utterance]) -> _Record:
    members = {path: member_of(path) for path in {u.audio_filepath for u in utterances}}
    states = {file: _state(file) for file in {member[0] if member else path for path, member in members.items()}}
    described: dict[str, str] = {}
    for u in utterances:
        member = members[u.audio_filepath]
        described[f"{_name(u.audio_filepath)} at {u.offset_s} s"] = _digest(
            u.text, u.duration_s, states[member[0] if member else u.audio_filepath]
        )
    sample = sorted(members, key=lambda path: _digest(_name(path)))[:_SAMPLED]
    return {"utterances": described, "content": {_name(path): _content(path, members[path]) for path in sample}}


def _name(path: Path) -> str:
    """The name of a file after that of its folder: the folders above may be a host's own."""
    return "/".join(path.parts[-2:])


def _digest(*values: object) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()[:16]


def _state(file: Path) -> tuple[int, int]:
    """The size and modification time of a file; zeros where there is none."""
    try:
        stat = file.stat()
    except OSError:
        return 0, 0
    return stat.st_size, stat.st_mtime_ns


def _content(path: Path, member: tuple[Path, str] | None) -> str:
    """A digest of some blocks of a file or member, from its first to its last byte; "" where it cannot be read."""
    try:
        descriptor = open_member(*member) if member else os.open(path, os.O_RDONLY)
        try:
            last = max(0, os.fstat(descriptor).st_size - _BLOCK_BYTES)
            starts = [last * block // (_BLOCKS - 1) for block in range(_BLOCKS)]
            return _digest([os.pread(descriptor, _BLOCK_BYTES, start) for start in starts])
        finally:
            os.close(descriptor)
    except (OSError, ShardError):
        return ""


def _difference(before: _Record, now: _Record) -> str:
    """Describe what changed; `before` may be another program's."""
    old, new = before.get("utterances", {}), now["utterances"]
    changed = [name for name in new if name in old and old[name] != new[name]]
    added, removed = [name for name in new if name not in old], len(old.keys() - new.keys())
    read = before.get("content", {}).items() & now["content"].items()
    compared = before.get("content", {}).keys() & now["content"].keys()
    other = len(compared) - len(read)
    if not (changed or added or removed or other):
        return f"unchanged ({counted(len(new), 'utterance')}, and the content of {counted(len(compared), 'recording')})"
    example = f", such as {[*changed, *added][0]}" if changed or added else ""
    return (
        f"{counted(len(added), 'utterance')} added, {removed} removed, {len(changed)} changed (text, times, size or "
        f"date of the file){example}; {other} of {len(compared)} sampled recordings have other content"
    )
