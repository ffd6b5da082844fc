"""The command `ds2`: finds the module of a command and runs it."""

import atexit
import logging
import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module

from ds2.system import USER_ERROR
from ds2.system.machine import VERSION, quick_imports, skip_last_collection
from ds2.system.plain import did_you_mean
from ds2.system.signals import default_signals
from ds2.system.terminal import VisibleFormatter, open_missing_streams, safe_output

_USAGE = """\
usage: ds2 COMMAND [...]

  init FOLDER                        a folder with a recipe of your own and a page of three commands
  train [OVERRIDE...] [--multirun]   train, or resume the run folder: ds2 train recipe=an4 model.depth=8
                                     fine-tune: checkpoint.init_from=MODEL; all keys: ds2 train --help
  info MODEL                         the content of a model file or run folder
  info [OVERRIDE...]                 layers, parameters, lookahead and memory: ds2 info model=rnn_48_skip_4
  evaluate MODEL [MANIFEST...]       WER report of a run folder or model file
  wer REFERENCES HYPOTHESES [B]      the same report for two texts or manifests, and whether a second system is better
  transcribe [MODEL] FILE...         audio files to text, JSON or captions
  serve [MODEL]                      live recognition: a page, and the protocols of OpenAI, Deepgram, Vosk, sherpa-onnx
                                     and Wyoming
  listen [MODEL]                     live recognition of this machine's microphone
  models [NAME]                      the models that come with ds2, and how good they are
  export MODEL --to onnx|torch       a streaming model in one file, for sherpa-onnx on phones, ONNX Runtime or torch
  align MODEL MANIFEST...            word times of transcripts, and the transcripts that are probably wrong
  data check [OVERRIDE...]           read everything before training; the exit status says whether it may start
  data prepare [OVERRIDE...]         write the manifests of a recipe
  data import FORMAT FOLDER OUT      corpus layout to manifest
  data stats MANIFEST...             hours, speakers, durations and pace
  data split MANIFEST... --out DIR   train, dev and test by speaker
  data filter MANIFEST OUT           the utterances that meet conditions
  data shards MANIFEST... FOLDER     tar files with indices (WebDataset), for corpora larger than a cache
  data alphabet MANIFEST...          the characters of transcripts as an alphabet
  data normalise TEXT...             a text as an alphabet normalises it
  data pieces FILE [OVERRIDE...]     byte-pair pieces of the training transcripts, instead of characters
  data lexicon FILE --dictionary D   pronunciations: the network writes phones, a search finds the words
  data splice FOLDER MANIFEST...     speech that says a text, made of pieces of recordings, to train with
  data export-kaldi MANIFEST FOLDER  manifest to Kaldi data folder
  lm build | convert | ppl | query   n-gram language models: ds2 lm build TEXT... --output books.lm
  lm train TEXT... --output FILE     a recurrent language model, which ranks hypotheses again (decode.rescore)
  lm tune MODEL LM [MANIFEST...]     alpha, beta and beam on a dev set; evaluate and transcribe pick them up
  completion bash|zsh|fish           a script with which the Tab key completes commands, options, recipes and keys
  version                            version and commit
  doctor                             versions, devices and backends of this machine

MODEL is a model file, a run folder or a name of `ds2 models`; where it may be left out, english.
OVERRIDE is Hydra's KEY=VALUE or GROUP=CHOICE; --config-dir DIR adds your own recipes. `ds2 COMMAND --help` says more.
"""

COMMANDS = ("init", "train", "info", "evaluate", "wer", "transcribe", "serve", "listen", "models", "export", "align",
            "data", "lm", "completion", "version", "doctor")  # fmt: skip
"""Each is a module of `ds2.commands` with `run(arguments) -> status`, None for 0, imported when it is called."""
_SPINS = "1000"  # of a waiting OpenMP thread before it sleeps; the default is 300,000: docs/results/accuracy.md


def let_waiting_threads_sleep() -> None:
    """Leave cores to others where OpenMP's threads wait, unless the user says how; read when torch is imported."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return 0 on success, 2 for a user error, 128 + n if signal n stopped it."""
    open_missing_streams()
    if arguments is None and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # else Ctrl-C at Python's end prints a traceback
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_USAGE, end="")
        return 0 if arguments else USER_ERROR
    if arguments[0] == "--version":
        print(f"ds2 {VERSION}")
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        hint = did_you_mean(name, COMMANDS, cutoff=0.5)
        listed = f"{hint} There are" if hint else "; one of"
        print(f"ds2: unknown command {name!r}{listed} {', '.join(COMMANDS)}", file=sys.stderr)
        return USER_ERROR
    let_waiting_threads_sleep()
    atexit.register(skip_last_collection)
    terminal = logging.StreamHandler()
    terminal.setFormatter(VisibleFormatter("%(asctime)s %(message)s", datefmt="%H:%M:%S"))
    logging.basicConfig(level=logging.INFO, handlers=[terminal])
    with default_signals():
        from ds2.commands.common import report_errors
        from ds2.distributed.launcher import launched

        if launched().rank:
            terminal.setLevel(logging.ERROR)  # rank 0 says the same; `ds2 train` logs each rank to a file

    def run() -> int:
        with default_signals(), quick_imports():
            command = import_module(f"ds2.commands.{name}")
        status: int | None = command.run(rest)
        return status or 0

    with safe_output():
        return report_errors(run)


if __name__ == "__main__":
    sys.exit(main())
