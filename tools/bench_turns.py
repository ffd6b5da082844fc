"""Time training steps of several source trees in turns on one device, which is how a change of some per cent is seen.

    git worktree add ../before main~3
    python tools/bench_turns.py --tree ../before . --model rnn_48_skip_4 --batch 4 64

Each tree trains in a process of its own, from its own sources; while one steps the others wait. Prints for each the
median over turns of the mean step, the least and the largest, its ratio to the first tree's, the peak of memory, the
loss, and whether all gradients have the bits of the first tree's: the learning rate is 0, so every step makes the same
ones. Other arguments are those of tools/bench_training.py; --steps are those of a turn.
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
from bench_training import opened, parser_of, write_corpus

from ds2.training.optim import set_learning_rate

_MARK = "turn: "


class Tree:
    """A source tree whose trainer takes steps when told to.

    Args:
        path: of the tree.
        given: what `work` needs to know.
    """

    def __init__(self, path: Path, given: dict[str, Any]) -> None:
        self.path, self.times_ms = path, list[float]()
        sources = os.pathsep.join([str(path), str(path / "ops"), os.environ.get("PYTHONPATH", "")])
        own = path / "tools" / Path(__file__).name  # knows the tree's own trainer; the messages are the same
        script = str(own if own.is_file() else __file__)
        self._process = subprocess.Popen(
            [sys.executable, script, "--worker", json.dumps(given)], env={**os.environ, "PYTHONPATH": sources},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.facts: dict[str, Any] = {}

    def ready(self) -> None:
        """Wait until it has warmed up, which all trees may do at the same time."""
        self.facts = self._answer()
        if not Path(self.facts["source"]).is_relative_to(self.path):
            raise SystemExit(f"{self.path}: its process took {self.facts['source']} instead")

    def turn(self) -> None:
        """Let it take the steps of a turn."""
        assert self._process.stdin is not None
        print("go", file=self._process.stdin, flush=True)
        self.times_ms.append(self._answer()["ms"])

    def close(self) -> None:
        """End its process."""
        self._process.kill()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(_MARK):
                answer: dict[str, Any] = json.loads(line.removeprefix(_MARK))
                return answer
        raise SystemExit(f"{self.path}: its process ended with status {self._process.wait()}, as it says above")


def work(given: dict[str, Any]) -> None:
    """Warm up, then take a turn's steps for each line that comes."""
    args = argparse.Namespace(**given)
    folder = Path(args.folder)
    folder.mkdir(parents=True)
    write_corpus(folder, args.batch, args.duration, args.characters)
    trainer, step = opened(args.model, args.batch, args.graphs, args, folder)
    on_gpu = trainer.device.type == "cuda"
    for _ in range(args.warmup):
        step()
    set_learning_rate(trainer.optimizer, 0.0)
    loss = step()
    digest = hashlib.sha256()
    for bucket in trainer.gradients.buckets:
        digest.update(bucket.cpu().numpy().tobytes())
    tell({"loss": loss, "bits": digest.hexdigest(), "source": sys.modules[type(trainer).__module__].__file__})
    for _ in sys.stdin:
        if on_gpu:
            torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(args.steps):
            step()
        if on_gpu:
            torch.cuda.synchronize()
        tell({"ms": 1000 * (time.perf_counter() - began) / args.steps})


def tell(answer: dict[str, Any]) -> None:
    """Write a line to whoever started this process."""
    if torch.cuda.is_available():
        answer["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    print(_MARK + json.dumps(answer), flush=True)


def main() -> None:
    """Parse, run, print; or be a tree's process."""
    if sys.argv[1:2] == ["--worker"]:
        work(json.loads(sys.argv[2]))
        return
    parser = parser_of(__doc__)
    parser.add_argument("--tree", nargs="+", type=Path, required=True, help="folders; ratios are to the first one's")
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()
    for tree in args.tree:
        if not (tree / "ds2" / "training" / "trainer.py").is_file():
            parser.error(f"--tree {tree}: holds no sources (ds2/training/trainer.py)")
    print(
        f"{'model':<18}{'batch':>6}{'graphs':>8}{'step ms':>10}{'range':>16}{'ratio':>8}{'GiB':>7}{'bits':>7}"
        f"  {'loss':<12} tree"
    )
    for model, batch, graphs in itertools.product(args.model, args.batch, args.graphs):
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            trees: list[Tree] = []
            for number, path in enumerate(args.tree):
                row = {"model": model, "batch": batch, "graphs": graphs, "folder": f"{folder}/{number}"}
                given = {key: value for key, value in vars(args).items() if key not in ("tree", "turns")} | row
                trees.append(Tree(path.resolve(), given))
                stack.callback(trees[-1].close)
            for tree in trees:
                tree.ready()
            for _ in range(args.turns):
                for tree in trees:
                    tree.turn()
            medians = [statistics.median(tree.times_ms) for tree in trees]
            for tree, median in zip(trees, medians, strict=True):
                first, facts = trees[0].facts, tree.facts
                spread = f"{min(tree.times_ms):.2f}-{max(tree.times_ms):.2f}"
                same = "same" if facts["bits"] == first["bits"] else "other"
                memory = f"{facts['peak_gib']:.2f}" if "peak_gib" in facts else "-"
                print(
                    f"{model:<18}{batch:>6}{graphs:>8}{median:>10.2f}{spread:>16}{median / medians[0]:>8.3f}{memory:>7}"
                    f"{same:>7}  {facts['loss']:<12.6g} {tree.path}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
