"""One translation unit: a header of csrc, and the kernel's entry, whose parameters are written once.

The same table of parameters gives the entry's signature, the names by which its body passes them on, and the C types
that arguments are turned into at a launch.
"""

import ctypes
import functools
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ds2_ops.jit.build import ENTRY


class HasAddress(Protocol):
    """An array that knows where it begins, as torch's tensors do."""

    def data_ptr(self) -> int:
        """Return the address."""
        ...


Argument = HasAddress | float | None
Parameters = tuple[tuple[str, str], ...]  # (C type, name), in the kernel's order


def parameters(declarations: str) -> Parameters:
    """Read C declarations, ``type name, type name, ...``."""
    pairs = (" ".join(declaration.split()).rpartition(" ") for declaration in declarations.split(","))
    return tuple((kind, name) for kind, _, name in pairs)


def names(parameters: Parameters) -> str:
    """Return the parameters as arguments of a call, or as what a struct is made of."""
    return ", ".join(name for _, name in parameters)


class Packed:
    """The arguments of one launch, 8 bytes each, and the array of their addresses that the driver takes.

    Attributes:
        memory: where the arguments lie.
        addresses: where the array of their addresses lies.
    """

    def __init__(self, count: int) -> None:
        self.memory = (ctypes.c_uint64 * count)()
        first = ctypes.addressof(self.memory)
        self._addresses = (ctypes.c_void_p * count)(*range(first, first + 8 * count, 8))
        self.addresses = ctypes.addressof(self._addresses)


@dataclass(frozen=True)
class Source:
    """A translation unit for ``build.build``, and its entry's parameters."""

    text: str
    parameters: Parameters

    def numbers(self, arguments: Sequence[Argument]) -> list[float]:
        """Turn arguments into the numbers that `pack` writes: tensors into their addresses, None into a null one.

        Raises:
            ValueError: they are more or fewer than the parameters.
            TypeError: a fraction where a pointer belongs, a tensor where a number belongs.
        """
        if len(arguments) != len(self.parameters):
            raise ValueError(f"{len(arguments)} arguments are given, the kernel takes {names(self.parameters)}")
        return [convert(given) for given, convert in zip(arguments, self._converters, strict=True)]

    def pack(self, numbers: Sequence[float]) -> Packed:
        """Write one number a parameter, addresses among them, as the driver reads them."""
        try:
            packed = self._spare.pop()
        except IndexError:
            packed = Packed(len(self.parameters))
        self._layout.pack_into(packed.memory, 0, *numbers)
        return packed

    def take_back(self, packed: Packed) -> None:
        """Keep what `pack` returned for another launch, once the driver has read it."""
        self._spare.append(packed)

    @functools.cached_property
    def _converters(self) -> list[Callable[[Any], Any]]:
        return [_SCALARS.get(kind, _POINTER)[1] for kind, _ in self.parameters]

    @functools.cached_property
    def _layout(self) -> struct.Struct:
        return struct.Struct("=" + "".join(_SCALARS.get(kind, _POINTER)[0] for kind, _ in self.parameters))

    @functools.cached_property
    def _spare(self) -> list[Packed]:
        """What no launch uses now: as many as threads ever launched the kernel at once."""
        return []


def translation_unit(
    header: str, parameters: Parameters, body: str, *, ahead: str = "", launch_bounds: str = ""
) -> Source:
    """Write a kernel around functions of a header.

    Args:
        header: path in csrc.
        parameters: of the entry.
        body: statements that use them.
        ahead: declarations between the header and the entry.
        launch_bounds: threads a block, and blocks a multiprocessor, if the compiler is to know them.
    """
    bounds = f"__launch_bounds__({launch_bounds}) " if launch_bounds else ""
    signature = ", ".join(f"{kind} {name}" for kind, name in parameters)
    text = f'#include "{header}"\n{ahead}extern "C" __global__ void {bounds}{ENTRY}({signature}) {{\n{body}}}\n'
    return Source(text, parameters)


def _pointer(value: HasAddress | int | None) -> int:
    if isinstance(value, int):
        return value
    if value is None:
        return 0
    if hasattr(value, "data_ptr"):
        return value.data_ptr()
    raise TypeError(f"{value!r} is given where the kernel takes a pointer: give a tensor, an address or None")


def _integer(value: Any) -> int:
    if isinstance(value, int):
        return value
    raise TypeError(f"{value!r} is given where the kernel takes an integer")


def _number(value: Any) -> float:
    if isinstance(value, (int, float)):
        return value
    raise TypeError(f"{value!r} is given where the kernel takes a number")


# Of 8 bytes: as `struct` writes it, and what makes it of an argument.
_POINTER = ("Q", _pointer)
_SCALARS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "int": ("i4x", _integer),
    "long long": ("q", _integer),
    "float": ("f4x", _number),
    "double": ("d", _number),
}
