"""Measure the tiles of the recurrent kernels, and fit the planner's model to them.

    python tools/plans.py sweep --out ops/figures/plans_h200.json     time every tile, on a GPU
    python tools/plans.py fit RECORD... --write                       fit the planner's constants
    python tools/plans.py compiled                                    record the registers of every tile

`python tools/plans.py COMMAND --help` shows the options of each.
"""

import sys

from dispatch import dispatch

if __name__ == "__main__":
    sys.exit(dispatch("planning", ("sweep", "fit", "compiled"), __doc__))
