"""How tests are collected and where they run; their fixtures are in `support.fixtures`."""

from __future__ import annotations

import gc
import os
from contextlib import suppress
from pathlib import Path

import pytest
from support.gpus import use_gpu_in_turn

# GPUs that are not there, by which tests plan, cannot be measured; a GPU that is there runs the tiles of the constants.
os.environ.setdefault("DS2_OPS_CALIBRATE", "0")

if "PYTEST_XDIST_WORKER" in os.environ:
    use_gpu_in_turn(int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw")))
    # Workers side by side, and the jobs they start, compute on one thread each: more only wait for each other.
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch is imported later


def _on_a_gpu(config: pytest.Config) -> bool:
    return config.option.markexpr in ("gpu", "gpu and two_gpus")


class _FailuresAtOnce:
    """Prints why a test failed as soon as it fails: a rented machine may be gone before the summary."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal = self.config.pluginmanager.getplugin("terminalreporter")
        if report.failed and terminal is not None:  # a worker of xdist has none
            terminal.write_line(f"\n{report.nodeid}\n{report.longreprtext}")


def pytest_configure(config: pytest.Config) -> None:
    """Import the fixtures, but not where other processes run the tests; with `-m gpu...`, print failures at once."""
    if "PYTEST_XDIST_WORKER" in os.environ or config.getoption("dist", "no") == "no":
        gc.disable()  # until all tests are collected: what is imported stays
        config.pluginmanager.import_plugin("support.fixtures")
    if _on_a_gpu(config):
        config.pluginmanager.register(_FailuresAtOnce(config))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests of kernels that the GPU, or the one that it stands for by $DS2_OPS_CAPABILITY, does not run."""
    needs = [name for name in ("hopper", "since_hopper") if item.get_closest_marker(name)]
    if needs:
        from ds2_ops.jit.runtime import capability

        version = capability(0)
        if version < (9, 0) or (version > (9, 0) and "hopper" in needs):
            pytest.skip(f"its kernels need compute capability 9.0, kernels are built for {version[0]}.{version[1]}")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m gpu...`, import only files and folders with GPU tests: a GPU machine may lack what the others import."""
    if not _on_a_gpu(config) or not (collection_path.is_dir() or collection_path.name.startswith("test_")):
        return None
    files = collection_path.rglob("test_*.py") if collection_path.is_dir() else [collection_path]
    return None if any("mark.gpu" in file.read_text("utf-8") for file in files) else True


def pytest_collection_finish() -> None:
    """Keep what was imported out of garbage collections, which otherwise look through all of it again and again."""
    if "PYTEST_XDIST_WORKER" in os.environ:  # each worker trains, and training imports these
        with suppress(ImportError):
            import torch._dynamo
            import torch.utils.tensorboard  # noqa: F401
    gc.freeze()
    gc.enable()
