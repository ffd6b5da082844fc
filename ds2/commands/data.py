"""`ds2 data`: corpora to manifests; manifests checked, split, counted, filtered, packed; alphabets, pieces, speech."""

import argparse
import logging
import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from ds2.audio.read import RATES_HZ
from ds2.commands import common
from ds2.commands.common import ALL_SETTINGS, ALPHABET_SETTINGS, Parser, add_command, real, whole
from ds2.commands.compose import choices, compose_config, overridden_keys, pronunciation_file, with_search_path
from ds2.config.allowed import COUNT, SEED, UNLIMITED
from ds2.config.schema import Config, ConfigError
from ds2.data import manifest
from ds2.data.check import check
from ds2.data.corpora import FORMATS, RECIPES, import_corpus, prepare
from ds2.data.corpora.kaldi import export_kaldi
from ds2.data.manifest import UNITS, Conditions, amount, hours, read_manifest, read_manifests, write_manifest
from ds2.data.shards import MANIFEST, write_shards
from ds2.data.splice import LabelledRecording, SplicedText, Splicer, check_folder, write_spliced
from ds2.data.splits import ensure_manifests, require_files, scored_utterances, warn_of_other_corpus
from ds2.system import UserError
from ds2.system.files import check_writable, sole_writer, write_json, write_text
from ds2.system.machine import quick_imports
from ds2.system.plain import counted, shortened
from ds2.system.signals import default_signals
from ds2.text.alphabet import Alphabet, AlphabetError, describe, unread_message
from ds2.text.pieces import learn_pieces
from ds2.text.pronunciations import Phones, Pronunciations, read_pronunciations
from ds2.text.unknown_characters import alphabet_lines, text_language

log = logging.getLogger(__name__)
_SHOWN_OF_A_KIND, _SHOWN_WORDS = 5, 10
_BASE_SYMBOLS = " '"
_MOST_SURPRISE = 1.0  # nats a label, of a recording whose pieces are used; without a quarter of its words it has more
_MOST_WORDS = 50  # of a line of a text to be spoken; longer ones are cut
_MOST_LETTERS = 50  # of a word of such a line


def make_parser() -> Parser:
    parser = Parser(prog="ds2 data", description="corpora to manifests, and tools for manifests")
    commands = parser.add_subparsers(dest="command", required=True)
    for add in (
        _add_check, _add_prepare, _add_import, _add_pieces, _add_export_kaldi, _add_split, _add_stats, _add_filter,
        _add_shards, _add_alphabet, _add_normalise, _add_lexicon, _add_splice,
    ):  # fmt: skip
        add(commands)
    return parser


def run(arguments: Sequence[str]) -> int | None:
    """Run one data command and return its exit status; 1 from `check` means that training must not start."""
    args = make_parser().parse_args(with_search_path(arguments))
    status: int | None = args.run(args)
    return status


def _add_check(commands: Any) -> None:
    parser = add_command(commands, "check", "read every utterance and report problems", _check, settings=ALL_SETTINGS)
    parser.add_argument("--all", action="store_true", help=f"print all findings, not {_SHOWN_OF_A_KIND} of each kind")
    parser.add_argument("--json", type=Path, help="also write the findings to this file")
    parser.add_argument("overrides", nargs="*", help="as for ds2 train: recipe=..., data.train=[...]")


def _check(args: argparse.Namespace) -> int:
    return run_check(compose_config(args.overrides), args.json, show_all=args.all)


def run_check(config: Config, json_path: Path | None = None, *, show_all: bool = False) -> int:
    """Check the manifests of a config, prepare them where missing, and print the report.

    Args:
        config: manifests, alphabet and model (of which only the striding is used).
        json_path: also write the report to this file.
        show_all: print all findings, not only some of each kind.

    Returns:
        0 if training may start, else 1.

    Raises:
        ManifestError: a manifest cannot be read at all.
    """
    with default_signals(), quick_imports():
        import torch  # imported here, since the other commands do not need it

        from ds2.audio.features import Features
        from ds2.model.acoustic import AcousticModel

    ensure_manifests(config.data)
    require_files(config)
    manifests = {"train": config.data.train, "dev": config.data.dev, "test": config.data.test}
    if json_path is not None:
        check_writable(json_path, inputs=chain(*manifests.values()))
    features = Features(config.features, config.data.sample_rate_hz)
    alphabet = Alphabet.from_config(config.alphabet)
    with torch.device("meta"):
        model = AcousticModel(config.model, features.bins, len(alphabet), config.features.step_s)
    splits = {name: read_manifests(paths) for name, paths in manifests.items() if paths}
    warn_of_other_corpus(config.data, splits["train"])

    def output_frames(samples: int) -> int:
        return int(model.output_frames(int(features.frames(samples))))

    report = check(splits, config.data, config.augment, alphabet, output_frames)
    print(report.format(None if show_all else _SHOWN_OF_A_KIND))
    if json_path is not None:
        report.write_json(json_path)
    return 0 if report.may_start else 1


def _add_prepare(commands: Any) -> None:
    parser = add_command(commands, "prepare", "write the manifests of a recipe", _prepare, settings=ALL_SETTINGS)
    parser.add_argument(
        "overrides", nargs="+", help=f"recipe=..., data.corpus=...; data.prepare is one of {', '.join(RECIPES)}"
    )


def _prepare(args: argparse.Namespace) -> None:
    data = compose_config(args.overrides).data
    for part, path in prepare(data.prepare, data.corpus, data.work_dir).items():
        print(f"{part}: {path}")


def _add_import(commands: Any) -> None:
    parser = add_command(commands, "import", "corpus layout to manifest", _import)
    parser.add_argument("format", choices=list(FORMATS))
    parser.add_argument("folder", type=Path, help="of the corpus; for csv and deepspeech_pytorch the table itself")
    parser.add_argument("manifest", type=Path, help="JSON-lines file to write")
    parser.add_argument("--split", default="", help="part of LibriSpeech (e.g. train-clean-100) or AN4 (train, test)")
    parser.add_argument("--skip-bad", action="store_true", help="leave out what has no usable audio or text")
    parser.add_argument(
        "--encoding", default="", metavar="NAME", help="of transcript files that are not Unicode: cp1252, cp1254, ..."
    )


def _import(args: argparse.Namespace) -> None:
    check_writable(args.manifest, inputs=[args.folder])
    utterances = import_corpus(args.format, args.folder, args.split, skip_bad=args.skip_bad, encoding=args.encoding)
    write_manifest(args.manifest, utterances)
    print(f"{args.manifest}: {amount(utterances)}")


def _add_pieces(commands: Any) -> None:
    summary = "learn byte-pair pieces from the training transcripts, for alphabet.pieces_file"
    parser = add_command(commands, "pieces", summary, _pieces, settings=ALL_SETTINGS)
    parser.add_argument("output", type=Path, help="text file to write, one piece a line")
    parser.add_argument("overrides", nargs="+", help="recipe=..., data.corpus=..., alphabet.symbols=...")
    parser.add_argument(
        "--count", type=whole(1, 1_000_000), required=True, help="labels of the network without the blank"
    )


def _pieces(args: argparse.Namespace) -> None:
    """Learn pieces from the training transcripts, which are prepared where missing.

    Raises:
        AlphabetError: no text, a count too small, or sentencepiece is not installed.
    """
    config, count, output = compose_config(args.overrides), args.count, args.output
    ensure_manifests(config.data)
    check_writable(output, inputs=config.data.train)
    texts = [u.text for u in read_manifests(config.data.train)]
    characters = replace(config.alphabet, pieces=[], lexicon="", unknown="drop")
    pieces = learn_pieces(texts, Alphabet.from_config(characters), count)
    if len(pieces) < count:
        log.warning(
            "only %d of %d pieces: these transcripts give no more. Use more text, or a smaller --count",
            len(pieces), count,
        )  # fmt: skip
    write_text(output, "".join(piece + "\n" for piece in pieces))
    alphabet = Alphabet.from_config(replace(characters, pieces=pieces))
    labels, words = sum(len(alphabet.encode(text)) for text in texts), sum(len(text.split()) for text in texts)
    per_word = labels / max(1, words)
    print(f"wrote {output}: {counted(len(pieces), 'piece')}, {per_word:.2f} per word of the training transcripts")


def _add_export_kaldi(commands: Any) -> None:
    parser = add_command(commands, "export-kaldi", "manifest to Kaldi data folder", _export_kaldi)
    parser.add_argument("manifest", type=Path)
    parser.add_argument("folder", type=Path)


def _export_kaldi(args: argparse.Namespace) -> None:
    export_kaldi(read_manifest(args.manifest), args.folder)
    print(f"{args.folder}: Kaldi data folder")


def _add_split(commands: Any) -> None:
    parser = add_command(
        commands, "split", "split manifests into train, dev and test, no speaker in two of them", _split
    )
    parser.add_argument("manifests", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True, help="folder for train.jsonl, dev.jsonl, ...")
    parser.add_argument(
        "--shares", nargs="+", default=["train=0.9", "dev=0.1"], metavar="PART=SHARE",
        help="of the audio; only proportions count, 8 and 2 are 0.8 and 0.2 (default train=0.9 dev=0.1)",
    )  # fmt: skip
    parser.add_argument("--by", choices=UNITS, default="speaker", help="unit that is not divided (default speaker)")
    parser.add_argument("--seed", type=whole(0, SEED), default=1)


def _split(args: argparse.Namespace) -> None:
    shares: dict[str, float] = {}
    for text in args.shares:
        name, _, share = text.partition("=")
        try:
            shares[name] = float(share)
        except ValueError as error:
            raise ConfigError(f"--shares {text!r} is not PART=SHARE, such as dev=0.1") from error
        if not name or Path(name).name != name:
            raise ConfigError(f"--shares {text!r}: the part names a file, give a plain word such as dev")
    if len(shares) < len(args.shares):
        raise ConfigError(f"--shares {' '.join(args.shares)}: give each part once")
    outputs = {name: args.out / f"{name}.jsonl" for name in shares}
    check_writable(*outputs.values(), inputs=args.manifests)
    utterances = read_manifests(args.manifests)
    parts = manifest.split(utterances, shares, by=args.by, seed=args.seed)
    total = hours(utterances)
    for name, part in parts.items():
        write_manifest(outputs[name], part)
        share = f"{100 * hours(part) / total:.1f} %"
        speakers = counted(len({u.speaker for u in part if u.speaker}), "speaker")
        print(f"{outputs[name]}: {amount(part)} ({share}), {speakers}")
    read = {path.resolve() for path in (*args.manifests, *outputs.values())}
    others = sorted(path.name for path in args.out.glob("*.jsonl") if path.resolve() not in read)
    if others:
        log.warning(
            "%s also holds %s, which this split did not write: of an earlier split, its speakers may be in train now",
            args.out, ", ".join(others),
        )  # fmt: skip


def _add_stats(commands: Any) -> None:
    parser = add_command(commands, "stats", "hours, speakers, durations and pace of manifests", _stats)
    parser.add_argument("manifests", type=Path, nargs="+")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--picture", type=Path, help="histograms of durations and pace (needs matplotlib)")


def _stats(args: argparse.Namespace) -> None:
    check_writable(*filter(None, (args.json, args.picture)), inputs=args.manifests)
    utterances = read_manifests(args.manifests)
    facts = manifest.statistics(utterances)
    print(manifest.format_statistics(facts))
    if args.json:
        write_json(args.json, facts)
    if args.picture:
        manifest.draw(utterances, args.picture)
        print(f"wrote {args.picture}")


def _add_filter(commands: Any) -> None:
    parser = add_command(commands, "filter", "the utterances of a manifest that meet conditions", _filter)
    parser.add_argument("manifest", type=Path)
    parser.add_argument("output", type=Path)
    for name, what in (("s", "seconds"), ("pace", "characters a second")):
        parser.add_argument(f"--min-{name}", type=real(0, UNLIMITED), metavar="X", help=f"at least so many {what}")
        parser.add_argument(f"--max-{name}", type=real(0, UNLIMITED), metavar="X", help=f"at most so many {what}")
    parser.add_argument("--speakers", nargs="+", default=[], help="only these")
    parser.add_argument("--without-speakers", nargs="+", default=[], metavar="SPEAKER", help="all but these")
    parser.add_argument("--text", default="", metavar="REGEX", help="that the transcript matches")
    parser.add_argument("--without-text", default="", metavar="REGEX", help="that the transcript does not match")


def _filter(args: argparse.Namespace) -> None:
    conditions = Conditions(
        args.min_s, args.max_s, args.min_pace, args.max_pace, args.speakers, args.without_speakers,
        args.text, args.without_text,
    )  # fmt: skip
    check_writable(args.output, inputs=[args.manifest])
    utterances = read_manifests([args.manifest])
    selected, dropped = manifest.select(utterances, conditions)
    write_manifest(args.output, selected)
    print(f"{args.output}: {len(selected)} of {len(utterances)} utterances, {hours(selected):.2f} h")
    for reason, count in dropped.most_common():
        print(f"  {count:6d} {reason}")
    absent = {*args.speakers, *args.without_speakers} - {u.speaker for u in utterances}
    if absent:
        log.warning("%s has no speaker %s", args.manifest, ", ".join(sorted(absent)))


def _add_shards(commands: Any) -> None:
    parser = add_command(
        commands, "shards", "manifests to tar files with indices, for corpora larger than a cache", _shards
    )
    parser.add_argument("manifests", type=Path, nargs="+")
    parser.add_argument("out", type=Path, help="folder for 000000.tar, ... and manifest.jsonl, to train with")
    rate, size = whole(*RATES_HZ), real(0, 1e9, above=True)
    parser.add_argument("--rate", type=rate, default=16000, help="of the FLAC in them, Hz: data.sample_rate_hz")
    common.add_channel(parser)
    parser.add_argument("--shard-mb", type=size, default=1000, help="of samples in one; FLAC takes half")
    parser.add_argument("--skip-bad", action="store_true", help="leave out utterances that cannot be read")


def _shards(args: argparse.Namespace) -> None:
    check_writable(args.out / MANIFEST, inputs=args.manifests)
    shard_bytes = int(1e6 * args.shard_mb)
    written = write_shards(
        read_manifests(args.manifests), args.out, args.rate, shard_bytes, channel=args.channel, skip_bad=args.skip_bad
    )
    for error in written.left_out:
        print(f"left out: {error}")
    print(
        f"{args.out / MANIFEST}: {amount(written.utterances)}, in {counted(written.shards, 'shard')}"
        + (f", {written.reused} of them reused" if written.reused else "")
        + (f"; {counted(len(written.left_out), 'utterance')} left out" if written.left_out else "")
    )


def _add_alphabet(commands: Any) -> None:
    summary = "the alphabet of manifests' transcripts, ready for conf/alphabet/"
    usage = "%(prog)s MANIFEST ... [--out FILE] [--least N] [alphabet=NAME] [alphabet.KEY=VALUE ...]"
    parser = add_command(commands, "alphabet", summary, _alphabet, settings=ALPHABET_SETTINGS, usage=usage)
    parser.add_argument("manifests", type=Path, nargs="+", metavar="MANIFEST", help="their texts are normalised")
    parser.add_argument("--out", type=Path, help="my_conf/alphabet/NAME.yaml, for --config-dir my_conf alphabet=NAME")
    parser.add_argument(
        "--least", type=whole(1, COUNT), default=1, metavar="N", help="characters that occur less often are left out"
    )


def _alphabet(args: argparse.Namespace) -> None:
    if args.out:
        check_writable(args.out, inputs=args.manifests)
        if args.out.stem in choices("alphabet"):
            raise ConfigError(f"--out {args.out}: alphabet={args.out.stem} is one of ds2: give yours another name")
    config = compose_config([*args.overrides, "run_dir=unused"]).alphabet
    set_keys = overridden_keys(args.overrides)
    if not set_keys & {"alphabet", "alphabet.symbols"}:
        config = replace(config, symbols=_BASE_SYMBOLS)
    if not set_keys & {"alphabet", "alphabet.punctuation"}:
        config = replace(config, punctuation="drop")
    alphabet = Alphabet.from_config(replace(config, unknown="drop", pieces=[]))
    texts = [utterance.text for utterance in read_manifests(args.manifests)]
    counts = Counter(chain.from_iterable(alphabet.normalise(text)[0] for text in texts))
    if not any(c.strip() for c in counts):
        names = ", ".join(map(str, args.manifests))
        raise ConfigError(f"{names}: no transcript has a letter or digit; alphabet.punctuation=keep counts other signs")
    digits = Counter({c: n for c, n in counts.items() if c.isdigit() and c not in alphabet.symbols})
    rare = Counter({c: n for c, n in counts.items() if n < args.least})
    symbols = counts.keys() - digits.keys() - rare.keys()
    if rare and not any(c.strip() for c in symbols):
        raise ConfigError(f"--least {args.least}: no letter occurs so often, so the alphabet would be empty: lower it")
    content = "\n".join(alphabet_lines({*symbols, " "}, alphabet, alphabet.rules())) + "\n"
    print(content, end="")
    print(f"{counted(len(symbols), 'symbol')}, by count: {describe(Counter({c: counts[c] for c in symbols}))}")
    if digits and alphabet.numbers:
        unread = [part for text in texts for part in alphabet.unread_numbers(text)]
        print(f"left out, {counted(sum(digits.values()), 'digit')}: {unread_message(unread, alphabet.numbers)}")
    elif digits:
        language = text_language(texts) or "LANGUAGE (en, de, tr, ...)"
        marks = {c for c in symbols if c in alphabet.symbols and not c.isalnum()} - {" "}  # which would be dropped
        value = "".join(sorted({*digits, *marks})).replace("'", "\\'")
        setting = f"\"alphabet.symbols='{value}'\"" if marks else f"alphabet.symbols={value}"
        print(
            f"left out, {counted(sum(digits.values()), 'digit')}: make them words with alphabet.numbers={language}, "
            f"or keep them with {setting}"
        )
    if rare:
        print(f"left out, occurring less than {args.least} times: {describe(rare)}")
    if args.out:
        source = ", ".join(path.name for path in args.manifests)
        write_text(args.out, f"# Characters of {source}, by `ds2 data alphabet`.\n{content}")
        folder, name = args.out.parent, args.out.stem
        use = f"use it with --config-dir {folder.parent} alphabet={name}"
        if folder.name != "alphabet" or args.out.suffix != ".yaml":  # Hydra finds no other place
            use = f"to use it move it to my_conf/alphabet/{name}.yaml, then --config-dir my_conf alphabet={name}"
        print(f"wrote {args.out}; {use}")


def _add_normalise(commands: Any) -> None:
    summary = "show a text as an alphabet normalises it: ds2 data normalise 'in 1995' alphabet=english_text"
    usage = "%(prog)s TEXT ... [alphabet=NAME] [alphabet.KEY=VALUE ...]"
    parser = add_command(commands, "normalise", summary, _normalise, settings=ALPHABET_SETTINGS, usage=usage)
    parser.add_argument("texts", nargs="+", metavar="TEXT", help="- reads lines from standard input")


def _normalise(args: argparse.Namespace) -> int:
    """Print each text as it is normalised; the status is 1 if the alphabet cannot write one of them."""
    alphabet = Alphabet.from_config(compose_config([*args.overrides, "run_dir=unused"]).alphabet)
    status = 0
    for text in chain.from_iterable(sys.stdin if argument == "-" else [argument] for argument in args.texts):
        normalised, unknown = alphabet.normalise(text)
        print(normalised, flush=True)
        unread = alphabet.unread_numbers(text)
        others = Counter({c: count for c, count in unknown.items() if not (unread and c.isdigit())})
        if unread:
            log.warning("%s", unread_message(unread, alphabet.numbers))
        if others:
            log.warning("outside the alphabet: %s", describe(others))
        if unpronounced := alphabet.unpronounced([text]):
            log.warning("without a pronunciation: %s", unpronounced)
        status |= bool(unknown or unpronounced)
    return status


def _add_lexicon(commands: Any) -> None:
    parser = add_command(
        commands,
        "lexicon",
        "pronunciations of the words of texts and language models, for alphabet.lexicon",
        _lexicon,
        settings=ALPHABET_SETTINGS,
        usage="%(prog)s OUTPUT --dictionary FILE [--words FILE ...] [alphabet=NAME] [alphabet.KEY=VALUE ...] [options]",
        epilog="Words are normalised as in training, by alphabet=turkish, alphabet.numbers=en and the like; "
        "alphabet.symbols has the marks that stay in them.",
    )
    parser.add_argument("output", type=Path, help="file to write in the format of CMUdict")
    parser.add_argument(
        "--dictionary", type=Path, required=True, help="pronunciations in that format, or a model of phones, as english"
    )
    parser.add_argument(
        "--words", type=Path, nargs="+", default=[], metavar="FILE",
        help="texts and manifests whose words are needed, and word models (.lm, .lm.xz, .arpa); none: all its words",
    )  # fmt: skip
    parser.add_argument("--keep-stress", action="store_true", help="keep the 0, 1 or 2 at the end of phones")
    parser.add_argument(
        "--no-guess", action="store_true", help="leave out words that the dictionary lacks, instead of a guess"
    )


def _lexicon(args: argparse.Namespace) -> None:
    # imported late: the other data commands need no torch
    from ds2.lm.letters_to_phones import MAX_LETTERS, LettersToPhones

    source = Path(pronunciation_file(str(args.dictionary)))
    check_writable(args.output, inputs=[source, *args.words])
    _require_texts("--words", args.words, "texts, manifests or word models")
    dictionary = read_pronunciations(source, keep_stress=args.keep_stress)
    phones = dictionary.phones
    # As training normalises with the lexicon. A full stop in it would stay in all transcripts, behind their last words.
    config = compose_config([*args.overrides, "run_dir=unused"]).alphabet
    symbols = "".join({" ", *set(config.symbols).intersection("".join(dictionary.words))})
    alphabet = Alphabet.from_config(replace(config, symbols=symbols, pieces=[], lexicon="", punctuation="drop"))
    normalised: dict[str, list[Phones]] = {}
    for word, variants in dictionary.words.items():
        written = alphabet.normalise(word)[0]
        if written and " " not in alphabet.normalise(f"a{word}a")[0]:  # without a mark, as a. and x-ray have
            normalised.setdefault(written, []).extend(variants)
    dictionary = Pronunciations.of(normalised)
    folded: dict[str, Sequence[Phones]] = {}  # a text that keeps its capitals has Nine where this has nine or NINE
    for word, variants in dictionary.words.items():
        folded.setdefault(word.lower(), variants)
    wanted = _words(args.words, alphabet) if args.words else Counter(dictionary.words)
    unknown = [word for word in wanted if word.lower() not in folded]
    letters = list(dict.fromkeys(map(str.lower, unknown)))
    guesses = LettersToPhones(Pronunciations.of(folded)).pronounce(letters) if unknown and not args.no_guess else {}
    guessed = {word: guesses[word.lower()] for word in unknown if word.lower() in guesses}
    listed = {word: dictionary.words.get(word) or folded.get(word.lower()) or (guessed[word],)
              for word in sorted(wanted) if word.lower() in folded or word in guessed}  # fmt: skip
    if not listed:
        texts = ", ".join(map(str, args.words))
        raise UserError(f"no word of {texts} has a pronunciation: take another --dictionary, or no --no-guess")
    lexicon = Pronunciations.of(listed)
    write_text(args.output, "".join(line + "\n" for line in lexicon.lines()))
    words, phones_of_words = counted(len(listed), "word"), counted(len(lexicon.phones), "phone")
    print(
        f"wrote {args.output}: {words}, {phones_of_words}; guessed from their letters, as {source} "
        f"lacks them: {len(guessed)}"
    )
    if source.suffix == ".safetensors" and (lost := [p for p in phones if p not in lexicon.phones]):
        log.warning(
            "no word of %s has these phones of the model, which a network trained with it cannot write: %s; name more "
            "texts by --words, or leave it out to write all words of the model", args.output, " ".join(lost),
        )  # fmt: skip
    if guessed:
        frequent = sorted(guessed, key=lambda word: -wanted[word])[:_SHOWN_WORDS]
        print("guessed: " + ", ".join(f"{word} {' '.join(guessed[word])}" for word in frequent))
    without = sorted((word for word in unknown if word not in guessed), key=lambda word: -wanted[word])
    if without:
        lacking = sorted(set("".join(without).lower()).difference(*folded))
        why = f"; the dictionary has no word with {' '.join(lacking)}" if lacking else ""
        long = sum(len(word) > MAX_LETTERS for word in without)
        why += f"; {counted(long, 'word')} of more than {MAX_LETTERS} letters: a text without spaces?" if long else ""
        shown = ", ".join(map(shortened, without[:_SHOWN_WORDS]))
        print(f"without a pronunciation: {counted(len(without), 'word')}, such as {shown}{why}")


def _require_texts(option: str, paths: Sequence[Path], what: str) -> None:
    if missing := [str(path) for path in paths if not path.is_file()]:
        raise UserError(f"{option}: there is no file {', '.join(missing)}: name {what}")


def _words(paths: list[Path], alphabet: Alphabet) -> Counter[str]:
    """The words of texts, manifests and language models, with their frequency in texts; no letter is left out."""
    from ds2.lm.files import load_ngram  # imported late, as above
    from ds2.lm.sentences import SentenceReader

    counts: Counter[str] = Counter()
    texts = [path for path in paths if not {".lm", ".arpa"} & set(path.suffixes[-2:])]
    for tokens in SentenceReader(texts):
        counts.update(alphabet.normalise(" ".join(tokens))[0].split())
    for path in paths:
        if path not in texts:
            model = load_ngram(path)
            if model.unit != "word":
                raise UserError(f"{path} is a model of {model.unit}s: give one of words")
            counts.update(dict.fromkeys(set(model.tokens) - counts.keys(), 0))
    return counts


def _add_splice(commands: Any) -> None:
    parser = add_command(commands, "splice", "speech that says a text, made of pieces of recordings", _splice)
    parser.add_argument("folder", type=Path, help="folder for the speech and manifest.jsonl, to train with")
    parser.add_argument("manifests", nargs="+", help="JSON-lines manifests of the recordings")
    parser.add_argument(
        "--model", type=Path, required=True, help="of phones: aligns the recordings, and has the phones of words"
    )
    parser.add_argument(
        "--text", type=Path, nargs="+", required=True, metavar="FILE", help="texts and manifests; lines are sentences"
    )
    parser.add_argument(
        "--hours", type=real(0, 1e6, above=True), required=True, help="of speech to write; one takes 115 MB at 16 kHz"
    )
    parser.add_argument("--seed", type=whole(0, SEED), default=1, help="of what is drawn")
    common.add_device(parser)


def _splice(args: argparse.Namespace) -> None:
    # imported late: the other data commands need no torch
    from ds2.config.device import resolve_device
    from ds2.config.schema import DecodeConfig
    from ds2.data.loader import SpeechLoader
    from ds2.model.checkpoint import find_model, load_model
    from ds2.recognition.recogniser import Recogniser
    from ds2.recognition.transcripts import align_utterances

    file, device = find_model(args.model), resolve_device(args.device)
    check_writable(args.folder / MANIFEST, inputs=[file, *args.manifests, *args.text])
    _require_texts("--text", args.text, "texts or manifests")
    lines = sum(1 for _ in _short_lines(args.text))  # the same errors, before minutes of alignment
    loaded = load_model(file, device)
    alphabet = loaded.alphabet
    if alphabet.has_pieces:
        raise UserError(f"{file} writes pieces of words, whose sounds have no certain times: take a model of phones")
    if alphabet.pronunciations is None:
        log.warning(
            "%s writes characters: where letters have several sounds, as in English, their pieces say other words; "
            "take a model of phones", file,
        )  # fmt: skip
    args.folder.mkdir(parents=True, exist_ok=True)
    with sole_writer(args.folder):
        check_folder(args.folder, args.hours, loaded.config.data.sample_rate_hz)
        utterances = scored_utterances(args.manifests, alphabet)
        loader = SpeechLoader(utterances, replace(loaded.config.data, workers=-1), device)
        aligned, _ = align_utterances(Recogniser.of(loaded, DecodeConfig(), device), loader)
        loader.close()  # only its audio is needed from here on
        recordings = []
        for position, (utterance, transcript) in enumerate(zip(utterances, aligned, strict=True)):
            labels = tuple(tuple(alphabet.spell(word.text)) for word in transcript.words)
            times_s = tuple((label.start_s, label.end_s) for label in transcript.labels)
            if times_s and transcript.surprise <= _MOST_SURPRISE and sum(map(len, labels)) == len(times_s):
                recording = LabelledRecording(position, utterance.speaker, labels, times_s, utterance.duration_s)
                recordings.append(recording)
        if len(recordings) < len(utterances):
            log.warning(
                "%d of %d recordings are not used, as the model hears other words in them (`ds2 align --out`: "
                "surprise)", len(utterances) - len(recordings), len(utterances),
            )  # fmt: skip
        splicer = Splicer(recordings, loader.audio)
        texts = _SpokenTexts(args.text, lines, alphabet, recordings, args.hours, args.seed)
        written = write_spliced(splicer, iter(texts), args.folder, args.hours, args.seed)
        print(f"{args.folder / MANIFEST}: {amount(written)}")
        if texts.unusable:
            total = counted(texts.lines, "line")  # one that is read again counts again
            print(f"not used: {texts.unusable} of {total} read, with words for which {file} has no labels")


def _short_lines(paths: Sequence[Path]) -> Iterator[list[str]]:
    """Yield the words of each line; a line of more than 50 words, such as a paragraph, is several.

    So is a word of more than 50 letters, such as a line of a script without spaces.
    """
    from ds2.lm.sentences import SentenceReader  # imported late, as above

    for line in SentenceReader(paths):
        words = [word[at : at + _MOST_LETTERS] for word in line for at in range(0, len(word), _MOST_LETTERS)]
        yield from (words[first : first + _MOST_WORDS] for first in range(0, len(words), _MOST_WORDS))


class _SpokenTexts:
    """Texts for spliced speech, evenly spread over the lines of files, again and again.

    Each is of the words of lines in a row, with as many labels as one of the recordings, which is drawn; fewer where a
    line that cannot be spoken or the last line ends it.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        total: int,
        alphabet: Alphabet,
        recordings: Sequence[LabelledRecording],
        hours_wanted: float,
        seed: int,
    ) -> None:
        self.paths, self.alphabet, self.draw = paths, replace(alphabet, unknown="stop"), random.Random(seed)
        self.lengths = [len(recording.times_s) for recording in recordings]
        wanted = 3600 * hours_wanted * len(recordings) / sum(recording.duration_s for recording in recordings)
        # Of the `total` short lines of the files, those from the begin of a text to that of the next.
        self.every = total / max(1.0, wanted)
        self.lines = self.unusable = 0  # that were read for texts, and of them those with words that have no labels

    def __iter__(self) -> Iterator[SplicedText]:
        while True:
            usable, next_line = self.lines - self.unusable, self.every * self.draw.random()
            words: list[tuple[str, tuple[int, ...]]] = []
            missing = 0  # labels
            for number, tokens in enumerate(_short_lines(self.paths), 1):
                if not words:
                    if number < next_line:
                        continue
                    missing = self.draw.choice(self.lengths)
                self.lines += 1
                spelled = self._spelled(" ".join(tokens))
                self.unusable += not spelled
                for word in spelled:
                    words.append(word)
                    missing -= len(word[1])
                    if missing <= 0:
                        break
                if words and (missing <= 0 or not spelled):
                    yield SplicedText(*zip(*words, strict=True))
                    words, next_line = [], next_line + self.every
            if words:
                yield SplicedText(*zip(*words, strict=True))
            if self.lines - self.unusable == usable:
                named = ", ".join(map(str, self.paths))
                raise UserError(f"no line of {named} has only words that the model has labels for: `ds2 data lexicon`")

    def _spelled(self, line: str) -> list[tuple[str, tuple[int, ...]]]:
        """Return the words of a line with their labels; empty where one has none."""
        try:
            words = self.alphabet.written(line).split()
        except AlphabetError:
            return []
        return [(word, tuple(self.alphabet.spell(word))) for word in words]
