"""The facts that all ranks must share, for `Communicator.agree`: program, settings and weights."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

import ds2_ops
import torch
from torch import nn

from ds2.config.convert import config_to_dict, flat
from ds2.config.schema import Config
from ds2.system.machine import VERSION

_HOST_SETTINGS = {
    "run_dir", "device", "data.train", "data.dev", "data.test", "data.corpus", "data.work_dir", "data.workers",
    "data.cache", "data.cache_gb", "augment.noise",
}  # fmt: skip


@cache
def program() -> dict[str, object]:
    """Return the versions of ds2, with a digest of its sources, and of torch."""
    digest = hashlib.sha256()
    for name, file in sources():
        digest.update(name.encode() + b"\0" + file.read_bytes())
    return {"ds2": f"{VERSION} ({digest.hexdigest()[:12]})", "torch": torch.__version__}


def sources() -> list[tuple[str, Path]]:
    """Return all source files of ds2 and ds2_ops with their paths in the package."""
    return [
        (file.relative_to(package).as_posix(), file)
        for package in (Path(__file__).parents[1], Path(str(ds2_ops.__file__)).parent)
        for file in sorted(package.rglob("*"))
        if file.suffix in (".py", ".cuh", ".h", ".json")
    ]


def settings(config: Config) -> dict[str, object]:
    """Return all settings by dotted key, without paths and devices, in which hosts may differ."""
    return {key: value for key, value in flat(config_to_dict(config)).items() if key not in _HOST_SETTINGS}


def weights(model: nn.Module) -> dict[str, object]:
    """Return a checksum of all float32 parameters and buffers: the exact sum of their bits as integers."""
    tensors = [t.detach() for t in (*model.parameters(), *model.buffers()) if t.dtype == torch.float32]
    sums = [t.contiguous().view(torch.int32).sum(dtype=torch.int64) for t in tensors if t.numel()]
    return {"weights": f"sum {int(torch.stack(sums).sum()) if sums else 0}"}
