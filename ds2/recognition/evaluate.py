"""Model and manifests to hypotheses and a WER report; also how training judges its dev set."""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from ds2 import __version__
from ds2.config.device import resolve_device, resolve_precision
from ds2.config.schema import CommConfig, ConfigError, DecodeConfig
from ds2.data.splits import scored_utterances
from ds2.decode_options import resolve_options, split_overrides
from ds2.decoding.methods import make_decoder
from ds2.distributed.communicator import Communicator
from ds2.distributed.launch import connect
from ds2.model.checkpoint import find_model, load_model
from ds2.recognition.logits import recognition_loader
from ds2.recognition.recognise import hypothesis_record, score, transcribe_utterances
from ds2.scoring.report import format_report, write_report
from ds2.scoring.wer import Report
from ds2.system.files import write_text

log = logging.getLogger(__name__)


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
