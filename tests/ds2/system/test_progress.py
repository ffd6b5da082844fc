"""ProgressBar: a line a minute without a terminal, a bar on one."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import termios
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from ds2.system.terminal import ProgressBar


def test_without_a_terminal_a_line_a_minute(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level("INFO")
    now = [0.0]
    monkeypatch.setattr("ds2.system.terminal.time", SimpleNamespace(monotonic=lambda: now[0]))

    def items() -> Iterator[float]:
        for _ in range(200):
            now[0] += 1.0
            yield now[0]

    with ProgressBar("reading", 200, "files") as progress:
        assert list(progress.over(items())) == list(range(1, 201))
    assert [record.getMessage() for record in caplog.records] == [
        "reading: 60 of 200 files, 2 min left",
        "reading: 120 of 200 files, 1 min left",
        "reading: 180 of 200 files, 0 min left",
    ]
    caplog.clear()
    for shown, total in ((False, 9.0), (True, None)):
        now[0] = 0.0
        progress = ProgressBar("reading", total, "s", shown=shown)
        now[0] = 61.0
        progress.update(5)
    assert [record.getMessage() for record in caplog.records] == ["reading: 5 s"]


def test_on_a_terminal_a_bar_and_standard_output_stays_clean() -> None:
    code = (
        "from ds2.system.terminal import ProgressBar\n"
        "with ProgressBar('a\\x1bb', 2, 'files') as progress:\n"
        "    progress.update(1); progress.clear(); print('text'); progress.update(2)\n"
    )
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    run = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=theirs, check=True)
    os.set_blocking(ours, False)
    shown = os.read(ours, 65536).decode()
    os.close(theirs)
    os.close(ours)
    assert run.stdout == b"text\n"
    assert "a\\x1bb:" in shown and "0/2" in shown
