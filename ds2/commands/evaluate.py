"""`ds2 evaluate`: WER reports of a model on manifests."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ds2.commands.common import DECODER_SETTINGS, Parser, add_where, manifests_of, real, whole
from ds2.commands.compose import resolve_options, split_overrides
from ds2.config.allowed import UNLIMITED
from ds2.config.schema import CommConfig, DataConfig
from ds2.data.manifest import Utterance, read_manifest
from ds2.data.splits import ScoredData, scored_utterances
from ds2.distributed.launch import connect
from ds2.distributed.launcher import launched
from ds2.model.checkpoint import find_model, load_model
from ds2.recognition.evaluate import evaluate, robustness, robustness_table, worst_recordings
from ds2.recognition.recogniser import Recogniser
from ds2.scoring.report import format_report, kaldi_line
from ds2.system.errors import UserError
from ds2.system.files import check_writable, write_text

log = logging.getLogger(__name__)


def run(arguments: Sequence[str]) -> int:
    """`ds2 evaluate MODEL [MANIFEST...] [decode=NAME] [decode.KEY=VALUE...]`: rank 0 reports on each manifest."""
    decode, arguments = split_overrides(arguments)
    args = _parse(arguments)
    with connect(CommConfig(), args.device) as comm:
        if comm.rank != 0:
            logging.disable(logging.WARNING)  # rank 0 logs for all
        file = find_model(args.model)
        loaded = load_model(file, comm.device)
        data = loaded.config.data
        manifests = manifests_of(file, args.manifests, data.test, "data.test")
        options = resolve_options(decode, file, loaded.config)
        reports = args.out or report_folder(args.model, file)
        if comm.rank == 0:
            check_writable(reports / "report.json")
        recogniser = Recogniser.of(loaded, options, comm.device, args.precision)
        if args.robustness is not None:
            return _robustness(recogniser, manifests, data, args, reports)
        trained_on = training_data(data) if comm.rank == 0 else []
        settings = {"batch_audio_s": args.batch_audio_s, "workers": args.workers, "comm": comm}
        for evaluation in evaluate(recogniser, manifests, data, **settings):
            if comm.rank == 0:
                folder = reports / evaluation.manifest.stem
                overlap = ScoredData.of([evaluation.manifest], evaluation.utterances, trained_on).warning()
                if overlap:
                    log.warning("%s", overlap)
                recordings = worst_recordings(evaluation, data, args.recordings)
                evaluation.write(folder, file, options, recordings)
                print(f"{evaluation.manifest}\n\n{format_report(evaluation.report)}")
                if evaluation.words_only is not None:
                    print(f"without case and punctuation: {kaldi_line('WER', evaluation.words_only.words)}\n")
                print(f"report: {folder}")
    return 0


def training_data(data: DataConfig) -> list[Utterance]:
    """Return the utterances that a model was trained on, as far as its manifests are here and can be read."""
    utterances: list[Utterance] = []
    for path in data.train:
        if Path(path).is_file():
            with suppress(UserError):
                utterances += read_manifest(path)
    return utterances


def _robustness(
    recogniser: Recogniser, manifests: Sequence[Path], data: DataConfig, args: argparse.Namespace, folder: Path
) -> int:
    """Print a table of WER by condition for each manifest, and write it to robustness.md."""
    snrs_db = args.robustness or [20.0, 10.0, 5.0, 0.0]
    for manifest in manifests:
        utterances = scored_utterances([str(manifest)], recogniser.alphabet)
        settings = {"batch_audio_s": args.batch_audio_s, "workers": args.workers}
        text = robustness_table(list(robustness(recogniser, utterances, data, snrs_db, **settings)))
        path = folder / manifest.stem / "robustness.md"
        write_text(path, f"{manifest}\n\n{text}")
        print(f"{manifest}\n\n{text}\nreport: {path}")
    return 0


def report_folder(model: Path, file: Path) -> Path:
    """Return the folder of reports: in the run folder beside the model, or for a bare model file in the current folder.

    Args:
        model: the model file or run folder of the command line.
        file: the model file.
    """
    in_a_run = model.is_dir() or (file.parent / "log.jsonl").is_file()
    return (file.parent if in_a_run else Path()) / f"{file.stem}-evaluation"


def make_parser() -> Parser:
    """Return the parser of `ds2 evaluate`."""
    parser = Parser(
        prog="ds2 evaluate",
        settings=DECODER_SETTINGS,
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
        "--recordings",
        type=whole(0, 1000),
        default=20,
        metavar="N",
        help="utterances with most errors whose audio errors.html plays, 4 MiB at most; 0: none",
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
        help="padded audio per batch; lower it if memory runs out",
    )
    parser.add_argument(
        "--workers", type=whole(-1, 1024), default=-1, help="processes that read audio; -1 chooses, 0 none"
    )
    return parser


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = make_parser()
    args = parser.parse_args(arguments)
    if args.robustness is not None and launched().world > 1:
        parser.error("--robustness runs in one process: start it without a launcher")
    return args
