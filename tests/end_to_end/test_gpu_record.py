"""GPU tests: processes take all GPUs in turn, a pass replaces the last one, a kernel that changed since is named."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import gpu_tests
import pytest
from fuzzing import kernels
from support.gpus import use_gpu_in_turn
from support.paths import ROOT

NO_PLUGINS = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # of other packages: they take longer than the tests
SUITE = """
import pytest
def test_right(): pass
def test_wrong(): assert {right}
@pytest.mark.skip
def test_elsewhere(): pass
"""


def a_pass(**changes: str) -> gpu_tests.Pass:
    values = ("H100", "gpu", "0123456789abcdef", "2026-11-26", "643", "5", "237", "a", "b")
    return replace(gpu_tests.Pass(*values), **changes)


def test_a_pass_replaces_the_one_of_the_same_gpu_and_tests(tmp_path: Path) -> None:
    path = tmp_path / "passes.tsv"
    assert gpu_tests.read(path) == []
    first, two, other = a_pass(), a_pass(tests="two_gpus"), a_pass(gpu="H200")
    for new in (first, two, other, a_pass(passed="650")):
        gpu_tests.note(path, new)
    assert gpu_tests.read(path) == [a_pass(passed="650"), two, other]


def test_changes_since_the_last_pass_are_listed_by_part() -> None:
    notices, now = gpu_tests.notices, {"csrc": "a", "python": "b"}
    assert notices([a_pass()], now) == []
    (kernels,) = notices([a_pass(tests="two_gpus"), a_pass(csrc="old")], now)
    assert kernels.startswith("CUDA sources in") and "H100 passed `make test-gpu` at 0123456, 2026-11-26" in kernels
    (both,) = notices([a_pass(tests="two_gpus", csrc="old", python="old")], now)
    assert both.startswith("CUDA sources and the Python") and "`make test-two-gpus`" in both
    assert "make test-gpu" in notices([], now)[0]


def test_digests_follow_names_and_contents_of_kernels_and_of_their_python(tmp_path: Path) -> None:
    package = tmp_path / "ops" / "ds2_ops"
    for name in ("csrc/a.cuh", "plan.py", "__pycache__/plan.pyc"):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(name)
    before = gpu_tests.digests(tmp_path)
    (package / "__pycache__" / "plan.pyc").write_text("compiled again")
    assert gpu_tests.digests(tmp_path) == before
    (package / "csrc" / "a.cuh").rename(package / "csrc" / "b.cuh")
    renamed = gpu_tests.digests(tmp_path)
    assert renamed["csrc"] != before["csrc"] and renamed["python"] == before["python"]
    (package / "plan.py").write_text("other")
    assert gpu_tests.digests(tmp_path)["python"] != before["python"]


@pytest.mark.parametrize(("right", "passed"), [(True, 2), (False, 1)])
def test_tests_that_passed_and_were_skipped_are_counted(tmp_path: Path, right: bool, passed: int) -> None:
    (tmp_path / "test_suite.py").write_text(SUITE.format(right=right))
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={report}", "test_suite.py"]
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, **NO_PLUGINS}, capture_output=True, check=False)
    assert done.returncode == int(not right)
    assert gpu_tests.counts(report) == (passed, 1)


NO_GPU = """
import runpy, sys
from types import SimpleNamespace
cuda = SimpleNamespace(is_available=lambda: True, device_count=lambda: 2, get_device_name=lambda index: "GPU")
sys.modules["torch"] = SimpleNamespace(cuda=cuda)  # to import the real one takes seconds
sys.argv = ["gpu_tests.py", "run", "--two-gpus", "--commit", "abc"]
sys.path.insert(0, "tools")
runpy.run_path("tools/gpu_tests.py", run_name="__main__")
"""


@pytest.mark.parametrize("right", [True, False])
def test_a_run_is_noted_only_if_all_passed(tmp_path: Path, right: bool) -> None:
    for folder in ("tests", "ops/ds2_ops"):
        (tmp_path / folder).mkdir(parents=True)
    for name in ("gpu_tests.py", "dispatch.py"):
        (tmp_path / "tools").mkdir(exist_ok=True)
        shutil.copy(ROOT / "tools" / name, tmp_path / "tools")
    body = f"import pytest\n@pytest.mark.gpu\n@pytest.mark.two_gpus\ndef test_it(): assert {right}\n"
    (tmp_path / "tests" / "test_it.py").write_text(body)
    done = subprocess.run(
        [sys.executable, "-c", NO_GPU], cwd=tmp_path, capture_output=True, text=True, check=False,
        env={"PYTHONPATH": str(ROOT), "PATH": "", "DS2_OPS_CAPABILITY": "8.0", **NO_PLUGINS},
    )  # fmt: skip
    assert done.returncode == int(not right), done.stdout + done.stderr
    record = tmp_path / "tests" / "gpu_passes.tsv"
    assert record.is_file() == right
    if right:
        line = record.read_text().splitlines()[1].split("\t")
        assert line[:3] == ["GPU as 8.0", "two_gpus", "abc"] and line[4:6] == ["1", "0"]


@pytest.mark.parametrize(
    ("names", "gpus", "cores", "expected", "processes"),
    [
        (None, 1, 16, "0", "14"),
        (None, 2, 32, "0,1", "28"),
        (None, 2, 16, "0,1", "16"),
        ("3,GPU-ab", 2, 64, "3,GPU-ab", "28"),
        ("1,-1,2", 1, 64, "1", "14"),  # CUDA reads no further than -1
    ],
)
def test_processes_of_a_run_take_all_gpus_that_the_user_allows(
    monkeypatch: pytest.MonkeyPatch, names: str | None, gpus: int, cores: int, expected: str, processes: str
) -> None:
    calls = []

    def fail(command: list[str], *, env: dict[str, str], **_: object) -> SimpleNamespace:
        calls.append((command, env))
        return SimpleNamespace(returncode=1)

    cuda = SimpleNamespace(is_available=lambda: True, device_count=lambda: gpus)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(gpu_tests.subprocess, "run", fail)
    monkeypatch.setattr(gpu_tests, "usable_cores", lambda: cores)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if names is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", names)
    assert gpu_tests.main(["run", "--commit", "abc"]) == 1
    (tests, env), (fuzz, fuzz_env) = calls
    assert tests[tests.index("-n") + 1] == fuzz[fuzz.index("--workers") + 1] == processes
    assert env["CUDA_VISIBLE_DEVICES"] == fuzz_env["CUDA_VISIBLE_DEVICES"] == expected


def test_a_process_has_one_gpu_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    for process, gpu in enumerate(("3", "GPU-ab", "3", "GPU-ab")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-ab")
        use_gpu_in_turn(process)
        assert os.environ["CUDA_VISIBLE_DEVICES"] == gpu
    for names in ("", None):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
        if names is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", names)
        use_gpu_in_turn(1)
        assert os.environ.get("CUDA_VISIBLE_DEVICES") == names


def test_a_worker_of_pytest_chooses_its_gpu_before_cuda_starts() -> None:
    code = f"""
import os, runpy, torch
runpy.run_path({str(ROOT / "tests" / "conftest.py")!r})
import support.fixtures
print(os.environ["CUDA_VISIBLE_DEVICES"], torch.cuda.is_initialized())
"""
    environment = {**os.environ, "PYTEST_XDIST_WORKER": "gw3", "CUDA_VISIBLE_DEVICES": "6,7"}
    environment["PYTHONPATH"] = os.pathsep.join(str(ROOT / name) for name in (".", "ops", "tests", "tools"))
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "7 False\n"


def test_a_worker_of_the_fuzzer_takes_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,7")
    kernels._worker(seed=0, first=3, step=4, until=0.0)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "7"
