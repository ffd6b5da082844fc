"""The client of docs/guide/live.md, as it is written there."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import soundfile
from support.paths import ROOT
from support.serving import RATE_HZ, WAIT_S, Running, samples_of, speech, text_alone


@pytest.mark.parametrize("channels", [1, 2])
def test_the_client_in_the_recipe(shared: Callable[..., Running], tmp_path: Path, channels: int) -> None:
    running, data = shared(), speech(2, 1.5)
    samples = np.stack([samples_of(data)] + [np.zeros(len(data) // 2, np.float32)] * (channels - 1), 1)
    soundfile.write(tmp_path / "talk.wav", samples, RATE_HZ, subtype="PCM_16")
    page = (ROOT / "docs/guide/live.md").read_text(encoding="utf-8")
    client = page.split("```python\n")[1].split("```")[0]
    command = [sys.executable, "-c", client, str(tmp_path / "talk.wav"), running.websocket]
    lines = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=True).stdout.splitlines()
    assert len(lines) == 9
    assert lines[-1] == text_alone(running.recogniser, data) != ""
