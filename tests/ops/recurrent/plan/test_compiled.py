"""The record of what the compiler said is of these kernels and this compiler, or is not believed."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from ds2_ops.jit import build as builder
from ds2_ops.jit.build import Binary, build
from ds2_ops.recurrent.plan.choose import space
from ds2_ops.recurrent.plan.devices import DEVICES
from ds2_ops.recurrent.plan.problem import Problem
from support import compiled

pytest.importorskip("cuda.bindings.nvrtc")


def tile(layout: str, hidden: int, cell: str) -> str:
    """One of those that every tile's tests hold to their registers."""
    choices = space(Problem(64, hidden, "bfloat16", cell, True), DEVICES["H200"])
    return next(choice.launch.source.text for choice in choices if choice.work.layout.startswith(layout))


SOURCE = tile("cluster", 1088, "tanh")


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Keep the record elsewhere, and replace the compiler by one whose kernels always spill."""
    monkeypatch.setattr(compiled, "RECORD", tmp_path / "compiled.tsv")
    monkeypatch.setattr(compiled, "reports", {(SOURCE, "sm_90a"): compiled.Report(128, 0, "")})
    monkeypatch.setattr(compiled, "build", lambda source, arch: Binary(b"", 255, 8, ""))
    compiled.write_record()
    compiled.recorded.cache_clear()
    yield tmp_path / "compiled.tsv"
    compiled.recorded.cache_clear()


def spills(source: str) -> bool:
    return compiled.report(source).local_bytes > 0


def test_what_is_recorded_is_not_compiled_and_all_else_is(record: Path) -> None:
    assert not spills(SOURCE)
    assert spills(SOURCE + "\n")


@pytest.mark.parametrize("other", ["compiler", "options", "waits", "header"])
def test_a_record_of_other_kernels_is_not_believed(other: str, record: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if other == "compiler":
        monkeypatch.setattr(builder, "compiler_version", lambda: "nvrtc 0.0")
    elif other == "options":
        monkeypatch.setattr(compiled, "_HOW", "with other options")
    elif other == "waits":
        monkeypatch.setenv("DS2_OPS_DEBUG", "1")
    else:
        changed = builder._headers() | {"ptx/sync.cuh": "// changed\n"}
        monkeypatch.setattr(builder, "_headers", lambda: changed)
    assert spills(SOURCE)


def test_a_kernel_that_loses_performance_is_not_recorded(record: Path) -> None:
    compiled.reports[SOURCE, "sm_90a"] = compiled.Report(128, 0, "instructions wait for each other")
    assert compiled.write_record() == 0
    assert spills(SOURCE)


@pytest.mark.parametrize(
    ("layout", "hidden", "cell"),
    [
        ("units", 96, "clipped_relu"),
        ("cluster", 1088, "tanh"),
        pytest.param("narrow", 1760, "tanh", marks=pytest.mark.slow),
        pytest.param("wide", 2560, "tanh", marks=pytest.mark.slow),
    ],
)
def test_the_compiler_says_what_is_recorded(layout: str, hidden: int, cell: str) -> None:
    source = tile(layout, hidden, cell)
    binary = build(source)
    assert compiled.report(source) == (binary.registers, binary.local_bytes, binary.loss)
