"""What the README and the guide show from Python runs as it is written there."""

from __future__ import annotations

import re
import subprocess
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from support.paths import ROOT

from ds2.config.schema import Config
from ds2.training.loop import train


def shown(page: str) -> str:
    """The code of a page's section "From Python"."""
    code = re.search(r"## From Python\n\n((?:    .*\n|\n(?=    ))+)", (ROOT / page).read_text(encoding="utf-8"))
    assert code, page
    return textwrap.dedent(code[1])


@pytest.fixture
def run_folder(tiny_config: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with `runs/an4` and `talk.mp3`, `talk.wav` of a second, which is the current one."""
    config = tiny_config("train.epochs=1", f"run_dir={tmp_path / 'runs' / 'an4'}")
    train(config, Path(config.run_dir))
    for name in ("talk.mp3", "talk.wav"):
        soundfile.write(tmp_path / name, 0.1 * np.random.default_rng(0).standard_normal(16000), 16000)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("cache_of_english")
def test_a_file_as_in_the_readme(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = shown("README.md")
    short = code.replace('"model=rnn_small"', '"model=rnn_small", "model.hidden=32", "device=cpu", "train.max_steps=1"')
    assert len(code.splitlines()) == 7 and short != code
    capsys.readouterr()
    names: dict[str, object] = {"samples": np.zeros(8000, np.float32)}
    exec(short, names)
    transcript = names["recogniser"].transcribe("talk.mp3")  # type: ignore[attr-defined]
    assert capsys.readouterr().out == transcript.text + "\n"
    assert transcript.duration_s == pytest.approx(1.0, abs=0.1)
    assert (run_folder / "runs/mine/last.safetensors").is_file()


def test_a_session_as_in_the_guide(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    names: dict[str, object] = {}
    exec(shown("docs/guide/live.md"), names)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6
    assert lines[-1] == names["recogniser"].transcribe("talk.wav").text  # type: ignore[attr-defined]


def test_the_kernels_as_in_the_guide() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs/guide/kernels.md").read_text("utf-8"), re.M | re.S)
    assert len(blocks) == 2
    names: dict[str, Any] = {}
    exec(blocks[0], names)
    whole, _ = names["theirs"](names["x"][:, :1])  # its first utterance has all frames
    torch.testing.assert_close(names["y"][:, :1], whole)
    assert names["layer"].weight_hh_l0.grad is not None
    exec(blocks[1], names)
    assert names["y"].shape == (100, 4, 512)


def test_the_planner_as_in_its_page(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs/design/planner.md").read_text(encoding="utf-8")
    code = re.search(r"((?:    from ds2_ops.*\n)+(?:    .*\n)+)", page)
    assert code
    exec(textwrap.dedent(code[1]), {})
    assert "us a step" in capsys.readouterr().out


def test_the_first_install_line_is_for_cpus_and_make_has_it_too() -> None:
    page = (ROOT / "README.md").read_text("utf-8")
    first, second = re.findall(r"^    pip install .*", page, re.M)
    index = "torch --index-url https://download.pytorch.org/whl/cpu"
    assert index in first and "--index-url" not in second
    assert all(line.count("-c constraints.txt") == 2 for line in (first, second))
    for cpu in ("1", ""):
        command = ["make", "-n", "demo", f"CPU={cpu}", "VENV=/nowhere"]
        shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        assert (index in shown) == bool(cpu) and "-c constraints.txt torch" in shown
