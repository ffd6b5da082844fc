"""No input, however damaged, gives a traceback, a hang, a gigabyte or, where checksums tell, a wrong result.

DS2_FUZZ_CASES=2000 DS2_FUZZ_SEED=7 fuzzes longer and elsewhere; see tools/fuzz.py inputs for one case alone.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fuzzing import inputs
from fuzzing.damage import BYTES
from fuzzing.files import Target
from support.launch import tool

CASES, SEED = os.environ.get("DS2_FUZZ_CASES", "12"), os.environ.get("DS2_FUZZ_SEED", "1")


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="cases are isolated by fork")
def test_damaged_inputs_are_named_errors_or_right_results() -> None:
    done = tool("fuzz", "inputs", "--cases", CASES, "--seed", SEED)
    assert done.returncode == 0, done.stdout
    assert f"\n{int(CASES) * len(inputs.TARGETS)} cases: " in done.stdout and "\noverrides: " in done.stdout


FAULTS: dict[str, Callable[[], object]] = {
    "traceback": lambda: {}["x"],
    "died": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "hang": lambda: time.sleep(3600),
    "memory": lambda: b"1" * (1 << 27),
    "wrong": lambda: None,
}


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="memory is measured by /proc")
@pytest.mark.parametrize("kind", FAULTS)
def test_the_fuzzer_sees_each_kind_of_fault(
    kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def read(folder: Path) -> bytes:
        content = (folder / "f").read_bytes()
        if content != b"whole":
            FAULTS[kind]()
        return content

    def make(folder: Path) -> None:
        (folder / "f").write_bytes(b"whole")

    target = Target("faulty", make, read, BYTES, checked=True)
    monkeypatch.setitem(inputs.TARGETS, target.name, target)
    monkeypatch.setattr(inputs, "MEMORY_KIB", 1 << 16)
    monkeypatch.setattr(inputs, "HANG_S", 0.2 if kind == "hang" else 60.0)
    monkeypatch.setattr(inputs.logging, "disable", lambda _: None)
    monkeypatch.setattr(inputs.torch, "set_num_threads", lambda _: None)
    assert inputs.main(["--cases", "2", "--only", target.name, "--commit", "abc"]) == 1
    assert f": {kind}: " in capsys.readouterr().out
