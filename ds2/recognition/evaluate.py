"""WER reports of a model on manifests, clean or degraded on purpose; training scores its dev set with `score` too."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import soundfile
import torch
from torch import Tensor

from ds2.audio.augment import encode
from ds2.audio.read import AudioError, read_audio
from ds2.config.schema import CODECS, AugmentConfig, ConfigError, DataConfig, DecodeConfig
from ds2.data.loader import SpeechLoader
from ds2.data.manifest import Utterance
from ds2.data.splits import scored_utterances
from ds2.decoding.hypothesis import Hypothesis, word_record
from ds2.decoding.keywords import keywords_in
from ds2.decoding.methods import METHODS
from ds2.decoding.phrases import OTHERS
from ds2.distributed.communicator import Communicator
from ds2.recognition.latency import Latency
from ds2.recognition.recogniser import Recogniser
from ds2.scoring.report import kaldi_line, most_errors, write_report
from ds2.scoring.wer import Report, corpus_report
from ds2.system.files import write_json_lines
from ds2.system.machine import VERSION
from ds2.system.plain import counted
from ds2.system.terminal import ProgressBar
from ds2.text.alphabet import Alphabet, fold

log = logging.getLogger(__name__)
PHONES_ONLY = (
    "the network writes phones, and without a search no words are found: what is called WER is the phone error rate; "
    "decode=phones with a decode.lm of words finds words"
)
_DEGRADE_SEED = 1
RECORDINGS_BYTES = 4 << 20  # of the recordings within a report
_LONGEST_RECORDING_S = 120.0
_COLOURS = {"white noise": 0.0, "pink noise": 1.0, "brown noise": 2.0}


@dataclass(frozen=True)
class Evaluation:
    """The hypotheses and scores of a manifest."""

    manifest: Path
    utterances: list[Utterance]
    hypotheses: list[Hypothesis]
    report: Report
    words_only: Report | None = None  # without case and punctuation, if the network writes them
    latency: Latency | None = None  # of the words as a stream shows them, if it was measured

    def write(
        self, folder: Path, model: Path, options: DecodeConfig, recordings: Mapping[int, bytes] | None = None
    ) -> None:
        """Write hypotheses.jsonl, report.txt, report.json, errors.txt and errors.html into `folder`.

        Args:
            folder: created if it does not exist.
            model, options: for the head of the report.
            recordings: of `worst_recordings`, which errors.html plays.
        """
        records = (
            _hypothesis_record(u, h, " ".join(aligned.reference))
            for u, h, aligned in zip(self.utterances, self.hypotheses, self.report.utterances, strict=True)
        )
        write_json_lines(folder / "hypotheses.jsonl", records)
        facts: dict[str, Any] = {
            "model": str(model),
            "manifest": str(self.manifest),
            "decoder": _describe_decoder(options),
            "ds2": VERSION,
        }
        if self.words_only is not None:
            facts["without case and punctuation"] = kaldi_line("WER", self.words_only.words)
        if self.latency is not None:
            facts |= self.latency.facts()
        write_report(self.report, folder, f"{self.manifest.stem} by {model}", facts, recordings)


def evaluate(
    recogniser: Recogniser,
    manifests: Sequence[Path],
    data: DataConfig,
    *,
    batch_audio_s: float | None = None,
    workers: int = -1,
    comm: Communicator | None = None,
) -> Iterator[Evaluation]:
    """Recognise and score manifests, one after the other.

    Args:
        manifests: with different names.
        data: of the model's config: how audio is read.
        batch_audio_s: padded audio per batch, seconds; lower it if memory runs out. None chooses by device.
        workers: processes that read audio; -1 chooses.
        comm: ranks that share the batches; each gets all results. None is this process alone.

    Raises:
        ConfigError: two manifests of one name, whose reports would share a folder.
        ManifestError, AudioError, DecodeError: a manifest, audio or utterance that cannot be read or decoded.
    """
    repeated = [name for name, times in Counter(p.stem for p in manifests).items() if times > 1]
    if repeated:
        raise ConfigError(
            f"two manifests are called {', '.join(repeated)}: evaluate them one by one, each with its --out"
        )
    if recogniser.writes_phones:
        log.warning(PHONES_ONLY)
    comm = comm or Communicator(recogniser.device)
    for path in manifests:
        began = time.monotonic()
        utterances = scored_utterances([str(path)], recogniser.alphabet)
        loader = recognition_loader(utterances, data, recogniser.device, workers)
        share = len(utterances) / comm.world  # of this rank, about
        with ProgressBar(f"evaluating {path}", share, "utterances", shown=comm.rank == 0) as progress:
            watch = _counting(progress)
            hypotheses = recogniser.recognise(loader, batch_audio_s=batch_audio_s, comm=comm, watch=watch)
        elapsed_s, audio_s = time.monotonic() - began, sum(u.duration_s for u in utterances)
        log.info("%s: %s, %.0f s of audio in %.1f s", path, counted(len(utterances), "utterance"), audio_s, elapsed_s)
        report = score(utterances, hypotheses, recogniser.alphabet, phones=recogniser.writes_phones)
        yield Evaluation(path, utterances, hypotheses, report, score_words(report, recogniser.alphabet))


def worst_recordings(evaluation: Evaluation, data: DataConfig, count: int) -> dict[int, bytes]:
    """Return MP3 files of the utterances with most errors, by index, 4 MiB in all at most (23 minutes).

    Args:
        data: of the model's config: how audio is read.
        count: of utterances; those of more than two minutes are left out.
    """
    recordings: dict[int, bytes] = {}
    remaining = RECORDINGS_BYTES
    for index in most_errors(evaluation.report, count):
        utterance = evaluation.utterances[index]
        if utterance.duration_s > _LONGEST_RECORDING_S:
            continue
        try:
            samples = read_audio(
                utterance.audio_filepath, data.sample_rate_hz, utterance.offset_s, utterance.duration_s, data.channel
            )
            recording = encode(samples, "mp3", data.sample_rate_hz)
        except (AudioError, soundfile.LibsndfileError) as error:  # the report itself is complete without them
            log.warning("the report has no recordings: %s", error)
            return {}
        remaining -= len(recording)
        if remaining < 0:
            break
        recordings[index] = recording
    return recordings


def _counting(progress: ProgressBar) -> Callable[[list[int], Tensor, Tensor], None]:
    """Return a function that counts the utterances of the batches that `Recogniser.logits` yields."""
    return lambda indices, logits, lengths: progress.update(progress.done + len(indices))


def recognition_loader(
    utterances: Sequence[Utterance], data: DataConfig, device: torch.device, workers: int = -1
) -> SpeechLoader:
    """Return a loader of audio that is read once, without a cache; -1 workers chooses by device."""
    return SpeechLoader(utterances, replace(data, cache="none", workers=workers), device)


def score(
    utterances: Sequence[Utterance], hypotheses: Sequence[Hypothesis], alphabet: Alphabet, *, phones: bool = False
) -> Report:
    """Score hypotheses against normalised transcripts; characters outside the alphabet count as errors.

    If the hypotheses are `phones`, so are the references, by the first pronunciations: the word error rate of the
    report is then the phone error rate.
    """
    lenient = replace(alphabet, unknown="drop")
    return corpus_report(
        [lenient.decode(lenient.encode(u.text)) if phones else alphabet.normalise(u.text)[0] for u in utterances],
        [h.text for h in hypotheses],
        names=[u.name for u in utterances],
        speakers=[u.speaker for u in utterances],
    )


def score_words(report: Report, alphabet: Alphabet) -> Report | None:
    """Score the same texts without case and punctuation; None if the network writes neither."""
    if not alphabet.as_printed:
        return None
    return corpus_report(
        [fold(" ".join(u.reference), alphabet.locale) for u in report.utterances],
        [fold(" ".join(u.hypothesis), alphabet.locale) for u in report.utterances],
        names=[u.name for u in report.utterances],
        speakers=[u.speaker for u in report.utterances],
    )


def _hypothesis_record(utterance: Utterance, hypothesis: Hypothesis, reference: str) -> dict[str, Any]:
    """Return one line of hypotheses.jsonl: NeMo's keys (`pred_text` is the hypothesis), score and words with times."""
    return {
        "audio_filepath": str(utterance.audio_filepath),
        "offset": utterance.offset_s,
        "duration": utterance.duration_s,
        "speaker": utterance.speaker,
        "text": reference,
        "pred_text": hypothesis.text,
        "score": hypothesis.score,
        "acoustic_score": hypothesis.acoustic,
        "lm_score": hypothesis.lm,
        "words": [word_record(word) for word in hypothesis.words],
    }


def _describe_decoder(options: DecodeConfig) -> str:
    """Return decoder settings in one line for a report."""
    taken, parts = METHODS[options.method].options, [options.method]
    if "beam" in taken:
        parts.append(f"beam {options.beam}")
    if "lm" in taken:
        weights = f"{options.lm}, alpha {options.alpha:g}, beta {options.beta:g}"
        parts.append(weights if options.lm else "no language model")
    return ", ".join(parts)


def conditions(snrs_db: Sequence[float]) -> dict[str, AugmentConfig]:
    """Degradations by name: none, noise of each kind at each ratio (of mean powers of an utterance), rooms, codecs."""
    degradations = {"clean": AugmentConfig()}
    for snr in snrs_db:
        noisy = AugmentConfig(noise_probability=1.0, noise_snr_db=[snr, snr])
        for name, exponent in _COLOURS.items():
            degradations[f"{name}, {snr:g} dB"] = replace(noisy, noise_colours=[exponent])
        degradations[f"babble of 4, {snr:g} dB"] = replace(noisy, babble_share=1.0)
    for low, high in ((0.2, 0.4), (0.6, 0.8)):
        degradations[f"rooms, {low} to {high} s"] = AugmentConfig(room_probability=1.0, room_rt60_s=[low, high])
    for codec in CODECS:
        degradations[codec] = AugmentConfig(codec_probability=1.0, codecs=[codec])
    return degradations


def robustness(
    recogniser: Recogniser,
    utterances: Sequence[Utterance],
    data: DataConfig,
    snrs_db: Sequence[float],
    *,
    batch_audio_s: float | None = None,
    workers: int = -1,
) -> Iterator[tuple[str, Report]]:
    """Yield each name of `conditions` and the report on the utterances degraded so; every run draws the same noise.

    `utterances` are as `scored_utterances` returns them; the other arguments and errors as of `evaluate`.
    """
    data = replace(data, workers=workers)
    for name, augment in conditions(snrs_db).items():
        loader = SpeechLoader(utterances, data, recogniser.device, augment=augment, seed=_DEGRADE_SEED)
        with ProgressBar(name, len(utterances), "utterances") as progress:
            hypotheses = recogniser.recognise(loader, batch_audio_s=batch_audio_s, watch=_counting(progress))
        yield name, score(utterances, hypotheses, recogniser.alphabet, phones=recogniser.writes_phones)


def robustness_table(reports: Sequence[tuple[str, Report]]) -> str:
    """The reports as a Markdown table with WER ratios to the first, which is the clean one."""
    lines = ["| condition | WER (95 %) | CER | WER / clean WER |", "|---|---|---|---|"]
    clean = reports[0][1].wer
    for name, report in reports:
        interval = f"{100 * report.interval.low:.2f} .. {100 * report.interval.high:.2f}"
        ratio = f"{report.wer / clean:.2f}" if clean else "-"
        lines.append(f"| {name} | {100 * report.wer:.2f} % ({interval}) | {100 * report.cer:.2f} % | {ratio} |")
    return "\n".join(lines) + "\n"


def keyword_table(evaluation: Evaluation, keywords: Collection[str]) -> str:
    """Return a Markdown table of keywords: how often they were said, found, and found though nobody said them.

    A keyword is right as often as the transcript of the utterance has it; what is found beyond that is a false alarm.

    Args:
        evaluation: by a recogniser of `Recogniser.only_keywords`.
        keywords: all texts that its keywords stand for.
    """
    spoken, right, false = Counter[str](), Counter[str](), Counter[str]()
    for aligned, hypothesis in zip(evaluation.report.utterances, evaluation.hypotheses, strict=True):
        reference = Counter(keywords_in(aligned.reference, keywords))
        written = Counter(word.text for word in hypothesis.words if word.text != OTHERS)
        spoken, right, false = spoken + reference, right + (written & reference), false + (written - reference)
    hours, texts = sum(utterance.duration_s for utterance in evaluation.utterances) / 3600, sorted(keywords)
    lines = ["| keyword | said | found | false alarms | an hour |", "|---|---|---|---|---|"]
    for name, own in [*((text, [text]) for text in texts), (f"all {len(texts)}; an hour of each", texts)]:
        times, hits, alarms = (sum(count[text] for text in own) for count in (spoken, right, false))
        share = f" ({100 * hits / times:.1f} %)" if times else ""
        lines.append(f"| {name} | {times} | {hits}{share} | {alarms} | {alarms / (hours * len(own)):.3g} |")
    return "\n".join(lines) + "\n"
