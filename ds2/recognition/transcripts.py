"""`ds2 align`: word times of transcripts, and the utterances whose transcript is probably wrong."""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from ds2.data.manifest import Utterance
from ds2.decoding.alignment import Alignment, force_align
from ds2.decoding.hypothesis import Word, spell_words
from ds2.model.checkpoint import LoadedModel, load_model
from ds2.text.alphabet import Alphabet

_MAD_TO_DEVIATION = 1.4826  # of a normal distribution
_DEVIATIONS = 6.0  # above the median: what is listed
_LEAST_SURPRISE = 2.0  # nats a label: where nearly all transcripts are certain, small doubts are no news


@dataclass(frozen=True)
class AlignedTranscript:
    """A transcript on its audio.

    `surprise` is how much less probable the transcript's best path is than the best path of all, in natural log a
    label: 0 where the network would have written just that, infinite where the transcript cannot fit in the audio.
    """

    words: tuple[Word, ...]
    surprise: float


def align_batch(
    log_probs: Tensor, lengths: Tensor, targets: Sequence[Sequence[int]], alphabet: Alphabet, frame_s: float
) -> list[AlignedTranscript]:
    """Align transcripts; arguments as `force_align`, `frame_s` is seconds an output frame."""
    valid = torch.arange(len(log_probs), device=log_probs.device)[:, None] < lengths.to(log_probs.device)
    best = torch.where(valid, log_probs.amax(2), 0.0).sum(0, dtype=torch.float64).tolist()
    return [
        _aligned(alignment, top, len(target), alphabet, frame_s)
        for alignment, top, target in zip(force_align(log_probs, lengths, targets), best, targets, strict=True)
    ]


def _aligned(
    alignment: Alignment | None, best: float, labels: int, alphabet: Alphabet, frame_s: float
) -> AlignedTranscript:
    if alignment is None:
        return AlignedTranscript((), math.inf)
    surprise = max(0.0, best - alignment.log_prob) / max(1, labels)
    return AlignedTranscript(spell_words(alignment.runs(), alphabet, frame_s), surprise)


def suspicious(surprises: Iterable[float]) -> list[int]:
    """Return the places of outliers, worst first: above two nats, and six median deviations above the median."""
    values = list(surprises)
    finite = [value for value in values if math.isfinite(value)]
    limit = 0.0
    if finite:
        median = statistics.median(finite)
        deviation = _MAD_TO_DEVIATION * statistics.median(abs(value - median) for value in finite)
        limit = max(_LEAST_SURPRISE, median + _DEVIATIONS * deviation)
    return sorted((i for i, value in enumerate(values) if value > limit), key=lambda i: -values[i])


def align_utterances(
    loaded: LoadedModel, utterances: Sequence[Utterance], device: torch.device
) -> list[AlignedTranscript]:
    """Align the transcripts of utterances to their audio, in order; characters outside the alphabet are left out.

    Args:
        loaded: the model, on `device`.
        utterances: any number.
        device: where the model runs.
    """
    from ds2.recognition.logits import logit_batches, recognition_loader

    alphabet, frame_s = loaded.alphabet, loaded.frame_s
    forgiving = replace(alphabet, unknown="drop")
    targets = [forgiving.encode(u.text) for u in utterances]
    aligned: dict[int, AlignedTranscript] = {}
    loader = recognition_loader(loaded, utterances, device)
    batches = logit_batches(loaded.model, loaded.features, loader, device=device)
    for indices, logits, lengths in batches:
        found = align_batch(logits.float().log_softmax(2), lengths, [targets[i] for i in indices], alphabet, frame_s)
        aligned.update(zip(indices, found, strict=True))
    return [aligned[i] for i in range(len(utterances))]


def run(arguments: Sequence[str]) -> int:
    """`ds2 align MODEL MANIFEST...`: times as JSON lines, suspicious transcripts on standard output; 0."""
    from ds2.config.device import resolve_device
    from ds2.data.splits import scored_utterances
    from ds2.system.files import write_text

    parser = argparse.ArgumentParser(
        prog="ds2 align", description="word times of transcripts, and doubtful transcripts"
    )
    parser.add_argument("model", type=Path, help="model file or run folder")
    parser.add_argument("manifests", nargs="+", help="JSON-lines manifests")
    parser.add_argument("--out", type=Path, help="JSON lines with the words' times, in the order of the manifests")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N")
    given = parser.parse_args(arguments)
    device = resolve_device(given.device)
    loaded = load_model(given.model, device)
    utterances = scored_utterances(given.manifests, loaded.alphabet)
    order = align_utterances(loaded, utterances, device)
    if given.out:
        records = (
            {
                "audio_filepath": str(u.audio_filepath),
                "offset": u.offset_s,
                "duration": u.duration_s,
                "text": u.text,
                "surprise": a.surprise if math.isfinite(a.surprise) else None,
                "words": [asdict(word) for word in a.words],
            }
            for u, a in zip(utterances, order, strict=True)
        )
        write_text(given.out, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
    doubtful = suspicious(a.surprise for a in order)
    print(f"{len(doubtful)} of {len(utterances)} transcripts are probably wrong (surprise in nats a label):")
    for index in doubtful:
        utterance = utterances[index]
        print(f"{order[index].surprise:8.2f}  {utterance.source or utterance.name}  {utterance.text!r}")
    return 0
