"""Commands of ds2 one after the other in one process: python many_commands.py '[["info", "MODEL"], ...]'

Standard output has a JSON line for each: its status, and what it said on both streams.
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
    """The status and all that was said; -1 and the trace of a command that failed otherwise than with a message."""
    said = io.StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        try:
            status = main(arguments)
        except SystemExit as ended:
            status = int(ended.code or 0)
        except Exception:
            status = -1
            traceback.print_exc()
    logging.getLogger().handlers.clear()  # they hold a stream that is gone
    return status, said.getvalue()


if __name__ == "__main__":
    for command in json.loads(sys.argv[1]):
        print(json.dumps(run(command)), flush=True)
