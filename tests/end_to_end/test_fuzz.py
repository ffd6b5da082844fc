"""No input, however damaged, gives a traceback, a hang, a gigabyte or, where checksums tell, a wrong result.

DS2_FUZZ_CASES=2000 DS2_FUZZ_SEED=7 fuzzes longer and elsewhere; see tools/fuzz.py for one case alone.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.paths import ROOT

CASES, SEED = os.environ.get("DS2_FUZZ_CASES", "12"), os.environ.get("DS2_FUZZ_SEED", "1")


def fuzz(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the tool in a process of its own: it forks, which a process with threads must not."""
    path = os.pathsep.join(map(str, (ROOT, ROOT / "ops", os.environ.get("PYTHONPATH", ""))))
    return subprocess.run(
        [sys.executable, str(ROOT / "tools" / "fuzz.py"), *arguments],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}, cwd=ROOT,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8", errors="replace", check=False,
    )  # fmt: skip


@pytest.mark.skipif(not hasattr(os, "fork"), reason="cases are isolated by fork")
def test_damaged_inputs_are_named_errors_or_right_results() -> None:
    done = fuzz("--cases", CASES, "--seed", SEED)
    assert done.returncode == 0, done.stdout
    assert f"| overrides | {CASES} |" in done.stdout


FAULTY_READER = """
import os, sys, time
sys.path[:0] = [{tools!r}]
import fuzz, fuzz_targets
from fuzz_damage import BYTES
def read(folder):
    kind = (folder / "f").read_bytes()
    if kind != b"whole":
        {fault}
    return kind
def make(folder):
    (folder / "f").write_bytes(b"whole")
fuzz.TARGETS["faulty"] = fuzz_targets.Target("faulty", make, read, BYTES, checked=True)
fuzz.HANG_S, fuzz.MEMORY_KIB = {hang_s}, 1 << 16
sys.exit(fuzz.main(["--cases", "3", "--only", "faulty"]))
"""


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        ("traceback", "raise KeyError('x')"),
        ("died", "os.abort()"),
        ("hang", "time.sleep(3600)"),
        ("memory", "kept = b'1' * (1 << 27)"),
        ("wrong", "pass"),
    ],
)
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="memory is measured by /proc")
def test_the_fuzzer_sees_each_kind_of_fault(kind: str, fault: str, tmp_path: Path) -> None:
    script = tmp_path / "faulty.py"
    script.write_text(FAULTY_READER.format(tools=str(ROOT / "tools"), fault=fault, hang_s=2 if kind == "hang" else 60))
    path = os.pathsep.join(map(str, (ROOT, ROOT / "ops")))
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert f"- faulty, {'?' if kind in ('died', 'hang') else ''}" in done.stdout and f": {kind}: " in done.stdout
