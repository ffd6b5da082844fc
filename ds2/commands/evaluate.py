"""`ds2 evaluate`: WER reports of a model on manifests."""

import argparse
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ds2.commands.common import DECODER_SETTINGS, Parser, add_device, add_model, manifests_of, real, whole
from ds2.commands.compose import resolve_options
from ds2.config.allowed import UNLIMITED
from ds2.config.schema import CommConfig, DataConfig
from ds2.data.manifest import Utterance, read_manifest
from ds2.data.splits import ScoredData, scored_utterances
from ds2.decoding.keywords import KeywordDecoder
from ds2.decoding.phrases import FALSE_ALARMS
from ds2.distributed.launch import connect
from ds2.distributed.launcher import launched
from ds2.model.checkpoint import find_model, load_model
from ds2.recognition import evaluate
from ds2.recognition.latency import Latency, WordEnds, aligned_ends, measure_latency, read_ends
from ds2.recognition.recogniser import Recogniser
from ds2.scoring.report import format_report, kaldi_line
from ds2.system import UserError
from ds2.system.files import STANDARD_INPUT, check_writable, write_text

log = logging.getLogger(__name__)


def make_parser() -> Parser:
    parser = Parser(
        prog="ds2 evaluate",
        settings=DECODER_SETTINGS,
        usage="%(prog)s MODEL [MANIFEST ...] [decode=NAME] [decode.KEY=VALUE ...] [options]",
        description="WER report of a model on manifests; decode=beam decode.lm=FILE recognises with a language model",
    )
    add_model(parser)
    parser.add_argument("manifests", type=Path, nargs="*", default=[], help="default: data.test of the model's config")
    parser.add_argument(
        "--out", type=Path,
        help="folder of the reports (default: best-evaluation in the run folder, or here for a bare model file)",
    )  # fmt: skip
    parser.add_argument(
        "--recordings", type=whole(0, 1000), default=20, metavar="N",
        help="utterances with most errors whose audio errors.html plays, 4 MiB at most; 0: none",
    )  # fmt: skip
    parser.add_argument(
        "--robustness", type=real(-100, 100), nargs="*", metavar="SNR_DB",
        help="report only the WER in noise of several kinds at these ratios (default 20 10 5 0), in rooms and codecs",
    )  # fmt: skip
    parser.add_argument(
        "--keywords", action="append", default=[], metavar="PHRASE",
        help="report only how often this word or phrase was said, found, and found though nobody said it; may be "
        "repeated",
    )  # fmt: skip
    parser.add_argument(
        "--false-alarms", type=real(0, 1e6, above=True), metavar="N",
        help=f"with --keywords: allowed of each in an hour of speech (default {FALSE_ALARMS})",
    )  # fmt: skip
    parser.add_argument(
        "--latency", action="store_true",
        help="stream the audio too: seconds from a word's end until it is first shown, and until it stays",
    )  # fmt: skip
    parser.add_argument(
        "--word-times",
        type=Path,
        metavar="FILE",
        help="with --latency: words' ends of `ds2 align --out`, one file for all models that are compared; default: "
        "the model's own alignment, which is late where the model is",
    )
    add_device(parser, precision=True)
    parser.add_argument(
        "--batch-audio-s", type=real(0, UNLIMITED, above=True),
        help="padded audio per batch; lower it if memory runs out",
    )  # fmt: skip
    parser.add_argument(
        "--workers", type=whole(-1, 1024), default=-1, help="processes that read audio; -1 chooses, 0 none"
    )
    return parser


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = make_parser()
    args = parser.parse_args(arguments)
    if launched().world > 1 and (args.latency or args.robustness is not None):
        option = "--latency" if args.latency else "--robustness"
        parser.error(f"{option} runs in one process: start it without a launcher")
    if args.latency + bool(args.keywords) + (args.robustness is not None) > 1:
        parser.error("--latency, --keywords and --robustness are reports of their own: give one of them")
    if args.false_alarms is not None and not args.keywords:
        parser.error("--false-alarms needs --keywords")
    if args.word_times is not None and not args.latency:
        parser.error("--word-times needs --latency")
    return args


def run(arguments: Sequence[str]) -> None:
    """`ds2 evaluate MODEL [MANIFEST...] [decode=NAME] [decode.KEY=VALUE...]`: rank 0 reports on each manifest."""
    args = _parse(arguments)
    with connect(CommConfig(), args.device) as comm:
        if comm.rank != 0:
            logging.disable(logging.WARNING)  # rank 0 logs for all
        file = find_model(args.model)
        loaded = load_model(file, comm.device)
        data = loaded.config.data
        manifests = manifests_of(file, args.manifests, data.test, "data.test")
        options = resolve_options(args.overrides, file, loaded.config)
        # Reports are beside the model in a run folder, those of a bare model file in the current folder.
        in_a_run = args.model.is_dir() or (file.parent / "log.jsonl").is_file()
        reports = args.out or (file.parent if in_a_run else Path()) / f"{file.stem}-evaluation"
        if comm.rank == 0:
            check_writable(reports / "report.json")
        recogniser = Recogniser.of(loaded, options, comm.device, args.precision)
        if args.latency:
            recogniser.session()  # raises where the model or the decoder does not stream
        word_ends = None if args.word_times is None else _word_ends(args.word_times, manifests)
        if args.robustness is not None:
            _robustness(recogniser, manifests, data, args, reports)
            return
        if args.keywords:
            recogniser = recogniser.only_keywords(args.keywords, args.false_alarms or FALSE_ALARMS)
        trained_on = training_data(data) if comm.rank == 0 and not args.keywords else []
        for scored in evaluate.evaluate(
            recogniser, manifests, data, batch_audio_s=args.batch_audio_s, workers=args.workers, comm=comm
        ):
            if comm.rank != 0:
                continue
            folder = reports / scored.manifest.stem
            if isinstance(recogniser.decoder, KeywordDecoder):
                table = evaluate.keyword_table(scored, recogniser.decoder.keywords)
                _report_table(scored.manifest, table, folder / "keywords.md")
                continue
            evaluation = _with_latency(recogniser, scored, data, args.workers, word_ends) if args.latency else scored
            overlap = ScoredData.of([evaluation.manifest], evaluation.utterances, trained_on).warning()
            if overlap:
                log.warning("%s", overlap)
            recordings = evaluate.worst_recordings(evaluation, data, args.recordings)
            evaluation.write(folder, file, options, recordings)
            print(f"{evaluation.manifest}\n\n{format_report(evaluation.report)}")
            if evaluation.words_only is not None:
                print(f"without case and punctuation: {kaldi_line('WER', evaluation.words_only.words)}\n")
            if evaluation.latency is not None:
                print(f"{evaluation.latency}\n")
                _log_latency(file, evaluation, evaluation.latency, int(loaded.metadata["metrics"].get("step", 0)))
            print(f"report: {folder}")


def _word_ends(path: Path, manifests: Sequence[Path]) -> WordEnds:
    """Read the words' ends; raises now, before minutes of recognition, where they do not fit a manifest."""
    ends = read_ends(path)
    for manifest in manifests:
        if manifest != STANDARD_INPUT:  # which is read once
            ends.of(read_manifest(manifest))
    return ends


def _with_latency(
    recogniser: Recogniser, evaluation: evaluate.Evaluation, data: DataConfig, workers: int, word_ends: WordEnds | None
) -> evaluate.Evaluation:
    """Stream the utterances of an evaluation and add when their words were shown."""
    utterances = evaluation.utterances
    if word_ends is not None:
        ends = word_ends.of(utterances)
    else:
        ends = aligned_ends(recogniser, evaluate.recognition_loader(utterances, data, recogniser.device, workers))
    references = [aligned.reference for aligned in evaluation.report.utterances]
    return replace(evaluation, latency=measure_latency(recogniser, utterances, references, ends, data))


def _log_latency(file: Path, evaluation: evaluate.Evaluation, latency: Latency, step: int) -> None:
    """Add a latency to the TensorBoard of the run of a model file, if it has one, at a step of the training."""
    folder = file.parent / "tensorboard"
    if not folder.is_dir():
        return
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder)) as board:
        for name, value in latency.facts().items():
            if name.endswith("_s") and value is not None:
                board.add_scalar(f"latency/{evaluation.manifest.stem}_{name.removeprefix('latency_')}", value, step)


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
) -> None:
    """Print a table of WER by condition for each manifest, and write it to robustness.md."""
    snrs_db = args.robustness or [20.0, 10.0, 5.0, 0.0]
    for manifest in manifests:
        utterances = scored_utterances([manifest], recogniser.alphabet)
        rows = evaluate.robustness(
            recogniser, utterances, data, snrs_db, batch_audio_s=args.batch_audio_s, workers=args.workers
        )
        _report_table(manifest, evaluate.robustness_table(list(rows)), folder / manifest.stem / "robustness.md")


def _report_table(manifest: Path, table: str, path: Path) -> None:
    write_text(path, f"{manifest}\n\n{table}")
    print(f"{manifest}\n\n{table}\nreport: {path}")
