"""Words are right or wrong by alignment, and the calibration error is that of hand-worked bins."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import numpy as np
import pytest

TOOL = runpy.run_path(str(Path(__file__).parents[2] / "tools" / "plot_confidence.py"))


def test_words_are_judged_by_alignment(tmp_path: Path) -> None:
    words = [
        {"text": text, "confidence": sure} for text, sure in (("the", 0.9), ("cat", 0.4), ("sat", 0.8), ("o", 0.1))
    ]
    record = {"text": "the hat sat", "pred_text": "the cat sat o", "words": words}
    (tmp_path / "h.jsonl").write_text(json.dumps(record) + "\n")
    confidences, right = TOOL["judge"](tmp_path / "h.jsonl")
    assert confidences.tolist() == [0.9, 0.4, 0.8, 0.1]
    assert right.tolist() == [True, False, True, False]
    found = TOOL["reliability"](confidences, right, bins=2)
    assert found.words.tolist() == [2, 2]
    assert found.calibration_error == pytest.approx((2 * 0.25 + 2 * 0.15) / 4)
    TOOL["draw"](found, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000


def test_empty_bins_and_certain_words_have_their_place() -> None:
    found = TOOL["reliability"](np.array([1.0, 1.0]), np.array([True, False]), bins=10)
    assert found.words[-1] == 2
    assert found.calibration_error == pytest.approx(0.5)


def test_hypotheses_without_words_are_named(tmp_path: Path) -> None:
    (tmp_path / "h.jsonl").write_text(json.dumps({"text": "a", "pred_text": "a", "words": []}) + "\n")
    with pytest.raises(ValueError, match=r"decode\.times=true"):
        TOOL["judge"](tmp_path / "h.jsonl")
