"""Model and manifests to hypotheses and a WER report; also how training judges its dev set."""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ds2 import __version__
from ds2.audio.features import Features
from ds2.config.device import resolve_device, resolve_precision
from ds2.config.schema import BatchingConfig, CommConfig, ConfigError, DecodeConfig
from ds2.data.batching import plan_epoch
from ds2.data.loader import SpeechLoader
from ds2.data.manifest import Utterance, corpus
from ds2.data.splits import scored_utterances
from ds2.decode_options import resolve_options, split_overrides
from ds2.decoding.decoder import Decoder
from ds2.decoding.greedy import GreedyDecoder
from ds2.decoding.hypothesis import DecodeError, Hypothesis
from ds2.decoding.methods import make_decoder
from ds2.distributed.agreement import weights
from ds2.distributed.communicator import Communicator
from ds2.distributed.launch import connect
from ds2.model.acoustic import AcousticModel
from ds2.model.checkpoint import LoadedModel, find_model, load_model
from ds2.scoring.report import format_report, write_report
from ds2.scoring.wer import Report, corpus_report
from ds2.system.files import write_text
from ds2.text.alphabet import Alphabet

log = logging.getLogger(__name__)
_BATCH_AUDIO_S = {
    "cpu": 120.0,
    "cuda": 1200.0,
}  # padded audio a batch: enough to fill the device, small beside training


@torch.inference_mode()
def transcribe_utterances(
    model: AcousticModel,
    features: Features,
    alphabet: Alphabet,
    loader: SpeechLoader,
    *,
    device: torch.device,
    precision: str = "fp32",
    batch_audio_s: float | None = None,
    comm: Communicator | None = None,
    decoder: Decoder | None = None,
) -> list[Hypothesis]:
    """Recognise utterances, in batches of like duration, longest first; their texts are not looked at.

    Args:
        model: in evaluation mode, on `device`.
        features: on `device`.
        alphabet: of the model.
        loader: of any number of utterances, without augmentation.
        device: where the model runs.
        precision: fp32 or bf16.
        batch_audio_s: budget of padded audio a batch, seconds; None chooses by device.
        comm: ranks that share the batches out and all get all hypotheses; None is this process alone.
        decoder: what turns log-probs to words; None is greedy.

    Returns:
        Hypotheses in the order of the utterances.

    Raises:
        DecodeError: the model gives NaN or infinity; names the utterances.
        AudioError: audio cannot be read.
        DisagreementError: a rank has other utterances or weights.
        RuntimeError: the model is in training mode.
    """
    comm, utterances = comm or Communicator(device), loader.utterances
    if comm.world > 1:
        comm.agree(corpus("to recognise", utterances), "give all hosts the same manifests")
        comm.agree(weights(model), "give all hosts the same model; in training, run on GPUs of one kind")
    decoder = decoder or GreedyDecoder(alphabet, features.step_s * model.time_stride)
    found: dict[int, Hypothesis] = {}
    batches = logit_batches(
        model, features, loader, device=device, precision=precision, batch_audio_s=batch_audio_s, comm=comm
    )
    for indices, logits, lengths in batches:
        try:
            rows = decode_batch(decoder, logits, lengths)
        except DecodeError as error:
            named = ", ".join(utterances[indices[row]].name for row in error.rows)
            raise DecodeError(f"{named}: {error}" if named else str(error)) from error
        found.update(zip(indices, rows, strict=True))
    found = {index: hypothesis for part in comm.allgather(found) for index, hypothesis in part.items()}
    return [found[index] for index in range(len(utterances))]


@torch.inference_mode()
def logit_batches(
    model: AcousticModel,
    features: Features,
    loader: SpeechLoader,
    *,
    device: torch.device,
    precision: str = "fp32",
    batch_audio_s: float | None = None,
    comm: Communicator | None = None,
) -> Iterator[tuple[list[int], Tensor, Tensor]]:
    """Yield what the model says of utterances: their places, logits (T', B, V), lengths (B,) on the CPU.

    Arguments and errors are those of :func:`transcribe_utterances`; with `comm`, this rank's batches.
    """
    if model.training:
        raise RuntimeError("recognition needs running statistics: call model.eval() first")
    if not loader.utterances:
        return
    budget = BatchingConfig(utterances=0, audio_s=batch_audio_s or _BATCH_AUDIO_S[device.type], sortagrad=True)
    plan = plan_epoch(np.array([u.duration_s for u in loader.utterances]), budget, epoch=1, seed=0)[::-1]
    if comm is not None:
        plan = plan[comm.rank :: comm.world]
    for batch in loader.epoch(plan, epoch=1):
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
            logits, lengths = model(*features(batch.waveforms.to(device, non_blocking=True), batch.sample_lengths))
        yield batch.indices.tolist(), logits, lengths


def recognition_loader(
    loaded: LoadedModel, utterances: Sequence[Utterance], device: torch.device, workers: int = -1
) -> SpeechLoader:
    """Return a loader of audio that is read once, for which no cache is written; -1 workers chooses by device."""
    data = replace(loaded.config.data, cache="none", workers=workers)
    return SpeechLoader(utterances, replace(loaded.config, data=data, device=str(device)), None, training=False)


def decode_batch(decoder: Decoder, logits: Tensor, lengths: Tensor) -> list[Hypothesis]:
    """Return the best hypothesis of each utterance of logits (T', B, V); too short for a frame, it is empty."""
    heard = lengths.nonzero()[:, 0]
    best = [Hypothesis("", 0.0, (), ()) for _ in lengths]
    if not len(heard):
        return best
    if len(heard) < len(best):
        logits, lengths = logits[:, heard.to(logits.device)], lengths[heard]
    try:
        rows = decoder.decode(logits.float().log_softmax(2), lengths)
    except DecodeError as error:
        raise DecodeError(str(error), heard[error.rows].tolist()) from error
    for row, found in zip(heard.tolist(), rows, strict=True):
        best[row] = found[0]
    return best


def score(utterances: Sequence[Utterance], hypotheses: Sequence[Hypothesis], alphabet: Alphabet) -> Report:
    """Report on hypotheses against normalised transcripts; characters outside the alphabet stay in, as errors."""
    return corpus_report(
        [alphabet.normalise(u.text)[0] for u in utterances],
        [h.text for h in hypotheses],
        names=[u.name for u in utterances],
        speakers=[u.speaker for u in utterances],
    )


def hypothesis_record(utterance: Utterance, hypothesis: Hypothesis, reference: str) -> dict[str, Any]:
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
        "words": [asdict(word) for word in hypothesis.words],
    }


def evaluate(
    model_path: Path,
    manifests: Sequence[Path] = (),
    out: Path | None = None,
    *,
    device: str = "auto",
    precision: str = "fp32",
    batch_audio_s: float | None = None,
    workers: int = -1,
    decode: Sequence[str] = (),
    comm: Communicator | None = None,
) -> dict[Path, Report]:
    """Evaluate a model on manifests, one report each.

    Every report is a folder `out`/<manifest's name> with hypotheses.jsonl, report.txt, report.json, errors.txt and
    errors.html.

    Args:
        model_path: model file or run folder (its best model).
        manifests: JSON-lines manifests; none means the test manifests of the model's own config.
        out: folder of the reports; None is `best-evaluation` beside best.safetensors, and so on.
        device: auto, cpu, cuda, cuda:N.
        precision: fp32, bf16 or auto (bf16 on a GPU).
        batch_audio_s: padded audio a batch, seconds; lower it where memory runs out. None chooses by device.
        workers: processes that read audio; -1 chooses.
        decode: overrides `decode=NAME`, `decode.KEY=VALUE`; see `resolve_options` for what applies without them.
        comm: ranks that share the batches out; rank 0 writes and prints. None is this process alone.

    Raises:
        ConfigError: no manifest, two of one name, an unknown device or precision, or decoder settings that cannot work.
        CheckpointError, ManifestError, AudioError, DecodeError: what cannot be read or decoded, by name.
    """
    file = find_model(model_path)
    chosen = resolve_device(device) if comm is None else comm.device
    loaded = load_model(file, chosen)
    paths = list(manifests) or [Path(p) for p in loaded.config.data.test]
    repeated = [name for name, times in Counter(p.stem for p in paths).items() if times > 1]
    if not paths:
        raise ConfigError(f"{file} names no test manifest (data.test is empty): give manifests to evaluate")
    if repeated:
        raise ConfigError(
            f"two manifests are called {', '.join(repeated)}: evaluate them one by one, each with its --out"
        )
    options = resolve_options(decode, file, loaded.config)
    decoder = make_decoder(options, loaded.alphabet, loaded.frame_s, chosen)
    reports = {}
    for path in paths:
        began = time.monotonic()
        utterances = scored_utterances([str(path)], loaded.alphabet)
        hypotheses = transcribe_utterances(
            loaded.model,
            loaded.features,
            loaded.alphabet,
            recognition_loader(loaded, utterances, chosen, workers),
            device=chosen,
            precision=resolve_precision(precision, chosen),
            batch_audio_s=batch_audio_s,
            decoder=decoder,
            comm=comm,
        )
        elapsed_s, audio_s = time.monotonic() - began, sum(u.duration_s for u in utterances)
        log.info("%s: %d utterances, %.0f s of audio in %.1f s", path, len(utterances), audio_s, elapsed_s)
        report = reports[path] = score(utterances, hypotheses, loaded.alphabet)
        if comm is not None and comm.rank != 0:
            continue
        folder = (out or file.with_name(f"{file.stem}-evaluation")) / path.stem
        lines = (
            json.dumps(hypothesis_record(u, h, " ".join(aligned.reference)), ensure_ascii=False)
            for u, h, aligned in zip(utterances, hypotheses, report.utterances, strict=True)
        )
        write_text(folder / "hypotheses.jsonl", "".join(line + "\n" for line in lines))
        facts = {"model": str(file), "manifest": str(path), "decoder": describe(options), "ds2": __version__}
        write_report(report, folder, f"{path.stem} by {file}", facts)
        print(f"{path}\n\n{format_report(report)}\nreport: {folder}")
    return reports


def describe(options: DecodeConfig) -> str:
    """Return decoder settings in one line for a report."""
    if options.method == "greedy":
        return "greedy"
    weights = f", {options.lm}, alpha {options.alpha:g}, beta {options.beta:g}" if options.lm else ", no language model"
    return f"{options.method}, beam {options.beam}{weights}"


def run(arguments: Sequence[str]) -> int:
    """`ds2 evaluate MODEL [MANIFEST...] [decode=NAME] [decode.KEY=VALUE...]`."""
    decode, arguments = split_overrides(arguments)
    parser = argparse.ArgumentParser(
        prog="ds2 evaluate",
        usage="%(prog)s MODEL [MANIFEST ...] [decode=NAME] [decode.KEY=VALUE ...] [options]",
        description="WER report of a model on manifests; decode=beam decode.lm=FILE recognises with a language model",
    )
    parser.add_argument("model", type=Path, help="model file or run folder")
    parser.add_argument("manifests", type=Path, nargs="*", help="default: data.test of the model's config")
    parser.add_argument(
        "--out", type=Path, help="folder of the reports (default: best-evaluation beside best.safetensors, ...)"
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N")
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16", "auto"])
    parser.add_argument("--batch-audio-s", type=float, help="padded audio a batch; lower it where memory runs out")
    parser.add_argument("--workers", type=int, default=-1, help="processes that read audio; -1 chooses, 0 none")
    given = parser.parse_args(arguments)
    if given.batch_audio_s is not None and not given.batch_audio_s > 0:
        parser.error(f"--batch-audio-s {given.batch_audio_s} must be above 0")
    with connect(CommConfig(), given.device) as comm:
        if comm.rank != 0:
            logging.disable(logging.WARNING)  # rank 0 says it
        evaluate(
            given.model,
            given.manifests,
            given.out,
            precision=given.precision,
            batch_audio_s=given.batch_audio_s,
            workers=given.workers,
            decode=decode,
            comm=comm,
        )
    return 0
