"""The log of a run: whole lines, whatever ended the job before."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from ds2.training.metrics import RunLog


def test_a_torn_last_line_does_not_swallow_the_next_event(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text('{"event": "start"}\n{"event": "tra')
    board = RunLog(tmp_path, resume_step=3)
    board.event("resume", 3, {})
    board.close()
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    assert lines[1] == '{"event": "tra' and json.loads(lines[2])["event"] == "resume"
    RunLog(tmp_path).close()
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 3


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    board = RunLog(tmp_path)
    board._jsonl.close()

    class Full:
        def write(self, text: str) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    full: Any = Full()
    board._jsonl = full
    with pytest.raises(OSError, match=r"No space left on device: '.*log\.jsonl'"):
        board.event("train", 1, {})
