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
    assert source.numbers([12, 0, 1, 0.0, 0.0])[0] == 12
    numbers = source.numbers([x, None, True, 2, 1.5])
    assert numbers == [x.data_ptr(), 0, 1, 2, 1.5]
    packed = source.pack(numbers)
    kinds = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_float, ctypes.c_double)
    addresses = (ctypes.c_void_p * len(kinds)).from_address(packed.addresses)
    read = [kind.from_address(address).value for kind, address in zip(kinds, addresses, strict=True)]
    assert read == [x.data_ptr(), None, 1, 2.0, 1.5]


def test_launches_at_once_have_memory_of_their_own() -> None:
    source = translation_unit("a.cuh", SCALE, "")
    first, second = (source.pack([12 * n, 0, n, 0.0, 0.0]) for n in (1, 2))
    assert (first.memory[0], second.memory[0]) == (12, 24)
    source.take_back(first)
    assert source.pack([36, 0, 3, 0.0, 0.0]) is first
    assert second.memory[0] == 24


def test_wrong_arguments_are_refused() -> None:
    source = translation_unit("a.cuh", SCALE, "")
    with pytest.raises(ValueError, match="4 arguments are given, the kernel takes x, y, count, by, bias"):
        source.numbers([None, None, 1, 2.0])
    with pytest.raises(TypeError, match=r"1\.5 is given where the kernel takes a pointer"):
        source.numbers([1.5, None, 1, 2.0, 0.0])
    with pytest.raises(TypeError, match=r"2\.5 is given where the kernel takes an integer"):
        source.numbers([None, None, 2.5, 2.0, 0.0])
    with pytest.raises(TypeError, match="where the kernel takes a number"):
        source.numbers([None, None, 2, torch.zeros(1), 0.0])


def test_a_unit_without_parameters_compiles(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    monkeypatch.setenv("DS2_OPS_CACHE_DIR", str(tmp_path))
    assert build(translation_unit("ptx/sync.cuh", (), "").text).code.startswith(b"\x7fELF")
