"""The tile with the lowest estimated time among those of all designs, or why there is none.

Shape letters: B batch, H hidden.
"""

import functools
from collections.abc import Callable
from dataclasses import replace

from ds2_ops.jit.runtime import MIN_CAPABILITY
from ds2_ops.recurrent.cells import CELLS
from ds2_ops.recurrent.plan.cluster import cluster_choices, largest_cluster_hidden
from ds2_ops.recurrent.plan.narrow import narrow_choices, portable_choices
from ds2_ops.recurrent.plan.problem import NUMBERS, Choice, DeviceFacts, DoesNotFit, Problem
from ds2_ops.recurrent.plan.units import units_choices
from ds2_ops.recurrent.plan.wide import wide_choices


def choose(problem: Problem, device: DeviceFacts, max_sms: int | None = None) -> Choice:
    """Return the tile with the lowest estimated time; arguments and errors are those of :func:`space`."""
    return rank(problem, device, max_sms)[0]


def rank(problem: Problem, device: DeviceFacts, max_sms: int | None = None) -> list[Choice]:
    """Return all tiles by estimated time; arguments and errors are those of :func:`space`."""
    return sorted(space(problem, device, max_sms), key=lambda choice: choice.step_us)


def space(problem: Problem, device: DeviceFacts, max_sms: int | None = None) -> list[Choice]:
    """Return every tile of every design that can run a problem, fast or not.

    The number of frames is not part of a problem: all blocks of a sequence must run on the same tile, because tiles
    round differently.

    Args:
        problem: the recurrence.
        device: the GPU.
        max_sms: use at most this many multiprocessors; None for all.

    Raises:
        DoesNotFit: no design can run it; the message says why, and what to use instead.
    """
    if problem.dtype not in NUMBERS:
        raise DoesNotFit(f"dtype {problem.dtype} is not one of {', '.join(NUMBERS)}: use backend='gemm' or 'reference'")
    if problem.nonlinearity not in CELLS:
        raise DoesNotFit(f"cell {problem.nonlinearity!r} is not one of {', '.join(CELLS)}: use backend='gemm'")
    if device.capability < MIN_CAPABILITY:
        raise DoesNotFit(
            f"{device.name} has compute capability {_version(device.capability)}; the persistent kernels need "
            f"{_version(MIN_CAPABILITY)} or later: use backend='gemm'"
        )
    sms = usable_sms(device, max_sms)
    if not hopper(device):
        if problem.directions > 1:
            raise DoesNotFit(
                "kernels for both directions in one launch need the clusters of compute capability 9.0, and "
                f"{device.name} has {'none' if device.capability == (9, 0) else _version(device.capability)}: run one "
                "direction after the other"
            )
        device = replace(device, active_clusters={})
    choices = units_choices(problem, device, sms)
    if problem.cell.phases == 1:
        choices += cluster_choices(problem, device, sms)
    choices += grid_choices(problem, device, sms)
    if not choices:
        raise DoesNotFit(_reason(problem, device, sms, largest_grid_hidden(problem, device, sms)))
    as_recorded = hopper(device) and not device.factors
    return choices if as_recorded else [replace(choice, processor=device.processor) for choice in choices]


def hopper(device: DeviceFacts) -> bool:
    """Whether the designs with clusters run on this GPU; others have the portable one, and that of one block.

    A slice of a Hopper GPU may have no clusters.
    """
    return device.capability == (9, 0) and any(device.active_clusters.values())


def _version(capability: tuple[int, int]) -> str:
    return "{}.{}".format(*capability)


def usable_sms(device: DeviceFacts, max_sms: int | None) -> int:
    """Return how many multiprocessors a kernel may use."""
    return device.sms if max_sms is None else min(max_sms, device.sms)


def _reason(problem: Problem, device: DeviceFacts, sms: int, largest_grid: int) -> str:
    if problem.cell.phases > 1 and problem.directions == 1:
        of_units = functools.partial(_fits, problem, lambda one: units_choices(one, device, sms))
        largest = max(largest_grid, _largest(of_units, 0, 2), _largest(of_units, -1, 2))
        return (
            f"hidden size {problem.hidden} in {problem.dtype} does not fit: on the {sms} multiprocessors that may be "
            f"used on {device.name}, {problem.nonlinearity} has kernels for at most {largest}; use reset_after=True, a "
            "smaller size, or backend='gemm'"
        )
    gates = problem.cell.gates
    largest_cluster = largest_cluster_hidden(problem.dtype, gates)
    times = f"{gates} x " if gates > 1 else ""
    if not hopper(device):
        return (
            f"hidden size {problem.hidden} in {problem.dtype} does not fit: the {sms} multiprocessors that may be used "
            f"on {device.name} ({device.sms} in all), with {device.smem_bytes_per_block >> 10} KiB of shared memory a "
            f"block and {device.l2_bytes >> 20} MiB of L2, keep at most {times}{largest_grid} x {largest_grid} "
            "weights: use a smaller size, or backend='gemm'"
        )
    if problem.directions > 1:
        return (
            f"both directions of hidden size {problem.hidden} in {problem.dtype} need clusters of 8 or 16 of the {sms} "
            f"multiprocessors that may be used on {device.name}, which keep at most {times}{largest_cluster} x "
            f"{largest_cluster} weights: run one direction after the other"
        )
    if problem.hidden > largest_cluster:
        return (
            f"hidden size {problem.hidden} in {problem.dtype} does not fit: a cluster of 16 multiprocessors keeps at "
            f"most {times}{largest_cluster} x {largest_cluster} weights, and the {sms} multiprocessors that may be "
            f"used on {device.name} ({device.sms} in all) at most {times}{largest_grid} x {largest_grid}; use a "
            "smaller size, or backend='gemm'"
        )
    return (
        f"hidden size {problem.hidden} in {problem.dtype} needs a cluster of 8 or 16 multiprocessors, "
        f"and {sms} of {device.sms} may be used on {device.name}: raise max_sms, or use backend='gemm'"
    )


def grid_choices(problem: Problem, device: DeviceFacts, sms: int) -> list[Choice]:
    """Return every tile of the whole-chip designs for this problem on ``sms`` multiprocessors, one block on each.

    There is none for two directions in one launch, because each direction needs the whole chip.
    """
    if problem.directions > 1:
        return []
    if not hopper(device):
        return portable_choices(problem, device, sms)
    choices = narrow_choices(problem, device, sms)
    if problem.cell.phases == 1:
        return choices + wide_choices(problem, device, sms)
    # Between the units design's sizes and those that clusters divide, no other design exchanges twice a step.
    return choices + portable_choices(problem, device, sms)


def largest_grid_hidden(problem: Problem, device: DeviceFacts, sms: int) -> int:
    """Return the largest hidden size whose both passes the whole-chip designs can run on ``sms`` multiprocessors."""
    fits = functools.partial(_fits, problem, lambda one: grid_choices(one, device, sms))
    hidden = 64 * sms  # more than registers and shared memory hold
    while hidden > 0 and not fits(hidden):
        hidden -= 64
    return _largest(fits, hidden, 1)


def _fits(problem: Problem, choices: Callable[[Problem], list[Choice]], hidden: int) -> bool:
    """Whether there are choices for both passes of a hidden size."""
    return all(choices(problem._replace(batch=1, hidden=hidden, backward=backward)) for backward in (True, False))


def _largest(fits: Callable[[int], bool], hidden: int, step: int) -> int:
    """Return the last hidden size, from one on, before one that does not fit."""
    while fits(hidden + step):
        hidden += step
    return hidden
