"""`make test-gpu` runs where only ds2's own dependencies, pytest and the packages of the kernels are installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib

import pytest
from support.paths import ROOT

COLLECT = """
import sys
import pytest
refused = set(sys.argv[1].split(","))
class Refuse:
    def find_spec(self, name, *_):
        if name.partition(".")[0] in refused:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Refuse())
sys.exit(pytest.main(["-q", "-m", "gpu", "--collect-only", "-p", "no:cacheprovider"]))
"""
NAMES = {
    "ctc-beam-decoder": "ctc_beam_decoder",
    "ufal-flashlight-text": "flashlight",
    "kubeflow-trainer-api": "kubeflow_trainer_api",
}


def packages_of_extras() -> set[str]:
    """Import names of all optional packages but those of pytest and of the kernels."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    lines = [line for extra, lines in extras.items() if extra != "gpu" for line in lines]
    names = {re.split(r"[<>=\[; ]", line)[0] for line in lines} - {"pytest", "pytest-xdist", "ds2-speech"}
    return {NAMES.get(name, name.replace("-", "_")) for name in names}


@pytest.mark.slow
def test_gpu_tests_import_no_package_of_another_extra() -> None:
    refused = packages_of_extras()
    assert {"openai", "sherpa_onnx", "hypothesis", "jiwer", "starlette", "av"} <= refused
    command = [sys.executable, "-c", COLLECT, ",".join(sorted(refused))]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # plugins of packages that are refused
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    assert int(re.findall(r"(\d+)/\d+ tests collected", done.stdout)[0]) > 500
