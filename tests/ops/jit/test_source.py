"""Translation units: what they say, and how arguments become what a launch takes."""

import ctypes

import pytest
import torch
from ds2_ops.jit.build import build
from ds2_ops.jit.source import names, parameters, translation_unit

SCALE = parameters("const float* x, double* y,\n    int count, float by, double bias")


def test_parameters_are_written_once() -> None:
    assert names(SCALE) == "x, y, count, by, bias"
    source = translation_unit(
        "a.cuh", SCALE, f"    f({names(SCALE)});\n", ahead="using A = int;\n", launch_bounds="64, 1"
    )
    assert source.text == (
        '#include "a.cuh"\nusing A = int;\n'
        'extern "C" __global__ void __launch_bounds__(64, 1) '
        "ds2_kernel(const float* x, double* y, int count, float by, double bias) {\n"
        "    f(x, y, count, by, bias);\n}\n"
    )
    assert "__launch_bounds__" not in translation_unit("a.cuh", SCALE, "").text


def test_arguments_take_the_types_of_their_parameters() -> None:
    source, x = translation_unit("a.cuh", SCALE, ""), torch.zeros(3)
    pointer, null, count, by, bias = source.pack([x, None, True, 2, 1.5])
    assert (pointer, null) == (x.data_ptr(), 0)
    assert [type(value) for value in (count, by, bias)] == [ctypes.c_int, ctypes.c_float, ctypes.c_double]
    assert (count.value, by.value, bias.value) == (1, 2.0, 1.5)
    assert source.pack([12, 0, 1, 0.0, 0.0])[0] == 12


def test_wrong_arguments_are_refused() -> None:
    source = translation_unit("a.cuh", SCALE, "")
    with pytest.raises(ValueError, match="4 arguments are given, the kernel takes x, y, count, by, bias"):
        source.pack([None, None, 1, 2.0])
    with pytest.raises(TypeError, match=r"1\.5 is given where the kernel takes a pointer"):
        source.pack([1.5, None, 1, 2.0, 0.0])
    with pytest.raises(TypeError):
        source.pack([None, None, 2.5, 2.0, 0.0])


def test_a_unit_without_parameters_compiles(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    monkeypatch.setenv("DS2_OPS_CACHE_DIR", str(tmp_path))
    assert build(translation_unit("ptx/sync.cuh", (), "").text).code.startswith(b"\x7fELF")
