"""Check that a wheel holds all that the checkout's packages are made of: modules, kernel headers, configuration.

    python tools/check_wheel.py dist/*.whl

A kernel header that is missing shows only where a kernel is first compiled: on a user's GPU.
"""

import argparse
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# folder of the checkout -> its place in the wheel, and what of it belongs there
PACKED = {
    "ds2": ("ds2", ("*.py", "*.safetensors", "*.lm.xz", "card.json")),
    "ops/ds2_ops": ("ds2_ops", ("*.py", "*.cuh")),
    "conf": ("ds2/conf", ("*.yaml",)),
}


def expected(root: Path = ROOT) -> set[str]:
    """Return the paths that a wheel built from the checkout at `root` must hold.

    Raises:
        FileNotFoundError: a kind of file is not in the checkout at all, so that nothing would be checked.
    """
    paths: set[str] = set()
    for folder, (place, patterns) in PACKED.items():
        for pattern in patterns:
            files = {f"{place}/{file.relative_to(root / folder).as_posix()}" for file in (root / folder).rglob(pattern)}
            if not files:
                raise FileNotFoundError(f"{root / folder} holds no {pattern}: is {root} a checkout?")
            paths |= files
    return paths


def missing(wheel: Path, paths: Iterable[str]) -> list[str]:
    """Return those of `paths` that are not in a wheel, sorted."""
    with zipfile.ZipFile(wheel) as archive:
        return sorted(set(paths) - set(archive.namelist()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("wheels", nargs="+", type=Path, metavar="WHEEL")
    paths = expected()
    absent = [f"{wheel.name} lacks {path}" for wheel in parser.parse_args().wheels for path in missing(wheel, paths)]
    print(f"{len(paths)} files of the checkout belong in a wheel, missing: {len(absent)}")
    print("".join(f"{line}\n" for line in absent), end="", file=sys.stderr)
    return int(bool(absent))


if __name__ == "__main__":
    sys.exit(main())
