"""How much worse a model hears in noise, in rooms and over telephones: the same utterances, degraded by seed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ds2.config.schema import CODECS, AugmentConfig, DataConfig
from ds2.data.loader import SpeechLoader
from ds2.data.manifest import Utterance
from ds2.recognition.evaluate import score
from ds2.recognition.recogniser import Recogniser
from ds2.scoring.wer import Report

_SEED = 1
_COLOURS = {"white noise": 0.0, "pink noise": 1.0, "brown noise": 2.0}


def conditions(snrs_db: Sequence[float]) -> dict[str, AugmentConfig]:
    """What utterances go through, by name: nothing, noise of each kind at each ratio, rooms, each codec.

    Args:
        snrs_db: of speech over noise, mean powers over the whole utterance.
    """
    found = {"clean": AugmentConfig()}
    for snr in snrs_db:
        noisy = AugmentConfig(noise_probability=1.0, noise_snr_db=[snr, snr])
        for name, exponent in _COLOURS.items():
            found[f"{name}, {snr:g} dB"] = replace(noisy, noise_colours=[exponent])
        found[f"babble of 4, {snr:g} dB"] = replace(noisy, babble_share=1.0)
    for low, high in ((0.2, 0.4), (0.6, 0.8)):
        found[f"rooms, {low} to {high} s"] = AugmentConfig(room_probability=1.0, room_rt60_s=[low, high])
    for codec in CODECS:
        found[codec] = AugmentConfig(codec_probability=1.0, codecs=[codec])
    return found


def robustness(
    recogniser: Recogniser,
    utterances: Sequence[Utterance],
    data: DataConfig,
    snrs_db: Sequence[float],
    *,
    batch_audio_s: float | None = None,
    workers: int = -1,
) -> Iterator[tuple[str, Report]]:
    """Yield the name of each of `conditions` and the report on the utterances heard through it.

    Args:
        recogniser: the model and its decoder.
        utterances: normalised or not, as `scored_utterances` gives them.
        data: of the model's config: how audio is read.
        snrs_db: as `conditions`.
        batch_audio_s, workers: as `evaluate`.

    Raises:
        AudioError, DecodeError: as `evaluate`.
    """
    data = replace(data, workers=workers)
    for name, augment in conditions(snrs_db).items():
        loader = SpeechLoader(utterances, data, recogniser.device, augment=augment, seed=_SEED)
        hypotheses = recogniser.recognise(loader, batch_audio_s=batch_audio_s)
        yield name, score(utterances, hypotheses, recogniser.alphabet)


def table(reports: Sequence[tuple[str, Report]]) -> str:
    """The reports as a Markdown table, each beside the first, which is the clean one."""
    lines = ["| condition | WER (95 %) | CER | beside clean |", "|---|---|---|---|"]
    clean = reports[0][1].wer
    for name, report in reports:
        interval = f"{100 * report.interval.low:.2f} .. {100 * report.interval.high:.2f}"
        ratio = f"{report.wer / clean:.2f}" if clean else "-"
        lines.append(f"| {name} | {100 * report.wer:.2f} % ({interval}) | {100 * report.cer:.2f} % | {ratio} |")
    return "\n".join(lines) + "\n"
