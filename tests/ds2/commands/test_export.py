"""`ds2 export`: what it says, where it writes, and one message for what a user can mend."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ds2.cli import main

Write = Callable[..., Path]
FITTING = (
    "features.kind=kaldi_fbank",
    "features.window_s=0.025",
    "model.convs=[{kernel:[11,5],stride:[4,2],channels:4},{kernel:[5,5],stride:[2,2],channels:4}]",
)


def test_a_model_for_sherpa_and_how_to_run_it(make_model: Write, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_model(*FITTING)
    assert main(["export", str(model), "--to", "onnx"]) == 0
    printed = capsys.readouterr().out
    assert (model.parent / "export" / "model.onnx").is_file() and (model.parent / "export" / "tokens.txt").is_file()
    assert (
        "chunks of 160 ms, 120 ms behind" in printed
        and "for sherpa-onnx up to 2.0.0; send 0.29 s of silence" in printed
    )
    assert main(["export", str(model), "--to", "onnx", "--int8", "--chunk-ms", "400"]) == 0
    assert (model.parent / "export" / "model.int8.onnx").is_file() and "chunks of 400 ms" in capsys.readouterr().out
    assert main(["info", str(model.parent / "export" / "model.onnx")]) == 2
    assert "written by `ds2 export` for other programs: give the model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--to", "onnx"], "features.kind=log_spectrogram: train with"),
        (["--to", "torch", "--interface", "sherpa"], "sherpa-onnx reads ONNX"),
        (["--to", "torch", "--int8"], "--int8 works with --to onnx only"),
        (["--to", "onnx", "--interface", "plain", "--chunk-ms", "5"], "less than an output frame of 20 ms"),
        (["--to", "onnx", "--interface", "plain", "--out", "/proc/none/model.onnx"], "could not be written"),
    ],
)
def test_mistakes(make_model: Write, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert main(["export", str(make_model()), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_an_unknown_target_is_named_with_those_that_exist(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["export", "runs/x", "--to", "tflite"])
    assert "invalid choice: 'tflite'" in capsys.readouterr().err


@pytest.mark.parametrize("package", ["onnx", "onnxruntime.quantization"])
def test_a_missing_package_is_named_with_its_extra(
    make_model: Write, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], package: str
) -> None:
    model = make_model(*FITTING)
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "ds2.export.onnx_operations", raising=False)
    assert main(["export", str(model), "--to", "onnx", "--int8"]) == 2
    assert f"ds2 export needs {package}" in capsys.readouterr().err


def test_what_is_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(tmp_path / "none"), "--to", "onnx"]) == 2
    assert "there is no checkpoint" in capsys.readouterr().err
