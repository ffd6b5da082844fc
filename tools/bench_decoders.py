"""Utterances a second and WER of the decoders on one set of log-probs, and of whole recognitions beside greedy.

    python tools/bench_decoders.py MODEL MANIFEST --lm books.lm --beams 128 512 \\
        --methods native:lexicon=true native flashlight:tokens=6 pyctcdecode
    python tools/bench_decoders.py MODEL MANIFEST --lm books.lm --beams 32 --methods beam native --whole --device cuda

The first takes log-probs computed once, on the CPU unless --device says otherwise, and runs the decoders in turn, round
after round: it prints the fastest round of each by the clock, the least CPU time, and the clock's ratio to the first
method. A method is one of decode.method or of `decoder_peers.py`, with settings of its own where some follow a colon.
--whole times recognition from audio to text: features, model and search, after a warm-up on the same utterances,
--repeat times in turn.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from multiprocessing import active_children
from pathlib import Path
from typing import cast

import torch
from decoder_peers import PEERS, PeerDecoder, Setup
from omegaconf import OmegaConf

from ds2.config.device import resolve_device, resolve_precision
from ds2.config.schema import DecodeConfig
from ds2.data.loader import SpeechLoader
from ds2.data.manifest import Utterance
from ds2.data.splits import scored_utterances
from ds2.decoding.decoder import Decoder
from ds2.decoding.external import thread_count
from ds2.decoding.greedy import GreedyDecoder
from ds2.decoding.hypothesis import DecodeError, Hypothesis
from ds2.decoding.methods import make_decoder
from ds2.lm.arpa import arpa_file
from ds2.lm.files import load_ngram
from ds2.model.checkpoint import LoadedModel, load_model
from ds2.recognition.evaluate import recognition_loader
from ds2.recognition.recogniser import Recogniser
from ds2.recognition.tuning import DevLogProbs
from ds2.scoring.wer import ErrorCounts, word_errors

_TOKENS = 29  # flashlight's labels a frame, unless a method says


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


def cpu_s() -> float:
    """Return the processor seconds that this process and its living workers have used."""
    spent = time.process_time()
    for child in active_children():
        fields = Path(f"/proc/{child.pid}/stat").read_text().rsplit(")", 1)[1].split()
        spent += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return spent


def settings(method: str, beam: int, arguments: argparse.Namespace) -> tuple[DecodeConfig, int]:
    """Return the settings of NAME[:KEY=VALUE,...] and how many labels flashlight follows in a frame."""
    name, _, given = method.partition(":")
    pairs = dict(pair.split("=", 1) for pair in given.split(",") if pair)
    tokens = int(pairs.pop("tokens", _TOKENS))
    base = DecodeConfig(
        method=name,
        beam=beam,
        lm=str(arguments.lm or ""),
        alpha=arguments.alpha,
        beta=arguments.beta,
        threads=arguments.threads,
        times=False,
    )
    merged = OmegaConf.merge(OmegaConf.structured(base), OmegaConf.create(pairs))
    return cast(DecodeConfig, OmegaConf.to_object(merged)), tokens


def decoders(loaded: LoadedModel, arguments: argparse.Namespace, device: torch.device) -> list[tuple[str, Decoder]]:
    """Return greedy and every asked method at every beam; those that are not installed are named and left out."""
    found: list[tuple[str, Decoder]] = [("greedy", GreedyDecoder(loaded.alphabet, loaded.frame_s))]
    lm = load_ngram(arguments.lm) if arguments.lm else None
    peers = lm is not None and any(method.partition(":")[0] in PEERS for method in arguments.methods)
    with arpa_file(lm, str(arguments.lm)) if lm is not None and peers else nullcontext(Path()) as arpa:
        for beam in arguments.beams:
            for method in arguments.methods:
                options, tokens = settings(method, beam, arguments)
                try:
                    if lm is not None and options.method in PEERS:
                        one = PEERS[options.method](Setup(loaded.alphabet, lm, arpa, options, tokens))
                        decoder: Decoder = PeerDecoder(one, thread_count(options))
                    else:
                        decoder = make_decoder(options, loaded.alphabet, loaded.frame_s, device, lm)
                except (DecodeError, OSError) as error:
                    print(f"{method} {beam}: {error}")
                    continue
                found.append((f"{method} {beam}", decoder))
    return found


def bench_search(loaded: LoadedModel, utterances: list[Utterance], arguments: argparse.Namespace) -> None:
    """Time the decoders alone, in turn."""
    device = resolve_device(arguments.device)
    texts = [loaded.alphabet.normalise(u.text)[0] for u in utterances]
    loader = recognition_loader(utterances, loaded.config.data, device)
    recogniser = Recogniser.of(loaded, DecodeConfig(), device)
    dev = DevLogProbs.of(recogniser.logits(loader, batch_audio_s=arguments.batch_audio_s), texts)
    references = [reference for batch in dev.references for reference in batch]
    contenders = decoders(loaded, arguments, device)
    best_s: dict[str, tuple[float, float]] = {}
    rates: dict[str, float] = {}
    for turn in range(arguments.repeat + 1):
        for name, decoder in contenders:
            began_s, cpu_began_s = time.perf_counter(), cpu_s()
            hypotheses = [row[0] for batch in dev.batches for row in decoder.decode(*batch)]
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            spent_s = (time.perf_counter() - began_s, cpu_s() - cpu_began_s)
            rates[name] = wer(references, hypotheses)
            if turn:
                best_s[name] = cast(tuple[float, float], tuple(map(min, spent_s, best_s.get(name, spent_s))))
    first_s = best_s[contenders[min(1, len(contenders) - 1)][0]][0]
    for name, (wall_s, used_s) in best_s.items():
        print(
            f"{name:48s} {len(references) / wall_s:8.1f} utterances/s  x {first_s / wall_s:5.2f}  "
            f"{1000 * used_s / len(references):7.2f} ms of CPU each  WER {100 * rates[name]:.2f} %",
            flush=True,
        )


def bench_whole(loaded: LoadedModel, utterances: list[Utterance], arguments: argparse.Namespace) -> None:
    """Time whole recognitions, each decoder beside greedy."""
    device = resolve_device(arguments.device)
    texts = [loaded.alphabet.normalise(u.text)[0] for u in utterances]
    audio_s = sum(u.duration_s for u in utterances)
    data = replace(loaded.config.data, cache="disk")
    greedy_s = 0.0
    for name, decoder in decoders(loaded, arguments, device):
        kept: list[Hypothesis] = []

        def everything(decoder: Decoder = decoder, kept: list[Hypothesis] = kept) -> None:
            parts = (loaded.model, loaded.features, loaded.alphabet, decoder, device, resolve_precision("auto", device))
            loader = SpeechLoader(utterances, data, device)
            kept[:] = Recogniser(*parts).recognise(loader, batch_audio_s=arguments.batch_audio_s)

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
    parser.add_argument("--utterances", type=int, default=0, help="so many, drawn by seed 0; 0: all")
    parser.add_argument("--batch-audio-s", type=float, help="padded audio a batch")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--whole", action="store_true", help="from audio to text, beside greedy")
    arguments = parser.parse_args()
    device = resolve_device(arguments.device)
    loaded = load_model(arguments.model, device)
    utterances = scored_utterances([arguments.manifest], loaded.alphabet)
    if arguments.utterances:
        utterances = random.Random(0).sample(utterances, arguments.utterances)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"{len(utterances)} utterances, {sum(u.duration_s for u in utterances):.0f} s of audio; {where}")
    (bench_whole if arguments.whole else bench_search)(loaded, utterances, arguments)


if __name__ == "__main__":
    main()
