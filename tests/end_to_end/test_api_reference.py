"""The API reference builds from the docstrings, without a warning."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
from support.paths import ROOT


@pytest.mark.slow
def test_every_module_has_a_page_and_none_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tools import api_reference

    monkeypatch.chdir(ROOT)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("default", category=DeprecationWarning)  # of packages that modules import
        api_reference.build(tmp_path)
    modules = [p for package in (ROOT / "ds2", ROOT / "ops" / "ds2_ops") for p in package.rglob("*.py")]
    pages = {page.relative_to(tmp_path).with_suffix("").as_posix() for page in tmp_path.rglob("*.html")}
    for module in modules:
        base = ROOT / "ops" if "ds2_ops" in module.parts else ROOT
        name = module.relative_to(base).with_suffix("").as_posix().removesuffix("/__init__")
        assert name in pages or name.replace("/", ".") in api_reference.NEEDS, name
    assert len(modules) > 200
    recogniser = (tmp_path / "ds2" / "recognition" / "recogniser.html").read_text(encoding="utf-8")
    assert "Recogniser.transcribe" in recogniser
