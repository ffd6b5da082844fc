"""Tensors with a JSON header in one safetensors file, which is the old one or the whole new one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ds2.system.errors import UserError
from ds2.system.files import whole_file

FORMAT_VERSION = 1
_JSON_KEY = "ds2"


class CheckpointError(UserError):
    """A file that cannot be written or is not a ds2 checkpoint; the message names the file and the way out."""


def save(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
    """Write tensors and JSON-serialisable metadata as one file that is either the old one or the whole new one.

    Raises:
        CheckpointError: the folder is not writable or the disk is full; an older file at `path` is left as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    contiguous = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    header = {_JSON_KEY: json.dumps({"format": FORMAT_VERSION, **metadata})}
    try:
        with whole_file(path) as partial:
            save_file(contiguous, partial, metadata=header)
    except (OSError, SafetensorError) as error:
        free = shutil.disk_usage(path.parent).free
        raise CheckpointError(
            f"{path} could not be written ({error}); {free / 2**20:.1f} MiB are free there and about "
            f"{sum(t.nbytes for t in contiguous.values()) / 2**20:.1f} are needed. The previous file is untouched; "
            "free some space and start the same command again, it resumes"
        ) from error


def load(path: Path, device: torch.device | str = "cpu") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a file that `save` wrote: its tensors on `device` and its metadata.

    Raises:
        CheckpointError: no such file, a truncated or foreign file, or one of a newer format.
    """
    return _read(path, str(device), tensors=True)


def read_metadata(path: Path) -> dict[str, Any]:
    """Read the metadata of a file that `save` wrote, without its tensors; raises CheckpointError as `load`."""
    return _read(path, "cpu", tensors=False)[1]


def _read(path: Path, device: str, *, tensors: bool) -> tuple[dict[str, Tensor], dict[str, Any]]:
    if not path.is_file():
        raise CheckpointError(f"there is no checkpoint {path}")
    try:
        with safe_open(str(path), framework="pt", device=device) as opened:
            header = opened.metadata() or {}
            found = {name: opened.get_tensor(name) for name in opened.keys()} if tensors else {}  # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not a whole safetensors file: {error}") from error
    if _JSON_KEY not in header:
        raise CheckpointError(f"{path} was not written by ds2: its header has no {_JSON_KEY!r} entry")
    metadata: dict[str, Any] = json.loads(header[_JSON_KEY])
    if metadata["format"] > FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format {metadata['format']}; this ds2 reads up to {FORMAT_VERSION}: install a newer ds2"
        )
    return found, metadata


def prefixed(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors under names that start with `prefix` and a dot: the part of a file that they are."""
    return {f"{prefix}.{name}": value for name, value in tensors.items()}


def part(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `prefixed`: the tensors of one part, under their own names."""
    return {name[len(prefix) + 1 :]: value for name, value in tensors.items() if name.startswith(prefix + ".")}
