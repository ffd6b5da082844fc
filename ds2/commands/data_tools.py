"""`ds2 data split | stats | filter | shards | alphabet`: manifests parted, counted, thinned, packed, their letters."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ds2.audio.read import RATES_HZ
from ds2.commands.common import real, whole, with_search_path
from ds2.commands.compose import compose_config, overridden_keys
from ds2.config.allowed import COUNT, SEED, UNLIMITED
from ds2.config.schema import ConfigError
from ds2.data.manifest import read_manifests, write_manifest
from ds2.data.shards import MANIFEST, write_shards
from ds2.data.split import TOGETHER, split
from ds2.data.statistics import Conditions, draw, keep, statistics
from ds2.system.files import write_text
from ds2.text.alphabet import Alphabet, describe
from ds2.text.unknown_characters import alphabet_lines

_BASE_SYMBOLS = " '"


def add_split(commands: Any) -> None:
    """Declare `ds2 data split`."""
    parser = commands.add_parser("split", help="manifests to train, dev and test, nobody in two of them")
    parser.add_argument("manifests", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True, help="folder for train.jsonl, dev.jsonl, ...")
    parser.add_argument(
        "--shares", nargs="+", default=["train=0.9", "dev=0.1"], metavar="PART=SHARE", help="default train=0.9 dev=0.1"
    )
    parser.add_argument("--by", choices=TOGETHER, default="speaker", help="what stays in one part (default speaker)")
    parser.add_argument("--seed", type=whole(0, SEED), default=1)
    parser.set_defaults(run=_split)


def _split(given: argparse.Namespace) -> int:
    shares: dict[str, float] = {}
    for text in given.shares:
        name, _, share = text.partition("=")
        try:
            shares[name] = float(share)
        except ValueError as error:
            raise ConfigError(f"--shares {text!r} is not PART=SHARE, such as dev=0.1") from error
        if not name or Path(name).name != name:
            raise ConfigError(f"--shares {text!r}: the part names a file, give a plain word such as dev")
    utterances = read_manifests(given.manifests)
    parts = split(utterances, shares, by=given.by, seed=given.seed)
    total_s = sum(u.duration_s for u in utterances)
    for name, part in parts.items():
        write_manifest(given.out / f"{name}.jsonl", part)
        held_s, speakers = sum(u.duration_s for u in part), len({u.speaker for u in part if u.speaker})
        print(
            f"{given.out / name}.jsonl: {len(part)} utterances, {held_s / 3600:.2f} h "
            f"({100 * held_s / total_s:.1f} %), {speakers} speakers"
        )
    return 0


def add_stats(commands: Any) -> None:
    """Declare `ds2 data stats`."""
    parser = commands.add_parser("stats", help="hours, speakers, durations and pace of manifests")
    parser.add_argument("manifests", type=Path, nargs="+")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    parser.add_argument("--picture", type=Path, help="histograms of durations and pace (needs matplotlib)")
    parser.set_defaults(run=_stats)


def _stats(given: argparse.Namespace) -> int:
    utterances = read_manifests(given.manifests)
    found = statistics(utterances)
    print(found.format())
    if given.json:
        write_text(given.json, json.dumps(asdict(found), ensure_ascii=False, indent=1) + "\n")
    if given.picture:
        draw(utterances, given.picture)
        print(f"wrote {given.picture}")
    return 0


def add_filter(commands: Any) -> None:
    """Declare `ds2 data filter`."""
    parser = commands.add_parser("filter", help="the utterances of a manifest that meet conditions")
    parser.add_argument("manifest", type=Path)
    parser.add_argument("output", type=Path)
    for name, what in (("s", "seconds"), ("pace", "characters a second")):
        parser.add_argument(f"--min-{name}", type=real(0, UNLIMITED), metavar="X", help=f"at least so many {what}")
        parser.add_argument(f"--max-{name}", type=real(0, UNLIMITED), metavar="X", help=f"at most so many {what}")
    parser.add_argument("--speakers", nargs="+", default=[], help="only these")
    parser.add_argument("--without-speakers", nargs="+", default=[], metavar="SPEAKER", help="all but these")
    parser.add_argument("--text", default="", metavar="REGEX", help="found in the transcript")
    parser.add_argument("--without-text", default="", metavar="REGEX", help="not found in the transcript")
    parser.set_defaults(run=_filter)


def _filter(given: argparse.Namespace) -> int:
    conditions = Conditions(
        given.min_s, given.max_s, given.min_pace, given.max_pace, given.speakers, given.without_speakers, given.text,
        given.without_text,
    )  # fmt: skip
    utterances = read_manifests([given.manifest])
    kept, dropped = keep(utterances, conditions)
    write_manifest(given.output, kept)
    hours = sum(u.duration_s for u in kept) / 3600
    print(f"{given.output}: {len(kept)} of {len(utterances)} utterances, {hours:.2f} h")
    for reason, count in dropped.most_common():
        print(f"  {count:6d} {reason}")
    return 0


def add_shards(commands: Any) -> None:
    """Declare `ds2 data shards`."""
    parser = commands.add_parser("shards", help="manifests to tar files with indices, for corpora larger than a cache")
    parser.add_argument("manifests", type=Path, nargs="+")
    parser.add_argument("out", type=Path, help="folder for 000000.tar, ... and manifest.jsonl, to train with")
    rate, size = whole(*RATES_HZ), real(0, 1e9, above=True)
    parser.add_argument("--rate", type=rate, default=16000, help="of the FLAC in them, Hz (data.sample_rate_hz; 16000)")
    parser.add_argument("--shard-mb", type=size, default=1000, help="of samples in one; FLAC takes half (1000)")
    parser.add_argument("--skip-bad", action="store_true", help="name, count and leave out what cannot be read")
    parser.set_defaults(run=_shards)


def _shards(given: argparse.Namespace) -> int:
    shard_bytes = int(1e6 * given.shard_mb)
    written = write_shards(read_manifests(given.manifests), given.out, given.rate, shard_bytes, skip_bad=given.skip_bad)
    for error in written.left_out:
        print(f"left out: {error}")
    hours = sum(u.duration_s for u in written.utterances) / 3600
    print(
        f"{given.out / MANIFEST}: {len(written.utterances)} utterances, {hours:.2f} h, in {written.shards} shards"
        + (f", {written.reused} of them reused" if written.reused else "")
        + (f"; {len(written.left_out)} utterances left out" if written.left_out else "")
    )
    return 0


def add_alphabet(commands: Any) -> None:
    """Declare `ds2 data alphabet`."""
    parser = commands.add_parser(
        "alphabet",
        usage="%(prog)s MANIFEST ... [--out FILE] [--least N] [alphabet=NAME] [alphabet.KEY=VALUE ...]",
        help="the alphabet of manifests' transcripts, ready for conf/alphabet/",
    )
    parser.add_argument("arguments", nargs="+", metavar="MANIFEST", help="manifests; alphabet.KEY=VALUE normalises")
    parser.add_argument("--out", type=Path, help="my_conf/alphabet/NAME.yaml, for --config-dir my_conf alphabet=NAME")
    parser.add_argument(
        "--least", type=whole(1, COUNT), default=1, metavar="N", help="characters that occur less often are left out"
    )
    parser.set_defaults(run=_alphabet)


def _alphabet(given: argparse.Namespace) -> int:
    overrides = [a for a in given.arguments if "=" in a]
    manifests = [Path(a) for a in given.arguments if "=" not in a]
    if not manifests:
        raise ConfigError("ds2 data alphabet needs a manifest: ds2 data alphabet train.jsonl alphabet.case=lower")
    config = compose_config(with_search_path([*overrides, "run_dir=unused"])).alphabet
    set_keys = overridden_keys(overrides)
    if not set_keys & {"alphabet", "alphabet.symbols"}:
        config = replace(config, symbols=_BASE_SYMBOLS)
    if not set_keys & {"alphabet", "alphabet.punctuation"}:
        config = replace(config, punctuation="drop")
    alphabet = Alphabet.from_config(replace(config, unknown="drop", pieces=[]))
    counts: Counter[str] = Counter()
    for utterance in read_manifests(manifests):
        counts.update(alphabet.normalise(utterance.text)[0])
    digits = Counter({c: n for c, n in counts.items() if c.isdigit() and c not in alphabet.symbols})
    rare = Counter({c: n for c, n in counts.items() if n < given.least})
    symbols = counts.keys() - digits.keys() - rare.keys()
    content = "\n".join(alphabet_lines({*symbols, " "}, alphabet, alphabet.rules())) + "\n"
    print(content, end="")
    print(f"{len(symbols)} symbols, by count: {describe(Counter({c: counts[c] for c in symbols}))}")
    if digits:
        print(
            f"left out, {sum(digits.values())} digits: make them words with alphabet.numbers=LANGUAGE (en, de, tr, "
            f"...), or keep them with alphabet.symbols={''.join(sorted(digits))}"
        )
    if rare:
        print(f"left out, occurring less than {given.least} times: {describe(rare)}")
    if given.out:
        source = ", ".join(path.name for path in manifests)
        write_text(given.out, f"# Characters of {source}, by `ds2 data alphabet`.\n{content}")
        use = f"--config-dir {given.out.parent.parent} alphabet={given.out.stem}"
        print(f"wrote {given.out}; use it with {use}")
    return 0
