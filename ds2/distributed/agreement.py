"""What all ranks must have in common for their sum to mean anything, as facts that `Communicator.agree` compares."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

import ds2_ops
import torch
from torch import nn

import ds2
from ds2.config.convert import config_to_dict, flat
from ds2.config.schema import Config

_A_HOSTS_OWN = {
    "run_dir", "device", "data.train", "data.dev", "data.test", "data.corpus", "data.work_dir", "data.workers",
    "data.cache", "data.cache_gb", "augment.noise",
}  # fmt: skip


@cache
def program() -> dict[str, object]:
    """The versions that run: of ds2 with a digest of its sources, and of torch."""
    digest = hashlib.sha256()
    for name, file in sources():
        digest.update(name.encode() + b"\0" + file.read_bytes())
    return {"ds2": f"{ds2.__version__} ({digest.hexdigest()[:12]})", "torch": torch.__version__}


def sources() -> list[tuple[str, Path]]:
    """Every source file of ds2 and ds2_ops, however deep, by its place in its package."""
    return [
        (file.relative_to(package).as_posix(), file)
        for package in (Path(str(module.__file__)).parent for module in (ds2, ds2_ops))
        for file in sorted(package.rglob("*"))
        if file.suffix in (".py", ".cuh", ".h", ".json")
    ]


def settings(config: Config) -> dict[str, object]:
    """Every setting by its dotted key, without paths and devices: those may be a host's own."""
    return {key: value for key, value in flat(config_to_dict(config)).items() if key not in _A_HOSTS_OWN}


def weights(model: nn.Module) -> dict[str, object]:
    """A sum over the bits of all float32 parameters and buffers, exact in any order: equal weights give equal sums."""
    tensors = [t.detach() for t in (*model.parameters(), *model.buffers()) if t.dtype == torch.float32]
    sums = [t.contiguous().view(torch.int32).sum(dtype=torch.int64) for t in tensors if t.numel()]
    return {"weights": f"sum {int(torch.stack(sums).sum()) if sums else 0}"}
