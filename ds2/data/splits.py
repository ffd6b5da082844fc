"""Utterances for training, dev and test of a run, and what changed in their files since it last started.

Manifests are prepared where missing, read and checked. A run records its corpus to find changes: name, size and
modification time of each file (a shard of many utterances is one file), and a digest of some content of 256 sampled
recordings. So a start costs one `stat` a file and reads at most 16 MiB, whatever the size of the corpus.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ds2.audio.augment import speed_range
from ds2.audio.shard import ShardError, member_of, open_member
from ds2.config.schema import AugmentConfig, ConfigError, DataConfig
from ds2.data.check import transcript_problems
from ds2.data.corpora import prepare
from ds2.data.manifest import Utterance, read_manifests
from ds2.system import UserError
from ds2.system.files import atomic_file
from ds2.text.alphabet import Alphabet
from ds2.text.unknown_characters import count_unknown, propose_alphabet

log = logging.getLogger(__name__)
_MAX_SHOWN = 20


class CorpusError(UserError):
    """Utterances that training cannot use; the message names them and the ways out."""


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
            f"but the config names {', '.join(not_written)}"
        )


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
    """Return the utterances of `data.train` that training can use; the others are logged and counted.

    Raises:
        CorpusError: some cannot be used and `data.on_bad_utterance` is `stop`, or no utterance is left.
    """
    utterances = read_manifests([Path(p) for p in data.train])
    warn_of_other_corpus(data, utterances)
    checked = [
        (u, transcript_problems(u, data, alphabet, output_frames, speeds=speed_range(augment))) for u in utterances
    ]
    reasons = [(u, "; ".join(text for severity, _, text in problems if severity == "error")) for u, problems in checked]
    refused = [(u, reason) for u, reason in reasons if reason]
    usable = [u for u, reason in reasons if not reason]
    unfit = count_unknown((u.text for u in utterances), alphabet)
    if alphabet.unknown == "drop" and unfit:
        log.warning("characters outside the alphabet dropped from training texts: %s", dict(unfit.most_common()))
    if refused:
        lines = [f"  {u.source or u.name}: {u.name}: {reason}" for u, reason in refused]
        if data.on_bad_utterance == "stop":
            listed = "\n".join(lines[:_MAX_SHOWN]) + ("\n  ..." if len(lines) > _MAX_SHOWN else "")
            raise CorpusError(
                f"{len(refused)} of {len(utterances)} training utterances cannot be used:\n{listed}\n"
                "Correct the manifest (`ds2 data check` lists all), or leave them out with data.on_bad_utterance=skip"
                + (
                    f"\n\n{propose_alphabet(unfit, alphabet, (u.text for u in utterances))}"
                    if alphabet.unknown == "stop" and unfit
                    else ""
                )
            )
        log.warning("%d of %d training utterances left out:\n%s", len(refused), len(utterances), "\n".join(lines))
    if not usable:
        raise CorpusError(f"no training utterance is left of {len(utterances)} in {', '.join(data.train)}")
    return usable


def scored_utterances(manifests: Sequence[str], alphabet: Alphabet) -> list[Utterance]:
    """Return all utterances of dev or test manifests. Characters outside the alphabet are logged and count as errors.

    They are never dropped, so that the WER is comparable between systems.
    """
    utterances = read_manifests([Path(p) for p in manifests])
    unknown = count_unknown((u.text for u in utterances), alphabet)
    if unknown:
        log.warning(
            "references hold characters outside the alphabet, which count as errors: %s", dict(unknown.most_common())
        )
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
    ) -> ScoredData:
        """Compare scored utterances with training data.

        Utterances are equal whose file names (without folders), times and texts are, so that copies of a corpus are.
        """
        trained, trained_speakers = set(map(_identity, training)), {u.speaker for u in training}
        speakers = {u.speaker for u in scored} - {""}
        return cls(
            ", ".join(str(path) for path in manifests),
            len(scored),
            round(sum(u.duration_s for u in scored) / 3600, 4),
            sum(_identity(u) in trained for u in scored),
            len(speakers),
            len(speakers & trained_speakers),
        )

    def describe(self) -> str:
        """The data in one line: name, utterances, hours."""
        return f"{self.manifests}, {self.utterances} utterances, {self.hours:.2f} h"

    def warning(self) -> str:
        """Why the error rates promise too much for other speech; empty where nothing is in the training data."""
        parts = []
        if self.trained_utterances:
            parts.append(f"{self.trained_utterances} of its {self.utterances} utterances")
        if self.trained_speakers:
            parts.append(f"{self.trained_speakers} of its {self.speakers} speakers")
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
_COLUMNS = 4  # key, bytes, modification time in ns (0: a row of the sample), digest of content that was read
_TEXTS = 0  # the key of the row that holds the number of utterances and a digest of their texts

Record = NDArray[np.int64]


def report_changes(path: Path, utterances: Sequence[Utterance], report: Callable[[str], object]) -> None:
    """Compare a corpus with its record of the last start, and write the new record.

    Args:
        path: of the record; it need not exist.
        report: takes one line: what changed, that nothing changed, or that there is nothing to compare with. Called
            before the record is written: a process that is killed between the two leaves it to the next start.

    Raises:
        OSError: the record cannot be written.
    """
    now, before = _record(utterances), _read(path)
    if before is None:
        report("corpus: no record of an earlier start to compare with")
    else:
        report(f"corpus since the last start: {_difference(before, now)}")
    with atomic_file(path) as partial, partial.open("wb") as file:
        np.save(file, now, allow_pickle=False)


def _read(path: Path) -> Record | None:
    try:
        record = np.load(io.BytesIO(path.read_bytes()), allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    fits = isinstance(record, np.ndarray) and record.dtype == np.int64 and record.shape[1:] == (_COLUMNS,)
    return record if fits else None


def _record(utterances: Sequence[Utterance]) -> Record:
    paths = sorted({u.audio_filepath for u in utterances})
    members = {path: member_of(path) for path in paths}
    files = sorted({member[0] if member else path for path, member in members.items()})
    texts = hashlib.sha256("\n".join(sorted(u.text for u in utterances)).encode("utf-8", "surrogatepass"))
    rows = [[_TEXTS, len(utterances), 0, _number(texts.digest())]]
    for file in files:
        try:
            stat = file.stat()
        except OSError:
            continue
        rows.append([_key("file", file), stat.st_size, stat.st_mtime_ns or 1, 0])
    for path in sorted(paths, key=lambda path: _key("sample", path))[:_SAMPLED]:
        rows.append([_key("sample", path), 0, 0, _content(path, members[path])])
    record = np.array(rows, np.int64)
    return record[np.unique(record[:, 0], return_index=True)[1]]


def _key(kind: str, path: Path) -> int:
    """A number for a file by its name and its folder's: the folders above may be a host's own."""
    return _number(hashlib.sha256("/".join((kind, *path.parts[-2:])).encode("utf-8", "surrogateescape")).digest())


def _number(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "little", signed=True)


def _content(path: Path, member: tuple[Path, str] | None) -> int:
    """A digest of some blocks of a file or member, from its first to its last byte; 0 where it cannot be read."""
    digest = hashlib.sha256()
    try:
        descriptor = open_member(*member) if member else os.open(path, os.O_RDONLY)
        try:
            size = os.fstat(descriptor).st_size
            last = max(0, size - _BLOCK_BYTES)
            for block in range(_BLOCKS):
                digest.update(os.pread(descriptor, _BLOCK_BYTES, last * block // (_BLOCKS - 1)))
        finally:
            os.close(descriptor)
    except (OSError, ShardError):
        return 0
    return _number(digest.digest()) or 1


def _difference(before: Record, now: Record) -> str:
    files = [record[record[:, 2] != 0] for record in (before, now)]
    samples = [record[(record[:, 2] == 0) & (record[:, 0] != _TEXTS)] for record in (before, now)]
    texts = [record[record[:, 0] == _TEXTS][:, [1, 3]].tolist() or [[0, 0]] for record in (before, now)]
    old, new = _common(*files)
    read_before, read_now = _common(*samples)
    resized = old[:, 1] != new[:, 1]
    other = int((read_before[:, 3] != read_now[:, 3]).sum())
    counts = {
        "{} files are new": len(files[1]) - len(new),
        "{} files are gone": len(files[0]) - len(old),
        "{} files have another size": int(resized.sum()),
        "{} files were modified at the same size": int(((old[:, 2] != new[:, 2]) & ~resized).sum()),
        f"{{}} of {len(read_now)} sampled recordings have other content": other,
        f"texts changed ({texts[0][0][0]} utterances before, {texts[1][0][0]} now)": int(texts[0] != texts[1]),
    }
    changes = [text.format(count) for text, count in counts.items() if count]
    whole = f"{len(new)} files and {len(read_now)} sampled recordings"
    return f"{', '.join(changes)}; compared were {whole}" if changes else f"unchanged ({whole} compared)"


def _common(before: Record, now: Record) -> tuple[Record, Record]:
    """The rows of both records whose keys both have, in the same order."""
    _, left, right = np.intersect1d(before[:, 0], now[:, 0], assume_unique=True, return_indices=True)
    return before[left], now[right]
