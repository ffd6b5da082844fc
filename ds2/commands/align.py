"""`ds2 align`: the word times of transcripts, and the transcripts that are probably wrong."""

import math
import os
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from ds2.commands.common import Parser, add_device, add_model, whole
from ds2.commands.transcribe import output_files
from ds2.config.device import resolve_device
from ds2.config.schema import ConfigError, DecodeConfig
from ds2.data.manifest import Utterance
from ds2.data.splits import scored_utterances
from ds2.decoding.hypothesis import clip_words, word_record
from ds2.model.checkpoint import find_model, load_model
from ds2.recognition.captions import Interval, text_grid
from ds2.recognition.evaluate import recognition_loader
from ds2.recognition.recogniser import Recogniser
from ds2.recognition.transcripts import AlignedTranscript, align_utterances, suspicious
from ds2.system.files import check_writable, write_json_lines, write_text
from ds2.system.plain import counted, grouped

_SAME_S = 1e-3  # by which utterances may overlap in manifests of rounded times


def make_parser() -> Parser:
    parser = Parser(prog="ds2 align", description="word times of transcripts, and doubtful transcripts")
    add_model(parser)
    parser.add_argument("manifests", nargs="+", help="JSON-lines manifests")
    parser.add_argument("--out", type=Path, help="JSON lines with the words' times, in the order of the manifests")
    parser.add_argument(
        "--textgrid", type=Path, metavar="FOLDER",
        help="a TextGrid of each recording for Praat: words, characters; in sub-folders as the recordings are",
    )  # fmt: skip
    parser.add_argument("--overwrite", action="store_true", help="replace existing TextGrids")
    parser.add_argument("--worst", type=whole(1, 1_000_000), help="print so many, the least probable first")
    add_device(parser)
    return parser


def run(arguments: Sequence[str]) -> None:
    """`ds2 align MODEL MANIFEST...`: write word times as JSON lines, and print suspicious transcripts."""
    args = make_parser().parse_args(arguments)
    file = find_model(args.model)
    if args.out:
        check_writable(args.out, inputs=[file, *args.manifests])
    device = resolve_device(args.device)
    loaded = load_model(file, device)
    utterances = scored_utterances(args.manifests, loaded.alphabet)
    in_time = sorted(range(len(utterances)), key=lambda index: utterances[index].offset_s)
    recordings = grouped(in_time, lambda index: utterances[index].audio_filepath)
    if args.textgrid:
        _check_overlaps(utterances, recordings)
        common = os.path.commonpath([audio.parent for audio in recordings])  # speakers may have files of one name
        names = [(str(audio), audio.relative_to(common)) for audio in recordings]
        grids = output_files(names, ".TextGrid", args.textgrid, overwrite=args.overwrite, option="--textgrid")
    recogniser = Recogniser.of(loaded, DecodeConfig(), device)
    aligned, swapped = align_utterances(recogniser, recognition_loader(utterances, loaded.config.data, device))
    if args.out:
        records = (
            {
                "audio_filepath": str(u.audio_filepath),
                "offset": u.offset_s,
                "duration": u.duration_s,
                "text": u.text,
                "surprise": a.surprise if math.isfinite(a.surprise) else None,
                "words": [word_record(word) for word in clip_words(a.words, u.duration_s)],
            }
            for u, a in zip(utterances, aligned, strict=True)
        )
        write_json_lines(args.out, records)
    if args.textgrid:
        labels = "phones" if loaded.alphabet.pronunciations is not None else f"{loaded.alphabet.unit}s"
        for indices, path in zip(recordings.values(), grids, strict=True):
            write_text(path, _grid([(utterances[i], aligned[i]) for i in indices], labels))
    doubtful = suspicious((a.surprise for a in aligned), swapped)
    worst = sorted(range(len(aligned)), key=lambda i: -aligned[i].surprise)[: args.worst] if args.worst else doubtful
    total = counted(len(utterances), "transcript")
    print(f"probably wrong: {len(doubtful)} of {total}" + " (surprise in nats a label):" * bool(worst))
    for index in worst:
        utterance = utterances[index]
        print(f"{aligned[index].surprise:8.2f}  {utterance.place}  {utterance.text!r}")


def _check_overlaps(utterances: Sequence[Utterance], recordings: Mapping[Path, Sequence[int]]) -> None:
    for indices in recordings.values():
        for first, second in pairwise(utterances[i] for i in indices):
            if second.offset_s < first.offset_s + first.duration_s - _SAME_S:
                raise ConfigError(
                    f"--textgrid: {first.name} and {second.name} overlap, and a tier holds no overlaps: align one of "
                    "them, or take --out"
                )


def _grid(aligned: Sequence[tuple[Utterance, AlignedTranscript]], labels: str) -> str:
    """The TextGrid of the utterances of a recording; `labels` is the name of the tier of the network's labels."""
    words, characters = list[Interval](), list[Interval]()
    for utterance, transcript in aligned:
        start_s, end_s = utterance.offset_s, utterance.offset_s + utterance.duration_s
        spoken = (Interval(word.start_s, word.end_s, word.text) for word in transcript.words)
        for tier, own in ((words, spoken), (characters, transcript.labels)):
            moved = (Interval(start_s + i.start_s, min(end_s, start_s + i.end_s), i.text) for i in own)
            tier += [interval for interval in moved if interval.end_s > interval.start_s]
    return text_grid({"words": words, labels: characters}, max(u.offset_s + u.duration_s for u, _ in aligned))
