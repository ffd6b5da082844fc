"""`ds2 data check`: reads all data before training and reports each utterance that would stop or mislead training."""

import hashlib
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
from numpy.typing import NDArray

from ds2.audio.augment import speed_range
from ds2.audio.read import END_TOLERANCE_S, QUIET_PEAK, AudioError, EmptyAudioError, audio_blocks, audio_info
from ds2.audio.shard import member_of
from ds2.config.schema import AugmentConfig, DataConfig
from ds2.data.manifest import Utterance, hours
from ds2.system.files import write_json
from ds2.system.machine import usable_cores
from ds2.system.plain import counted
from ds2.system.signals import worker_processes
from ds2.system.terminal import ProgressBar
from ds2.text.alphabet import Alphabet, describe, fewest_frames, unread_message
from ds2.text.unknown_characters import count_unknown, propose_alphabet

log = logging.getLogger(__name__)

SILENT_PEAK = 1e-3  # -60 dB of full scale
FULL_SCALE = 0.999
_CLIPPED_RUN = 3  # samples in a row at full scale; shorter runs occur in unclipped sound
CLIPPED_FRACTION = 1e-3
_OUTLIER_FACTOR = 4.0  # times the median pace, seconds a character
_OUTLIER_DEVIATIONS = 5.0  # robust standard deviations of its logarithm; both must be exceeded
_MIN_UTTERANCES_FOR_PACE = 50
_CHUNK = 16  # utterances per task of a process
_MAX_IN_PROCESS = 64  # utterances; for so few, starting processes takes longer than reading

OutputFrames = Callable[[int], int]


@dataclass(frozen=True)
class Finding:
    """One problem of one utterance."""

    severity: str  # error: training would stop or be misled | warning: training is possible
    kind: str
    split: str
    source: str  # "manifest:line"
    name: str
    message: str
    excess: float = 0.0  # size of the problem, for kinds that have a measure


@dataclass
class CheckReport:
    """Result of `check`."""

    utterances: int
    hours: float
    findings: list[Finding]
    notes: list[str] = field(default_factory=list)  # of the corpus as a whole
    unfit: str = ""  # table of characters outside the alphabet, and an alphabet that has them

    @property
    def may_start(self) -> bool:
        """Whether there are no errors."""
        return all(finding.severity != "error" for finding in self.findings)

    @property
    def counts(self) -> Counter[tuple[str, str]]:
        """Findings by (severity, kind)."""
        return Counter((finding.severity, finding.kind) for finding in self.findings)

    def format(self, shown: int | None = None) -> str:
        """Return the report as text: the counts of findings, the findings of each kind, the verdict.

        Of each kind `shown` findings are printed, the worst ones where the kind has an order; None prints all.
        """
        lines = [f"{counted(self.utterances, 'utterance')}, {self.hours:.2f} h"]
        counts = sorted(self.counts.items())
        lines += [f"  {count:6d} {severity}{'s' * (count != 1)}: {kind}" for (severity, kind), count in counts]
        for (severity, kind), count in counts:
            same_kind = [f for f in self.findings if (f.severity, f.kind) == (severity, kind)]
            same_kind.sort(key=lambda f: -f.excess)
            lines += [f"{severity}: {f.source or f.name}: {f.name}: {kind}: {f.message}" for f in same_kind[:shown]]
            if shown is not None and count > shown:
                lines.append(f"  ... and {count - shown} more {severity}s: {kind} (--all prints them, --json has them)")
        lines += [f"note: {note}" for note in self.notes]
        lines += ["", self.unfit, ""] if self.unfit else []
        lines.append("training may start" if self.may_start else "training may not start: correct the errors above")
        return "\n".join(lines)

    def write_json(self, path: Path) -> None:
        """Write the report as one JSON object."""
        counts = [
            {"severity": severity, "kind": kind, "count": n} for (severity, kind), n in sorted(self.counts.items())
        ]
        write_json(path, asdict(self) | {"counts": counts, "may_start": self.may_start})


@dataclass(frozen=True)
class Probe:
    """Measurements of an utterance's samples, or the reason why there are none."""

    error: str = ""
    kind: str = ""  # of the error: unreadable | empty | duration
    rate_hz: int = 0  # of the file
    file_s: float = 0.0  # length of the file
    peak: float = 0.0  # full scale = 1
    clipped: float = 0.0  # fraction of samples in runs at full scale
    digest: str = ""  # of the samples
    averaged: bool = False  # over several channels


def check(
    splits: Mapping[str, Sequence[Utterance]],
    data: DataConfig,
    augment: AugmentConfig,
    alphabet: Alphabet,
    output_frames: OutputFrames,
) -> CheckReport:
    """Read every utterance, in parallel, and check audio, transcripts and splits.

    Errors would stop or mislead training: audio that is unreadable, empty, silent or ends before its segment; the same
    audio in two splits; in the training split also a duration outside the limits, characters outside the alphabet or
    numbers without a sure reading (`alphabet.unknown` = stop), no transcript, or fewer output frames than CTC needs
    (one per label and one between repeats). In dev and test, problems of transcripts are warnings: they count as
    recognition errors. Other warnings: clipping, another sample rate, a duration that differs from the file's, an
    unusual pace, the same audio twice in a split.

    Args:
        splits: utterances by split; `train` is checked as training data, any other as test data.
        augment: its speeds may make an utterance too short.
        output_frames: samples of audio at `data.sample_rate_hz` -> output frames of the model.
    Raises:
        AudioError: a reading process died; the message names the files it was reading.
    """
    listed = [(split, u) for split, utterances in splits.items() for u in utterances]
    probes = _probe_all([u for _, u in listed], data)
    shared = Counter(u.audio_filepath for _, u in listed)
    findings: list[Finding] = []
    for (split, u), measured in zip(listed, probes, strict=True):
        is_whole_file = shared[u.audio_filepath] == 1 and not u.offset_s
        problems = _audio_problems(u, measured, data, is_whole_file)
        problems += transcript_problems(
            u, data, alphabet, output_frames, speeds=speed_range(augment) if split == "train" else None
        )
        findings += [Finding(severity, kind, split, u.source, u.name, text) for severity, kind, text in problems]
    findings += _duplicates(listed, probes)
    findings += _pace_outliers(listed)
    texts = [u.text for _, u in listed]
    unfit = propose_alphabet(count_unknown(texts, alphabet), alphabet, texts)
    return CheckReport(len(listed), hours(u for _, u in listed), findings, _notes(splits, alphabet), unfit)


def transcript_problems(
    u: Utterance, data: DataConfig, alphabet: Alphabet, output_frames: OutputFrames, *, speeds: Sequence[float] | None
) -> list[tuple[str, str, str]]:
    """Return (severity, kind, message) of the problems that a manifest line shows without its audio; see `check`.

    `speeds` are the factors by which training may speed the utterance up; None for an utterance of dev or test.
    """
    problems = []
    strict = "warning" if speeds is None else "error"
    if not data.min_duration_s <= u.duration_s <= data.max_duration_s:
        limits = f"data.min_duration_s={data.min_duration_s:g} to data.max_duration_s={data.max_duration_s:g}"
        problems.append((strict, "duration_limits", f"{u.duration_s:.2f} s is outside {limits}"))
    text, unknown = alphabet.normalise(u.text)
    severity = strict if alphabet.unknown == "stop" else "warning"
    unread = alphabet.unread_numbers(u.text) if unknown else []
    if unread:
        problems.append((severity, "numbers", unread_message(unread, alphabet.numbers)))
    if others := {c: count for c, count in unknown.items() if not (unread and c.isdigit())}:
        problems.append((severity, "characters", f"outside the alphabet: {describe(others)}"))
    labels = alphabet.encode("".join(character for character in text if character not in unknown))
    if not labels:
        problems.append((strict, "no_transcript", f"the transcript {u.text!r} has no labels"))
        return problems
    needed = fewest_frames(labels)
    fastest = max([1.0, *(speeds or ())])
    frames = output_frames(round(u.duration_s * data.sample_rate_hz))
    if frames < needed:
        reason = f"{u.duration_s:.2f} s make {frames} output frames, CTC needs {needed} for {len(labels)} labels"
        problems.append((strict, "too_short", reason))
    elif output_frames(int(u.duration_s * data.sample_rate_hz / fastest)) < needed:
        how = f"{fastest:g} times as fast (augment.speed)"
        reason = f"{frames} output frames suffice for {needed}, but no longer {how}"
        problems.append(("warning", "too_short_when_fast", reason))
    return problems


def probe(utterance: Utterance, sample_rate_hz: int, channel: int = 0) -> Probe:
    """Measure the samples of an utterance at `sample_rate_hz`, in bounded memory."""
    path = utterance.audio_filepath
    try:
        info = audio_info(path, sample_rate_hz)
        if utterance.duration_s <= 0:
            return Probe("the manifest gives it a duration of 0 s", "empty")
        end_s = utterance.offset_s + utterance.duration_s
        if end_s > info.duration_s + END_TOLERANCE_S:
            return Probe(
                f"the manifest says that it ends at {end_s:.3f} s, {path} ends at {info.duration_s:.3f} s", "duration"
            )
        peak, clipped, count = 0.0, 0, 0
        digest = hashlib.sha256()
        segment = utterance.offset_s, utterance.duration_s
        for block in audio_blocks(path, sample_rate_hz, *segment, channel=channel):
            peak = max(peak, float(np.abs(block).max()))
            clipped += _clipped_samples(block)
            count += len(block)
            digest.update((block * 32768).astype(np.int16).tobytes())  # the bytes of 0.0 and -0.0 differ
    except EmptyAudioError as error:
        return Probe(str(error), "empty")
    except AudioError as error:
        return Probe(str(error), "unreadable")
    fraction = clipped / max(count, 1)
    averaged = info.channels > 1 and not channel
    return Probe("", "", info.sample_rate_hz, info.duration_s, peak, fraction, digest.hexdigest(), averaged)


def _clipped_samples(block: NDArray[np.float32]) -> int:
    """Count the samples in runs of at least _CLIPPED_RUN at full scale."""
    edges = np.diff(np.concatenate([[0], np.abs(block) >= FULL_SCALE, [0]]).astype(np.int8))
    runs = np.flatnonzero(edges < 0) - np.flatnonzero(edges > 0)
    return int(runs[runs >= _CLIPPED_RUN].sum())


def _probe_all(utterances: Sequence[Utterance], data: DataConfig) -> list[Probe]:
    measure = partial(probe, sample_rate_hz=data.sample_rate_hz, channel=data.channel)
    workers = nullcontext() if len(utterances) <= _MAX_IN_PROCESS else worker_processes(usable_cores())
    probes: list[Probe] = []
    with ProgressBar("reading audio", len(utterances), "utterances") as progress, workers as pool:
        try:
            measured = pool.map(measure, utterances, chunksize=_CHUNK) if pool else map(measure, utterances)
            probes.extend(progress.over(measured))
        except BrokenProcessPool as error:
            names = ", ".join(str(u.audio_filepath) for u in utterances[len(probes) : len(probes) + _CHUNK])
            raise AudioError(
                f"a process died (out of memory, or a decoder crashed) while reading these files: {names}"
            ) from error
    return probes


def _audio_problems(u: Utterance, measured: Probe, data: DataConfig, is_whole_file: bool) -> list[tuple[str, str, str]]:
    wanted_hz = data.sample_rate_hz
    if measured.error:
        return [("error", measured.kind, measured.error)]
    problems = []
    if measured.peak < SILENT_PEAK:
        peak = f"its peak is {_decibel(measured.peak)} of full scale" if measured.peak else "all its samples are zero"
        cancelled = "; its channels may cancel each other: try data.channel=1" if measured.averaged else ""
        problems.append(("error", "silent", peak + cancelled))
    elif measured.peak < QUIET_PEAK:
        problems.append(("warning", "quiet", f"its peak is {_decibel(measured.peak)} of full scale: amplify it"))
    if measured.clipped > CLIPPED_FRACTION:
        problems.append(("warning", "clipped", f"{measured.clipped:.2%} of its samples are stuck at full scale"))
    if measured.rate_hz < wanted_hz:
        reason = f"{measured.rate_hz} Hz: nothing above {measured.rate_hz // 2} Hz, where other audio may have content"
        problems.append(("warning", "low_rate", reason))
    elif measured.rate_hz > wanted_hz:
        if member_of(u.audio_filepath):
            when = f"at each reading; `ds2 data shards --rate {wanted_hz}` writes shards that need none"
        elif data.cache == "none":
            when = "at each reading, since data.cache=none"
        else:
            when = "once, for the audio cache"
        problems.append(("warning", "rate", f"{measured.rate_hz} Hz, is resampled to {wanted_hz} Hz {when}"))
    if is_whole_file and measured.file_s - u.duration_s > END_TOLERANCE_S:
        reason = f"the manifest says {u.duration_s:.3f} s, the file lasts {measured.file_s:.3f} s; the rest is not used"
        problems.append(("warning", "duration", reason))
    return problems


def _decibel(level: float) -> str:
    return f"{20 * math.log10(level):.0f} dB"


def _duplicates(listed: Sequence[tuple[str, Utterance]], probes: Sequence[Probe]) -> list[Finding]:
    first: dict[str, tuple[str, Utterance]] = {}
    findings = []
    for (split, u), measured in zip(listed, probes, strict=True):
        if not measured.digest or measured.peak < SILENT_PEAK:
            continue
        other_split, other = first.setdefault(measured.digest, (split, u))
        if other is not u:
            severity = "error" if other_split != split else "warning"
            message = f"the same audio as {other.name} in {other_split}, {other.source}"
            findings.append(Finding(severity, "duplicate", split, u.source, u.name, message))
    return findings


def _pace_outliers(listed: Sequence[tuple[str, Utterance]]) -> list[Finding]:
    """Find utterances whose seconds per character are unusual: mostly wrong transcripts or wrong cuts."""
    paced = [
        (split, u, math.log(u.duration_s) - math.log(len(u.text))) for split, u in listed if u.text and u.duration_s > 0
    ]
    if len(paced) < _MIN_UTTERANCES_FOR_PACE:
        return []
    centre = median(pace for _, _, pace in paced)
    deviation = 1.4826 * median(abs(pace - centre) for _, _, pace in paced)
    limit = max(math.log(_OUTLIER_FACTOR), _OUTLIER_DEVIATIONS * deviation)
    findings = []
    for split, u, pace in paced:
        if abs(pace - centre) > limit:
            times = f"is {math.exp(pace - centre):.2g} times the usual time"
            message = f"{u.duration_s:.2f} s for {len(u.text)} characters {times}"
            findings.append(Finding("warning", "pace", split, u.source, u.name, message, abs(pace - centre)))
    return findings


def _notes(splits: Mapping[str, Sequence[Utterance]], alphabet: Alphabet) -> list[str]:
    notes = []
    texts = {alphabet.normalise(u.text)[0] for u in splits.get("train", ())}
    speakers = {u.speaker for u in splits.get("train", ()) if u.speaker}
    for split, utterances in splits.items():
        if split == "train":
            continue
        known = sum(alphabet.normalise(u.text)[0] in texts for u in utterances)
        if known:
            notes.append(f"{known} of {len(utterances)} texts of {split} also occur in train")
        shared = sorted({u.speaker for u in utterances} & speakers)
        if shared:
            notes.append(f"{len(shared)} speakers of {split} also occur in train: {', '.join(shared[:10])}")
    return notes
