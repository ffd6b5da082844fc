"""`ds2 data check | prepare | import | export-kaldi`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from ds2.alphabet import Alphabet
from ds2.compose import compose_config
from ds2.config import Config
from ds2.corpus import ensure_manifests
from ds2.data_check import check
from ds2.features import Features
from ds2.importers import FORMATS, RECIPES, export_kaldi, import_corpus, prepare
from ds2.manifest import read_manifest, read_manifests, write_manifest
from ds2.model import AcousticModel


def run(arguments: Sequence[str]) -> int:
    """Run one data command and return its exit status; 1 from `check` means that training must not start."""
    parser = argparse.ArgumentParser(prog="ds2 data", description=__doc__)
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

    exported = commands.add_parser("export-kaldi", help="manifest to Kaldi data folder")
    exported.add_argument("manifest", type=Path)
    exported.add_argument("folder", type=Path)

    given = parser.parse_args(arguments)
    if given.command == "check":
        return run_check(compose_config(given.overrides), given.json)
    if given.command == "prepare":
        data = compose_config(given.overrides).data
        for part, path in prepare(data.prepare, data.corpus, data.work_dir).items():
            print(f"{part}: {path}")
    elif given.command == "import":
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
    ensure_manifests(config)
    features = Features(config.features, config.data.sample_rate_hz)
    labels = len(Alphabet.from_config(config.alphabet))
    with torch.device("meta"):
        model = AcousticModel(config.model, features.bins, labels, config.features.step_s)
    named = {"train": config.data.train, "dev": config.data.dev, "test": config.data.test}
    splits = {split: read_manifests([Path(p) for p in paths]) for split, paths in named.items() if paths}
    report = check(splits, config, lambda samples: int(model.output_frames(int(features.frames(samples)))))
    print(report.format())
    if json_path is not None:
        report.write_json(json_path)
    return 0 if report.may_start else 1
