"""`ds2 data check | prepare | import | export-kaldi`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from ds2.compose import compose_config
from ds2.data_check import run_check
from ds2.importers import FORMATS, RECIPES, export_kaldi, import_corpus, prepare
from ds2.manifest import read_manifest, write_manifest


def run(arguments: Sequence[str]) -> int:
    """Run one data command and return its exit status; 1 from `check` means that training must not start."""
    parser = argparse.ArgumentParser(prog="ds2 data", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    check = commands.add_parser("check", help="read every utterance and name what is wrong with it")
    check.add_argument("--json", type=Path, help="write the findings there too")
    check.add_argument("overrides", nargs="*", help="as for ds2 train: recipe=..., data.train=[...]")

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
