"""The command line of language models: `ds2 lm build`, `train`, `convert`, `ppl`, `query`, `tune`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from ds2.commands import lm_train
from ds2.commands.common import DECODER_SETTINGS, Parser, whole
from ds2.commands.compose import split_overrides
from ds2.commands.lm_tune import add_arguments as add_tune_arguments
from ds2.commands.lm_tune import run as run_tune
from ds2.config.allowed import COUNT
from ds2.config.schema import AlphabetConfig
from ds2.lm.files import load_ngram, save_ngram, write_arpa
from ds2.lm.kneser_ney import DEFAULT_MEMORY_BYTES, MAX_ORDER, estimate
from ds2.lm.ngram import END, UNITS, LanguageModelError, NGram
from ds2.lm.recurrent import load_recurrent
from ds2.lm.sentences import SentenceReader, perplexity, tokenise
from ds2.system.files import check_writable
from ds2.text.alphabet import Alphabet
from ds2.text.pieces import read_pieces


def _alphabet(arguments: argparse.Namespace) -> Alphabet:
    if arguments.model and arguments.pieces:
        raise LanguageModelError(
            "--pieces and --model exclude each other: the alphabet of the network has its own labels"
        )
    if arguments.model:
        from ds2.model.checkpoint import load_model

        return load_model(arguments.model).alphabet
    replace = {}
    for pair in arguments.replace:
        old, equals, new = pair.partition("=")
        if not old or not equals:
            raise LanguageModelError(f"--replace {pair!r} is not OLD=NEW")
        replace[old] = new
    pieces = read_pieces(arguments.pieces) if arguments.pieces else []
    return Alphabet.from_config(AlphabetConfig(arguments.symbols, arguments.case, replace, pieces=pieces))


def _stored_alphabet(model: NGram) -> Alphabet | None:
    return None if model.alphabet is None else Alphabet.from_dict(model.alphabet)


def _refuse_missing(arguments: argparse.Namespace) -> None:
    missing = [str(path) for path in (*arguments.text, *(arguments.heldout or ())) if not path.is_file()]
    if missing:
        raise LanguageModelError(f"there is no text {', '.join(missing)}")


def _build(arguments: argparse.Namespace) -> int:
    alphabet = None if arguments.unit == "piece" and not (arguments.model or arguments.pieces) else _alphabet(arguments)
    if arguments.unit == "piece" and alphabet is not None and not alphabet.has_pieces:
        raise LanguageModelError(f"--unit piece: the alphabet of {arguments.model} has characters: give --pieces alone")
    output = arguments.output
    _refuse_missing(arguments)
    check_writable(output, *([arguments.arpa] if arguments.arpa else []))
    reader = SentenceReader(arguments.text, arguments.unit, alphabet, arguments.unknown)
    result = estimate(
        reader,
        arguments.order,
        arguments.prune,
        unit=arguments.unit,
        alphabet=None if alphabet is None else alphabet.to_dict(),
        memory_bytes=arguments.memory_mib << 20,
        temp_dir=arguments.temp_dir,
    )
    print(f"read {reader.report()}")
    for n, (size, counted, discounts) in enumerate(
        zip(result.remaining_counts, result.counts, result.discounts, strict=True), start=1
    ):
        print(f"{n}-grams {size} of {counted}, D1 {discounts[0]:.4f}, D2 {discounts[1]:.4f}, D3+ {discounts[2]:.4f}")
    save_ngram(result.model, output)
    print(f"wrote {output}, {output.stat().st_size / 2**20:.1f} MiB")
    if arguments.arpa:
        write_arpa(result.model, arguments.arpa)
        print(f"wrote {arguments.arpa}, {arguments.arpa.stat().st_size / 2**20:.1f} MiB")
    if arguments.heldout:
        _print_perplexity(result.model, arguments.heldout, alphabet, arguments.unknown)
    return 0


def _print_perplexity(model: NGram, texts: Sequence[Path], alphabet: Alphabet | None, unknown: str) -> None:
    reader = SentenceReader(texts, model.unit, alphabet, unknown)
    result = perplexity(model, reader)
    print(f"held out: {reader.report()}\n{result.format()}")


def _convert(arguments: argparse.Namespace) -> int:
    model = load_ngram(arguments.lm)
    if arguments.output.suffix == ".arpa":
        write_arpa(model, arguments.output)
    else:
        save_ngram(model, arguments.output)
    sizes = " + ".join(str(end - start) for start, end in pairwise(model.entry_starts))
    print(f"wrote {arguments.output}: {sizes} n-grams of orders 1 to {model.order}")
    return 0


def _train(arguments: argparse.Namespace) -> int:
    _refuse_missing(arguments)
    return lm_train.run(arguments, _alphabet(arguments))


def _ppl(arguments: argparse.Namespace) -> int:
    if arguments.lm.suffix == ".safetensors":
        lm_train.print_perplexity(load_recurrent(arguments.lm), arguments.text)
        return 0
    model = load_ngram(arguments.lm)
    _print_perplexity(model, arguments.text, _stored_alphabet(model), arguments.unknown)
    return 0


def _query(arguments: argparse.Namespace) -> int:
    model = load_ngram(arguments.lm)
    alphabet = _stored_alphabet(model)
    for line in sys.stdin:
        text = line if alphabet is None else alphabet.normalise(line)[0]
        tokens = list(text.strip()) if model.unit == "character" else tokenise(text, model.unit, alphabet)
        scores = model.sentence(tokens)
        known = ["" if token in model.ids or token == " " else " OOV" for token in tokens]
        parts: Iterator[str] = (
            f"{token!r} {score:.4f}{mark}"
            for token, score, mark in zip([*tokens, END], scores, [*known, ""], strict=True)
        )
        print(f"{sum(scores):.4f}: {', '.join(parts)}", flush=True)
    return 0


def _add_build(commands: argparse._SubParsersAction[Parser]) -> None:
    build = commands.add_parser("build", help="estimate a modified Kneser-Ney model of texts (plain, .gz, .xz)")
    build.add_argument("text", type=Path, nargs="+", help="UTF-8, one sentence a line")
    build.add_argument("--output", type=Path, required=True, help="the compact binary, e.g. books.lm")
    build.add_argument("--arpa", type=Path, help="also write this ARPA file")
    build.add_argument("--order", type=whole(1, MAX_ORDER), default=4, help="longest n-gram in tokens")
    build.add_argument("--prune", type=whole(0, COUNT), nargs="+", default=[], metavar="COUNT",
                       help="leave out n-grams seen at most so often, by order: 0 0 1 drops trigrams and longer ones "
                            "seen once (default: keep all)")  # fmt: skip
    build.add_argument(
        "--unit",
        choices=UNITS,
        default="word",
        help="token: what spaces part, a character, or a piece (of --model's alphabet; without --model as is)",
    )
    build.add_argument("--memory-mib", type=whole(1, COUNT), default=DEFAULT_MEMORY_BYTES >> 20, help="working arrays")
    build.add_argument("--temp-dir", type=Path, help="for counts on disk, about 40 bytes a distinct n-gram")
    build.set_defaults(run=_build)
    _add_alphabet(build)


def _add_alphabet(command: argparse.ArgumentParser) -> None:
    defaults = AlphabetConfig()
    command.add_argument(
        "--heldout", type=Path, nargs="+", metavar="TEXT", help="print perplexity and OOV rate of this text"
    )
    command.add_argument(
        "--model", type=Path, help="normalise as this network's alphabet does (model file or run folder)"
    )
    command.add_argument(
        "--symbols", default=defaults.symbols, help=f"the alphabet without --model (default {defaults.symbols!r})"
    )
    command.add_argument(
        "--pieces",
        type=Path,
        help="byte-pair pieces of these symbols, of `ds2 data pieces`, or a .model of sentencepiece",
    )
    command.add_argument("--case", choices=("lower", "upper", "keep"), default=defaults.case, help="(default lower)")
    command.add_argument("--replace", nargs="+", default=[], metavar="OLD=NEW", help="applied first, longest first")
    _add_unknown(command)


def _add_unknown(command: argparse.ArgumentParser) -> None:
    command.add_argument("--unknown", choices=("skip", "drop", "stop"), default="skip",
                         help="what becomes of characters outside the alphabet: skip the line (default), drop them "
                              "or stop; always counted and reported")  # fmt: skip


def make_parser() -> Parser:
    """Return the parser of `ds2 lm`."""
    parser = Parser(prog="ds2 lm", description="Build, train and query language models.")
    commands = parser.add_subparsers(required=True, metavar="build | train | convert | ppl | query | tune")

    _add_build(commands)

    train = commands.add_parser("train", help="fit a recurrent model to texts, for decode.rescore")
    train.add_argument("text", type=Path, nargs="+", help="UTF-8, one sentence a line")
    train.add_argument("--output", type=Path, required=True, help="the model file, e.g. books.safetensors")
    train.set_defaults(run=_train)
    lm_train.add_arguments(train)
    _add_alphabet(train)

    convert = commands.add_parser("convert", help="an ARPA file of any tool to the compact binary, or back")
    convert.add_argument("lm", type=Path, help="binary or ARPA")
    convert.add_argument("output", type=Path, help="ARPA where the name ends in .arpa, else binary")
    convert.set_defaults(run=_convert)

    ppl = commands.add_parser("ppl", help="perplexity and OOV rate of texts")
    ppl.add_argument("lm", type=Path, help="binary, ARPA or, ending in .safetensors, a recurrent model")
    ppl.add_argument("text", type=Path, nargs="+")
    ppl.set_defaults(run=_ppl)
    _add_unknown(ppl)

    query = commands.add_parser("query", help="natural-log probability of each sentence on standard input, by token")
    query.add_argument("lm", type=Path, help="binary or ARPA")
    query.set_defaults(run=_query)

    tune = commands.add_parser(
        "tune",
        settings=DECODER_SETTINGS,
        help="alpha, beta and beam of a model on a dev set",
        usage="%(prog)s MODEL LM [MANIFEST ...] [decode=NAME] [decode.KEY=VALUE ...] [options]",
        description="Find alpha, beta and the beam on a dev set, by default of decode=beam; decode.prune, "
        "decode.label_min_log_prob and decode.unknown_score stay as the model's config or the command line has them.",
    )
    add_tune_arguments(tune)
    return parser


def run(arguments: Sequence[str]) -> int:
    """Run `ds2 lm ARGUMENTS` and return its exit status.

    Raises:
        LanguageModelError: a mistake that the user can mend.
    """
    overrides, others = split_overrides(arguments)
    parser = make_parser()
    parsed = parser.parse_args(others, argparse.Namespace(overrides=overrides))
    if overrides and parsed.run != run_tune:
        parser.error(f"{overrides[0]}: only `ds2 lm tune` takes settings of decoders")
    status: int = parsed.run(parsed)
    return status
