"""Which kernel runs a problem on a GPU of this machine: adopted, calibrated, or the model's choice."""

import functools
import warnings
from collections.abc import Mapping

from ds2_ops.recurrent.calibrate import calibrate, key_of, wanted
from ds2_ops.recurrent.device import device_facts
from ds2_ops.recurrent.plan.choose import rank
from ds2_ops.recurrent.plan.problem import Choice, Problem

_adopted: list[Mapping[str, str]] = []  # one, or none


def adopt(choices: Mapping[str, str] | None) -> None:
    """Use these tiles from now on, as :func:`ds2_ops.recurrent.calibrate.calibrate` returned them.

    All other problems get the model's choice then, whatever $DS2_OPS_CALIBRATE says: what runs is what a checkpoint
    holds, on every rank. None ends that.
    """
    _adopted[:] = [] if choices is None else [dict(choices)]
    plan_for.cache_clear()


@functools.lru_cache(maxsize=1024)
def plan_for(problem: Problem, index: int, max_sms: int | None, early: bool = False) -> Choice:
    """Choose for CUDA device ``index``.

    Args:
        problem: what is to run.
        index: the device.
        max_sms: as of `Options`.
        early: as of `Options`: only the cluster design can, and of its sizes the largest is taken, as each adds up in
            an order of its own. So the bits of an utterance do not depend on its batch.

    Returns:
        The adopted tile of the problem, else the calibrated one if $DS2_OPS_CALIBRATE asks for it, else the model's.

    Raises:
        DoesNotFit: no design can; the message gives the reason and the way out.
    """
    ranked = rank(problem, device_facts(index), max_sms)
    if early and (clusters := [choice for choice in ranked if choice.design == "cluster"]):
        largest = max(choice.launch.cluster for choice in clusters)
        ranked = [choice for choice in clusters if choice.launch.cluster == largest]
    key = key_of(problem, index, max_sms)
    name = _adopted[0].get(key) if _adopted else None
    if not _adopted and (most := wanted()):
        name = calibrate([(problem, max_sms)], index, most)[key]
    if name is None:
        return ranked[0]
    for choice in ranked:
        if choice.name == name:
            return choice
    if early:
        return ranked[0]
    warnings.warn(
        f"the tile {name!r} that was kept for {key} is not one of this version's: the model's choice runs instead",
        RuntimeWarning,
        stacklevel=2,
    )
    return ranked[0]
