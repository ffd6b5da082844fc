"""Record what the compiler reports about kernels, so that tests compile only kernels that changed.

    python tools/plans.py compiled

Runs the tests of compiled kernels (`make test` before it fills the cache of kernels on all cores) and, if they pass,
writes tests/ops/recurrent/plan/compiled.tsv. Its difference in a commit shows what a change of a kernel did to the
registers of each tile.
"""

import sys
from pathlib import Path

import pytest
from dispatch import plain_parser

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from support import compiled

_TESTS = ("recurrent/plan", "jit/test_architectures.py", "ctc", "convolution", "primitives")  # in tests/ops


def main(arguments: list[str] | None = None) -> int:
    """Compile, run the tests and write the record."""
    plain_parser(__doc__).parse_args(arguments)
    compiled.RECORD.unlink(missing_ok=True)
    failed = pytest.main(["-q", "-m", "not gpu", *(str(compiled.RECORD.parents[2] / name) for name in _TESTS)])
    if not failed:
        print(f"{compiled.RECORD}: {compiled.write_record()} kernels")
    return failed
