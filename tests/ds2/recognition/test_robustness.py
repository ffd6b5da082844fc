"""`ds2 evaluate --robustness`: every condition is a row, the same on every run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ds2.cli import main
from ds2.config.schema import CODECS
from ds2.recognition.evaluate import conditions

MakeModel = Callable[..., Path]


def test_every_kind_of_noise_comes_at_every_ratio() -> None:
    found = conditions([20.0, 5.0])
    assert next(iter(found)) == "clean"
    assert len(found) == 1 + 2 * 4 + 2 + len(CODECS)
    assert found["babble of 4, 5 dB"].noise_snr_db == [5.0, 5.0]


def test_the_table_has_a_row_a_condition_and_repeats(
    make_model: MakeModel, tone_manifest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = []
    for name in ("one", "other"):
        command = ["evaluate", str(make_model()), str(tone_manifest), "--robustness", "10", "--workers", "0"]
        assert main([*command, "--device", "cpu", "--out", str(tmp_path / name)]) == 0
        texts.append((tmp_path / name / "tones" / "robustness.md").read_text())
    assert texts[0] == texts[1] and texts[0] in capsys.readouterr().out.replace("\nreport:", "report:")
    rows = [line.split("|")[1].strip() for line in texts[0].splitlines() if line.startswith("| ")]
    assert rows == ["condition", *conditions([10.0])]
    assert "| clean |" in texts[0] and texts[0].count("| 1.00 |") >= 1
