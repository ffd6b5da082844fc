"""No input, however damaged, gives a traceback, a hang, a gigabyte or, where checksums tell, a wrong result.

DS2_FUZZ_CASES=2000 DS2_FUZZ_SEED=7 fuzzes longer and elsewhere; see tools/fuzz.py inputs for one case alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fuzzing.ranks import Strike, pauses_s
from support.launch import tool
from support.paths import ROOT

CASES, SEED = os.environ.get("DS2_FUZZ_CASES", "12"), os.environ.get("DS2_FUZZ_SEED", "1")


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="cases are isolated by fork")
def test_damaged_inputs_are_named_errors_or_right_results() -> None:
    done = tool("fuzz", "inputs", "--cases", CASES, "--seed", SEED)
    assert done.returncode == 0, done.stdout
    assert f"| overrides | {CASES} |" in done.stdout


FAULTY_READERS = """
import os, sys, time
sys.path[:0] = [{tools!r}]
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
    script.write_text(FAULTY_READERS.format(tools=str(ROOT / "tools")))
    path = os.pathsep.join(map(str, (ROOT, ROOT / "ops")))
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False)
    for kind in ("traceback", "died", "hang", "memory", "wrong"):
        assert f"\n{kind} 1\n" in done.stdout and f": {kind}: " in done.stdout, done.stdout + done.stderr


def test_a_pause_counts_from_the_last_loss_that_ranks_waited_for(tmp_path: Path) -> None:
    lines = [
        ("train", 1, 10.0, []),
        ("ranks", 1, 19.0, ["rank 1 on host (process 11) has been silent for 8 s"]),
        ("ranks", 1, 27.5, ["rank 0 on host (process 12) has been silent for 8 s"]),
        ("train", 2, 28.0, []),
        ("ranks", 2, 36.0, ["rank 1 on host (process 14) ended"]),
        ("train", 2, 36.1, []),  # the new rank 0 logs it again
        ("train", 3, 36.5, []),
    ]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "log.jsonl").write_text(
        "".join(
            json.dumps({"event": event, "step": step, "time": time_s, "left": left}) + "\n"
            for event, step, time_s, left in lines
        )
    )
    strikes = [
        Strike("stop", 11, 10.5, until_s=25.0),  # went on when the others had left it
        Strike("stop", 12, 19.5),
        Strike("kill", 13, 29.0),
        Strike("stop", 14, 30.0, until_s=35.0),  # went on before anybody noticed, and ended
        Strike("kill", 15, 40.0),
    ]
    assert pauses_s(tmp_path, strikes) == [("stopped", 8.5), ("killed, or left", 1.5)]
