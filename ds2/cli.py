"""One command, `ds2`: every way in for people and CI."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from ds2 import __version__

_USER_ERROR = 2

_USAGE = """\
usage: ds2 COMMAND [...]

  train [OVERRIDE...] [--multirun]   train, or resume the run folder: ds2 train recipe=an4 model.depth=8
  info [OVERRIDE...]                 layers, parameters, lookahead and memory: ds2 info model=rnn_48_skip_4
  evaluate MODEL [MANIFEST...]       WER report of a run folder or model file
  wer REFERENCES HYPOTHESES [B]      the same report for two texts or manifests, and whether a second system is better
  transcribe MODEL FILE...           audio files to text or JSON
  align MODEL MANIFEST...            word times of transcripts, and the transcripts that are probably wrong
  data check [OVERRIDE...]           read everything before training; the exit status says whether it may start
  data prepare [OVERRIDE...]         write the manifests of a recipe
  data import FORMAT FOLDER OUT      corpus layout to manifest
  data export-kaldi MANIFEST FOLDER  manifest to Kaldi data folder
  lm build | convert | ppl | query   n-gram language models: ds2 lm build TEXT... --output books.lm
  lm tune MODEL LM [MANIFEST...]     alpha, beta and beam on a dev set; evaluate and transcribe pick them up
  doctor                             what this machine has: versions, devices, backends

OVERRIDE is Hydra's KEY=VALUE or GROUP=CHOICE; --config-dir DIR adds your own recipes. `ds2 COMMAND --help` says more.
"""


def _with_search_path(arguments: Sequence[str]) -> list[str]:
    """Turn `--config-dir DIR` into the Hydra override that both our check and the run understand."""
    remaining, folders = [], []
    pending = iter(arguments)
    for argument in pending:
        if argument in ("--config-dir", "-cd"):
            folders.append(next(pending, ""))
        elif argument.startswith("--config-dir="):
            folders.append(argument.split("=", 1)[1])
        else:
            remaining.append(argument)
    for folder in folders:
        if not Path(folder).is_dir():
            raise FileNotFoundError(f"--config-dir {folder!r} is not a folder")
    if folders:
        remaining.append(f"hydra.searchpath=[{','.join('file://' + str(Path(f).resolve()) for f in folders)}]")
    return remaining


def _train(arguments: Sequence[str]) -> int:
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode
    from omegaconf import DictConfig

    from ds2.commands.compose import PRIMARY_CONFIG, compose_config, config_dir, first_of_sweep, read_config, register

    arguments = _with_search_path(arguments)
    arguments.sort(key=lambda argument: argument in ("-m", "--multirun"))  # Hydra wants its overrides in one piece
    compose_config(first_of_sweep([a for a in arguments if not a.startswith("-")]))
    statuses: list[int] = []

    def job(composed: DictConfig) -> None:
        from ds2.training.loop import train

        config = read_config(composed)
        sweep = HydraConfig.get().mode == RunMode.MULTIRUN
        run_dir = Path(HydraConfig.get().runtime.output_dir if sweep else config.run_dir)
        config.run_dir = str(run_dir)
        statuses.append(_report_errors(lambda: train(config, run_dir)))

    register()
    sys.argv = ["ds2 train", *arguments]
    hydra.main(config_path=str(config_dir()), config_name=PRIMARY_CONFIG, version_base="1.3")(job)()
    return max(statuses, default=0)


def _info(arguments: Sequence[str]) -> int:
    from ds2.audio.features import Features
    from ds2.commands.compose import compose_config
    from ds2.model.acoustic import AcousticModel
    from ds2.model.summary import summary
    from ds2.text.alphabet import Alphabet

    config = compose_config(_with_search_path(arguments))
    features = Features(config.features, config.data.sample_rate_hz)
    labels = len(Alphabet.from_config(config.alphabet))
    print(summary(AcousticModel(config.model, features.bins, labels, config.features.step_s)))
    return 0


def _data(arguments: Sequence[str]) -> int:
    from ds2.data_commands import run

    return run(_with_search_path(arguments))


def _evaluate(arguments: Sequence[str]) -> int:
    from ds2.recognition.evaluate import run

    return run(arguments)


def _transcribe(arguments: Sequence[str]) -> int:
    from ds2.recognition.transcribe import run

    return run(arguments)


def _align(arguments: Sequence[str]) -> int:
    from ds2.recognition.transcripts import run

    return run(arguments)


def _lm(arguments: Sequence[str]) -> int:
    from ds2.lm_commands import run

    return run(arguments)


def _wer(arguments: Sequence[str]) -> int:
    from ds2.commands.wer import run

    return run(arguments)


def _doctor(arguments: Sequence[str]) -> int:
    from ds2.doctor import run

    return run()


_COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "train": _train,
    "info": _info,
    "evaluate": _evaluate,
    "transcribe": _transcribe,
    "data": _data,
    "align": _align,
    "lm": _lm,
    "wer": _wer,
    "doctor": _doctor,
}


def _report_errors(action: Callable[[], int]) -> int:
    """Run `action`; errors that a user can mend become one message and status 2, others keep their traceback."""
    from ds2.distributed.launch import yield_to_rank_0
    from ds2.system.errors import UserError

    try:
        return action()
    except (UserError, OSError) as error:
        yield_to_rank_0()
        print(f"ds2: {error}", file=sys.stderr)
        return _USER_ERROR
    except KeyboardInterrupt:
        print("ds2: interrupted", file=sys.stderr)
        return 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point: 0 on success, 2 for a mistake that the user can mend, 128 + n when signal n stopped it."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_USAGE, end="")
        return 0 if arguments else _USER_ERROR
    if arguments[0] == "--version":
        print(f"ds2 {__version__}")
        return 0
    command = _COMMANDS.get(arguments[0])
    if command is None:
        print(f"ds2: unknown command {arguments[0]!r}; one of {', '.join(_COMMANDS)}", file=sys.stderr)
        return _USER_ERROR
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    return _report_errors(lambda: command(arguments[1:]))


if __name__ == "__main__":
    sys.exit(main())
