"""The demo behind `make demo`: train on AN4 where a copy is found, else on a corpus made here; then a WER report."""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from dispatch import variables_of_ranks

from ds2.cli import let_waiting_threads_sleep
from ds2.cli import main as ds2
from ds2.data.corpora.layouts import AN4_SOURCE
from ds2.system import USER_ERROR
from ds2.system.machine import usable_cores
from ds2.system.signals import die_with_parent

ROOT = Path(__file__).resolve().parent.parent
_ENDS_S = 30.0  # a rank ends by itself within this time after the other has ended


def find_an4(folder: str) -> Path | None:
    """The AN4 folder (with etc/ and wav/) that the user named, or one in or beside the checkout; None without one."""
    named = folder or os.environ.get("DS2_AN4", "")
    candidates = [Path(named)] if named else [ROOT / "an4", ROOT.parent / "an4"]
    corpus = next((path for path in candidates if (path / "etc" / "an4_train.fileids").is_file()), None)
    if named and corpus is None:
        sys.exit(
            f"demo: {'' if folder else 'DS2_AN4='}{named} is not an AN4 folder: it has no etc/an4_train.fileids. Name "
            f"the folder that holds etc/ and wav/, or none for a synthesised corpus. To get AN4: {AN4_SOURCE}"
        )
    return corpus


def train(command: Sequence[str]) -> int:
    """Run a ds2 command and return its status: on two ranks, of which this process is rank 0, or on one.

    Each computes half of every batch. Two threads of one process train little faster than one: most operations of
    so small a network are too short to be divided. A GPU, or a single core, stays with one process.
    """
    let_waiting_threads_sleep()
    import torch

    if torch.cuda.is_available() or usable_cores() < 2:
        return ds2(command)
    own, others = variables_of_ranks(2)
    others["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # no warnings of Gloo after the end of rank 0
    # Rank 0 may end by _exit, without the lines below, on an error that both have.
    other = subprocess.Popen(
        [sys.executable, "-m", "ds2.cli", *command],
        env=os.environ | others,
        preexec_fn=die_with_parent,  # noqa: PLW1509 - takes no lock
    )
    os.environ.update(own)
    status = 0
    try:
        status = ds2(command)
        return status
    finally:
        if status != USER_ERROR:  # launchers end the other ranks at once too: they would print the same message
            with suppress(subprocess.TimeoutExpired):
                other.wait(_ENDS_S)
        other.kill()  # without effect on a process that has ended
        for name in own:
            del os.environ[name]


def main() -> int:
    """Train, evaluate, and say where everything lies."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--an4", default="", help="folder of the AN4 corpus, with etc/ and wav/")
    parser.add_argument("--run-dir", default="", help="run folder (default: runs/<recipe>); reuse one to resume it")
    parser.add_argument("overrides", nargs="*", help="further settings, e.g. train.epochs=2")
    options = parser.parse_args()
    os.chdir(ROOT)
    an4 = find_an4(options.an4)
    recipe = "an4_demo" if an4 else "synthetic"
    run_dir = options.run_dir or f"runs/{recipe}"
    print(
        f"demo: AN4 in {an4}"
        if an4
        else f"demo: no copy of AN4 (make demo AN4=FOLDER); using a synthesised corpus. To get AN4: {AN4_SOURCE}"
    )
    began = time.monotonic()
    overrides = [f"recipe={recipe}", f"run_dir={run_dir}", *([f"data.corpus={an4}"] if an4 else []), *options.overrides]
    status = train(["train", *overrides]) or ds2(["evaluate", run_dir])
    if status:
        return status
    print(f"""
demo: finished in {(time.monotonic() - began) / 60:.1f} minutes
  model        {run_dir}/best.safetensors
  report       the WER above is that of the test set, greedy; aligned errors lie beside the model
  TensorBoard  .venv/bin/tensorboard --logdir {run_dir}/tensorboard
  transcribe   .venv/bin/ds2 transcribe {run_dir} some.wav""")
    return 0


if __name__ == "__main__":
    sys.exit(main())
