"""What docs/guide/export.md shows for plain ONNX runs as it is written there, to the last letter."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest
from support.paths import ROOT

from ds2.config.schema import DecodeConfig
from ds2.data.manifest import read_manifest
from ds2.export.files import export_onnx
from ds2.model.checkpoint import load_model
from ds2.recognition.recogniser import Recogniser


def test_plain_onnx_as_written(
    tone_run: Path,
    tone_manifest: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown = re.search(
        r"\n\n(    import json\n(?:    .*\n)+)", (ROOT / "docs/guide/export.md").read_text(encoding="utf-8")
    )
    assert shown
    export_onnx(load_model(tone_run), tmp_path / "model.onnx", for_sherpa=False)
    ours = Recogniser.load(tone_run, device="cpu", decode=DecodeConfig())
    monkeypatch.chdir(tmp_path)
    for utterance in read_manifest(tone_manifest)[:4]:
        (tmp_path / "talk.wav").write_bytes(utterance.audio_filepath.read_bytes())
        capsys.readouterr()
        exec(textwrap.dedent(shown[1]), {})
        assert capsys.readouterr().out.strip() == ours.transcribe(utterance.audio_filepath).text != ""
