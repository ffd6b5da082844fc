"""One translation unit: a header of csrc, and the kernel's entry, whose parameters are written once.

The same table of parameters gives the entry's signature, the names by which its body passes them on, and the C types
that arguments are turned into at a launch.
"""

import ctypes
import functools
import operator
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


@dataclass(frozen=True)
class Source:
    """A translation unit for ``build.build``, and its entry's parameters."""

    text: str
    parameters: Parameters

    def pack(self, arguments: Sequence[Argument]) -> list[Any]:
        """Turn arguments into what the launch takes: tensors and addresses into pointers, None into a null one.

        Raises:
            ValueError: they are more or fewer than the parameters.
            TypeError: a fraction where a pointer belongs, a tensor where a number belongs.
        """
        if len(arguments) != len(self.parameters):
            raise ValueError(f"{len(arguments)} arguments are given, the kernel takes {names(self.parameters)}")
        return list(map(operator.call, self._converters, arguments))

    @functools.cached_property
    def _converters(self) -> list[Callable[[Any], Any]]:
        return [_SCALARS.get(kind, _pointer) for kind, _ in self.parameters]


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


_SCALARS: dict[str, Callable[[Any], Any]] = {
    "int": ctypes.c_int,
    "long long": ctypes.c_longlong,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
}
