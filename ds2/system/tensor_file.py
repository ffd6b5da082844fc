"""Tensors with a JSON header in one safetensors file, which is the old one or the whole new one, and says if damaged.

The header holds a digest of everything else: SHA-256 over the metadata and, by name, each tensor's type, shape and own
SHA-256 (or, for a file that is mapped rather than read, its type and shape alone).
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ds2.system.errors import UserError
from ds2.system.files import whole_file
from ds2.system.machine import usable_cores
from ds2.system.plain import parse_json

FORMAT_VERSION = 2  # 1 had no digest
WAY_OUT = "the file is damaged or of another program: copy it again"
_JSON_KEY = "ds2"  # one entry alone: safetensors writes several in any order, and equal files would differ
_DIGEST = re.compile(r'\{"digest": "([0-9a-f]{64})", ')


class CheckpointError(UserError):
    """A file that cannot be written or is not a ds2 checkpoint; the message names the file and the way out."""


def save(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
    """Write tensors of any shape and dtype and JSON-serialisable metadata as one file, the old or the whole new one.

    Raises:
        CheckpointError: the folder is not writable or the disk is full; an older file at `path` is left as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    contiguous = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    try:
        with whole_file(path) as partial:
            save_file(contiguous, partial, metadata=make_header({"format": FORMAT_VERSION, **metadata}, contiguous))
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
        CheckpointError: no such file, a truncated, damaged or foreign file, or one of a newer format.
    """
    return _read(path, str(device), tensors=True)


def read_metadata(path: Path) -> dict[str, Any]:
    """Read the metadata of a file that `save` wrote, without its tensors; raises CheckpointError as `load`."""
    return _read(path, "cpu", tensors=False)[1]


def _read(path: Path, device: str, *, tensors: bool) -> tuple[dict[str, Tensor], dict[str, Any]]:
    if not path.is_file():
        raise CheckpointError(f"there is no checkpoint {path}")
    try:
        path.open("rb").close()  # safetensors takes whatever cannot be opened for missing
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    try:
        with safe_open(str(path), framework="pt", device="cpu") as opened:
            header = opened.metadata() or {}
            metadata = read_header(header, FORMAT_VERSION)
            found = {name: opened.get_tensor(name) for name in opened.keys()} if tensors else {}  # noqa: SIM118 (no dict)
        if tensors and has_digest(header):
            check_digest(header, found)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not a whole safetensors file: {error}") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error
    return {name: tensor.to(device) for name, tensor in found.items()}, metadata


def make_header(metadata: Mapping[str, Any], tensors: Mapping[str, Tensor], *, content: bool = True) -> dict[str, str]:
    """The header of a file: metadata as JSON, first of it the digest, over the tensors' `content` or shapes alone."""
    text = json.dumps(metadata)
    return {_JSON_KEY: f'{{"digest": "{_digest(text, tensors, content=content)}", {text[1:]}'}


def read_header(header: Mapping[str, str], newest: int) -> dict[str, Any]:
    """The metadata of a header.

    Raises:
        ValueError: the header is not of ds2, is damaged, or of a format above `newest`.
    """
    if _JSON_KEY not in header:
        raise ValueError(f"was not written by ds2: its header has no {_JSON_KEY!r} entry")
    try:
        metadata = parse_json(header[_JSON_KEY])
    except ValueError as error:
        raise ValueError(f"metadata: not JSON ({error}); {WAY_OUT}") from error
    if not isinstance(metadata, dict) or type(metadata.get("format")) is not int:
        raise ValueError(f"format: is missing or no whole number; {WAY_OUT}")
    if metadata["format"] < 1:
        raise ValueError(f"format: is {metadata['format']}, formats are numbered from 1; {WAY_OUT}")
    if metadata["format"] > newest:
        raise ValueError(f"format: is {metadata['format']}, this ds2 reads up to {newest}: install a newer ds2")
    metadata.pop("digest", None)
    return metadata


def has_digest(header: Mapping[str, str]) -> bool:
    """Whether a header holds a digest, or must: only files of format 1 may be without."""
    return _DIGEST.match(header[_JSON_KEY]) is not None or parse_json(header[_JSON_KEY])["format"] >= 2


def check_digest(header: Mapping[str, str], tensors: Mapping[str, Tensor], *, content: bool = True) -> None:
    """Raise ValueError unless metadata and tensors are those that the header's digest was made of."""
    stored = header[_JSON_KEY]
    noted = _DIGEST.match(stored)
    if noted is None or noted[1] != _digest(f"{{{stored[noted.end() :]}", tensors, content=content):
        raise ValueError("digest: tensors or metadata are not those that were written; the file was damaged since: "
                         "copy it again, or take another checkpoint")  # fmt: skip


def _digest(text: str, tensors: Mapping[str, Tensor], *, content: bool) -> str:
    names = sorted(tensors)
    with ThreadPoolExecutor(usable_cores()) as threads:  # hashing leaves the interpreter lock
        parts = list(threads.map(_content_digest, (tensors[name] for name in names))) if content else [""] * len(names)
    listed = [[name, str(tensors[name].dtype), list(tensors[name].shape), part]
              for name, part in zip(names, parts, strict=True)]  # fmt: skip
    return hashlib.sha256(json.dumps([text, listed]).encode()).hexdigest()


def _content_digest(tensor: Tensor) -> str:
    content: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(content).hexdigest()


def prefixed(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors under names that start with `prefix` and a dot: the part of a file that they are."""
    return {f"{prefix}.{name}": value for name, value in tensors.items()}


def part(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `prefixed`: the tensors of one part, under their own names."""
    return {name[len(prefix) + 1 :]: value for name, value in tensors.items() if name.startswith(prefix + ".")}


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Momenta of the parameters' shapes and () step counts, by parameter number; rates come from the config."""
    state = optimizer.state_dict()["state"]
    return {
        f"{index}.{name}": value for index, entry in state.items() for name, value in entry.items() if value is not None
    }


def restore_optimizer(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """The inverse of `optimizer_tensors`, shapes and all, onto an optimizer made from the same model and config."""
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        index, name = key.split(".", 1)
        state.setdefault(int(index), {})[name] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
