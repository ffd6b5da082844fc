"""The tile with the lowest estimated time among those of all designs, or why there is none.

Shape letters: B batch, H hidden.
"""

from ds2_ops.recurrent.cells import CELLS
from ds2_ops.recurrent.plan.cluster import cluster_choices, largest_cluster_hidden
from ds2_ops.recurrent.plan.narrow import narrow_choices
from ds2_ops.recurrent.plan.problem import NUMBERS, Choice, DeviceFacts, DoesNotFit, Problem
from ds2_ops.recurrent.plan.units import largest_units_hidden, units_choices
from ds2_ops.recurrent.plan.wide import wide_choices


def choose(problem: Problem, device: DeviceFacts, max_sms: int | None = None) -> Choice:
    """Pick the tile with the lowest estimated time of :func:`space`, whose arguments and errors these are."""
    return rank(problem, device, max_sms)[0]


def rank(problem: Problem, device: DeviceFacts, max_sms: int | None = None) -> list[Choice]:
    """Order all tiles of :func:`space`, whose arguments and errors these are, by estimated time."""
    return sorted(space(problem, device, max_sms), key=lambda choice: choice.step_us)


def space(problem: Problem, device: DeviceFacts, max_sms: int | None = None) -> list[Choice]:
    """Every tile of every design that can run a problem, whether it would be fast or not.

    The number of frames is no part of a problem: a sequence cut in T must meet the same tile, as another one rounds
    differently.

    Args:
        problem: what to run.
        device: where.
        max_sms: use at most this many multiprocessors; None for all.

    Raises:
        DoesNotFit: no design can; the message gives the reason and the way out.
    """
    if problem.dtype not in NUMBERS:
        raise DoesNotFit(f"dtype {problem.dtype} is not one of {', '.join(NUMBERS)}: use backend='gemm' or 'reference'")
    if problem.nonlinearity not in CELLS:
        known = ", ".join(CELLS)
        raise DoesNotFit(f"cell {problem.nonlinearity!r} is not one of {known}: use backend='gemm'")
    if device.capability != (9, 0):
        major, minor = device.capability
        raise DoesNotFit(
            f"{device.name} has compute capability {major}.{minor}; the persistent kernels are built for 9.0 "
            "(H100, H200) and its clusters of 16 multiprocessors: use backend='gemm'"
        )
    sms = usable_sms(device, max_sms)
    choices = units_choices(problem, device, sms)
    if CELLS[problem.nonlinearity].phases == 1:
        choices += cluster_choices(problem, device, sms) + grid_choices(problem, device, sms)
    if not choices:
        raise DoesNotFit(_reason(problem, device, sms, largest_grid_hidden(problem, device, sms)))
    return choices


def usable_sms(device: DeviceFacts, max_sms: int | None) -> int:
    """How many multiprocessors a kernel may occupy."""
    return device.sms if max_sms is None else min(max_sms, device.sms)


def _reason(problem: Problem, device: DeviceFacts, sms: int, largest_grid: int) -> str:
    if CELLS[problem.nonlinearity].phases > 1 and problem.directions == 1:
        even, odd = largest_units_hidden(problem, device, sms)
        return (
            f"hidden size {problem.hidden} in {problem.dtype} does not fit: on the {sms} multiprocessors that may be "
            f"used on {device.name}, {problem.nonlinearity} has kernels for at most {even}, or {odd} if it is odd; use "
            "reset_after=True, a smaller size, or backend='gemm'"
        )
    gates = CELLS[problem.nonlinearity].gates
    largest_cluster = largest_cluster_hidden(problem.dtype, gates)
    times = f"{gates} x " if gates > 1 else ""
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
    """Every tile of the whole-chip designs that can run this problem on ``sms`` multiprocessors, one block on each.

    None in two directions at once: each of them takes the whole chip.
    """
    if problem.directions > 1:
        return []
    return narrow_choices(problem, device, sms) + wide_choices(problem, device, sms)


def largest_grid_hidden(problem: Problem, device: DeviceFacts, sms: int) -> int:
    """The largest hidden size whose both passes the whole-chip designs can keep on ``sms`` multiprocessors."""

    def fits(hidden: int) -> bool:
        passes = (problem._replace(batch=1, hidden=hidden, backward=backward) for backward in (True, False))
        return all(grid_choices(one, device, sms) for one in passes)

    hidden = 64 * sms  # more than registers and shared memory hold
    while hidden > 0 and not fits(hidden):
        hidden -= 64
    while fits(hidden + 1):
        hidden += 1
    return hidden
