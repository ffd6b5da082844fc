"""`ds2 wer` as a script: python tools/wer.py REFERENCES HYPOTHESES [HYPOTHESES_B] [options]."""

import sys

from ds2.cli import main

if __name__ == "__main__":
    sys.exit(main(["wer", *sys.argv[1:]]))
