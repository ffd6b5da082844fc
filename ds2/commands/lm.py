"""The command line of language models: `ds2 lm build`, `train`, `convert`, `ppl`, `query`, `tune`."""

import argparse
import logging
import math
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from ds2.commands import common
from ds2.commands.common import DECODER_SETTINGS, NumberArgument, Parser, add_command, real, whole
from ds2.commands.compose import resolve_options
from ds2.config.allowed import ALLOWED, COUNT, UNLIMITED
from ds2.config.convert import setting_comments
from ds2.config.device import resolve_device
from ds2.config.schema import AlphabetConfig, DecodeConfig
from ds2.data.splits import scored_utterances
from ds2.decoding.hypothesis import DecodeError
from ds2.decoding.methods import METHODS, make_decoder
from ds2.lm.files import load_ngram, named_arpa, save_ngram, write_arpa
from ds2.lm.kneser_ney import DEFAULT_MEMORY_BYTES, MAX_ORDER, estimate
from ds2.lm.ngram import END, UNITS, LanguageModelError, NGram
from ds2.lm.recurrent import RecurrentLM, RecurrentShape, load_recurrent, save_recurrent
from ds2.lm.recurrent_training import StateFile, TrainingProgress, TrainingSettings, TrainingText, train
from ds2.lm.sentences import SentenceReader, perplexity, tokenise
from ds2.model.checkpoint import LoadedModel, find_model, load_model
from ds2.model.shipped import is_shipped
from ds2.recognition import tuning
from ds2.recognition.recogniser import Recogniser
from ds2.recognition.settings import save_settings, tuned_file
from ds2.system.files import STANDARD_INPUT, check_writable, sole_writer
from ds2.system.machine import git_commit
from ds2.system.plain import counted
from ds2.system.signals import Stopped
from ds2.text.alphabet import Alphabet
from ds2.text.pieces import read_pieces
from ds2.training.stopping import Interrupts

log = logging.getLogger(__name__)
_CHANGEABLE = ("epochs", "max_minutes", "learning_rate", "warmup_steps", "weight_decay")  # when a training resumes
_LIMIT, _MAX_VALUES = 1e6, 1000  # of decode.alpha and decode.beta
_GRID = ("0:1.6:5", "0:3:4")  # of alpha and beta
_PHONE_GRID = ("0.4:1.6:4", "0:1:3")  # words of one sound need the model (alpha 0 cannot tell them apart), few a bonus


def make_parser() -> Parser:
    parser = Parser(prog="ds2 lm", description="Build, train and query language models.")
    commands = parser.add_subparsers(required=True, metavar="build | train | convert | ppl | query | tune")

    _add_build(commands)
    _add_train(commands)

    convert = add_command(commands, "convert", "a model of any form, such as an ARPA file, to another", _convert)
    convert.add_argument("lm", type=Path, help="binary, compressed or ARPA")
    convert.add_argument("output", type=Path, help="books.arpa: ARPA; books.lm: binary; books.lm.xz: compressed")

    ppl = add_command(commands, "ppl", "perplexity and OOV rate of texts", _ppl)
    ppl.add_argument("lm", type=Path, help="binary, ARPA or, ending in .safetensors, a recurrent model")
    ppl.add_argument("text", type=Path, nargs="+")
    _add_unknown(ppl)

    query = add_command(
        commands, "query", "natural-log probability of each sentence on standard input, by token", _query
    )
    query.add_argument("lm", type=Path, help="binary or ARPA")

    _add_tune(commands)
    return parser


def run(arguments: Sequence[str]) -> None:
    """Run `ds2 lm ARGUMENTS`; raises LanguageModelError for what the user can mend."""
    args = make_parser().parse_args(arguments)
    args.run(args)


def _add_build(commands: Any) -> None:
    parser = add_command(commands, "build", "estimate a modified Kneser-Ney model of texts (plain, .gz, .xz)", _build)
    parser.add_argument("text", type=Path, nargs="+", help="UTF-8, one sentence a line; - is standard input")
    parser.add_argument("--output", type=Path, required=True, help="books.lm: binary; books.lm.xz: compressed")
    parser.add_argument("--arpa", type=Path, help="also write this ARPA file")
    parser.add_argument("--order", type=whole(1, MAX_ORDER), default=4, help="longest n-gram in tokens")
    parser.add_argument("--prune", type=whole(0, COUNT), nargs="+", default=[], metavar="COUNT",
                       help="leave out n-grams seen at most so often, by order: 0 0 1 drops trigrams and longer ones "
                            "seen once (default: keep all)")  # fmt: skip
    parser.add_argument(
        "--unit", choices=UNITS, default="word",
        help="token: a word, a character, or a piece (of --model's alphabet; without --model the text has pieces)",
    )  # fmt: skip
    parser.add_argument("--memory-mib", type=whole(1, COUNT), default=DEFAULT_MEMORY_BYTES >> 20, help="working arrays")
    parser.add_argument("--temp-dir", type=Path, help="for counts on disk, about 40 bytes a distinct n-gram")
    _add_text_options(parser)


def _build(args: argparse.Namespace) -> None:
    own_pieces = args.unit == "piece" and not (args.model or args.pieces)
    alphabet = None if own_pieces else _alphabet(args, of_words=args.unit == "word")
    if args.unit == "piece" and alphabet is not None and not alphabet.has_pieces:
        raise LanguageModelError(f"--unit piece: the alphabet of {args.model} has characters: give --pieces alone")
    output = args.output
    if named_arpa(output):  # as which other commands would read it
        raise LanguageModelError(
            f"--output {output}: this file is binary: call it {output.with_suffix('.lm')}; --arpa {output} writes ARPA"
        )
    _check_texts(args)
    _refuse_repeated(args.text)
    check_writable(output, *filter(None, [args.arpa]), inputs=_inputs(args))
    with sole_writer(output):
        reader = SentenceReader(args.text, args.unit, alphabet, args.unknown)
        stored, memory = None if alphabet is None else alphabet.to_dict(), args.memory_mib << 20
        result = estimate(
            reader, args.order, args.prune, unit=args.unit, alphabet=stored, memory_bytes=memory, temp_dir=args.temp_dir
        )
        print(f"read {reader.report()}")
        for n, (size, before, discounts) in enumerate(
            zip(result.remaining_counts, result.counts, result.discounts, strict=True), start=1
        ):
            print(f"{n}-grams {size} of {before}, D1 {discounts[0]:.4f}, D2 {discounts[1]:.4f}, D3+ {discounts[2]:.4f}")
        save_ngram(result.model, output)
        print(_written(output))
        if args.arpa:
            write_arpa(result.model, args.arpa)
            print(_written(args.arpa))
    if args.heldout:
        _print_perplexity(result.model, args.heldout, alphabet, args.unknown)


def _add_train(commands: Any) -> None:
    parser = add_command(commands, "train", "fit a recurrent model to texts, for decode.rescore", _train)
    parser.add_argument("text", type=Path, nargs="+", help="UTF-8, one sentence a line; - is standard input")
    parser.add_argument("--output", type=Path, required=True, help="the model file, e.g. books.safetensors")
    for kind in (RecurrentShape, TrainingSettings):  # their comments are the help
        comments = setting_comments(sys.modules[kind.__module__])
        for field in fields(kind):
            option, about = f"--{field.name.replace('_', '-')}", comments[kind.__name__, field.name]
            kind_of: Any = type(field.default)
            allowed = NumberArgument(kind_of, field.metadata[ALLOWED])
            parser.add_argument(option, type=allowed, default=field.default, help=about)
    parser.add_argument(
        "--save-minutes", type=real(0, UNLIMITED), default=5.0, metavar="M",
        help="how often OUTPUT.state, from which the same command resumes, is written; also when a signal ends "
        "the training; 0: only then",
    )  # fmt: skip
    common.add_device(parser)
    _add_text_options(parser)


def _train(args: argparse.Namespace) -> None:
    """Read the texts, train, write the model and score it; a signal ends the training early and writes the model too.

    After a stop or a kill, the same command resumes from the state file next to the model, which is removed when the
    model is complete.

    Raises:
        UserError: the model cannot be written, or another process trains it; raised before the text is read.
        CheckpointError: the state is damaged or of another training.
        Stopped: by a signal, after state and model are written.
    """
    _check_texts(args)
    alphabet = _alphabet(args, of_words=False)
    output: Path = args.output
    state_file = output.parent / f"{output.name}.state"
    check_writable(output, state_file, inputs=_inputs(args))
    with sole_writer(output):
        reader = SentenceReader(args.text, alphabet.unit, alphabet, args.unknown)
        text = TrainingText.of(reader, alphabet)
        print(f"read {reader.report()}", flush=True)
        device = resolve_device(args.device)
        torch.manual_seed(args.seed)
        shape, settings = _settings(RecurrentShape, args), _settings(TrainingSettings, args)
        model = RecurrentLM(alphabet, shape).to(device)
        parameters = sum(p.numel() for p in model.parameters())
        fixed = {f"--{name.replace('_', '-')}": value for name, value in {**asdict(shape), **asdict(settings)}.items()
                 if name not in _CHANGEABLE}  # fmt: skip
        made_of = {**fixed, "text": text.digest, "alphabet": alphabet.to_dict()}
        state = StateFile(state_file, made_of, 60 * args.save_minutes)
        resumed = f", on from {state.path}" if state.path.is_file() else ""
        print(f"training {parameters:,} parameters on {device}{resumed}", flush=True)
        with Interrupts() as interrupts:
            progress = train(model, text, settings, _show, stop=lambda: bool(interrupts.received), state=state)
            if interrupts.received and not progress.step:
                raise Stopped(interrupts.received)
            minutes = progress.elapsed_s / 60
            facts = {"epoch": progress.epoch, "step": progress.step, "minutes": minutes, "git_commit": git_commit()}
            save_recurrent(output, model, facts)
            print(f"{_written(output)}, after {counted(progress.step, 'step')} in {minutes:.1f} minutes")
            if interrupts.received:
                raise Stopped(interrupts.received)
            state.remove()
    if args.heldout:
        _print_recurrent_perplexity(model, args.heldout, args.unknown)


def _show(progress: TrainingProgress) -> None:
    print(
        f"epoch {progress.epoch}, step {progress.step}, {100 * progress.part:.0f} %: "
        f"{progress.loss / math.log(2):.3f} bits a label, {progress.tokens_per_s:,.0f} labels a second",
        flush=True,
    )


def _settings(kind: type[Any], args: argparse.Namespace) -> Any:
    return kind(**{field.name: getattr(args, field.name) for field in fields(kind)})


def _convert(args: argparse.Namespace) -> None:
    check_writable(args.output, inputs=[args.lm])
    model = load_ngram(args.lm)
    if named_arpa(args.output):
        write_arpa(model, args.output)
    else:
        save_ngram(model, args.output)
    sizes = " + ".join(str(end - start) for start, end in pairwise(model.entry_starts))
    print(f"wrote {args.output}: {sizes} n-grams of orders 1 to {model.order}")


def _ppl(args: argparse.Namespace) -> None:
    if args.lm.suffix == ".safetensors":
        _print_recurrent_perplexity(load_recurrent(args.lm), args.text, args.unknown)
        return
    model = load_ngram(args.lm)
    _print_perplexity(model, args.text, _stored_alphabet(model), args.unknown)


def _query(args: argparse.Namespace) -> None:
    model = load_ngram(args.lm)
    alphabet = _stored_alphabet(model)
    for line in sys.stdin:
        text, unknown = (line, Counter[str]()) if alphabet is None else alphabet.normalise(line)
        if model.unit == "character":
            tokens = list(text.strip())
        else:  # a word with a character that the pieces lack is one token, which the model lacks too
            spelled = ((w, None if unknown.keys() & set(w) else alphabet) for w in text.split())
            tokens = [token for word, own in spelled for token in tokenise(word, model.unit, own)]
        scores = model.sentence(tokens)
        known = ["" if token in model.ids or token == " " else " OOV" for token in tokens]
        parts = (
            f"{token!r} {score:.4f}{mark}"
            for token, score, mark in zip([*tokens, END], scores, [*known, ""], strict=True)
        )
        print(f"{sum(scores):.4f}: {', '.join(parts)}", flush=True)


def _add_tune(commands: Any) -> None:
    parser = add_command(
        commands,
        "tune",
        "alpha, beta and beam of a model on a dev set",
        _tune,
        settings=DECODER_SETTINGS,
        usage="%(prog)s MODEL LM [MANIFEST ...] [decode=NAME] [decode.KEY=VALUE ...] [options]",
        description="Find alpha, beta and the beam on a dev set, by default of decode=beam; decode.prune, "
        "decode.label_min_log_prob and decode.unknown_score stay as the model's config or the command line has them.",
    )
    common.add_model(parser)
    parser.add_argument("lm", type=Path, help="binary or ARPA")
    parser.add_argument("manifests", nargs="*", default=[], help="default: data.dev of the model's config")
    parser.add_argument("--alphas", type=_range, help=_grid_help(0))
    parser.add_argument("--betas", type=_range, help=_grid_help(1))
    parser.add_argument("--beam", type=whole(1, 1_000_000), help="while alpha and beta are tried (default decode.beam)")
    parser.add_argument("--picture", type=Path, help="the WER surface (default: MODEL-decode.png beside the model)")
    common.add_device(parser)


def _tune(args: argparse.Namespace) -> None:
    """Tune, print each trial, draw the WER surface and write the best settings next to the model."""
    file, device = find_model(args.model), resolve_device(args.device)
    if is_shipped(file):
        raise DecodeError(
            f"{args.model}: the settings of a model that comes with ds2 are not changed: copy {file.parent} and "
            "tune the copy"
        )
    loaded, lm = load_model(file, device), load_ngram(args.lm)
    options = _untuned_options(args, file, loaded)
    make_decoder(options, loaded.alphabet, loaded.frame_s, device, lm)  # raises errors before the model runs
    target = tuned_file(file)
    picture = args.picture or target.with_suffix(".png")
    check_writable(target, picture)
    with sole_writer(target):
        manifests = common.manifests_of(file, args.manifests, loaded.config.data.dev, "data.dev")
        utterances = scored_utterances(manifests, loaded.alphabet)
        recogniser = Recogniser.of(loaded, DecodeConfig(), device, "auto")
        dev = tuning.DevLogProbs.of(recogniser, utterances, loaded.config.data, lm)
        alphas, betas = map(_range, _GRID if loaded.alphabet.pronunciations is None else _PHONE_GRID)
        alphas, betas = args.alphas or alphas, args.betas or betas
        trials: list[tuning.TuningTrial] = []
        for trial in tuning.search(dev, replace(options, rescore=""), alphas, betas):
            trials.append(trial)
            print(
                f"{len(trials):3d}  alpha {trial.alpha:<6g} beta {trial.beta:<6g} beam {trial.beam:<4d} "
                f"WER {100 * trial.errors.rate:.2f} %, best {100 * tuning.choose(trials).errors.rate:.2f} %",
                flush=True,
            )
        best = tuning.choose(trials)
        tuned = replace(options, alpha=best.alpha, beta=best.beta, beam=best.beam)
        if options.rescore:
            tuned = _tune_rescoring(dev, tuned)
        slope, offset = tuning.tune_confidence(dev, tuned)
        tuned = replace(tuned, confidence=[round(slope, 4), round(offset, 4)], keyword_alarms=[])
        if tuned.method == "beam":
            tuned = _tune_keywords(dev, tuned)
        save_settings(tuned, target)
        print(
            f"wrote {target}: alpha {best.alpha:g}, beta {best.beta:g}, beam {best.beam}, confidences calibrated by "
            f"{slope:.2f} logit + {offset:.2f}; evaluate and transcribe use it"
        )
        tuning.plot(trials, best, picture)
        print(f"wrote {picture}")


def _tune_rescoring(dev: tuning.DevLogProbs, options: DecodeConfig) -> DecodeConfig:
    shares = tuning.tune_rescoring(dev, options, load_recurrent(Path(options.rescore), dev.device))
    for share, errors in shares:
        print(f"recurrent model's share {share:g}: WER {100 * errors.rate:.2f} %", flush=True)
    share, _ = min(shares, key=lambda pair: pair[1].errors)
    return replace(options, rescore=str(Path(options.rescore).resolve()), rescore_weight=share)


def _tune_keywords(dev: tuning.DevLogProbs, options: DecodeConfig) -> DecodeConfig:
    keywords = tuning.tune_keywords(dev, replace(options, rescore=""))
    for keyword in keywords:
        print(
            f"keywords, bonus {keyword.bonus:g}: {100 * keyword.recall:.1f} % found, {keyword.alarms:.3g} false "
            "alarms an hour of each",
            flush=True,
        )
    return replace(options, keyword_alarms=[float(f"{keyword.alarms:.3g}") for keyword in keywords])


def _untuned_options(args: argparse.Namespace, file: Path, loaded: LoadedModel) -> DecodeConfig:
    """Return the settings that the trials begin with: those of the command line, with a method that has weights."""
    options = resolve_options(args.overrides, file, loaded.config, tuned=False)
    if "alpha" not in METHODS[options.method].options:
        if any(override.split("=")[0] in ("decode", "decode.method") for override in args.overrides):
            raise DecodeError(
                f"decode.method={options.method} has no weights to tune: take decode=beam or decode=native"
            )
        options = replace(options, method="beam")
    return replace(options, lm=str(args.lm.resolve()), beam=args.beam or options.beam)


def _range(text: str) -> list[float]:
    try:
        low, high, count = (float(part) for part in text.split(":"))
    except ValueError:
        low = high = count = math.nan
    if not (-_LIMIT <= low <= high <= _LIMIT and 1 <= count <= _MAX_VALUES and count == int(count)):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not LOW:HIGH:COUNT with -{_LIMIT:g} <= LOW <= HIGH <= {_LIMIT:g} and a COUNT from 1 to "
            f"{_MAX_VALUES}"
        )
    return torch.linspace(low, high, int(count), dtype=torch.float64).tolist()


def _grid_help(axis: int) -> str:
    return f"LOW:HIGH:COUNT (default {_GRID[axis]}, for a network of phones {_PHONE_GRID[axis]})"


def _add_text_options(parser: argparse.ArgumentParser) -> None:
    defaults = AlphabetConfig()
    parser.add_argument(
        "--heldout", type=Path, nargs="+", default=[], metavar="TEXT", help="print perplexity and OOV rate of this text"
    )
    parser.add_argument(
        "--model", type=Path, help="normalise as this network's alphabet does (model file or run folder)"
    )
    parser.add_argument(
        "--symbols", default=defaults.symbols, help=f"the alphabet without --model (default {defaults.symbols!r})"
    )
    parser.add_argument(
        "--pieces", type=Path,
        help="byte-pair pieces of these symbols, of `ds2 data pieces`, or a .model of sentencepiece",
    )  # fmt: skip
    parser.add_argument("--case", choices=("lower", "upper", "keep"), default=defaults.case, help="(default lower)")
    parser.add_argument("--replace", nargs="+", default=[], metavar="OLD=NEW", help="applied first, longest first")
    _add_unknown(parser)


def _add_unknown(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--unknown", choices=("skip", "drop", "stop"), default="skip",
                         help="what becomes of characters outside the alphabet: skip the line (default), drop them "
                              "or stop; always counted and reported")  # fmt: skip


def _alphabet(args: argparse.Namespace, *, of_words: bool) -> Alphabet:
    if args.model and args.pieces:
        raise LanguageModelError(
            "--pieces and --model exclude each other: the alphabet of the network has its own labels"
        )
    if args.model:
        alphabet = load_model(args.model).alphabet
        if alphabet.pronunciations is not None and not of_words:
            raise LanguageModelError(
                f"--model {args.model}: this network writes phones, and texts have letters: leave --model out "
                "(--symbols, --case and --replace say how texts are normalised), or take `ds2 lm build --unit word`"
            )
        return alphabet
    replacements = {}
    for pair in args.replace:
        old, equals, new = pair.partition("=")
        if not old or not equals:
            raise LanguageModelError(f"--replace {pair!r} is not OLD=NEW")
        replacements[old] = new
    pieces = read_pieces(args.pieces) if args.pieces else []
    return Alphabet.from_config(AlphabetConfig(args.symbols, args.case, replacements, pieces=pieces))


def _stored_alphabet(model: NGram) -> Alphabet | None:
    alphabet = None if model.alphabet is None else Alphabet.from_dict(model.alphabet)
    if alphabet is not None and alphabet.pronunciations is not None and model.unit != "word":
        raise LanguageModelError(
            "the language model is one of phones, as train.objective=ctc_crf makes it, and texts have letters: name a "
            "model of words, characters or pieces"
        )
    return alphabet


def _inputs(args: argparse.Namespace) -> list[Path]:
    """The files that `build` and `train` read."""
    inputs = [*args.text, *args.heldout, *filter(None, [args.pieces])]
    if args.model:
        inputs.append(find_model(args.model))
    return inputs


def _check_texts(args: argparse.Namespace) -> None:
    """Refuse texts that are missing, and standard input twice; warn of held-out texts that the model is made of.

    Raises:
        LanguageModelError: names them.
    """
    missing = [str(path) for path in (*args.text, *args.heldout) if path != STANDARD_INPUT and not path.is_file()]
    if missing:
        raise LanguageModelError(f"there is no text {', '.join(missing)}: name files, or - for standard input")
    if [*args.text, *args.heldout].count(STANDARD_INPUT) > 1:
        raise LanguageModelError("standard input (-) can be read once: give it once, and files for other texts")
    own = {path.resolve() for path in args.text if path != STANDARD_INPUT}
    for path in args.heldout:
        if path.resolve() in own:
            log.warning("%s is held out and also a text of the model: its perplexity says nothing about others", path)


def _refuse_repeated(texts: Sequence[Path]) -> None:
    """Raise LanguageModelError for a text that is listed twice.

    Kneser-Ney takes its discounts from how many n-grams were seen once or twice.
    """
    first: dict[Path, Path] = {}
    for path in texts:
        if path.resolve() in first:
            raise LanguageModelError(
                f"{path} is the same text as {first[path.resolve()]}: each of its n-grams would count twice, which "
                "spoils the discounts of those seen once. Name each text once"
            )
        first[path.resolve()] = path


def _written(path: Path) -> str:
    return f"wrote {path}, {path.stat().st_size / 2**20:.1f} MiB"


def _print_perplexity(model: NGram, texts: Sequence[Path], alphabet: Alphabet | None, unknown: str) -> None:
    reader = SentenceReader(texts, model.unit, alphabet, unknown)
    result = perplexity(model, reader)
    print(f"held out: {reader.report()}\n{result.format()}")


def _print_recurrent_perplexity(model: RecurrentLM, texts: Sequence[Path], unknown: str) -> None:
    reader = SentenceReader(texts, "word", model.alphabet, unknown)
    lines = [" ".join(words) for words in reader]
    nats = -sum(model.score(lines))
    labels = sum(len(model.alphabet.spell(line)) for line in lines) + len(lines)
    a_word = torch.tensor(nats / (reader.tokens + len(lines)), dtype=torch.float64).exp()  # infinite where math fails
    print(
        f"held out: {reader.report()}\nperplexity {a_word:.6g} a word, of any spelling, "
        f"{nats / labels / math.log(2):.3f} bits a label"
    )
