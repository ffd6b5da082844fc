"""What files say never commands a terminal, and no encoding stops what was computed from being told."""

from __future__ import annotations

import io
import logging
import os
import pty
import re
import subprocess
import sys
from contextlib import suppress

import pytest

from ds2.system.terminal import ProgressBar, VisibleFormatter, stderr_without, visible
from ds2.training.metrics import progress_bar


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain", "plain"),
        ("Grüße, 你好 \u0646\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645\n\t.", None),
        ("\x1b[2J\x07", "\\x1b[2J\\x07"),
        ("a\rb\x9b31m\x7f", "a\\rb\\x9b31m\\x7f"),
        ("txt\u202eexe\u2066", "txt\\u202eexe\\u2066"),
        ("\u2028", "\\u2028"),
    ],
)
def test_control_characters_are_escaped(text: str, shown: str | None) -> None:
    assert visible(text) == (text if shown is None else shown)


def test_log_lines_are_visible() -> None:
    record = logging.LogRecord("a", logging.INFO, "f", 1, "file %s", ("\x1b]0;x\x07",), None)
    assert VisibleFormatter("%(message)s").format(record) == "file \\x1b]0;x\\x07"


def test_lines_of_a_library_are_dropped_and_all_others_printed(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="bad"), stderr_without(re.compile("Reading .*")):
        os.write(2, b"Reading file\nan error\nnot Reading\n")
        raise ValueError("bad")
    os.write(2, b"Reading again\n")
    assert capfd.readouterr().err == "an error\nnot Reading\nReading again\n"


def test_a_program_may_have_no_standard_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    with ProgressBar("work", 2.0, "part") as progress, progress_bar(2, 1, 1, 0) as steps:
        progress.update(1.0)
        steps.update()
    with stderr_without(re.compile("Reading .*")):
        pass


def test_errors_show_paths() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "ds2.cli", "wer", "no\x1b[31mthing", "x"], capture_output=True, text=True, check=False
    )
    assert run.returncode == 2 and "no\\x1b[31mthing" in run.stderr and "\x1b" not in run.stderr


CODE = (
    "import sys\nfrom ds2 import cli\nfrom ds2.commands import wer\n"
    "wer.run = lambda arguments: print('\\x1b[31m gr\\u00fc\\u00df \\u4f60') or 0\nsys.exit(cli.main(['wer']))"
)


def test_a_terminal_gets_escaped_text_and_a_pipe_the_original() -> None:
    run = subprocess.run([sys.executable, "-c", CODE], capture_output=True, check=False,
                         env={**os.environ, "PYTHONIOENCODING": "utf-8"})  # fmt: skip
    assert run.stdout.decode() == "\x1b[31m grüß 你\n"
    leader, follower = pty.openpty()
    with subprocess.Popen([sys.executable, "-c", CODE], stdout=follower) as process:
        os.close(follower)
        shown = b""
        with io.open(leader, "rb", buffering=0) as screen, suppress(OSError):  # noqa: UP020 (an error ends a terminal)
            while part := screen.read(1000):
                shown += part
        assert process.wait() == 0
    assert shown.startswith(b"\\x1b[31m gr")


def test_an_encoding_that_lacks_a_character_does_not_fail() -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1", "PYTHONUTF8": "0"}
    run = subprocess.run([sys.executable, "-c", CODE], capture_output=True, env=environment, check=False)
    assert (run.returncode, run.stdout) == (0, b"\x1b[31m gr\xfc\xdf \\u4f60\n")
