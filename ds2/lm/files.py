"""Language model files: a compact binary that opens memory-mapped without running code, and ARPA text of any tool."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ds2.lm.arpa import read_arpa
from ds2.lm.ngram import TENSORS, LanguageModelError, NGram
from ds2.system.files import whole_file

FORMAT_VERSION = 1
_HEAD_BYTES = 4096  # an ARPA file says so within these


def save_ngram(model: NGram, path: Path) -> None:
    """Write the compact binary: a safetensors file, either the old one or the whole new one.

    Raises:
        LanguageModelError: the folder is not writable or the disk is full.
    """
    tensors = {name: getattr(model, name).cpu().contiguous() for name in TENSORS}
    tensors["vocabulary"] = torch.frombuffer(bytearray("\n".join(model.vocabulary).encode()), dtype=torch.uint8)
    header = {
        "format": FORMAT_VERSION,
        "kind": "n-gram",
        "entry_starts": model.entry_starts,
        "state_starts": model.state_starts,
        "unit": model.unit,
        "alphabet": None if model.alphabet is None else dict(model.alphabet),
    }
    try:
        with whole_file(path) as partial:
            save_file(tensors, partial, metadata={"ds2": json.dumps(header)})
    except (OSError, SafetensorError) as error:
        needed_mib = sum(tensor.nbytes for tensor in tensors.values()) / 2**20
        free = f", {shutil.disk_usage(path.parent).free / 2**20:.0f} MiB are free" if path.parent.is_dir() else ""
        raise LanguageModelError(f"{path} could not be written ({error}): {needed_mib:.0f} MiB needed{free}") from error


def load_ngram(path: Path) -> NGram:
    """Open a language model: a binary of `save_ngram`, whose pages are read as queries need them, or an ARPA file.

    Raises:
        LanguageModelError: no such file, a cut-off or foreign file, or a binary of a newer format.
    """
    if not path.is_file():
        raise LanguageModelError(f"there is no language model {path}")
    if ".arpa" in path.suffixes or _looks_like_arpa(path):
        return read_arpa(path)
    try:
        with safe_open(str(path), framework="pt") as opened:
            header = json.loads((opened.metadata() or {}).get("ds2", "{}"))
            if header.get("kind") != "n-gram":
                raise LanguageModelError(f"{path} is a safetensors file, but not a language model of ds2")
            if header["format"] > FORMAT_VERSION:
                raise LanguageModelError(
                    f"{path} has format {header['format']}, this ds2 reads up to {FORMAT_VERSION}: install a newer ds2"
                )
            tensors = {name: opened.get_tensor(name) for name in (*TENSORS, "vocabulary")}
    except (SafetensorError, OSError, json.JSONDecodeError) as error:
        raise LanguageModelError(
            f"{path} is not a whole language model ({error}): cut off, or not written by ds2 lm build"
        ) from error
    return NGram(
        tuple(bytes(tensors.pop("vocabulary").numpy()).decode().split("\n")),
        **tensors,
        entry_starts=tuple(header["entry_starts"]),
        state_starts=tuple(header["state_starts"]),
        unit=header["unit"],
        alphabet=header["alphabet"],
    )


def _looks_like_arpa(path: Path) -> bool:
    with open(path, "rb") as opened:
        return b"\\data\\" in opened.read(_HEAD_BYTES)
