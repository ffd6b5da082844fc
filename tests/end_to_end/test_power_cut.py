"""After a power cut every file that a command wrote is the old one or the complete new one."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
from support.many_commands import run
from support.power_cut import watched

from ds2.system.files import atomic_file, write_text

APPENDED = ("log.jsonl", "events.out", "lock", "rank", "train.log")  # records that grow; a cut last line is dropped


def test_commands_flush_before_they_name(
    tiny_overrides: list[str], tone_manifest: Path, make_model: Callable[..., Path], tmp_path: Path
) -> None:
    model, out = str(make_model()), tmp_path / "out"
    manifest, lone = str(tone_manifest), ["--device", "cpu"]
    text = tmp_path / "text.txt"
    text.write_text("a b c\nb c a\n" * 20)
    commands = [
        ["train", *tiny_overrides, "train.epochs=2", "checkpoint.every_steps=1", "data.cache=disk"],
        ["evaluate", model, manifest, *lone, "--out", f"{out}/report"],
        ["transcribe", model, str(next(tone_manifest.parent.glob("*.wav"))), *lone, "--out", f"{out}/texts"],
        ["align", model, manifest, *lone, "--out", f"{out}/align.jsonl"],
        ["lm", "build", str(text), "--order", "2", "--output", f"{out}/t.lm", "--arpa", f"{out}/t.arpa"],
        ["data", "check", *tiny_overrides, "--json", f"{out}/check.json"],
        ["data", "stats", manifest, "--json", f"{out}/stats.json"],
        ["data", "split", manifest, "--out", f"{out}/split", "--by", "utterance"],
        ["data", "filter", manifest, f"{out}/filtered.jsonl"],
        ["data", "shards", manifest, f"{out}/shards"],
        ["data", "export-kaldi", manifest, f"{out}/kaldi"],
        ["export", model, "--to", "torch", "--out", f"{out}/model.pt2"],
    ]
    with watched(tmp_path, *APPENDED) as disk:
        for command in commands:
            status, printed = run(command)
            assert status == (1 if "check" in command else 0), (command, printed)  # 1: it found errors
    assert not disk.faults()


@pytest.mark.parametrize("fault", ["in place", "not flushed", "folder not flushed"])
def test_a_writer_that_flushes_too_little_is_found(fault: str, tmp_path: Path) -> None:
    with watched(tmp_path) as disk:
        if fault == "in place":
            (tmp_path / "a").write_text("new")
        elif fault == "not flushed":
            with patch("os.fsync", lambda descriptor: None):
                write_text(tmp_path / "a", "new")
        else:
            with atomic_file(tmp_path / "a") as partial:
                partial.write_text("new")
            os.replace(tmp_path / "a", tmp_path / "b")
    assert [line.split()[0] for line in disk.faults()] == (["b"] if fault == "folder not flushed" else ["a"])
