"""A disk that fills up in the middle of the work: the file is named, nothing half written stays, the same command goes
on once there is room, and a training ends with the bits that it would have had."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.rank_runs import same_bits
from support.run_log import losses

from ds2.cli import main
from ds2.data.corpora import synthetic

pytestmark = [pytest.mark.slow, pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts small file systems")]
Disk = Callable[[int], Path]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """Mount disks of so many KiB."""
    mounted: list[Path] = []

    def mount(kib: int) -> Path:
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kib}k", "none", str(folder)], check=False)
        if done.returncode:
            pytest.skip("mounting is not permitted here")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "-l", str(folder)], check=False)


def enlarge(disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)


def said(capsys: pytest.CaptureFixture[str]) -> str:
    return next(line for line in capsys.readouterr().err.splitlines() if line.startswith("ds2: "))


@pytest.mark.parametrize("kib", [40, 150, 300, 400])
def test_a_training_names_the_file_and_goes_on_bit_for_bit(
    kib: int, disk: Disk, tiny_overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr("ds2.training.run_folder._FREE_BYTES_AT_START", 0)  # which would refuse such a disk
    small = disk(kib)
    command = ["train", *tiny_overrides, "train.epochs=3", "checkpoint.every_steps=1"]
    assert main([*command, f"run_dir={tmp_path / 'whole'}"]) == 0
    capsys.readouterr()
    assert main([*command, f"run_dir={small / 'run'}"]) == 2
    told = said(capsys)
    assert re.search(rf"{small}/run/(trainer|best|last)\.safetensors could not be written .*No space left", told)
    assert not list(small.rglob("*.partial"))
    enlarge(small)
    assert main([*command, f"run_dir={small / 'run'}"]) == 0
    assert same_bits(small / "run", tmp_path / "whole") and losses(small / "run") == losses(tmp_path / "whole")


def test_an_evaluation_names_the_report(
    disk: Disk, make_model: Callable[..., Path], tone_manifest: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = disk(8)
    command = ["evaluate", str(make_model()), str(tone_manifest), "--device", "cpu", "--out", str(small / "report")]
    assert main(command) == 2
    assert f"{small}/report" in said(capsys) and not list(small.rglob("*.partial"))
    enlarge(small)
    assert main(command) == 0


def test_lm_build_names_file_or_folder(disk: Disk, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small, text, fine = disk(8), tmp_path / "t.txt", tmp_path / "fine.lm"
    words = ["".join(pair) for pair in itertools.product("abcdefghij", repeat=2)]
    text.write_text("".join(f"{words[n % 97]} {words[n * n % 89]} {words[n % 7]}\n" for n in range(4000)))
    build = ["lm", "build", str(text), "--order", "3"]
    for options, told in (
        (["--output", str(small / "t.lm")], f"{small}/t.lm could not be written"),
        (["--output", str(fine), "--arpa", str(small / "t.arpa")], f"{small}/t.arpa could not be written"),
        (["--output", str(fine), "--temp-dir", str(small), "--memory-mib", "1"], f"do not fit in {small}"),
    ):
        assert main([*build, *options]) == 2
        assert told in said(capsys) and not list(small.iterdir())
    enlarge(small)
    assert main([*build, "--output", str(small / "t.lm"), "--temp-dir", str(small), "--memory-mib", "1"]) == 0
    assert main([*build, "--output", str(fine)]) == 0


def test_preparation_names_the_file_and_goes_on(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(synthetic, "UTTERANCES", {"train": 16, "dev": 2, "test": 2})
    small = disk(400)
    command = ["data", "prepare", "recipe=synthetic"]
    assert main([*command, f"data.work_dir={small}"]) == 2
    assert f"{small}" in (told := said(capsys)) and "give another data.work_dir" in told
    assert not list(small.rglob("*.jsonl"))
    enlarge(small)
    for folder in (small, tmp_path / "whole"):
        assert main([*command, f"data.work_dir={folder}"]) == 0
    whole = {path.name: path.read_bytes() for path in (tmp_path / "whole").rglob("*.wav")}
    assert whole == {path.name: path.read_bytes() for path in small.rglob("*.wav")} and len(whole) == 20
