"""Where the tests find the checkout, and real speech beside it where there is some."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REAL_DATA = ROOT.parent / "shared" / "data"
