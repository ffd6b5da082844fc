"""Look for faults of ds2 and its kernels with random inputs.

    python tools/fuzz.py inputs --cases 2000 --seed 7           damaged files and messages
    python tools/fuzz.py kernels --seconds 240 --workers 14     random problems on random tiles, on a GPU
    python tools/fuzz.py kills --kills 4                        kill -9 at random moments, then the same command again
    python tools/fuzz.py simulation --seeds 10000               a server with its clients under a virtual clock
    python tools/fuzz.py meetings --seeds 1000                  ranks that come and go under a virtual clock
    python tools/fuzz.py ranks --runs 5                         ranks that are killed, stopped and started

`python tools/fuzz.py COMMAND --help` shows the options of each.
"""

import sys
from pathlib import Path

from dispatch import dispatch

sys.path.insert(1, str(Path(__file__).parents[1] / "tests"))  # whose `support` fuzzers share

if __name__ == "__main__":
    sys.exit(dispatch("fuzzing", ("inputs", "kernels", "kills", "simulation", "meetings", "ranks"), __doc__))
