"""Exported files in the programs that run them: ONNX Runtime, and torch in a process that cannot import ds2."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from ds2_ops.recurrent.cells import PLAIN
from support.exported import in_onnxruntime, log_energies, of_energies, sound, streamed
from support.layer_cases import GATED_CELLS
from torch import Tensor

from ds2.audio.read import read_audio
from ds2.data.manifest import read_manifest
from ds2.export.files import DESCRIPTION, export_onnx, export_torch
from ds2.export.model import Exported
from ds2.export.onnx_operations import OnnxOperations
from ds2.model.checkpoint import LoadedModel, load_model
from ds2.system import UserError

Make = Callable[..., LoadedModel]
SHAPES: list[dict[str, Any]] = [
    {},
    {"nonlinearity": "tanh"},
    *({"cell": cell} for cell in GATED_CELLS),
    {"depth": 48, "skip": 4},
]
ALONE = """
import sys
sys.modules["ds2"] = sys.modules["ds2_ops"] = None  # an import of them fails
import json, torch
extra = {"ds2": ""}
program = torch.export.load(sys.argv[1], extra_files=extra)
described = json.loads(extra["ds2"])
given, model = torch.load(sys.argv[2], weights_only=True), program.module()
state = [torch.zeros(1, *sizes, dtype=torch.int64 if name.endswith("_len") else torch.float32)
         for name, sizes in described["inputs"].items()][2:]
found = []
for signal, length in given:
    log_probs, frames, *state = model(signal, length, *state)
    found.append((log_probs, frames))
torch.save(found, sys.argv[3])
"""


def rms(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt())


@pytest.mark.parametrize("name", PLAIN)
def test_every_nonlinearity_of_the_operators_is_exported(tmp_path: Path, name: str) -> None:
    """Another method of tensors than `OnnxValue` has fails here: it needs it too."""
    pre, activate_ = torch.arange(-30.0, 31.0) / 4, PLAIN[name].activate_
    assert activate_ is not None
    graph = OnnxOperations()
    shapes = {"pre": (True, [len(pre)]), "y": (True, [len(pre)])}
    onnx.save(graph.model(["pre"], {"y": activate_(graph.input("pre"), 5.0)}, shapes, {}), tmp_path / "model.onnx")  # type: ignore[arg-type]
    (exported,) = in_onnxruntime(tmp_path / "model.onnx")(pre)
    # The two libraries may round tanh differently; the others only choose one of two numbers.
    torch.testing.assert_close(exported, activate_(pre.clone(), 5.0), atol=4e-7 if name == "tanh" else 0, rtol=0)


def test_functions_of_torch_are_methods_of_onnx_values() -> None:
    value = OnnxOperations().input("x")
    assert torch.relu_(value).name == "Clip_1_0"  # type: ignore[arg-type]
    with pytest.raises(AttributeError, match="'OnnxValue' object has no attribute 'elu_'"):
        torch.nn.functional.elu_(value)  # type: ignore[arg-type]


@pytest.mark.parametrize("settings", SHAPES, ids=str)
def test_onnx_errs_no_more_than_torch(random_model: Make, tmp_path: Path, settings: dict[str, Any]) -> None:
    """Beside float64, from the same float32 energies, twice the model's own error in float32 at most."""
    loaded = random_model(**settings)
    described = export_onnx(loaded, tmp_path / "model.onnx")
    onnx.checker.check_model(onnx.load(tmp_path / "model.onnx"), full_check=True)
    exported = Exported.of(loaded, from_samples=False, chunk_s=0.16)
    energies = [log_energies(loaded, sound(samples, samples)).float() for samples in (30_000, 9000)]
    for one, found in zip(energies, streamed(in_onnxruntime(tmp_path / "model.onnx"), exported, energies), strict=True):
        truth = of_energies(loaded, one.double())
        assert found.shape == truth.shape
        assert rms(found - truth) <= 2 * rms(of_energies(loaded, one) - truth)
        assert (found.argmax(1) == truth.argmax(1)).float().mean() > 0.99
    assert (described["chunk"], described["frame_s"], described["opset"]) == (16, 0.04, 17)


@pytest.mark.parametrize("kind", ["nemo_fbank", "log_spectrogram"])
def test_plain_onnx_takes_samples(random_model: Make, tmp_path: Path, kind: str) -> None:
    loaded = random_model(kind, cell="lstm")
    described = export_onnx(loaded, tmp_path / "model.onnx", for_sherpa=False)
    assert described["chunk"] == 2560 and described["symbols"][:2] == ["<blk>", " "]
    exported = Exported.of(loaded, from_samples=True, chunk_s=0.16)
    samples = sound(20_000)
    (found,) = streamed(in_onnxruntime(tmp_path / "model.onnx"), exported, [samples])
    truth = of_energies(loaded, log_energies(loaded, samples))
    # Both transform the sound in float32, one by a product of 400 terms, which rounds it more: 50 u of its size.
    assert found.shape == truth.shape and rms(found - truth) < 50 * torch.finfo(torch.float32).eps * rms(truth)


@pytest.mark.parametrize("cell", ["rnn", "lstm"])
def test_bidirectional_models_take_whole_utterances(random_model: Make, tmp_path: Path, cell: str) -> None:
    loaded = random_model(cell=cell, bidirectional=True, max_lookahead_ms=0.0)
    assert export_onnx(loaded, tmp_path / "model.onnx", for_sherpa=False)["chunk"] == 0
    run = in_onnxruntime(tmp_path / "model.onnx")
    signals = [sound(20_000, 1), sound(9000, 2)]
    batch = torch.cat([torch.nn.functional.pad(s, (0, 20_000 - s.shape[1]), value=torch.nan) for s in signals])
    log_probs, frames = run(batch, torch.tensor([20_000, 9000]))
    for row, samples in enumerate(signals):
        truth = of_energies(loaded, log_energies(loaded, samples))
        found = log_probs[row, : frames[row]]
        assert found.shape == truth.shape and rms(found - truth) < 50 * torch.finfo(torch.float32).eps * rms(truth)
    with pytest.raises(UserError, match="--to onnx --interface plain"):
        export_torch(loaded, tmp_path / "model.pt2")


def test_int8_is_small_and_recognises_the_same(
    random_model: Make, tone_run: Path, tone_manifest: Path, tmp_path: Path
) -> None:
    files = [tmp_path / name for name in ("model.onnx", "model.int8.onnx")]
    for file in files:
        export_onnx(random_model(hidden=160), file, int8="int8" in file.name)
    written = onnx.load(files[1])
    matrices = [w for w in written.graph.initializer if len(w.dims) == 2 and max(w.dims) >= 160 and min(w.dims) > 1]
    assert len(matrices) == 7 and all(w.data_type == onnx.TensorProto.INT8 for w in matrices)
    assert "vocab_size" in {entry.key for entry in written.metadata_props}
    assert 3 * files[1].stat().st_size < files[0].stat().st_size
    (tmp_path / "tokens.txt").unlink()
    loaded = load_model(tone_run)
    for file in files:
        export_onnx(loaded, file, int8="int8" in file.name)
    exported = Exported.of(loaded, from_samples=False, chunk_s=0.16)
    sounds = [torch.from_numpy(read_audio(u.audio_filepath)) for u in read_manifest(tone_manifest)]
    energies = [log_energies(loaded, samples[None]).float() for samples in sounds]
    full, small = (torch.cat(streamed(in_onnxruntime(file), exported, energies)).argmax(1) for file in files)
    assert float((full == small).float().mean()) > 0.95


@pytest.mark.parametrize("large", ["output", "input"])
def test_a_large_number_leaves_the_others_their_bits(random_model: Make, tmp_path: Path, large: str) -> None:
    loaded = random_model()
    with torch.no_grad():
        if large == "output":
            loaded.model.classifier.weight[0] *= 1000.0
        else:
            loaded.model.recurrent_modules[-1].row_convs[-1].weight[::2] *= 1000.0
            loaded.model.classifier.weight[:, ::2] /= 1000.0
    for int8 in (False, True):
        export_onnx(loaded, tmp_path / f"{int8}.onnx", int8=int8)
    exported = Exported.of(loaded, from_samples=False, chunk_s=0.16)
    energies = [log_energies(loaded, 0.1 * torch.randn(1, 32000)).float()]
    full, small = (
        streamed(in_onnxruntime(tmp_path / f"{int8}.onnx"), exported, energies)[0][:, 1:].log_softmax(-1)
        for int8 in (False, True)
    )
    assert rms(full - small) < 0.1 * rms(full - full.mean(1, keepdim=True))


def test_torch_program_runs_where_there_is_no_ds2(random_model: Make, tmp_path: Path) -> None:
    loaded = random_model(row_convs=2, depth=2)
    described = export_torch(loaded, tmp_path / "model.pt2", chunk_s=0.08)
    chunk, samples = described["chunk"], sound(9000)
    parts = [samples[:, at : at + chunk] for at in range(0, 9000, chunk)] + [samples[:, :0]] * 12
    given = [
        (torch.nn.functional.pad(part, (0, chunk - part.shape[1])), torch.tensor([part.shape[1]])) for part in parts
    ]
    torch.save(given, tmp_path / "given.pt")
    files = [str(tmp_path / name) for name in ("model.pt2", "given.pt", "found.pt")]
    subprocess.run([sys.executable, "-c", ALONE, *files], check=True, cwd=tmp_path, timeout=300)
    found = [log_probs[0] for log_probs, _ in torch.load(tmp_path / "found.pt", weights_only=True)]
    real = torch.cat([own[own[:, 1] > -1e4] for own in found])
    truth = of_energies(loaded, log_energies(loaded, samples))
    assert real.shape == truth.shape and rms(real - truth) < 50 * torch.finfo(torch.float32).eps * rms(truth)


def test_a_program_of_torch_has_a_bounded_number_of_steps(random_model: Make, tmp_path: Path) -> None:
    loaded = random_model(depth=3, row_convs=0)
    longest_s = 2000 // 3 * loaded.frame_s
    message = rf"667 frames in 3 .* 2001 steps, .* --chunk-ms {1000 * longest_s:g} or less, or --to onnx"
    with pytest.raises(UserError, match=message):
        export_torch(loaded, tmp_path / "model.pt2", chunk_s=longest_s + loaded.frame_s)
    assert export_onnx(loaded, tmp_path / "model.onnx", for_sherpa=False, chunk_s=longest_s + loaded.frame_s)["chunk"]


def test_files_say_what_they_are(random_model: Make, tmp_path: Path) -> None:
    described = export_onnx(random_model(), tmp_path / "model.onnx", chunk_s=0.32)
    stored = {entry.key: entry.value for entry in onnx.load(tmp_path / "model.onnx").metadata_props}
    assert json.loads(stored[DESCRIPTION]) == described
    assert (stored["window_size"], stored["chunk_shift"], stored["subsampling_factor"]) == ("32", "32", "4")
    assert stored["vocab_size"] == "28" and len(described["symbols"]) == 29
    assert np.isclose(described["tail_s"], (4 * described["lag_frames"] + 33) / 100)
    lines = (tmp_path / "tokens.txt").read_text(encoding="utf-8").splitlines()
    assert lines[:4] == ["<blk> 0", "  1", "' 2", "a 3"] and len(lines) == 29


@pytest.mark.filterwarnings("error:No complete tensor found")
def test_a_program_of_torch_meets_a_full_disk_with_a_message(
    random_model: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, content: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(UserError, match=r"model\.pt2 could not be written .*No space left"):
        export_torch(random_model(depth=1, row_convs=0), tmp_path / "model.pt2")
    assert not list(tmp_path.iterdir())


def test_a_file_that_cannot_be_written_leaves_nothing(random_model: Make, tmp_path: Path) -> None:
    loaded = random_model()
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(UserError, match=r"file/model\.onnx could not be written .* --out"):
        export_onnx(loaded, tmp_path / "file" / "model.onnx")
    (tmp_path / "tokens.txt").write_text("<blk> 0\nx 1\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"tokens\.txt is of another model"):
        export_onnx(loaded, tmp_path / "model.onnx")
    assert not (tmp_path / "model.onnx").exists()
