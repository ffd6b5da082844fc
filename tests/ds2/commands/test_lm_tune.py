"""`ds2 lm tune` as a user calls it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ds2.cli import main
from ds2.config.schema import Config
from ds2.data.manifest import read_manifest
from ds2.recognition.settings import decode_settings, tuned_file


@pytest.mark.parametrize("method", ["beam", "native"])
def test_what_was_tuned_is_what_evaluate_takes(
    method: str,
    make_model: Callable[..., Path],
    tone_manifest: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model, text, lm = make_model(), tmp_path / "text.txt", tmp_path / "text.lm"
    text.write_text("".join(f"{u.text}\n" for u in read_manifest(tone_manifest)), encoding="utf-8")
    assert main(["lm", "build", str(text), "--output", str(lm), "--order", "2", "--symbols", "abc "]) == 0
    tuned_file(model).write_text("method: [")  # damaged: tuning is the way out
    tune = ["lm", "tune", str(model), str(lm), str(tone_manifest), "--device", "cpu"]
    grid = ["--alphas", "0:1:2", "--betas", "0:1:2", "--beam", "8"]
    chosen = [] if method == "beam" else [f"decode={method}", "decode.threads=1", "decode.hot_words=[ab]"]
    assert main([*tune, *grid, *chosen]) == 0
    settings = decode_settings(model, Config(run_dir=""))
    assert settings.method == method and settings.lm == str(lm) and settings.hot_words == ["ab"] * bool(chosen)
    assert tuned_file(model).with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    capsys.readouterr()
    assert main([*tune, *grid, "decode=greedy"]) == 2
    assert "no weights to tune: take decode=beam or decode=native" in capsys.readouterr().err
