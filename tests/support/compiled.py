"""What the compiler says about kernels, from a record where that is of the very same kernels.

Registers and spills are a function of the translation unit, the headers that it includes, the compiler and its options.
Rows of the record are named by all four, so the compiler would say the same again, for twenty minutes. What has no row,
such as every kernel that includes a header that was changed, is compiled: an old record costs time, never a check.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import pytest
from ds2_ops.jit import build as builder
from ds2_ops.jit.build import LAUNCH_REGISTERS, build
from ds2_ops.recurrent.plan.problem import Choice

RECORD = Path(__file__).parents[1] / "ops/recurrent/plan/compiled.tsv"
_HOW = inspect.getsource(builder._compile)  # among it the compiler's options


class Report(NamedTuple):
    """Registers, bytes of local memory a thread, and losses, as in `ds2_ops.jit.build.Binary`."""

    registers: int
    local_bytes: int
    loss: str


HOPPER = "sm_90a"
reports: dict[tuple[str, str], Report] = {}  # by translation unit and architecture, since the process began


def report(source: str, arch: str = HOPPER) -> Report:
    """What the compiler says about a translation unit, compiled only if the record does not know it."""
    result = recorded().get(key(source, arch))
    if result is None:
        binary = build(source, arch)
        result = Report(binary.registers, binary.local_bytes, binary.loss)
    reports[source, arch] = result
    return result


def assert_no_spills(choices: Iterable[Choice], arch: str = HOPPER) -> None:
    """Assert that kernels compile without local memory and losses, to as many registers as their threads share."""
    pytest.importorskip("cuda.bindings.nvrtc")
    for choice in choices:
        text, threads = choice.launch.source.text, choice.launch.threads
        compiled = report(text, arch)
        assert (compiled.local_bytes, compiled.loss) == (0, ""), choice.explain()
        assert compiled.registers * threads <= 65536
        if LAUNCH_REGISTERS in text:  # what setmaxnreg moves is counted from these
            assert compiled.registers == 65536 // threads // 8 * 8, choice.explain()


def write_record() -> int:
    """Write the reports of kernels without losses to the record; return their number."""
    rows = sorted(
        f"{_shape(source, arch)}\t{result.registers}\t{result.local_bytes}\t{key(source, arch)}"
        for (source, arch), result in reports.items()
        if not result.loss
    )
    RECORD.write_text("\n".join(["kernel\tregisters\tlocal_bytes\tkey", *rows, ""]))
    return len(rows)


@functools.cache
def recorded() -> dict[str, Report]:
    """What the record says, by :func:`key`."""
    rows = RECORD.read_text().splitlines()[1:] if RECORD.exists() else []
    fields = (row.split("\t") for row in rows)
    return {name: Report(int(registers), int(local), "") for _, registers, local, name in fields}


def key(source: str, arch: str = HOPPER) -> str:
    """Name all that decides what the compiler says."""
    return hashlib.sha256(f"{builder.key(source, arch)}{_HOW}".encode()).hexdigest()[:12]


def _shape(source: str, arch: str) -> str:
    """The type of a tile, or the call of another kernel."""
    shape = re.search(r"using Shape = (.*);", source) or re.search(r"ds2::([\w:<>, ]+)\(", source)
    assert shape, source
    return shape[1].replace("ds2::", "") + ("" if arch == HOPPER else f" {arch}")
