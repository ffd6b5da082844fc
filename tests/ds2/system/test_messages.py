"""Messages between processes: every kind of value comes back as it was; nothing that comes in runs code."""

from __future__ import annotations

import json
import pickle
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ds2.system import UserError
from ds2.system.messages import MessageError, decode, encode


@dataclass(frozen=True)
class Point:
    x: float
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Positive:
    x: float

    def __post_init__(self) -> None:
        if not self.x > 0:
            raise UserError("x is not positive")


def message(header: object, buffers: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + buffers


@pytest.mark.parametrize(
    "value",
    [
        None, True, -(2**70), 0.1, float("inf"), "grüße\0", b"\0\xff", [], (), {}, [1, (2, [3.5, None])],
        {1: "a", "1": "b", (2, "c"): {"tuple": []}}, {"dict": 1, "two": 2},
        Point(1.5, ("a",)), [Point(-0.0), {"p": Point(2)}],
    ],
)  # fmt: skip
def test_a_value_comes_back_as_it_was(value: Any) -> None:
    read = decode(encode(value), [Point])
    assert read == value and repr(read) == repr(value)


def test_numbers_of_numpy_become_those_of_python() -> None:
    assert repr(decode(encode(np.float64(0.5)))) == "0.5"


@pytest.mark.parametrize("dtype", ["<f4", ">i2", "?", "<i8", "|u1"])
@pytest.mark.parametrize("shape", [(), (0,), (3, 2), (2, 0, 4)])
def test_arrays_and_bytes_beside_each_other_come_back_and_can_be_written(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.random.default_rng(0).integers(0, 2, shape).astype(dtype)
    first, middle, second = decode(encode([array, b"abc", array.T]))
    assert first.dtype == array.dtype and middle == b"abc"
    assert np.array_equal(first, array) and np.array_equal(second, array.T)
    first[...] = 0


def test_what_has_no_form_is_refused_before_it_is_sent() -> None:
    for value in (object(), {1, 2}, np.array([object()]), np.zeros(1, np.complex64), torch.zeros(1)):
        with pytest.raises(TypeError):
            encode(value)


class TouchesAFile:
    """Pickled, this creates a file when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_a_pickle_is_no_message_and_does_not_run(tmp_path: Path) -> None:
    data = pickle.dumps(TouchesAFile(tmp_path / "ran"))
    for whole in (data, struct.pack("<Q", len(data)) + data, message({"class": ["Path", [], []]})):
        with pytest.raises(MessageError, match="same version of ds2"):
            decode(whole, [Point])
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\1", struct.pack("<Q", 2**63) + b"{}", struct.pack("<Q", 3) + b"{}",
        message({"unknown": 1}), message({"a": 1, "b": 2}), message({"tuple": 3}), message({"dict": [[1]]}),
        message({"dict": [[[], 1]]}), message({"class": ["Point", ["y"], [1]]}), message({"class": ["Other", [], []]}),
        message({"bytes": [0, 1]}), message({"bytes": [-1, 1]}, b"ab"), message({"bytes": [1, -1]}, b"ab"),
        message({"array": ["<f4", [2**40, 2**40], 0, 4]}, b"abcd"), message({"array": ["<f4", [-1], 0, 4]}, b"abcd"),
        message({"array": ["other", [1], 0, 8]}, b"12345678"), message({"array": ["<f4", [1], 2, 4]}, b"abcd"),
        message({"array": ["|O", [1], 0, 8]}, b"12345678"), message({"tensor": ["<f4", [1], 0, 4]}, b"abcd"),
        message({"array": ["<f4", [1.0], 0, 4]}, b"abcd"), message({"array": ["<f4", "a", 0, 4]}, b"abcd"),
        message({"class": ["Point", ["x"], []]}), message({"class": ["Point", None, None]}),
        message({"class": ["Positive", ["x"], [0]]}), message({"array": ["(,)f4", [0], 0, 0]}),
        struct.pack("<Q", 200_000) + b"[" * 100_000 + b"]" * 100_000,
    ],
)  # fmt: skip
def test_damaged_messages_are_refused(data: bytes) -> None:
    with pytest.raises(MessageError):
        decode(data, [Point, Positive])


def test_deep_nesting_is_refused() -> None:
    text = b'{"tuple": [' * 20_000 + b"]}" * 20_000
    with pytest.raises(MessageError):
        decode(struct.pack("<Q", len(text)) + text)
