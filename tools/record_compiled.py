"""Records what the compiler says about the planner's kernels, so that tests need not compile what did not change.

    python tools/record_compiled.py

Runs the planner's tests on kernels all compiled (or from the cache of compiled kernels: `make test` before fills it on
all cores) and, if they pass, writes tests/ops/recurrent/plan/compiled.tsv. Its difference in a commit is what a change
of a kernel did to the registers of each tile.
"""

import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1] / "tests"
sys.path.insert(0, str(TESTS))

from support import compiled  # noqa: E402  (the tests' own)


def main() -> int:
    compiled.RECORD.unlink(missing_ok=True)
    failed = pytest.main(["-q", "-m", "not gpu", str(compiled.RECORD.parent)])
    if not failed:
        print(f"{compiled.RECORD}: {compiled.write_record()} kernels")
    return failed


if __name__ == "__main__":
    sys.exit(main())
