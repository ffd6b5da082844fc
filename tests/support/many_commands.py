"""Commands of ds2 one after the other in one process: python many_commands.py '[["info", "MODEL"], ...]'

Standard output has a JSON line for each: its status and the text of both streams.
"""

from __future__ import annotations

import io
import json
import logging
import sys
import traceback
from contextlib import redirect_stderr, redirect_stdout

from ds2.cli import main


def run(arguments: list[str]) -> tuple[int, str]:
    """The status and the text of both streams; -1 and the traceback of a command that failed without a message."""
    output = io.StringIO()
    with redirect_stdout(output), redirect_stderr(output):
        try:
            status = main(arguments)
        except SystemExit as ended:
            status = int(ended.code or 0)
        except Exception:
            status = -1
            traceback.print_exc()
    logging.getLogger().handlers.clear()  # they hold a stream that is gone
    return status, output.getvalue()


if __name__ == "__main__":
    for command in json.loads(sys.argv[1]):
        print(json.dumps(run(command)), flush=True)
