"""`ds2 align`: the word times of transcripts, and the transcripts that are probably wrong."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

from ds2.commands.common import Parser, whole
from ds2.config.device import resolve_device
from ds2.config.schema import DecodeConfig
from ds2.data.splits import scored_utterances
from ds2.decoding.hypothesis import word_record
from ds2.model.checkpoint import load_model
from ds2.recognition.evaluate import recognition_loader
from ds2.recognition.recogniser import Recogniser
from ds2.recognition.transcripts import align_utterances, suspicious
from ds2.system.files import check_writable, write_text


def make_parser() -> Parser:
    """Return the parser of `ds2 align`."""
    parser = Parser(prog="ds2 align", description="word times of transcripts, and doubtful transcripts")
    parser.add_argument("model", type=Path, help="model file or run folder")
    parser.add_argument("manifests", nargs="+", help="JSON-lines manifests")
    parser.add_argument("--out", type=Path, help="JSON lines with the words' times, in the order of the manifests")
    parser.add_argument("--worst", type=whole(1, 1_000_000), help="print so many, the least probable first")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N")
    return parser


def run(arguments: Sequence[str]) -> int:
    """`ds2 align MODEL MANIFEST...`: write word times as JSON lines, and print suspicious transcripts."""
    args = make_parser().parse_args(arguments)
    if args.out:
        check_writable(args.out)
    device = resolve_device(args.device)
    loaded = load_model(args.model, device)
    utterances = scored_utterances(args.manifests, loaded.alphabet)
    recogniser = Recogniser.of(loaded, DecodeConfig(), device)
    order, swapped = align_utterances(recogniser, recognition_loader(utterances, loaded.config.data, device))
    if args.out:
        records = (
            {
                "audio_filepath": str(u.audio_filepath),
                "offset": u.offset_s,
                "duration": u.duration_s,
                "text": u.text,
                "surprise": a.surprise if math.isfinite(a.surprise) else None,
                "words": [word_record(word) for word in a.words],
            }
            for u, a in zip(utterances, order, strict=True)
        )
        write_text(args.out, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
    doubtful = suspicious((a.surprise for a in order), swapped)
    print(f"{len(doubtful)} of {len(utterances)} transcripts are probably wrong (surprise in nats a label):")
    worst = sorted(range(len(order)), key=lambda i: -order[i].surprise)[: args.worst] if args.worst else doubtful
    for index in worst:
        utterance = utterances[index]
        print(f"{order[index].surprise:8.2f}  {utterance.source or utterance.name}  {utterance.text!r}")
    return 0
