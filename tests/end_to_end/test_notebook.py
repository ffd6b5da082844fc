"""The notebook runs: its cells in their order, as Jupyter runs them, without Jupyter."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from support.paths import ROOT

NOTEBOOK = ROOT / "docs" / "guide" / "first_model.ipynb"


def cells() -> list[dict[str, Any]]:
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4
    return list(notebook["cells"])


def test_no_output_is_stored() -> None:
    code = [cell for cell in cells() if cell["cell_type"] == "code"]
    assert code and all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)


@pytest.mark.slow
def test_the_cells_run_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib").use("agg")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    names: dict[str, Any] = {}
    for number, cell in enumerate(cells()):
        if cell["cell_type"] == "code":
            source = "".join(cell["source"]).replace("train.epochs=4", "train.epochs=2")
            exec(compile(source, f"cell {number}", "exec"), names)
    shown = capsys.readouterr().out
    assert "%WER " in shown and " s to " in shown
    assert names["report"].wer < 0.5  # synthesised digits are easy
    assert names["axes"].get_title() == names["transcripts"][0].text
