"""Measure the tiles of the recurrent kernels, and fit the planner's model to them.

    python tools/plans.py sweep --out ops/figures/plans_h200.json     time every tile, on a GPU
    python tools/plans.py fit RECORD... --write                       fit the planner's constants
    python tools/plans.py compiled                                    record the registers of every tile

`python tools/plans.py COMMAND --help` shows the options of each.
"""

from __future__ import annotations

import sys

from dispatch import dispatch

COMMANDS = {name: f"planning.{name}" for name in ("sweep", "fit", "compiled")}

if __name__ == "__main__":
    sys.exit(dispatch(COMMANDS, __doc__))
