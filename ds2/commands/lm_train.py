"""`ds2 lm train`: a recurrent language model of texts, for rescoring."""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch

from ds2.commands.common import NumberArgument, real
from ds2.config.allowed import KEY, UNLIMITED
from ds2.config.convert import setting_comments
from ds2.config.device import resolve_device
from ds2.lm.ngram import LanguageModelError
from ds2.lm.recurrent import RecurrentLM, RecurrentShape, save_recurrent
from ds2.lm.recurrent_training import StateFile, TrainingProgress, TrainingSettings, TrainingText, train
from ds2.lm.sentences import SentenceReader
from ds2.system.files import check_writable
from ds2.system.machine import git_commit
from ds2.system.signals import Stopped
from ds2.text.alphabet import Alphabet
from ds2.training.stopping import Interrupts

_FREE = ("epochs", "max_minutes", "learning_rate", "warmup_steps", "weight_decay")  # may change when a training resumes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `ds2 lm train` other than those of the alphabet; comments of the settings are their help."""
    for kind in (RecurrentShape, TrainingSettings):
        comments = setting_comments(sys.modules[kind.__module__])
        for field in fields(kind):
            kind_of: Any = type(field.default)
            parser.add_argument(
                f"--{field.name.replace('_', '-')}",
                type=NumberArgument(kind_of, field.metadata[KEY]),
                default=field.default,
                help=comments[kind.__name__, field.name],
            )
    parser.add_argument(
        "--save-minutes", type=real(0, UNLIMITED), default=5.0, metavar="M",
        help="how often OUTPUT.state, from which the same command resumes, is written; also when a signal ends "
        "the training; 0: only then",
    )  # fmt: skip
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N")


def run(arguments: argparse.Namespace, alphabet: Alphabet) -> int:
    """Read the texts, train, write the model and score it; a signal ends the training early and writes the model too.

    After a stop or a kill, the same command resumes from the state file next to the model.

    Raises:
        UnwritableError: the model cannot be written; raised before the text is read.
        CheckpointError: the state is damaged or of another training.
        Stopped: by a signal, after state and model are written.
    """
    output: Path = arguments.output
    check_writable(output, state_file(output))
    reader = SentenceReader(arguments.text, alphabet.unit, alphabet, arguments.unknown)
    text = TrainingText.of(reader, alphabet)
    print(f"read {reader.report()}", flush=True)
    device = resolve_device(arguments.device)
    torch.manual_seed(arguments.seed)
    shape, settings = _settings(RecurrentShape, arguments), _settings(TrainingSettings, arguments)
    model = RecurrentLM(alphabet, shape).to(device)
    parameters = sum(p.numel() for p in model.parameters())
    fixed = {f"--{name.replace('_', '-')}": value for name, value in {**asdict(shape), **asdict(settings)}.items()
             if name not in _FREE}  # fmt: skip
    made_of = {**fixed, "text": text.digest, "alphabet": alphabet.to_dict()}
    state = StateFile(state_file(output), made_of, 60 * arguments.save_minutes)
    goes_on = f", on from {state.path}" if state.path.is_file() else ""
    print(f"training {parameters:,} parameters on {device}{goes_on}", flush=True)
    with Interrupts() as interrupts:
        passed = train(model, text, settings, _show, stop=lambda: bool(interrupts.received), state=state)
        if interrupts.received and not passed.step:
            raise Stopped(interrupts.received)
        minutes = passed.elapsed_s / 60
        facts = {"epoch": passed.epoch, "step": passed.step, "minutes": minutes, "git_commit": git_commit()}
        save_recurrent(output, model, facts)
        size_mib = output.stat().st_size / 2**20
        print(f"wrote {output}, {size_mib:.1f} MiB, after {passed.step} steps in {minutes:.1f} minutes")
        if interrupts.received:
            raise Stopped(interrupts.received)
        state.remove()
    if arguments.heldout:
        print_perplexity(model, arguments.heldout)
    return 0


def state_file(output: Path) -> Path:
    """Return the file of the training state, which is removed when the model is complete."""
    return output.parent / f"{output.name}.state"


def print_perplexity(model: RecurrentLM, texts: list[Path]) -> None:
    """Print the perplexity of texts per word and per label; of manifests, the transcripts are used.

    Raises:
        LanguageModelError: an empty text, or characters that the model does not know.
    """
    reader = SentenceReader(texts, "word", None)
    lines = [" ".join(words) for words in reader]
    if not lines:
        raise LanguageModelError("the text to score is empty: no line holds a word")
    lines = [model.alphabet.normalise(line)[0] for line in lines]
    log_prob, words = sum(model.score(lines)), sum(len(line.split()) for line in lines)
    labels = sum(len(model.alphabet.spell(line)) for line in lines) + len(lines)
    print(
        f"held out: {len(lines)} lines, {words} words: perplexity {math.exp(-log_prob / (words + len(lines))):.2f} a "
        f"word, of any spelling, {-log_prob / labels / math.log(2):.3f} bits a label"
    )


def _show(passed: TrainingProgress) -> None:
    print(
        f"epoch {passed.epoch}, step {passed.step}, {100 * passed.part:.0f} %: {passed.loss / math.log(2):.3f} bits a "
        f"label, {passed.tokens_per_s:,.0f} labels a second",
        flush=True,
    )


def _settings(kind: type[Any], arguments: argparse.Namespace) -> Any:
    return kind(**{field.name: getattr(arguments, field.name) for field in fields(kind)})
