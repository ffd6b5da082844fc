"""Packages that tests compare with where they are installed and load."""

from __future__ import annotations

from types import ModuleType

import pytest


def torchaudio() -> ModuleType:
    """The package, whose binaries load beside a CUDA build of torch only; else the test is skipped with the reason."""
    try:
        import torchaudio
        import torchaudio.compliance.kaldi
        import torchaudio.functional
    except (ImportError, OSError) as error:
        pytest.skip(f"torchaudio does not import here: {error}")
    return torchaudio
