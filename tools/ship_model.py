"""Make `ds2/models/NAME`, a model that comes with ds2, from a run folder: weights in 16 bits, language model, card.

    ds2 data prepare recipe=english data.corpus=CORPORA
    python tools/ship_model.py text corpora/english/train.jsonl others.txt
    ds2 lm build books_norm_42mb.txt.xz others.txt --order 4 --prune 0 0 0 1 --output english.lm
    ds2 data lexicon english.txt --dictionary cmudict.dict --words corpora/english/train.jsonl english.lm
    ds2 train recipe=english data.corpus=CORPORA
    ds2 lm tune runs/english english.lm decode=phones
    ds2 evaluate runs/english decode=greedy --out greedy
    ds2 evaluate runs/english --out lm
    python tools/ship_model.py pack runs/english english.lm card.json --greedy greedy --lm lm
    ds2 evaluate english corpora/english/dev.jsonl decode=greedy

The last command tells whether 16 bits change error rates.
"""

import argparse
import json
import shutil
import sys
from dataclasses import asdict, replace
from pathlib import Path

from ds2.config.convert import config_from_dict
from ds2.config.schema import DataConfig
from ds2.data.manifest import read_manifest
from ds2.lm.files import load_ngram, save_ngram
from ds2.model.checkpoint import find_model
from ds2.model.shipped import FOLDER
from ds2.recognition.settings import decode_settings, save_settings, tuned_file
from ds2.system.tensor_file import load, save
from ds2.text.alphabet import Alphabet

MAX_BYTES = 15_000_000  # of the weights, and of the language model
SPEECH = {
    "librispeech": "LibriSpeech, 20 readers of test-clean",
    "an4": "AN4's test part",
    "learners": "learners, 25 speakers of speechocean762",
    "ljspeech": "LJSpeech, 60 utterances",
}


def write_text(manifest: Path, output: Path) -> None:
    """Write the transcripts of a manifest that are not LibriSpeech's, as the books have text, one a line."""
    alphabet = Alphabet.from_config(config_from_dict({"alphabet": {"punctuation": "drop"}}).alphabet)
    others = (u.text for u in read_manifest(manifest) if "LibriSpeech" not in u.audio_filepath.parts)
    output.write_text("".join(alphabet.normalise(text)[0] + "\n" for text in others), encoding="utf-8")


def pack_weights(source: Path, target: Path) -> None:
    """Copy a model file with matrices in 16 bits and without the paths of the machine that trained it."""
    tensors, metadata = load(source)
    small = {name: t.half() if t.ndim > 1 and t.is_floating_point() else t for name, t in tensors.items()}
    config = config_from_dict(metadata["config"])
    alphabet = replace(config.alphabet, lexicon=Path(config.alphabet.lexicon).name)
    train = replace(config.train, intermediate_lexicon=Path(config.train.intermediate_lexicon).name)
    run_dir = f"runs/{target.parent.name}"
    metadata["config"] = asdict(replace(config, data=DataConfig(), alphabet=alphabet, train=train, run_dir=run_dir))
    metadata["metrics"].pop("dev", None)
    save(target, small, metadata)


def scores(greedy: Path, lm: Path) -> list[dict[str, object]]:
    """Read the error rates of a card from two folders of `ds2 evaluate --out`: of phones, greedy, and of words."""
    rows: list[dict[str, object]] = []
    for part, speech in SPEECH.items():
        reports = [json.loads((folder / part / "report.json").read_text()) for folder in (greedy, lm)]
        rates = [round(100 * report["wer"], 2) for report in reports]
        count = reports[0]["utterances"]
        rows.append({"speech": speech, "utterances": count, "phones": rates[0], "words": rates[1]})
    return rows


def pack(options: argparse.Namespace) -> int:
    """Write the folder of a model."""
    source, folder = find_model(options.run), options.folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    weights, lm = folder / "best.safetensors", folder / f"{folder.name}.lm.xz"
    pack_weights(source, weights)
    save_ngram(load_ngram(options.language_model), lm)
    for file in (weights, lm):
        print(f"{file}: {file.stat().st_size:,} bytes")
        if file.stat().st_size > MAX_BYTES:
            print(f"{file} is larger than {MAX_BYTES:,} bytes", file=sys.stderr)
            return 1
    tensors, metadata = load(source)
    tuned = decode_settings(source, config_from_dict(metadata["config"]))
    save_settings(replace(tuned, method="beam", lm=lm.name), tuned_file(weights))
    card = json.loads(options.card.read_text(encoding="utf-8"))
    card["parameters"] = sum(t.numel() for name, t in tensors.items() if name.startswith("model.") and t.ndim > 1)
    trained_by = str(metadata["metrics"].get("git_commit", "unknown"))
    card["commit"] = card["commit"] if trained_by == "unknown" else trained_by[:7]
    card["scores"] = scores(options.greedy, options.lm)
    (folder / "card.json").write_text(json.dumps(card, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    commands = parser.add_subparsers(dest="command", required=True)
    text = commands.add_parser("text", help="transcripts for the language model")
    text.add_argument("manifest", type=Path)
    text.add_argument("output", type=Path)
    packed = commands.add_parser("pack", help="the folder of the model")
    packed.add_argument("run", type=Path)
    packed.add_argument("language_model", type=Path)
    packed.add_argument("card", type=Path, help="language, sources, licence, made_by, notes; scores are filled in")
    packed.add_argument("--greedy", type=Path, required=True, help="folder of reports of decode=greedy")
    packed.add_argument("--lm", type=Path, required=True, help="folder of reports with the language model")
    packed.add_argument("--folder", type=Path, default=FOLDER / "english")
    options = parser.parse_args()
    if options.command == "pack":
        return pack(options)
    write_text(options.manifest, options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
