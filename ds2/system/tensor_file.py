"""Checkpoint files: tensors and JSON metadata in one safetensors file, written atomically, checked by a digest.

The digest in the header is SHA-256 over the metadata and, in order of names, each tensor's type, shape and SHA-256. In
files that are memory-mapped the tensors' contents are not part of it.

Metadata may name shards: files in the same folder, with their digests, whose tensors belong to this file.
"""

import functools
import hashlib
import json
import operator
import re
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from ds2_ops.jit import runtime
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ds2.system import UserError
from ds2.system.files import atomic_file, describe_full_disk
from ds2.system.machine import usable_cores
from ds2.system.plain import from_plain, parse_json

FORMAT_VERSION = 2  # 1 had no digest
_SHARDED_FORMAT = 3  # of files with shards, of which programs that read up to 2 know nothing
WAY_OUT = "the file is damaged or was written by another program: copy it again"
_TYPES = {  # names in the format, in the order of its contents: the widest numbers first
    torch.int64: "I64", torch.float64: "F64", torch.float32: "F32", torch.int32: "I32", torch.bfloat16: "BF16",
    torch.float16: "F16", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_JSON_KEY = "ds2"  # a single entry: safetensors writes several in any order, and equal files would differ
_HASHING_THREADS = 4  # each takes the interpreter lock for every tensor, for which steps that run meanwhile wait
_PIECE, _PAUSE_S = 128, 1e-3  # tensors a header lists at a time; in the pause a step gets the interpreter lock
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: it does not wait for the default stream
_DIGEST = re.compile(r'\{"digest": "([0-9a-f]{64})", ')


class CheckpointError(UserError):
    """A file cannot be written or is not a ds2 checkpoint; the message names the file and what to do."""


def save(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any], check: Callable[[], None] = lambda: None
) -> None:
    """Write tensors of any shape and dtype and JSON-serialisable metadata as one file, atomically.

    Args:
        metadata: the entry `shards` has files by name, whose tensors belong to this one, and their digests.
        check: called when the temporary file is there; if it raises, the file at `path` stays as it is.

    Raises:
        CheckpointError: the folder is not writable or the disk is full; an older file at `path` is unchanged.
    """
    prepare_save(path, tensors, metadata, check)()


def prepare_save(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any], check: Callable[[], None] = lambda: None
) -> Callable[[], None]:
    """Copy tensors as they are now, and return the function that writes the copies, in any thread; see `save`."""
    return partial(write_copies, path, TensorCopies().start(tensors), metadata, check)


def write_copies(
    path: Path,
    fetch: Callable[[], dict[str, Tensor]],
    metadata: Mapping[str, Any],
    check: Callable[[], None] = lambda: None,
) -> None:
    """As `save`, of the copies that `TensorCopies.start` began."""
    copies = fetch()
    try:
        with atomic_file(path) as partial_file:
            check()
            version = _SHARDED_FORMAT if "shards" in metadata else FORMAT_VERSION
            write_tensors(copies, partial_file, make_header({"format": version, **metadata}, copies))
    except OSError as error:
        size_mib = sum(copy.nbytes for copy in copies.values()) / 2**20
        way_out = describe_full_disk(error) or "; when its folder can be written, start the same command again"
        raise CheckpointError(
            f"{path} could not be written ({error}). It has {size_mib:.1f} MiB, the previous file is untouched"
            f"{way_out}, it resumes"
        ) from error


class TensorCopies:
    """Copies of tensors in memory of the host.

    Each save copies into the same memory, which is several times as fast as new memory. What is the same for all saves
    of the same tensors, changed in place, is made by the first one, since a GPU may have to wait for it.
    """

    def __init__(self) -> None:
        self._memory: dict[str, Tensor] = {}
        self._tensors: dict[str, Tensor] = {}  # of the last call
        self._groups: list[_Group] = []  # those of them on a GPU

    @torch.no_grad()
    def start(self, tensors: Mapping[str, Tensor]) -> Callable[[], dict[str, Tensor]]:
        """Copy tensors as they are now; the returned function, called in any thread, returns the copies by name.

        No copies of an earlier call may still be used.

        Tensors of a GPU are first copied within its memory, so that the next step does not wait for a transfer to the
        host. That needs twice their size of free memory: once for the copy, and as much again for the step.
        """
        if list(tensors) != list(self._tensors) or not same_objects(tensors.values(), self._tensors.values()):
            self._tensors, self._groups = dict(tensors), _groups(tensors)
        groups, device = self._groups, next((group.device for group in self._groups), None)
        if device is not None and torch.cuda.mem_get_info(device)[0] < 2 * sum(group.bytes for group in groups):
            groups = []
        joined = [(group, group.join()) for group in groups]
        copied = torch.cuda.current_stream(device).record_event() if groups else None
        for name in tensors.keys() - {name for group in groups for name in group.tensors}:
            self._copy_of(name, tensors[name]).copy_(tensors[name])

        def fetch() -> dict[str, Tensor]:
            if copied is not None and device is not None:
                stream = _stream(device)
                stream.wait_event(copied)
                with torch.cuda.stream(stream):
                    for group, flat in joined:
                        parts = torch.split_with_sizes(flat, group.sizes)
                        for (name, value), part in zip(group.tensors.items(), parts, strict=True):
                            self._copy_of(name, value).view(-1).copy_(part)
            joined.clear()
            return {name: self._memory[name] for name in tensors}

        return fetch

    def _copy_of(self, name: str, value: Tensor) -> Tensor:
        """Return the memory that a tensor is copied to, made anew if its shape or type differs."""
        copy = self._memory.get(name)
        if copy is None or copy.shape != value.shape or copy.dtype != value.dtype:
            copy = self._memory[name] = torch.empty(value.shape, dtype=value.dtype)
            if value.is_cuda:
                # A system provides memory at its first use. If that were during the copy, the driver would launch no
                # step.
                copy.zero_()
        return copy


class _Group:
    """Tensors on a GPU by name, of one type, all of them contiguous or none."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors, first = tensors, next(iter(tensors.values()))
        self.device = first.device
        self.sizes = [value.numel() for value in tensors.values()]
        self.bytes = sum(value.nbytes for value in tensors.values())
        self._views = [value.view(-1) for value in tensors.values()] if first.is_contiguous() else []

    def join(self) -> Tensor:
        """Copy the tensors as they are now into one new tensor, one after the other."""
        return torch.cat(self._views or [value.reshape(-1) for value in self.tensors.values()])


def _groups(tensors: Mapping[str, Tensor]) -> list[_Group]:
    groups: dict[tuple[torch.dtype, bool], dict[str, Tensor]] = {}
    for name, value in tensors.items():
        if value.is_cuda:
            groups.setdefault((value.dtype, value.is_contiguous()), {})[name] = value
    return [_Group(group) for group in groups.values()]


def same_objects(objects: Collection[object], others: Collection[object]) -> bool:
    """Whether these are the same objects in the same order; equal ones are not enough."""
    return len(objects) == len(others) and all(map(operator.is_, objects, others))


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream on which copies leave a GPU, which nothing else uses.

    `torch.cuda.Stream` hands out 32 streams in turn: sooner or later the one on which the main thread records a graph,
    and the recording would break.
    """
    with runtime.current(device.index):  # a thread has no current device yet
        stream = runtime.call("cuStreamCreate", _NON_BLOCKING)
    return torch.cuda.ExternalStream(int(stream), device)  # type: ignore[no-untyped-call]


def load(path: Path, device: torch.device | str = "cpu") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a file that `save` wrote: its tensors on `device`, those of its shards too, and its metadata.

    Raises:
        CheckpointError: the file or a shard is missing, truncated, damaged, of another program or of a newer format.
    """
    return _read(path, str(device), tensors=True)


def read_metadata(path: Path) -> dict[str, Any]:
    """Read the metadata of a file that `save` wrote, without its tensors; raises CheckpointError as `load`."""
    return _read(path, "cpu", tensors=False)[1]


def _read(path: Path, device: str, *, tensors: bool) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a file; read it again if another process replaced it meanwhile, since safetensors opens it twice."""
    while True:
        before = identity(path)
        try:
            return _read_once(path, device, tensors=tensors)
        except CheckpointError:
            if identity(path) == before:
                raise


def identity(path: Path) -> tuple[int, ...]:
    """Return what differs between two files that have the same path one after the other; () without a file."""
    try:
        status = path.stat()
    except OSError:
        return ()
    return status.st_dev, status.st_ino, status.st_mtime_ns


def _read_once(path: Path, device: str, *, tensors: bool, digest: str = "") -> tuple[dict[str, Tensor], dict[str, Any]]:
    if not path.is_file():
        raise CheckpointError(f"there is no checkpoint {path}")
    try:
        path.open("rb").close()  # safetensors reports every file that it cannot open as missing
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    try:
        with safe_open(str(path), framework="pt", device="cpu") as opened:
            header = opened.metadata() or {}
            metadata = read_header(header, _SHARDED_FORMAT)
            shards = from_plain(dict[str, str], metadata.pop("shards", {}), "metadata.shards")
            loaded = {name: opened.get_tensor(name) for name in opened.keys()} if tensors else {}  # noqa: SIM118 (no dict)
        if tensors and has_digest(header):
            check_digest(header, loaded)
        if any("/" in name for name in shards):
            raise ValueError(f"metadata.shards: names files of other folders; {WAY_OUT}")
        if digest not in ("", _digest_in(header)):
            raise ValueError("is another file than was written there; copy all files of the folder again")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not a whole safetensors file: {error}; {WAY_OUT}") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error
    for name, own_digest in shards.items() if tensors else ():
        try:
            loaded |= _read_once(path.with_name(name), device, tensors=True, digest=own_digest)[0]
        except CheckpointError as error:
            raise CheckpointError(f"{path} has a shard that is missing or damaged: {error}") from error
    return {name: tensor.to(device) for name, tensor in loaded.items()}, metadata


def read_digest(path: Path) -> str:
    """Return the digest in the header of a file that `save` wrote; raises CheckpointError where it cannot be read."""
    try:
        with safe_open(str(path), framework="pt", device="cpu") as opened:
            return _digest_in(opened.metadata() or {})
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not a whole safetensors file: {error}; {WAY_OUT}") from error


def _digest_in(header: Mapping[str, str]) -> str:
    match = _DIGEST.match(header.get(_JSON_KEY, ""))
    return match[1] if match else ""


def write_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str]) -> None:
    """Write contiguous tensors in memory of the host, with the bytes of `safetensors.torch.save_file`.

    That function copies every tensor to Python's memory and holds the interpreter lock, so that training would wait.
    """
    types = list(_TYPES)
    ordered = sorted(tensors.items(), key=lambda item: (types.index(item[1].dtype), item[0]))
    header: dict[str, Any] = {"__metadata__": metadata}
    pieces, end = [], 0
    for first in range(0, max(1, len(ordered)), _PIECE):
        if first:
            time.sleep(_PAUSE_S)
        for name, value in ordered[first : first + _PIECE]:
            start, end = end, end + value.nbytes
            header[name] = {"dtype": _TYPES[value.dtype], "shape": list(value.shape), "data_offsets": [start, end]}
        pieces.append(json.dumps(header, separators=(",", ":"), ensure_ascii=False)[1:-1])
        header = {}
    text = f"{{{','.join(pieces)}}}".encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, value in ordered:
            file.write(_content(value))


def make_header(metadata: Mapping[str, Any], tensors: Mapping[str, Tensor], *, content: bool = True) -> dict[str, str]:
    """Return a header: metadata as JSON, the digest first; without `content` it covers shapes only."""
    text = json.dumps(metadata)
    return {_JSON_KEY: f'{{"digest": "{_digest(text, tensors, content=content)}", {text[1:]}'}


def read_header(header: Mapping[str, str], newest: int) -> dict[str, Any]:
    """Return the metadata of a header.

    Raises:
        ValueError: the header was not written by ds2, is damaged, or its format is not 1 to `newest`.
    """
    if _JSON_KEY not in header:
        raise ValueError(f"was not written by ds2: its header has no {_JSON_KEY!r} entry")
    try:
        metadata = parse_json(header[_JSON_KEY])
    except ValueError as error:
        raise ValueError(f"metadata: is not JSON ({error}); {WAY_OUT}") from error
    if not isinstance(metadata, dict) or type(metadata.get("format")) is not int:
        raise ValueError(f"format: is missing or not a whole number; {WAY_OUT}")
    if metadata["format"] < 1:
        raise ValueError(f"format: is {metadata['format']}, formats are numbered from 1; {WAY_OUT}")
    if metadata["format"] > newest:
        raise ValueError(f"format: is {metadata['format']}, this ds2 reads up to {newest}: install a newer ds2")
    metadata.pop("digest", None)
    return metadata


def has_digest(header: Mapping[str, str]) -> bool:
    """Whether a header has a digest, or must have one: only files of format 1 may lack it."""
    return _DIGEST.match(header[_JSON_KEY]) is not None or parse_json(header[_JSON_KEY])["format"] >= 2


def check_digest(header: Mapping[str, str], tensors: Mapping[str, Tensor], *, content: bool = True) -> None:
    """Raise ValueError unless the digest of the header is that of its metadata and these tensors."""
    stored = header[_JSON_KEY]
    digest = _DIGEST.match(stored)
    if digest is None or digest[1] != _digest(f"{{{stored[digest.end() :]}", tensors, content=content):
        raise ValueError("digest: the file was damaged after it was written: copy it again, or use another "
                         "checkpoint")  # fmt: skip


def _digest(text: str, tensors: Mapping[str, Tensor], *, content: bool) -> str:
    names, listed = sorted(tensors), dict[str, str]()
    count = min(_HASHING_THREADS, 1 + usable_cores() // 4)  # one that has the lock should not wait for a core
    shares = [{name: tensors[name] for name in names[first::count]} for first in range(count)]
    with ThreadPoolExecutor(count) as threads:
        for part in threads.map(partial(_digest_entries, content=content), shares):
            listed |= part
    entries = ", ".join(listed[name] for name in names)
    return hashlib.sha256(f"[{json.dumps(text)}, [{entries}]]".encode()).hexdigest()


def _digest_entries(tensors: Mapping[str, Tensor], *, content: bool) -> dict[str, str]:
    """What the digest covers of each tensor, as JSON; the interpreter lock is free while a content is hashed."""
    return {
        name: json.dumps(
            [name, str(value.dtype), [*value.shape], hashlib.sha256(_content(value)).hexdigest() if content else ""]
        )
        for name, value in tensors.items()
    }


def _content(tensor: Tensor) -> Any:
    """The bytes of a tensor, as NumPy shows its memory."""
    return tensor.reshape(-1).view(torch.uint8).numpy()


def with_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with `prefix` and a dot before each name."""
    return {f"{prefix}.{name}": value for name, value in tensors.items()}


def without_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors whose names start with `prefix` and a dot, without them: the inverse of `with_prefix`."""
    return {name[len(prefix) + 1 :]: value for name, value in tensors.items() if name.startswith(prefix + ".")}


def counting_modules(module: nn.Module) -> dict[str, nn.Module]:
    """The parts of a module that have an extra state, a count on the host, by its key in the state dict."""
    return {
        f"{name}._extra_state": part
        for name, part in module.named_modules()
        if type(part).get_extra_state is not nn.Module.get_extra_state
    }


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return momenta and step counts of an optimizer as tensors named INDEX.NAME."""
    state = optimizer.state_dict()["state"]
    return {
        f"{index}.{name}": value for index, entry in state.items() for name, value in entry.items() if value is not None
    }


def restore_optimizer(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Load what `optimizer_tensors` returned into an optimizer of the same model and config."""
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        index, name = key.split(".", 1)
        state.setdefault(int(index), {})[name] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
