"""Time training steps of several source trees in turns on one device, which shows differences of some per cent.

    git worktree add ../before main~3
    python tools/bench.py turns --tree ../before . --model rnn_48_skip_4 --batch 4 64

Each tree trains in a process of its own, from its own sources; while one takes steps the others wait. Prints for each
tree the median over turns of the mean step, the range, its ratio to the first tree's, the peak of memory, the loss, and
whether all gradients equal the first tree's bit for bit: the learning rate is 0, so that every step computes the same
ones. `--steps` is the number of steps in a turn; the other options are those of `bench.py training`.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from benchmarks.common import Table, write_noise
from benchmarks.training import add_training_options, open_trainer, training_overrides

from ds2.training.optim import set_learning_rate

_MARK = "turn: "  # lines of the worker's output that are messages
COLUMNS = {
    "model": "{model}", "batch": "{batch}", "graphs": "{graphs}", "step ms": "{step_ms:.2f}",
    "range": "{least_ms:.2f}-{most_ms:.2f}", "ratio": "{ratio:.3f}", "GiB": "{peak_gib:.2f}",
    "gradients": "{gradients}", "loss": "{loss:.6g}", "tree": "{tree}",
}  # fmt: skip


class Tree:
    """A source tree with a process that trains from it.

    Args:
        path: of the tree.
        options: of the worker: model, batch, folder, ...
    """

    def __init__(self, path: Path, options: dict[str, Any]) -> None:
        self.path, self.times_ms = path, list[float]()
        sources = os.pathsep.join([str(path), str(path / "ops"), os.environ.get("PYTHONPATH", "")])
        self._process = subprocess.Popen(
            [sys.executable, *_worker(path), "--worker", json.dumps(options)],
            env={**os.environ, "PYTHONPATH": sources}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.facts: dict[str, Any] = {}

    def wait_until_ready(self) -> None:
        """Wait until the process has warmed up, which all trees may do at the same time."""
        self.facts = self._answer()
        if not Path(self.facts["source"]).is_relative_to(self.path):
            raise SystemExit(f"{self.path}: its process imported {self.facts['source']} instead")

    def take_turn(self) -> None:
        """Take the steps of a turn."""
        assert self._process.stdin is not None
        print("go", file=self._process.stdin, flush=True)
        self.times_ms.append(self._answer()["ms"])

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(_MARK):
                answer: dict[str, Any] = json.loads(line.removeprefix(_MARK))
                return answer
        raise SystemExit(f"{self.path}: its process ended with status {self._process.wait()}; its error is above")


def _worker(tree: Path) -> list[str]:
    """The tool of the tree itself, which fits its trainer, or else this one."""
    own = tree / "tools" / "bench.py"
    return [str(own if own.is_file() else Path(__file__).parents[1] / "bench.py"), "turns"]


def work(options: argparse.Namespace) -> None:
    """Warm up, then take the steps of a turn for each line of standard input."""
    folder = Path(options.folder)
    folder.mkdir(parents=True)
    write_noise(folder, options.batch, options.duration, options.characters)
    overrides = training_overrides(options.model, options.batch, options.graphs, options, folder)
    trainer, step = open_trainer(overrides, options.batch)
    on_gpu = trainer.device.type == "cuda"
    for _ in range(options.warmup):
        step()
    set_learning_rate(trainer.optimizer, 0.0)
    loss = step()
    digest = hashlib.sha256()
    for bucket in trainer.gradients.buckets:
        digest.update(bucket.cpu().numpy().tobytes())
    _send({"loss": loss, "bits": digest.hexdigest(), "source": sys.modules[type(trainer).__module__].__file__})
    for _ in sys.stdin:
        if on_gpu:
            torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(options.steps):
            step()
        if on_gpu:
            torch.cuda.synchronize()
        _send({"ms": 1000 * (time.perf_counter() - began) / options.steps})


def _send(message: dict[str, Any]) -> None:
    if torch.cuda.is_available():
        message["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    print(_MARK + json.dumps(message), flush=True)


def main(arguments: list[str]) -> int:
    """Start a process a tree and let them take turns; or be such a process."""
    if arguments[:1] == ["--worker"]:
        work(argparse.Namespace(**json.loads(arguments[1])))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", nargs="+", type=Path, required=True, help="folders; ratios are to the first one's")
    parser.add_argument("--turns", type=int, default=5)
    add_training_options(parser)
    options = parser.parse_args(arguments)
    for tree in options.tree:
        if not (tree / "ds2" / "training" / "trainer.py").is_file():
            parser.error(f"--tree {tree}: holds no sources (ds2/training/trainer.py)")
    table = Table(COLUMNS)
    for model, batch, graphs in itertools.product(options.model, options.batch, options.graphs):
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            trees: list[Tree] = []
            size = {"model": model, "batch": batch, "graphs": graphs}
            shared = {key: value for key, value in vars(options).items() if key not in ("tree", "turns")} | size
            for number, path in enumerate(options.tree):
                trees.append(Tree(path.resolve(), {**shared, "folder": f"{folder}/{number}"}))
                stack.callback(trees[-1].close)
            for tree in trees:
                tree.wait_until_ready()
            for _ in range(options.turns):
                for tree in trees:
                    tree.take_turn()
            first_ms = statistics.median(trees[0].times_ms)
            for tree in trees:
                median_ms, same = statistics.median(tree.times_ms), tree.facts["bits"] == trees[0].facts["bits"]
                table.print_row({
                    **size, **tree.facts, "step_ms": median_ms, "least_ms": min(tree.times_ms),
                    "most_ms": max(tree.times_ms), "ratio": median_ms / first_ms,
                    "gradients": "same" if same else "other", "tree": tree.path,
                })  # fmt: skip
    return 0
