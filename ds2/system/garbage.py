"""Python's garbage collection in processes that must not pause: trainings and servers."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def short_collections() -> Iterator[None]:
    """Keep garbage collections short and memory flat while the block runs.

    Libraries leave hundreds of thousands of objects that stay for ever. A full collection that visits them takes 0.1 to
    0.2 s, in which no thread runs Python: a server answers no client, a training launches nothing on its GPU. And
    Python delays it until a quarter as many objects are new: meanwhile what has ended, such as thousands of
    connections, stays in memory.
    """
    gc.collect()
    gc.freeze()
    gc.collect()  # sets the number of objects that the quarter refers to
    try:
        yield
    finally:
        gc.unfreeze()
