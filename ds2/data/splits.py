"""Utterances for training, dev and test of a run: manifests are prepared where missing, read and checked."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ds2.audio.augment import speed_range
from ds2.config.schema import AugmentConfig, ConfigError, DataConfig
from ds2.data.check import transcript_problems
from ds2.data.corpora import prepare
from ds2.data.manifest import Utterance, read_manifests
from ds2.system.errors import UserError
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


def training_utterances(
    data: DataConfig, augment: AugmentConfig, alphabet: Alphabet, output_frames: Callable[[int], int]
) -> list[Utterance]:
    """Return the utterances of `data.train` that training can use; the others are logged and counted.

    Raises:
        CorpusError: some cannot be used and `data.on_bad_utterance` is `stop`, or no utterance is left.
    """
    utterances = read_manifests([Path(p) for p in data.train])
    checked = [
        (u, transcript_problems(u, data, alphabet, output_frames, speeds=speed_range(augment))) for u in utterances
    ]
    refused = [(u, text) for u, problems in checked for severity, _, text in problems if severity == "error"]
    usable = [u for u, problems in checked if not any(severity == "error" for severity, _, _ in problems)]
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
