"""What the README shows from Python runs as it is written there."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import soundfile
from support.paths import ROOT

from ds2.config.schema import Config
from ds2.training.loop import train


def test_from_python_as_written(
    tiny_config: Callable[..., Config],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown = re.search(r"## From Python\n\n((?:    .*\n)+)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert shown
    code = textwrap.dedent(shown[1])
    assert len(code.splitlines()) == 3
    config = tiny_config("train.epochs=1", f"run_dir={tmp_path / 'runs' / 'an4'}")
    train(config, Path(config.run_dir))
    soundfile.write(tmp_path / "talk.mp3", 0.1 * np.random.default_rng(0).standard_normal(16000), 16000)
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    names: dict[str, object] = {}
    exec(code, names)
    transcript = names["recogniser"].transcribe("talk.mp3")  # type: ignore[attr-defined]
    assert capsys.readouterr().out == transcript.text + "\n"
    assert transcript.duration_s == pytest.approx(1.0, abs=0.1)
