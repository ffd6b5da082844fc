"""N-gram model files: a memory-mapped binary, which runs no code when it is opened, and ARPA files of any tool."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ds2.lm.arpa import read_arpa
from ds2.lm.ngram import TENSORS, UNITS, LanguageModelError, NGram
from ds2.system.files import atomic_file
from ds2.system.plain import from_plain
from ds2.system.tensor_file import WAY_OUT, check_digest, has_digest, make_header, read_header
from ds2.text.alphabet import Alphabet, AlphabetError

FORMAT_VERSION = 2  # 1 had no digest of the header
_HEAD_BYTES = 4096  # an ARPA file has its first header line in these


def save_ngram(model: NGram, path: Path) -> None:
    """Write the binary, a safetensors file, atomically.

    Raises:
        LanguageModelError: the folder is not writable or the disk is full.
    """
    tensors = {name: getattr(model, name).cpu().contiguous() for name in TENSORS}
    tensors["vocabulary"] = torch.frombuffer(bytearray("\n".join(model.vocabulary).encode()), dtype=torch.uint8)
    metadata = {
        "format": FORMAT_VERSION,
        "kind": "n-gram",
        "entry_starts": model.entry_starts,
        "state_starts": model.state_starts,
        "unit": model.unit,
        "alphabet": None if model.alphabet is None else dict(model.alphabet),
    }
    try:
        with atomic_file(path) as partial:
            save_file(tensors, partial, metadata=make_header(metadata, tensors, content=False))
    except (OSError, SafetensorError) as error:
        needed_mib = sum(tensor.nbytes for tensor in tensors.values()) / 2**20
        free = f", {shutil.disk_usage(path.parent).free / 2**20:.0f} MiB are free" if path.parent.is_dir() else ""
        raise LanguageModelError(f"{path} could not be written ({error}): {needed_mib:.0f} MiB needed{free}") from error


def load_ngram(path: Path) -> NGram:
    """Open a language model: a binary of `save_ngram`, which is memory-mapped, or an ARPA file.

    Raises:
        LanguageModelError: the file is missing, truncated, damaged, of another program or of a newer format. The
            contents of a binary's tensors are not checked: `NGram.check` does.
    """
    if not path.is_file():
        raise LanguageModelError(f"there is no language model {path}")
    if ".arpa" in path.suffixes or _looks_like_arpa(path):
        return read_arpa(path)
    try:
        with safe_open(str(path), framework="pt") as opened:
            header = opened.metadata() or {}
            metadata = read_header(header, FORMAT_VERSION)
            if metadata.get("kind") != "n-gram":
                raise ValueError(
                    f"is a {metadata.get('kind')}, not an n-gram model: `ds2 lm build` writes "
                    "n-gram models; a recurrent model belongs in decode.rescore"
                )
            stored = from_plain(_NgramHeader, metadata, "metadata")
            tensors = {name: opened.get_tensor(name) for name in (*TENSORS, "vocabulary")}
        if has_digest(header):
            check_digest(header, tensors, content=False)
        return _model(stored, tensors)
    except (SafetensorError, OSError) as error:
        raise LanguageModelError(
            f"{path} is no language model or is truncated ({error}): `ds2 lm build` writes them"
        ) from error
    except (ValueError, LanguageModelError) as error:
        raise LanguageModelError(f"{path}: {error}") from error


@dataclass
class _NgramHeader:
    """The metadata of a binary n-gram model."""

    format: int
    kind: str
    entry_starts: tuple[int, ...]
    state_starts: tuple[int, ...]
    unit: str
    alphabet: dict[str, Any] | None


def _model(stored: _NgramHeader, tensors: dict[str, Tensor]) -> NGram:
    """Build the model; raises ValueError if header and tensors do not match. Reads no contents of tensors."""
    text = tensors.pop("vocabulary")
    types = {"keys": torch.int64, "log_prob": torch.float32, "next_state": torch.int32, "backoff": torch.float32,
             "suffix": torch.int32, "vocabulary": torch.uint8}  # fmt: skip
    for name, tensor in {**tensors, "vocabulary": text}.items():
        if tensor.dtype != types[name] or tensor.ndim != 1:
            raise ValueError(f"{name}: is {tensor.dtype} {tuple(tensor.shape)}, expected {types[name]} in 1-D")
    vocabulary = tuple(bytes(text.numpy()).decode().split("\n"))
    entries, states = stored.entry_starts, stored.state_starts
    for name, starts, held in (
        ("entry_starts", entries, [tensors[key].numel() for key in ("keys", "log_prob", "next_state")]),
        ("state_starts", states, [tensors[key].numel() for key in ("backoff", "suffix")]),
    ):
        if len(starts) < 2 or starts[0] != 0 or list(starts) != sorted(starts) or {starts[-1]} != set(held):
            raise ValueError(f"metadata.{name}: is {starts}, expected to rise from 0 to {held}; {WAY_OUT}")
    if len(entries) != len(states) or entries[1] != len(vocabulary) or states[1] != 1:
        raise ValueError(f"metadata: {entries} and {states} do not fit {len(vocabulary)} words; {WAY_OUT}")
    if stored.unit not in UNITS:
        raise ValueError(f"metadata.unit: is {stored.unit!r}, expected one of {', '.join(UNITS)}; {WAY_OUT}")
    if stored.alphabet is not None:
        try:
            Alphabet.from_dict(stored.alphabet)
        except AlphabetError as error:
            raise ValueError(f"metadata.{error}; {WAY_OUT}") from error
    return NGram(
        vocabulary, **tensors, entry_starts=entries, state_starts=states, unit=stored.unit, alphabet=stored.alphabet
    )


def _looks_like_arpa(path: Path) -> bool:
    with open(path, "rb") as opened:
        return b"\\data\\" in opened.read(_HEAD_BYTES)
