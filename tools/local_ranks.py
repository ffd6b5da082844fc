"""What ranks on this machine find each other by."""

from __future__ import annotations

import socket


def variables_of_ranks(world: int) -> list[dict[str, str]]:
    """Return the environment variables of each rank, as torchrun sets them, with a port that is free now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    group = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [{**group, "RANK": str(rank)} for rank in range(world)]
