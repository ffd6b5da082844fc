"""Folders and files whose names hold whatever a file system allows, and folders that are links."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ds2.cli import main
from ds2.config.schema import Config
from ds2.data.manifest import Utterance, read_manifest, write_manifest
from ds2.training.loop import train

pytestmark = pytest.mark.slow
ODD = "a\nb ü 日本 \u202e [1] {x} $(y) 'q' \"d\" ,=;#%"


@pytest.fixture
def odd(tmp_path: Path, tone_manifest: Path) -> tuple[Path, Path]:
    """A folder of an odd name with a manifest, whose audio has odd names too; and the manifest."""
    folder = tmp_path / ODD
    folder.mkdir()
    moved = []
    for number, utterance in enumerate(read_manifest(tone_manifest)):
        path = folder / f"{number} {ODD}.wav"
        shutil.copy(utterance.audio_filepath, path)
        moved.append(Utterance(path, utterance.duration_s, utterance.text))
    write_manifest(folder / "m.jsonl", moved)
    return folder, folder / "m.jsonl"


def test_a_run_trains_resumes_and_is_used_whatever_its_folders_are_called(
    odd: tuple[Path, Path], tiny_config: Callable[..., Config], capfd: pytest.CaptureFixture[str]
) -> None:
    folder, manifest = odd
    config = tiny_config("train.epochs=2", "train.max_steps=4")
    config.data.train = config.data.dev = [str(manifest)]
    config.data.work_dir = str(folder / "work")
    for steps in (4, 0):
        config.train.max_steps = steps
        assert train(config, folder / "run") == 0
    model, lone = str(folder / "run" / "best.safetensors"), ["--device", "cpu"]
    assert main(["evaluate", model, str(manifest), *lone, "--out", str(folder / "report")]) == 0
    assert main(["align", model, str(manifest), *lone, "--out", str(folder / "times.jsonl")]) == 0
    capfd.readouterr()
    assert main(["transcribe", str(folder / "run"), str(next(folder.glob("*.wav"))), *lone, "--format", "json"]) == 0
    assert json.loads(capfd.readouterr().out)
    assert len((folder / "times.jsonl").read_text().splitlines()) == 10
    assert main(["data", "filter", str(manifest), str(folder / "few.jsonl"), "--max-s", "0.8"]) == 0
    assert read_manifest(folder / "few.jsonl")
    assert not list(folder.rglob("*.partial"))


def test_a_run_folder_may_be_a_link_even_to_another_disk(tiny_config: Callable[..., Config], tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    real.mkdir()
    link.symlink_to(real)
    assert train(tiny_config("train.epochs=1"), link) == 0
    assert train(tiny_config("train.epochs=2"), real) == 0
    assert link.is_symlink() and (real / "best.safetensors").is_file()
    dangling = tmp_path / "dangling"
    dangling.symlink_to(tmp_path / "none" / "x")
    assert main(["train", *["run_dir=" + str(dangling)], "recipe=synthetic", f"data.work_dir={tmp_path}"]) == 2
