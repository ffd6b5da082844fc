"""Processes beside each other take the GPUs of a machine in turn."""

from __future__ import annotations

import os

VISIBLE = "CUDA_VISIBLE_DEVICES"


def use_gpu_in_turn(process: int) -> None:
    """Leave this process one of the GPUs that CUDA_VISIBLE_DEVICES lists, by its number among those beside it.

    Call it before CUDA starts, which reads the variable once. Where it is not set, it stays so.
    """
    gpus = [name for name in os.environ.get(VISIBLE, "").split(",") if name.strip()]
    if gpus:
        os.environ[VISIBLE] = gpus[process % len(gpus)].strip()
