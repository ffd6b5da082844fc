"""`ds2 data`: check, prepare, import, pieces, export-kaldi here; the others in `data_tools`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ds2.commands import data_tools
from ds2.commands.common import Parser, whole, with_search_path
from ds2.commands.compose import compose_config
from ds2.config.schema import Config
from ds2.data.check import check
from ds2.data.corpora import FORMATS, RECIPES, export_kaldi, import_corpus, prepare
from ds2.data.manifest import read_manifest, read_manifests, write_manifest
from ds2.data.splits import ensure_manifests
from ds2.system.files import check_writable, write_text
from ds2.system.signals import default_signals
from ds2.text.alphabet import Alphabet
from ds2.text.pieces import learn_pieces

log = logging.getLogger(__name__)


def run(arguments: Sequence[str]) -> int:
    """Run one data command and return its exit status; 1 from `check` means that training must not start."""
    parser = Parser(prog="ds2 data", description="corpora to manifests, and what can be done with those")
    commands = parser.add_subparsers(dest="command", required=True)

    checked = commands.add_parser("check", help="read every utterance and name what is wrong with it")
    checked.add_argument("--json", type=Path, help="write the findings there too")
    checked.add_argument("overrides", nargs="*", help="as for ds2 train: recipe=..., data.train=[...]")

    made = commands.add_parser("prepare", help="write the manifests of a recipe")
    made.add_argument(
        "overrides", nargs="+", help=f"recipe=..., data.corpus=...; data.prepare is one of {', '.join(RECIPES)}"
    )

    imported = commands.add_parser("import", help="corpus layout to manifest")
    imported.add_argument("format", choices=FORMATS)
    imported.add_argument("folder", type=Path, help="of the corpus; for csv and deepspeech_pytorch the table itself")
    imported.add_argument("manifest", type=Path, help="JSON-lines file to write")
    imported.add_argument("--split", default="", help="part of LibriSpeech (e.g. train-clean-100) or AN4 (train, test)")
    imported.add_argument("--skip-bad", action="store_true", help="name, count and leave out what has no usable audio")

    pieces = commands.add_parser(
        "pieces", help="learn byte-pair pieces from the training transcripts, for alphabet.pieces_file"
    )
    pieces.add_argument("output", type=Path, help="text file to write, one piece a line")
    pieces.add_argument("overrides", nargs="+", help="recipe=..., data.corpus=..., alphabet.symbols=...")
    pieces.add_argument(
        "--count", type=whole(1, 1_000_000), required=True, help="labels of the network without the blank"
    )

    exported = commands.add_parser("export-kaldi", help="manifest to Kaldi data folder")
    exported.add_argument("manifest", type=Path)
    exported.add_argument("folder", type=Path)

    tools = (data_tools.add_split, data_tools.add_stats, data_tools.add_filter, data_tools.add_shards)
    for add in (*tools, data_tools.add_alphabet):
        add(commands)

    given = parser.parse_args(with_search_path(arguments))
    if "run" in given:
        status: int = given.run(given)
        return status
    if given.command == "check":
        return run_check(compose_config(given.overrides), given.json)
    if given.command == "prepare":
        data = compose_config(given.overrides).data
        for part, path in prepare(data.prepare, data.corpus, data.work_dir).items():
            print(f"{part}: {path}")
    elif given.command == "pieces":
        learn(compose_config(given.overrides), given.count, given.output)
    elif given.command == "import":
        check_writable(given.manifest)
        utterances = import_corpus(given.format, given.folder, given.split, skip_bad=given.skip_bad)
        write_manifest(given.manifest, utterances)
        hours = sum(u.duration_s for u in utterances) / 3600
        print(f"{given.manifest}: {len(utterances)} utterances, {hours:.2f} h")
    else:
        export_kaldi(read_manifest(given.manifest), given.folder)
        print(f"{given.folder}: Kaldi data folder")
    return 0


def run_check(config: Config, json_path: Path | None = None) -> int:
    """Check the manifests of a config, preparing them where missing; print the report; return 0 if training may start.

    Args:
        config: names the manifests, the alphabet and the model, of which only the striding is used.
        json_path: also write the report there.
    Returns:
        0 or 1.
    Raises:
        ManifestError: a manifest cannot be read at all.
    """
    with default_signals():
        import torch  # here: the other commands need not wait for it

        from ds2.audio.features import Features
        from ds2.model.acoustic import AcousticModel

    ensure_manifests(config.data)
    features = Features(config.features, config.data.sample_rate_hz)
    alphabet = Alphabet.from_config(config.alphabet)
    with torch.device("meta"):
        model = AcousticModel(config.model, features.bins, len(alphabet), config.features.step_s)
    named = {"train": config.data.train, "dev": config.data.dev, "test": config.data.test}
    splits = {split: read_manifests([Path(p) for p in paths]) for split, paths in named.items() if paths}

    def output_frames(samples: int) -> int:
        return int(model.output_frames(int(features.frames(samples))))

    report = check(splits, config.data, config.augment, alphabet, output_frames)
    print(report.format())
    if json_path is not None:
        report.write_json(json_path)
    return 0 if report.may_start else 1


def learn(config: Config, count: int, output: Path) -> None:
    """Write pieces learnt from the training transcripts of a config, preparing them where missing; say how they cut.

    Args:
        config: names the training manifests and the alphabet of characters.
        count: pieces in all.
        output: text file, one piece a line.

    Raises:
        AlphabetError: no text, a count too small, or sentencepiece is not installed.
    """
    ensure_manifests(config.data)
    texts = [u.text for u in read_manifests([Path(p) for p in config.data.train])]
    characters = replace(config.alphabet, pieces=[], unknown="drop")
    found = learn_pieces(texts, Alphabet.from_config(characters), count)
    if len(found) < count:
        log.warning(
            "only %d of %d pieces: these transcripts have no more to join. Give more text, or a smaller --count",
            len(found),
            count,
        )
    write_text(output, "".join(piece + "\n" for piece in found))
    cut = Alphabet.from_config(replace(characters, pieces=found))
    labels, words = sum(len(cut.encode(text)) for text in texts), sum(len(text.split()) for text in texts)
    print(f"wrote {output}: {len(found)} pieces, {labels / max(1, words):.2f} a word of the training transcripts")
