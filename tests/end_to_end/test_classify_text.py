"""tools/classify_text.py tells texts apart that differ in order alone, and names what it cannot use."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

from support.paths import ROOT


def classify(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "classify_text.py"), *map(str, arguments), "--device", "cpu"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_letters_of_equal_counts_in_another_order_are_told_apart(tmp_path: Path) -> None:
    draw, files = random.Random(1), []
    for name, word in (("one", "ab!"), ("two", "BA,")):
        files.append(tmp_path / f"{name}.txt")
        files[-1].write_text("".join(f"{' '.join([word] * draw.randint(2, 9))}\n" for _ in range(150)))
    found = classify(*files, "--hidden", 16, "--epochs", 12, "--learning-rate", 1e-2, "--batch", 16)
    assert "held out: 100.00 % of 30 lines right" in found.stdout, found.stdout + found.stderr
    table = [line.rpartition(": ")[2].split(", ") for line in found.stdout.splitlines()[-2:]]
    assert table[0][1] == table[1][0] == "0" and int(table[0][0]) + int(table[1][1]) == 30


def test_what_cannot_be_told_apart_is_named(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("a\n" * 20)
    alone = classify(tmp_path / "one.txt")
    assert alone.returncode == 2 and "two texts and ten lines are needed" in alone.stderr
    missing = classify(tmp_path / "one.txt", tmp_path / "none.txt")
    assert missing.returncode == 2 and "none.txt: No such file" in missing.stderr
