"""Packages that tests compare with where they are installed and load."""

from __future__ import annotations

import importlib
import shutil
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest


def torchaudio(*, compiled: bool = False) -> ModuleType:
    """The package; the test is skipped with the reason where it cannot be had.

    Its wheels on PyPI are linked to CUDA's libraries and load beside a CUDA build of torch only. Beside another build
    its Python files alone are imported, which is all that filter banks, resampling and edit distances need.

    Args:
        compiled: whether the test needs its binaries.
    """
    try:
        return _import()
    except ImportError as error:
        pytest.skip(f"torchaudio does not import here: {error}")
    except OSError as error:
        if compiled:
            pytest.skip(f"torchaudio's binaries do not load here: {error}")
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchaudio"]:
        del sys.modules[name]
    spec = find_spec("torchaudio")
    assert spec is not None and spec.origin is not None
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(Path(spec.origin).parent, Path(folder) / "torchaudio", ignore=shutil.ignore_patterns("*.so"))
        sys.path.insert(0, folder)
        try:
            return _import()
        finally:
            sys.path.remove(folder)


def _import() -> ModuleType:
    for part in ("compliance.kaldi", "functional"):
        importlib.import_module(f"torchaudio.{part}")
    return sys.modules["torchaudio"]
