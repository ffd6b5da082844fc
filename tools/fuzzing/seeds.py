"""The command line of a simulation: run seeds, which replay any failure, or look for planted faults."""

import gc
import hashlib
import inspect
import logging
import math
import multiprocessing
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from dispatch import plain_parser

from ds2.system.machine import usable_cores


class Fault(Exception):
    """A run that breaks a promise, fails or hangs."""


def planted(*rows: tuple[Any, ...]) -> dict[str, Callable[[], Any]]:
    """Faults by name, from rows of a name, a module or class, an attribute of it, and what is put there.

    Each is called for a context manager in which it is there. What is put there is a value or, for a function, a text
    of its source and the text that replaces it.
    """
    return {name: partial(_plant, *where) for name, *where in rows}


def _plant(owner: Any, name: str, *value: Any) -> Any:
    if len(value) == 1:
        return patch.object(owner, name, *value)
    function, made = inspect.unwrap(getattr(owner, name)), dict[str, Any]()
    source, (old, new) = textwrap.dedent(inspect.getsource(function)), value
    if source.count(old) != 1:
        raise ValueError(f"{name} has {source.count(old)} times, where a fault is planted: {old}")
    exec("from __future__ import annotations\n" + source.replace(old, new), function.__globals__, made)
    return patch.object(owner, name, made[function.__name__])


def simulate(
    description: str | None,
    run: Callable[[int], str],
    planted_faults: Mapping[str, Callable[[], Any]],
    arguments: Sequence[str] | None,
) -> int:
    """Run seeds, or look for the planted faults; returns the exit status.

    Args:
        description: what `--help` shows.
        run: runs a seed and returns a digest of what happened, or raises Fault.
    """
    parser = plain_parser(description)
    parser.add_argument("--first", type=int, default=0, help="seed of the first run")
    parser.add_argument("--seeds", type=int, default=1000, help="runs; with --faults the most for each")
    parser.add_argument(
        "--faults", nargs="*", choices=planted_faults, metavar="FAULT",
        help="plant each of these, by default all, and print the first seed that finds it",
    )  # fmt: skip
    parser.add_argument("--workers", type=int, default=usable_cores(), help="processes")
    parser.add_argument("--seconds", type=float, default=math.inf, help="after which no further seed counts")
    options = parser.parse_args(arguments)
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    gc.freeze()  # modules are not looked through again in each run
    gc.set_threshold(50_000)  # a run makes few cycles
    seeds = range(options.first, options.first + options.seeds)
    attempts = partial(_attempts, run, seeds, options.workers)
    if options.faults is None:
        return _print_runs(parser.prog, attempts, options.seconds)
    missed, faults = 0, options.faults or planted_faults
    for name in faults:
        began_s = time.monotonic()
        with planted_faults[name]():
            first = next(((seed, wrong) for seed, wrong, _ in attempts() if wrong), None)
        missed += first is None
        how = f"seed {first[0]}: {first[1][:200]}" if first else f"not found in {len(seeds)} seeds"
        print(f"{name}: {how} ({time.monotonic() - began_s:.0f} s)", flush=True)
    return int(missed > 0)


def _attempt(run: Callable[[int], str], seed: int) -> tuple[int, str, str]:
    """Run a seed; return it, what was wrong, or '', and its digest."""
    try:
        return seed, "", run(seed)
    except Exception as error:
        return seed, str(error) if isinstance(error, Fault) else f"unexpected {error!r}", ""


def _attempts(run: Callable[[int], str], seeds: range, workers: int) -> Iterator[tuple[int, str, str]]:
    """Run seeds in forked processes, which end with the iterator; yields what `_attempt` returns of each, in order."""
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        yield from pool.imap(partial(_attempt, run), seeds, chunksize=4)


def _print_runs(program: str, attempts: Callable[[], Any], most_s: float) -> int:
    began_s, digest, failed, done = time.monotonic(), hashlib.sha256(), 0, 0
    for seed, wrong, digest_of_run in attempts():
        digest.update(digest_of_run.encode())
        failed, done = failed + bool(wrong), done + 1
        if wrong:
            print(f"seed {seed}: {wrong}\n  again: python tools/{program} --first {seed} --seeds 1")
        if time.monotonic() - began_s > most_s:
            break
    rate = done / (time.monotonic() - began_s)
    print(f"{done} seeds, {failed} failed, {rate:.1f} a second; digest {digest.hexdigest()[:16]}")
    return int(failed > 0)
