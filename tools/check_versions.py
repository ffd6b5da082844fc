"""Install the oldest or the newest packages that pyproject.toml allows, and run what a new user runs first.

    python tools/check_versions.py oldest
    python tools/check_versions.py newest
    python tools/check_versions.py oldest --torch torch==2.13.0        # another PyTorch: the one from PyPI takes 5.5 GB
    python tools/check_versions.py oldest --wheel dist/ds2_speech-0.1.0-py3-none-any.whl

"oldest" holds every package to the lower bound of its range, "newest" to none; `--torch` replaces that of torch.
Without `--wheel` the checkout is installed. The environment is a temporary one: first without extras, in which a model
is trained, then with them. Fails where a command fails or prints a warning of a binding ("nanobind: leaked").
"""

import argparse
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = ("decode", "pieces", "text", "media", "serve", "export")  # those that work on any CPU
_NOISE = "nanobind"
_MODULES = ("ds2.serve.http", "ds2.export.files", "ds2.audio.ffmpeg")  # import what their extras bring
TEXT = "one two three four five six seven eight nine zero\n"
COMMANDS_WITHOUT_EXTRAS = (
    ["version"],
    ["doctor"],
    ["info", "model=rnn_8"],
    ["train", "recipe=synthetic", "train.max_steps=2", "data.workers=0", "device=cpu"],
)


def requirements() -> list[str]:
    """The requirements of the project and of the extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    return [*project["dependencies"], *(requirement for extra in EXTRAS for requirement in extras[extra])]


def lowest(requirements: Sequence[str]) -> list[str]:
    """Constraints that hold each package to its lower bound; raises ValueError for a requirement without one."""
    constraints = []
    for requirement in requirements:
        match = re.match(r"([A-Za-z0-9._-]+)>=([^,;\s]+)", requirement)
        if not match:
            raise ValueError(f"{requirement!r} in pyproject.toml has no lower bound: write NAME>=VERSION")
        constraints.append(f"{match[1]}=={match[2]}")
    return constraints


def commands(folder: Path) -> Iterator[list[str]]:
    """Yield the commands that a new user runs next, in order, on what the others left in `folder`."""
    run, lm, text, data = "runs/synthetic", "words.lm", folder / "words.txt", "corpora/synthetic"
    text.write_text(TEXT * 20, encoding="utf-8")
    yield ["doctor"]
    yield ["info", run]
    yield ["lm", "build", str(text), "--order", "2", "--output", lm]
    yield ["evaluate", run, f"{data}/dev.jsonl", "--device", "cpu", "decode=native", f"decode.lm={lm}"]
    yield ["transcribe", run, data, "--device", "cpu", "--format", "srt", "--out", "text"]
    yield ["data", "normalise", "1995 $3.50", "alphabet.numbers=en"]
    yield ["export", run, "--to", "onnx", "--interface", "plain", "--out", "exported"]


def check(ds2: Path, folder: Path, in_order: Iterable[list[str]]) -> None:
    """Run commands of an installed ds2 in a folder; raise SystemExit at the first that fails."""
    for command in in_order:
        run = subprocess.run([ds2, *command], cwd=folder, capture_output=True, text=True, check=False)
        printed = run.stdout + run.stderr
        if run.returncode or _NOISE in printed:
            print(printed, file=sys.stderr)
            raise SystemExit(f"ds2 {' '.join(command)}: status {run.returncode}")
        print(f"ok: ds2 {' '.join(command[:2])}", flush=True)


def main(arguments: Sequence[str]) -> None:
    """Make the environment and check it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", choices=["oldest", "newest"])
    parser.add_argument("--torch", metavar="REQUIREMENT", help="in place of the oldest or newest: torch==VERSION")
    parser.add_argument("--wheel", type=Path, metavar="FILE", help="install this wheel, not the checkout")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="ds2-versions-") as name:
        folder, source = Path(name), options.wheel.resolve() if options.wheel else ROOT
        subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
        python, ds2 = folder / "venv/bin/python", folder / "venv/bin/ds2"
        constraints = lowest(requirements()) if options.which == "oldest" else []
        if options.torch:
            constraints = [c for c in constraints if not c.startswith("torch==")] + [options.torch]
        (folder / "constraints.txt").write_text("\n".join(constraints) + "\n", encoding="utf-8")
        pip = [python, "-m", "pip"]
        install = [*pip, "install", "--quiet", "--no-compile", "-c", folder / "constraints.txt"]
        subprocess.run([*install, source], check=True)
        check(ds2, folder, COMMANDS_WITHOUT_EXTRAS)
        subprocess.run([*install, f"{source}[{','.join(EXTRAS)}]"], check=True)
        listed = subprocess.run([*pip, "list"], capture_output=True, text=True, check=True).stdout
        names = {re.split(r"[>=]", requirement)[0] for requirement in requirements()}
        versions = dict(line.split()[:2] for line in listed.splitlines()[2:])
        print(options.which, *(f"{name}={version}" for name, version in versions.items() if name in names))
        check(ds2, folder, commands(folder))
        for module in _MODULES:
            subprocess.run([python, "-c", f"import {module}"], cwd=folder, check=True)


if __name__ == "__main__":
    main(sys.argv[1:])
