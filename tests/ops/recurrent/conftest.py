"""Fixtures of the tests that run the persistent kernels on a CPU."""

import pytest
from support.chip import Chip, patch


@pytest.fixture
def chip(monkeypatch: pytest.MonkeyPatch) -> Chip:
    """See `support.chip.patch`."""
    return patch(monkeypatch)
