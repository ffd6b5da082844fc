"""Build the API reference from the docstrings as HTML pages: `make docs`, or python tools/api_reference.py FOLDER."""

from __future__ import annotations

import re
import sys
import warnings
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pdoc

PACKAGES = ("ds2", "ds2_ops")
NEEDS = {"ds2_ops.row_convolution.triton_kernels": "triton"}  # left out where that is not installed: CPU-only torch


def build(folder: Path) -> None:
    """Write a page for every module; warns of what cannot be imported or read."""
    for package in map(import_module, PACKAGES):
        for name in getattr(package, "__all__", ()):
            setattr(package, name, getattr(package, name))  # what a package gives when asked pdoc does not ask for
    pdoc.render.configure(docformat="google", footer_text="from the docstrings, by pdoc")
    with warnings.catch_warnings():
        for name, package in NEEDS.items():
            if not find_spec(package):
                warnings.filterwarnings("ignore", message=f"Couldn't import {re.escape(name)}")
        pdoc.pdoc(*modules(), output_directory=folder)


def modules() -> list[str]:
    """The packages, and those modules of theirs that pdoc leaves out since a package's `__all__` does not name them."""
    names = []
    for package in PACKAGES:
        root = Path(str(import_module(package).__file__)).parent
        files = [file.relative_to(root.parent).with_suffix("") for file in sorted(root.rglob("*.py"))]
        names += [".".join(file.parts).removesuffix(".__init__") for file in files]
    specs, found = list(PACKAGES), set(pdoc.extract.walk_specs(PACKAGES))
    for name in names:
        if name not in found:
            specs.append(name)
            found.update(pdoc.extract.walk_specs([name]))
    return [*specs, *(f"!{name}" for name, package in NEEDS.items() if not find_spec(package))]


if __name__ == "__main__":
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "build/api")
    build(target)
    print(f"wrote {target / 'index.html'}")
