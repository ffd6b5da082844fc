"""What the compiler says about the planner's kernels, from a record where that is of the very same kernels.

Registers and spills are a function of the translation unit, the headers and the compiler. The record names all three,
so the compiler would say the same again, for 15 minutes. Whatever is not in it, such as every kernel after a change of
csrc, is compiled: a record that is old costs time, never a check.
"""

from __future__ import annotations

import functools
import hashlib
import re
import warnings
from pathlib import Path
from typing import NamedTuple

from ds2_ops.jit.build import build, debug_waits, sources_digest

RECORD = Path(__file__).parents[1] / "ops/recurrent/plan/compiled.tsv"


class Report(NamedTuple):
    """Registers, bytes of local memory a thread, and losses, as in `ds2_ops.jit.build.Binary`."""

    registers: int
    local_bytes: int
    loss: str


heard: dict[str, Report] = {}  # by translation unit, since the process began


def report(source: str) -> Report:
    """What the compiler says about a translation unit, compiled only if the record does not know it."""
    found = recorded().get(key(source))
    if found is None:
        binary = build(source)
        found = Report(binary.registers, binary.local_bytes, binary.loss)
    heard[source] = found
    return found


def write_record() -> int:
    """Record what was heard of kernels without losses; returns their number."""
    rows = sorted(
        f"{_shape(source)}\t{said.registers}\t{said.local_bytes}\t{key(source)}"
        for source, said in heard.items()
        if not said.loss
    )
    RECORD.write_text("\n".join([f"kernel\tregisters\tlocal_bytes\t{sources_digest()}", *rows, ""]))
    return len(rows)


@functools.cache
def recorded() -> dict[str, Report]:
    """What the record says, by :func:`key`; nothing, with a warning, where it is of other kernels or compilers."""
    head, *rows = RECORD.read_text().splitlines() if RECORD.exists() else [""]
    if debug_waits() or head.rpartition("\t")[2] != sources_digest():
        warnings.warn(
            "compiled.tsv is of other kernels or another compiler: each is compiled; "
            "`python tools/record_compiled.py` records them",
            stacklevel=1,
        )
        return {}
    fields = (row.split("\t") for row in rows)
    return {unit: Report(int(registers), int(local), "") for _, registers, local, unit in fields}


def key(source: str) -> str:
    """Name a translation unit."""
    return hashlib.sha256(source.encode()).hexdigest()[:12]


def _shape(source: str) -> str:
    shape = re.search(r"using Shape = (.*);", source)
    assert shape, source
    return shape[1].replace("ds2::", "")
