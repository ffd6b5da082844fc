"""The commands of the step-by-step pages, run as they are written, on a made-up language and with a tiny model."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import numpy as np
import pytest
import soundfile
from dispatch import MPI_AS_ROOT
from support.launch import mpirun_command
from support.paths import ROOT

from ds2.cli import main

PAGES = ROOT / "docs" / "guide"
RATE_HZ = 22050
TONES_HZ = {"ö": 400.0, "l": 900.0, "ş": 1700.0}
TINY = {
    "model.convs": "[{kernel:[11,5],stride:[4,2],channels:4}]",
    **{"model.hidden": 48, "model.depth": 2, "model.skip": 1, "model.row_convs": 1, "model.row_conv_context": 2},
    **{"optim.learning_rate": 0.01, "optim.warmup_steps": 0, "batching.utterances": 8, "data.workers": 0},
    **{"train.epochs": 6, "train.evaluate_every_epochs": 3, "device": "cpu"},
}  # what makes a command of a page one of a second


def record(folder: Path, speakers: list[str], utterances: int, seed: int) -> None:
    """Write recordings of tone letters, each with its transcript beside it."""
    rng = np.random.default_rng(seed)
    for speaker in speakers:
        (folder / speaker).mkdir(parents=True)
        for number in range(1, utterances + 1):
            text = "".join(rng.choice(list(TONES_HZ), size=3))
            time_s = np.arange(int(0.15 * RATE_HZ)) / RATE_HZ
            pause = np.zeros(int(0.08 * RATE_HZ))
            sound = np.concatenate(
                [part for c in text for part in (0.3 * np.sin(2 * np.pi * TONES_HZ[c] * time_s), pause)]
            )
            path = folder / speaker / f"{number:03d}.wav"
            soundfile.write(path, sound + 0.001 * rng.standard_normal(len(sound)), RATE_HZ)
            path.with_suffix(".txt").write_text(text.capitalize() + "\n", encoding="utf-8")


def commands(page: str) -> list[str]:
    """The lines of a page's blocks that are marked as commands of ds2."""
    blocks = re.findall(r"^```ds2\n(.*?)^```$", (PAGES / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return [line for block in blocks for line in block.splitlines()]


def run(line: str, base: Path) -> int:
    """Run one command: ds2 here, several ranks as processes of their own."""
    words = [word.replace("/big/", f"{base}/big/") for word in shlex.split(line)]
    if "train" in words:
        own = {word.partition("=")[0] for word in words}
        taken = ("model.",) if "checkpoint.init_from" in own else ()
        words += [f"{k}={value}" for k, value in TINY.items() if k not in own and not k.startswith(taken)]
    elif words[1] in ("evaluate", "transcribe"):
        words += ["--device", "cpu"] + ["--workers", "0"] * (words[1] == "evaluate")
    elif words[1:3] == ["lm", "tune"]:
        words += ["--device", "cpu", "--beam", "8"]
    if words[0] == "mpirun":
        ranks, rest = int(words[2]), words[4:]
        command = [*mpirun_command(ranks), "-m", "ds2.cli", *rest]
        done = subprocess.run(command, env={**os.environ, **MPI_AS_ROOT}, check=False)
        return done.returncode
    assert words[0] == "ds2"
    return main(words[1:])


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with recordings."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'ops'}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    record(tmp_path / "recordings", ["ayse", "deniz", "efe", "gul"], 8, seed=1)
    record(tmp_path / "recordings2", ["hakan", "idil", "lale"], 4, seed=2)
    return tmp_path


def test_from_recordings_to_transcripts_and_to_a_fine_tuned_model(
    place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for page in ("own_language.md", "fine_tuning.md"):
        lines = commands(page)
        assert len(lines) > 5, page
        for line in lines:
            assert run(line, place) == 0, f"{page}: {line}: {capfd.readouterr()}"
    alphabet = (place / "my_conf" / "alphabet" / "mine.yaml").read_text(encoding="utf-8")
    assert all(letter in alphabet for letter in TONES_HZ)
    shown = capfd.readouterr().out
    assert "WEBVTT" not in shown and "%WER" in shown and (place / "runs" / "mine" / "best-decode.yaml").is_file()


@pytest.mark.slow
def test_a_cluster_job(place: Path) -> None:
    first = [line for line in commands("own_language.md") if line.startswith("ds2 data")]
    for line in (*first, *commands("cluster_job.md")):
        assert run(line, place) == 0, line
    log = (place / "runs" / "job" / "log.jsonl").read_text(encoding="utf-8")
    assert '"event": "resume", "step": 3' in log and '"ranks": 2' in log and '"ranks": 1' in log
