"""Install the oldest or the newest packages that pyproject.toml allows, and run what a new user runs first.

    python tools/check_versions.py oldest
    python tools/check_versions.py newest
    python tools/check_versions.py oldest --torch torch==2.13.0        # another PyTorch: the one from PyPI takes 5.5 GB

"oldest" holds every package to the lower bound of its range, "newest" to none; `--torch` replaces that of torch. The
environment is a temporary one. Fails where a command fails or prints a warning of a binding ("nanobind: leaked").
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = ("decode", "pieces", "text", "media", "serve", "export")  # those that work on any CPU
_NOISE = "nanobind"
_MODULES = ("ds2.serve.http", "ds2.export.files", "ds2.audio.ffmpeg")  # import what their extras bring
TEXT = "one two three four five six seven eight nine zero\n"


def requirements() -> list[str]:
    """The requirements of the project and of the extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    return [*project["dependencies"], *(requirement for extra in EXTRAS for requirement in extras[extra])]


def lowest(requirements: Sequence[str]) -> list[str]:
    """Constraints that hold each package to its lower bound.

    Raises:
        ValueError: a requirement without a lower bound.
    """
    constraints = []
    for requirement in requirements:
        match = re.match(r"([A-Za-z0-9._-]+)>=([^,;\s]+)", requirement)
        if not match:
            raise ValueError(f"{requirement!r} in pyproject.toml has no lower bound: write NAME>=VERSION")
        constraints.append(f"{match[1]}=={match[2]}")
    return constraints


def commands(folder: Path) -> Iterator[list[str]]:
    """Yield the commands that a new user runs, in order; their files go to `folder`."""
    run, lm, text = str(folder / "run"), str(folder / "words.lm"), folder / "words.txt"
    text.write_text(TEXT * 20, encoding="utf-8")
    data = [f"data.work_dir={folder / 'data'}", f"run_dir={run}", "data.workers=0", "device=cpu"]
    yield ["version"]
    yield ["doctor"]
    yield ["train", "recipe=synthetic", "train.max_steps=2", *data]
    yield ["info", run]
    yield ["lm", "build", str(text), "--order", "2", "--output", lm]
    dev = str(folder / "data" / "dev.jsonl")
    yield ["evaluate", run, dev, "--device", "cpu", "decode=native", f"decode.lm={lm}"]
    yield ["transcribe", run, str(folder / "data"), "--device", "cpu", "--format", "srt", "--out", str(folder / "text")]
    yield ["data", "normalise", "1995 $3.50", "alphabet.numbers=en"]
    yield ["export", run, "--to", "onnx", "--interface", "plain", "--out", str(folder / "exported")]


def check(python: Path, folder: Path) -> None:
    """Run the commands in an environment; raise SystemExit at the first that fails."""
    for command in commands(folder):
        run = subprocess.run(
            [python, "-m", "ds2.cli", *command], cwd=folder, capture_output=True, text=True, check=False
        )
        printed = run.stdout + run.stderr
        if run.returncode or _NOISE in printed:
            print(printed, file=sys.stderr)
            raise SystemExit(f"ds2 {' '.join(command)}: status {run.returncode}")
        print(f"ok: ds2 {' '.join(command[:2])}", flush=True)
    for module in _MODULES:
        subprocess.run([python, "-c", f"import {module}"], cwd=folder, check=True)


def main(arguments: Sequence[str]) -> None:
    """Make the environment and check it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", choices=["oldest", "newest"])
    parser.add_argument("--torch", metavar="REQUIREMENT", help="in place of the oldest or newest: torch==VERSION")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="ds2-versions-") as name:
        folder = Path(name)
        subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
        pip = [folder / "venv/bin/python", "-m", "pip", "install", "--quiet", "--no-compile"]
        constraints = lowest(requirements()) if options.which == "oldest" else []
        if options.torch:
            constraints = [c for c in constraints if not c.startswith("torch==")] + [options.torch]
        (folder / "constraints.txt").write_text("\n".join(constraints) + "\n", encoding="utf-8")
        subprocess.run([*pip, "-c", folder / "constraints.txt", f"{ROOT}[{','.join(EXTRAS)}]"], check=True)
        listed = subprocess.run([*pip[:3], "list"], capture_output=True, text=True, check=True).stdout
        names = {re.split(r"[>=]", requirement)[0] for requirement in requirements()}
        versions = dict(line.split()[:2] for line in listed.splitlines()[2:])
        print(options.which, *(f"{name}={version}" for name, version in versions.items() if name in names))
        check(folder / "venv/bin/python", folder)


if __name__ == "__main__":
    main(sys.argv[1:])
