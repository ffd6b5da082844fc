"""No input, however damaged, gives a traceback, a hang, a gigabyte or, where checksums tell, a wrong result.

DS2_FUZZ_CASES=2000 DS2_FUZZ_SEED=7 fuzzes longer and elsewhere; see tools/fuzz.py inputs for one case alone.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fuzzing.inputs import TARGETS
from support.launch import tool
from support.paths import ROOT

CASES, SEED = os.environ.get("DS2_FUZZ_CASES", "12"), os.environ.get("DS2_FUZZ_SEED", "1")


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="cases are isolated by fork")
def test_damaged_inputs_are_named_errors_or_right_results() -> None:
    done = tool("fuzz", "inputs", "--cases", CASES, "--seed", SEED)
    assert done.returncode == 0, done.stdout
    assert f"\n{int(CASES) * len(TARGETS)} cases: " in done.stdout and "\noverrides: " in done.stdout


FAULTY_READERS = """
import os, sys, time
sys.path[:0] = [{tools!r}, {tests!r}]
from fuzzing import files, inputs
from fuzzing.damage import BYTES

def make(folder):
    (folder / "f").write_bytes(b"whole")

def reader(fault):
    def read(folder):
        kind = (folder / "f").read_bytes()
        if kind != b"whole":
            fault()
        return kind
    return read

faults = dict(
    traceback=lambda: {{}}["x"], died=os.abort, hang=lambda: time.sleep(3600), memory=lambda: b"1" * (1 << 27),
    wrong=lambda: None,
)
inputs.MEMORY_KIB = 1 << 16
for name, fault in faults.items():
    inputs.HANG_S = 2 if name == "hang" else 60
    inputs.TARGETS["faulty"] = files.Target("faulty", make, reader(fault), BYTES, checked=True)
    print(name, inputs.main(["--cases", "2", "--only", "faulty"]))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="memory is measured by /proc")
def test_the_fuzzer_sees_each_kind_of_fault(tmp_path: Path) -> None:
    script = tmp_path / "faulty.py"
    script.write_text(FAULTY_READERS.format(tools=str(ROOT / "tools"), tests=str(ROOT / "tests")))
    path = os.pathsep.join(map(str, (ROOT, ROOT / "ops")))
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False)
    for kind in ("traceback", "died", "hang", "memory", "wrong"):
        assert f"\n{kind} 1\n" in done.stdout and f": {kind}: " in done.stdout, done.stdout + done.stderr
