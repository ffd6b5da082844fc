"""`ds2 evaluate`: WER reports of a model on manifests."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path

from ds2.commands.common import Parser, add_where, manifests_of, real, whole
from ds2.commands.decode_options import resolve_options, split_overrides
from ds2.config.allowed import UNLIMITED
from ds2.config.schema import CommConfig, DataConfig
from ds2.data.splits import scored_utterances
from ds2.distributed.launch import connect
from ds2.distributed.launcher import launched
from ds2.model.checkpoint import find_model, load_model
from ds2.recognition.evaluate import evaluate, robustness, robustness_table
from ds2.recognition.recogniser import Recogniser
from ds2.scoring.report import format_report, kaldi_line
from ds2.system.files import check_writable, write_text


def run(arguments: Sequence[str]) -> int:
    """`ds2 evaluate MODEL [MANIFEST...] [decode=NAME] [decode.KEY=VALUE...]`: a report a manifest, by rank 0."""
    decode, arguments = split_overrides(arguments)
    given = _parse(arguments)
    with connect(CommConfig(), given.device) as comm:
        if comm.rank != 0:
            logging.disable(logging.WARNING)  # rank 0 says it
        file = find_model(given.model)
        loaded = load_model(file, comm.device)
        data = loaded.config.data
        manifests = manifests_of(file, given.manifests, data.test, "data.test")
        options = resolve_options(decode, file, loaded.config)
        reports = given.out or report_folder(given.model, file)
        if comm.rank == 0:
            check_writable(reports / "report.json")
        recogniser = Recogniser.of(loaded, options, comm.device, given.precision)
        if given.robustness is not None:
            return _robustness(recogniser, manifests, data, given, reports)
        how = {"batch_audio_s": given.batch_audio_s, "workers": given.workers, "comm": comm}
        for evaluation in evaluate(recogniser, manifests, data, **how):
            if comm.rank == 0:
                folder = reports / evaluation.manifest.stem
                evaluation.write(folder, file, options)
                print(f"{evaluation.manifest}\n\n{format_report(evaluation.report)}")
                if evaluation.words_only is not None:
                    print(f"without case and punctuation: {kaldi_line('WER', evaluation.words_only.words)}\n")
                print(f"report: {folder}")
    return 0


def _robustness(
    recogniser: Recogniser, manifests: Sequence[Path], data: DataConfig, given: argparse.Namespace, folder: Path
) -> int:
    """Print a table of WER by condition for each manifest, and keep it in robustness.md."""
    snrs_db = given.robustness or [20.0, 10.0, 5.0, 0.0]
    for manifest in manifests:
        utterances = scored_utterances([str(manifest)], recogniser.alphabet)
        how = {"batch_audio_s": given.batch_audio_s, "workers": given.workers}
        text = robustness_table(list(robustness(recogniser, utterances, data, snrs_db, **how)))
        path = folder / manifest.stem / "robustness.md"
        write_text(path, f"{manifest}\n\n{text}")
        print(f"{manifest}\n\n{text}\nreport: {path}")
    return 0


def report_folder(given: Path, file: Path) -> Path:
    """Return where reports go: into the run folder, beside the model; a bare model file's to the current folder."""
    in_a_run = given.is_dir() or (file.parent / "log.jsonl").is_file()
    return (file.parent if in_a_run else Path()) / f"{file.stem}-evaluation"


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="ds2 evaluate",
        usage="%(prog)s MODEL [MANIFEST ...] [decode=NAME] [decode.KEY=VALUE ...] [options]",
        description="WER report of a model on manifests; decode=beam decode.lm=FILE recognises with a language model",
    )
    parser.add_argument("model", type=Path, help="model file or run folder")
    parser.add_argument("manifests", type=Path, nargs="*", default=[], help="default: data.test of the model's config")
    parser.add_argument(
        "--out",
        type=Path,
        help="folder of the reports (default: best-evaluation in the run folder, or here for a bare model file)",
    )
    parser.add_argument(
        "--robustness",
        type=real(-100, 100),
        nargs="*",
        metavar="SNR_DB",
        help="instead: WER in noise of several kinds at these ratios (default 20 10 5 0), in rooms, through codecs",
    )
    add_where(parser)
    parser.add_argument(
        "--batch-audio-s",
        type=real(0, UNLIMITED, above=True),
        help="padded audio a batch; lower it where memory runs out",
    )
    parser.add_argument(
        "--workers", type=whole(-1, 1024), default=-1, help="processes that read audio; -1 chooses, 0 none"
    )
    given = parser.parse_args(arguments)
    if given.robustness is not None and launched().world > 1:
        parser.error("--robustness runs in one process: start it without a launcher")
    return given
