"""Utterances a second and WER of the decoders on one set of log-probs, and of whole recognitions beside greedy.

    python tools/bench_decoders.py MODEL MANIFEST --lm books.lm --beams 128 512 --methods native beam
    python tools/bench_decoders.py MODEL MANIFEST --lm books.lm --beams 32 --methods beam native --whole --device cuda

The first takes log-probs computed once, on the CPU unless --device says otherwise. --whole times recognition from
audio to text: features, model and search, after a warm-up on the same utterances, --repeat times in turn.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ds2.beam_search import DecodeError, Hypothesis
from ds2.checkpoint import LoadedModel, load_model
from ds2.config import DecodeConfig
from ds2.corpus import scored_utterances
from ds2.decoding import Decoder, GreedyDecoder, make_decoder
from ds2.device import resolve_device, resolve_precision
from ds2.evaluate import logit_batches, transcribe_utterances
from ds2.lm_tune import DevSet
from ds2.manifest import Utterance
from ds2.ngram_file import load_ngram
from ds2.wer import ErrorCounts, word_errors


def timed_s(action: Callable[[], object], device: torch.device, repeat: int) -> float:
    """Return the median seconds of `repeat` runs after one that warms up."""
    times_s = []
    for _ in range(repeat + 1):
        began = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times_s.append(time.perf_counter() - began)
    return statistics.median(times_s[1:])


def wer(references: Sequence[str], hypotheses: Sequence[Hypothesis]) -> float:
    """Return word errors over reference words."""
    pairs = zip(references, hypotheses, strict=True)
    return sum((word_errors(r, h.text) for r, h in pairs), ErrorCounts()).rate


def decoders(loaded: LoadedModel, arguments: argparse.Namespace, device: torch.device) -> list[tuple[str, Decoder]]:
    """Return greedy and every asked method at every beam; those that are not installed are named and left out."""
    frame_s = loaded.features.step_s * loaded.model.time_stride
    found: list[tuple[str, Decoder]] = [("greedy", GreedyDecoder(loaded.alphabet, frame_s))]
    lm = load_ngram(arguments.lm) if arguments.lm else None
    for method in arguments.methods:
        for beam in arguments.beams:
            options = DecodeConfig(
                method=method,
                beam=beam,
                lm=str(arguments.lm or ""),
                alpha=arguments.alpha,
                beta=arguments.beta,
                threads=arguments.threads,
                times=False,
            )
            try:
                found.append((f"{method} {beam}", make_decoder(options, loaded.alphabet, frame_s, device, lm)))
            except DecodeError as error:
                print(f"{method} {beam}: {error}")
    return found


def bench_search(loaded: LoadedModel, utterances: list[Utterance], arguments: argparse.Namespace) -> None:
    """Time the decoders alone."""
    device = resolve_device(arguments.device)
    texts = [loaded.alphabet.normalise(u.text)[0] for u in utterances]
    config = replace(loaded.config, data=replace(loaded.config.data, cache="none"))
    batches = logit_batches(
        loaded.model, loaded.features, utterances, config, device=device, batch_audio_s=arguments.batch_audio_s
    )
    dev = DevSet.of(batches, texts)
    count = sum(map(len, dev.references))
    references = [reference for batch in dev.references for reference in batch]
    for name, decoder in decoders(loaded, arguments, device):

        def everything(decoder: Decoder = decoder) -> list[Hypothesis]:
            return [row[0] for batch in dev.batches for row in decoder.decode(*batch)]

        rate = count / timed_s(everything, device, arguments.repeat)
        print(f"{name:14s} {rate:9.1f} utterances/s  WER {100 * wer(references, everything()):.2f} %", flush=True)


def bench_whole(loaded: LoadedModel, utterances: list[Utterance], arguments: argparse.Namespace) -> None:
    """Time whole recognitions, each decoder beside greedy."""
    device = resolve_device(arguments.device)
    texts = [loaded.alphabet.normalise(u.text)[0] for u in utterances]
    audio_s = sum(u.duration_s for u in utterances)
    config = replace(loaded.config, data=replace(loaded.config.data, cache="disk"))
    greedy_s = 0.0
    for name, decoder in decoders(loaded, arguments, device):
        kept: list[Hypothesis] = []

        def everything(decoder: Decoder = decoder, kept: list[Hypothesis] = kept) -> None:
            kept[:] = transcribe_utterances(
                loaded.model,
                loaded.features,
                loaded.alphabet,
                utterances,
                config,
                device=device,
                precision=resolve_precision("auto", device),
                batch_audio_s=arguments.batch_audio_s,
                decoder=decoder,
            )

        elapsed_s = timed_s(everything, device, arguments.repeat)
        greedy_s = greedy_s or elapsed_s
        print(
            f"{name:14s} {elapsed_s:7.2f} s, {100 * (elapsed_s / greedy_s - 1):+6.1f} % beside greedy, "
            f"real-time factor {elapsed_s / audio_s:.5f}, WER {100 * wer(texts, kept):.2f} %",
            flush=True,
        )


def main() -> None:
    """Parse arguments and print one line a decoder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("manifest")
    parser.add_argument("--lm", type=Path)
    parser.add_argument("--methods", nargs="+", default=["native", "beam"])
    parser.add_argument("--beams", nargs="+", type=int, default=[128, 512])
    parser.add_argument("--alpha", type=float, default=0.5)
    parser.add_argument("--beta", type=float, default=1.5)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--utterances", type=int, default=0, help="the first so many; 0: all")
    parser.add_argument("--batch-audio-s", type=float, help="padded audio a batch")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--whole", action="store_true", help="from audio to text, beside greedy")
    arguments = parser.parse_args()
    device = resolve_device(arguments.device)
    loaded = load_model(arguments.model, device)
    utterances = scored_utterances([arguments.manifest], loaded.alphabet)
    utterances = utterances[: arguments.utterances or None]
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"{len(utterances)} utterances, {sum(u.duration_s for u in utterances):.0f} s of audio; {where}")
    (bench_whole if arguments.whole else bench_search)(loaded, utterances, arguments)


if __name__ == "__main__":
    main()
