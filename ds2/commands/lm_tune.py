"""`ds2 lm tune`: tune alpha, beta and the beam on a dev set, and write the best values next to the model."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch

from ds2.commands.common import manifests_of, whole
from ds2.commands.compose import resolve_options
from ds2.config.device import resolve_device
from ds2.config.schema import DecodeConfig
from ds2.data.splits import scored_utterances
from ds2.decoding.hypothesis import DecodeError
from ds2.decoding.methods import METHODS, make_decoder
from ds2.lm.files import load_ngram
from ds2.lm.recurrent import load_recurrent
from ds2.model.checkpoint import LoadedModel, find_model, load_model
from ds2.model.shipped import is_shipped
from ds2.recognition.evaluate import recognition_loader
from ds2.recognition.recogniser import Recogniser
from ds2.recognition.settings import save_settings, tuned_file
from ds2.recognition.tuning import (
    DevLogProbs,
    TuningTrial,
    choose,
    draw,
    search,
    tune_confidence,
    tune_keywords,
    tune_rescoring,
)
from ds2.system.files import check_writable

_LIMIT, _MAX_VALUES = 1e6, 1000  # of decode.alpha and decode.beta
_GRID = ("0:1.6:5", "0:3:4")  # of alpha and beta
_PHONE_GRID = ("0.4:1.6:4", "0:1:3")  # words of one sound need the model (alpha 0 cannot tell them apart), few a bonus


def _range(text: str) -> list[float]:
    low, high, count = (float(part) for part in text.split(":"))
    if not (-_LIMIT <= low <= high <= _LIMIT and 1 <= count <= _MAX_VALUES and count == int(count)):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not LOW:HIGH:COUNT with -{_LIMIT:g} <= LOW <= HIGH <= {_LIMIT:g} and a COUNT from 1 to "
            f"{_MAX_VALUES}"
        )
    return torch.linspace(low, high, int(count), dtype=torch.float64).tolist()


def _grid_help(axis: int) -> str:
    return f"LOW:HIGH:COUNT (default {_GRID[axis]}, for a network of phones {_PHONE_GRID[axis]})"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `ds2 lm tune`."""
    parser.add_argument("model", type=Path, help="model file or run folder")
    parser.add_argument("lm", type=Path, help="binary or ARPA")
    parser.add_argument("manifests", nargs="*", default=[], help="default: data.dev of the model's config")
    parser.add_argument("--alphas", type=_range, help=_grid_help(0))
    parser.add_argument("--betas", type=_range, help=_grid_help(1))
    parser.add_argument("--beam", type=whole(1, 1_000_000), help="while alpha and beta are tried (default decode.beam)")
    parser.add_argument("--picture", type=Path, help="the WER surface (default: MODEL-decode.png beside the model)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Tune, print each trial, draw the WER surface and write the best settings next to the model."""
    file, device = find_model(arguments.model), resolve_device(arguments.device)
    if is_shipped(file):
        raise DecodeError(
            f"{arguments.model}: the settings of a model that comes with ds2 are not changed: copy {file.parent} and "
            "tune the copy"
        )
    loaded, lm = load_model(file, device), load_ngram(arguments.lm)
    options = _options(arguments, file, loaded)
    make_decoder(options, loaded.alphabet, loaded.frame_s, device, lm)  # raises errors before the model runs
    target = tuned_file(file)
    picture = arguments.picture or target.with_suffix(".png")
    check_writable(target, picture)
    manifests = manifests_of(file, arguments.manifests, loaded.config.data.dev, "data.dev")
    utterances = scored_utterances([str(path) for path in manifests], loaded.alphabet)
    recogniser = Recogniser.of(loaded, DecodeConfig(), device, "auto")
    batches = recogniser.logits(recognition_loader(utterances, loaded.config.data, device))
    references = [loaded.alphabet.normalise(u.text)[0] for u in utterances]
    dev = DevLogProbs.of(batches, references, loaded.frame_s, loaded.alphabet, lm, device)
    alphas, betas = map(_range, _GRID if loaded.alphabet.pronunciations is None else _PHONE_GRID)
    alphas, betas = arguments.alphas or alphas, arguments.betas or betas
    trials: list[TuningTrial] = []
    for trial in search(dev, replace(options, rescore=""), alphas, betas):
        trials.append(trial)
        print(
            f"{len(trials):3d}  alpha {trial.alpha:<6g} beta {trial.beta:<6g} beam {trial.beam:<4d} "
            f"WER {100 * trial.errors.rate:.2f} %, best {100 * choose(trials).errors.rate:.2f} %",
            flush=True,
        )
    best = choose(trials)
    tuned = replace(options, alpha=best.alpha, beta=best.beta, beam=best.beam)
    if options.rescore:
        shares = tune_rescoring(dev, tuned, load_recurrent(Path(options.rescore), device))
        for share, errors in shares:
            print(f"recurrent model's share {share:g}: WER {100 * errors.rate:.2f} %", flush=True)
        share, _ = min(shares, key=lambda pair: pair[1].errors)
        tuned = replace(tuned, rescore=str(Path(options.rescore).resolve()), rescore_weight=share)
    slope, offset = tune_confidence(dev, tuned)
    tuned = replace(tuned, confidence=[round(slope, 4), round(offset, 4)], keyword_alarms=[])
    if tuned.method == "beam":
        keywords = tune_keywords(dev, replace(tuned, rescore=""))
        for keyword in keywords:
            print(
                f"keywords, bonus {keyword.bonus:g}: {100 * keyword.recall:.1f} % found, {keyword.alarms:.3g} false "
                "alarms an hour of each",
                flush=True,
            )
        tuned = replace(tuned, keyword_alarms=[float(f"{keyword.alarms:.3g}") for keyword in keywords])
    save_settings(tuned, target)
    print(
        f"wrote {target}: alpha {best.alpha:g}, beta {best.beta:g}, beam {best.beam}, confidences calibrated by "
        f"{slope:.2f} logit + {offset:.2f}; evaluate and transcribe use it"
    )
    draw(trials, best, picture)
    print(f"wrote {picture}")
    return 0


def _options(arguments: argparse.Namespace, file: Path, loaded: LoadedModel) -> DecodeConfig:
    """Return the settings that the trials begin with: those of the command line, with a method that has weights."""
    options = resolve_options(arguments.overrides, file, loaded.config, tuned=False)
    if "alpha" not in METHODS[options.method].options:
        if any(override.split("=")[0] in ("decode", "decode.method") for override in arguments.overrides):
            raise DecodeError(
                f"decode.method={options.method} has no weights to tune: take decode=beam or decode=native"
            )
        options = replace(options, method="beam")
    return replace(options, lm=str(arguments.lm.resolve()), beam=arguments.beam or options.beam)
