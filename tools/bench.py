"""Measure the speed of ds2 and its kernels.

    python tools/bench.py rnn              one recurrent layer against torch.nn and float64
    python tools/bench.py training         training steps of whole models
    python tools/bench.py scaling          training steps on several ranks
    python tools/bench.py collectives      sums over ranks
    python tools/bench.py predict          throughput on many ranks, from scaling.json and collectives.json
    python tools/bench.py streaming        a chunk of live audio, without a server
    python tools/bench.py serving          latency of a server

`python tools/bench.py COMMAND --help` shows the options of each.
"""

import sys

from dispatch import dispatch

COMMANDS = ("rnn", "training", "scaling", "collectives", "predict", "streaming", "serving")

if __name__ == "__main__":
    sys.exit(dispatch("benchmarks", COMMANDS, __doc__))
