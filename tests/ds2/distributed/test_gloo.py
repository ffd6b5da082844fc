"""Ranks that torchrun started: what a stranger writes into the rendezvous store is data, and is ignored."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ds2.distributed.gloo import StoreChannel
from ds2.distributed.watchdog import RankStatus
from ds2.system.messages import encode


class TouchesAFile:
    """Pickled, this creates a file when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_a_pickle_in_the_store_does_not_run(tmp_path: Path) -> None:
    store = dist.HashStore()
    channel = StoreChannel(store, 0)
    store.queue_push("0", pickle.dumps(TouchesAFile(tmp_path / "ran")))
    for report in ([1], [1, {"step": "x"}], [1, {"no": 0}], ["1", None], 5):
        store.queue_push("0", encode(report))
    here = RankStatus(step=3, phase="forward", changes=2)
    StoreChannel(store, 1).send(here, 0)
    StoreChannel(store, 1).send(None, 0)
    assert channel.receive() == (1, here) and channel.receive() == (1, None)
    assert channel.receive() is None
    assert not (tmp_path / "ran").exists()
