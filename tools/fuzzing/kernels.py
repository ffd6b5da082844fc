"""Run random problems on random tiles of the recurrent kernels on a GPU, and compare the results with float64.

    python tools/fuzz.py kernels --seconds 240 --workers 14      prints a line for each failure; exit status 1
    python tools/fuzz.py kernels --seed 3 --case 31              one case again

A case is a cell, a dtype, a hidden size and, for each pass, a layout of its space, whether the planner would choose it
or not; it runs with several tiles, batches, numbers of frames and kinds of lengths, with a first state and without, on
the whole chip or a part. Inputs hold NaN at padding, and memory of the results holds NaN before. Each utterance of each
result may err by three times what the worst utterance of the same equations in torch errs, or three roundings of the
largest utterance (of 1 where a result is a handful of numbers, each perhaps a small difference of larger ones). The
same launch again gives the same bits.
Shape letters: T frames, B batch, H hidden.
"""

import multiprocessing
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor

import torch
from dispatch import plain_parser
from ds2_ops.recurrent.backends import gemm, persistent
from ds2_ops.recurrent.calibrate import device_facts
from ds2_ops.recurrent.cells import GATED, Options
from ds2_ops.recurrent.plan.choose import space
from ds2_ops.recurrent.plan.problem import Choice, DoesNotFit, Problem
from support import gated_cases, persistent_cases
from support.gpus import use_gpu_in_turn
from support.op_cases import nan_filled_memory, poison_padding
from torch import Tensor

CELLS = ("relu", "clipped_relu", "tanh", *GATED)
LARGEST = {"relu": 2816, "clipped_relu": 2816, "tanh": 2816, "lstm": 1280, "gru_after": 1312, "gru_before": 1312}
ROUNDING = {"bfloat16": 2**-9, "float16": 2**-12, "float32": 2**-11}  # fp32 products go through TF32
RUNS, MAX_NUMBERS, HANDFUL = 4, 4_000_000, 8


def cases(seed: int, case: int) -> Iterator[str]:
    """Run one case; yields what is wrong, and "" for each run that is not."""
    rng = random.Random(f"{seed}/{case}")
    cell, dtype = rng.choice(CELLS), rng.choice(("bfloat16", "bfloat16", "float16", "float32"))
    hidden = rng.randint(1, rng.choice((64, 256, 512, LARGEST[cell])))
    hidden = max(1, hidden - hidden % rng.choice((1, 2, 8, 64)))
    layouts: dict[bool, str] = {}
    for _ in range(RUNS):
        max_sms = rng.choice((None, None, None, 16, 64, 120))
        batch = rng.choice((1, rng.randint(2, 16), rng.randint(17, 32), rng.randint(33, 64), rng.randint(65, 130)))
        frames = rng.choice((1, 2, rng.randint(3, 15), rng.randint(16, 40), rng.randint(41, 150)))
        frames = max(1, min(frames, MAX_NUMBERS // (batch * hidden)))
        try:
            tiles = {
                backward: _tile(rng, Problem(batch, hidden, dtype, cell, backward), max_sms, layouts)
                for backward in (False, True)
            }
        except DoesNotFit:
            continue
        shape, kind = (frames, batch, hidden), rng.choice(("ragged", "full", "random", "few"))
        lengths = _lengths(rng, frames, batch, kind)
        persistent.choose_tile = lambda wanted, *_: tiles[wanted.backward]  # noqa: B023  (used in this turn)
        wrong = _wrong(cell, dtype, shape, lengths, rng.random() < 0.7)
        names = " and ".join(tiles[backward].name for backward in (False, True))
        yield f"case {case}: {cell} {dtype} (T, B, H) = {shape}, {kind}, {names}: {wrong}" if wrong else ""


def _tile(rng: random.Random, problem: Problem, max_sms: int | None, layouts: dict[bool, str]) -> Choice:
    """A tile of the layout that the case has taken before, if this problem has it: it may need no new kernel."""
    choices = space(problem, device_facts(0), max_sms)
    same = [choice for choice in choices if choice.work.layout == layouts.get(problem.backward)]
    layout = rng.choice(sorted({choice.work.layout for choice in same or choices}))
    layouts.setdefault(problem.backward, layout)
    return rng.choice([choice for choice in choices if choice.work.layout == layout])


def _lengths(rng: random.Random, frames: int, batch: int, kind: str) -> Tensor:
    if kind == "ragged":
        return torch.linspace(frames, 0, batch).int()
    least, most = {"full": (frames, frames), "random": (0, frames), "few": (0, min(frames, 3))}[kind]
    return torch.tensor([rng.randint(least, most) for _ in range(batch)], dtype=torch.int32)


def _wrong(cell: str, dtype: str, shape: tuple[int, int, int], lengths: Tensor, with_state: bool) -> str:
    """Name the results that differ too much from float64, or between two launches."""
    kind, device = getattr(torch, dtype), torch.device("cuda")
    lengths = lengths.to(device)
    with nan_filled_memory():
        ours, stock, truth = (_gated if cell in GATED else _plain)(cell, shape, kind, lengths, with_state)
        faults = []
        for i, (once, again) in enumerate(zip(*ours, strict=True)):
            if not torch.equal(once, again):
                faults.append(f"result {i} differs between launches")
            batch_first = [
                r.double().movedim(-2 if r.dim() < 4 else 1, 0).flatten(1) for r in (once, stock[i], truth[i])
            ]
            error, usual = ((r - batch_first[2]).norm(dim=1) for r in batch_first[:2])
            largest = max(float(batch_first[2].norm(dim=1).max()), 1.0 if once.numel() < HANDFUL else 0.0)
            right = error <= 3 * max(float(usual.max()), ROUNDING[dtype] * largest)  # NaN is not
            if not right.all():
                faults.append(f"result {i}, utterances {(~right).nonzero().flatten().tolist()[:8]}")
    return ", ".join(faults)


Results = tuple[tuple[list[Tensor], list[Tensor]], list[Tensor], list[Tensor]]  # ours twice, stock's, the truth


def _plain(cell: str, shape: tuple[int, int, int], kind: torch.dtype, lengths: Tensor, with_state: bool) -> Results:
    x, weight, h0, grad_y, grad_h_n = persistent_cases.inputs(shape, kind)
    options, zeros = Options(cell, persistent_cases.CLIP), torch.zeros_like(h0)
    poisoned_x, poisoned_grad = poison_padding(x, lengths), poison_padding(grad_y, lengths)

    def ours() -> list[Tensor]:
        y, h_n = persistent_cases.forward(poisoned_x, weight, h0 if with_state else None, lengths, options)
        last = grad_h_n if with_state else None
        grads = persistent_cases.backward_data(poisoned_grad, last, y, weight, lengths, options)
        return [y, h_n, *grads]

    once, again = ours(), ours()
    first, last = (h0, grad_h_n) if with_state else (zeros, zeros)

    def loops(to: torch.dtype) -> list[Tensor]:
        inputs = [tensor.to(to) for tensor in (x, weight, first, grad_y, last, once[0])]
        forward = persistent_cases.forward_loop(*inputs[:3], lengths, cell)
        return [*forward, *persistent_cases.backward_loop(inputs[3], inputs[4], inputs[5], inputs[1], lengths, cell)]

    return (once, again), loops(kind), loops(torch.float64)


def _gated(cell: str, shape: tuple[int, int, int], kind: torch.dtype, lengths: Tensor, with_state: bool) -> Results:
    (x, weight, bias, h0, c0), cotangents = gated_cases.problem(cell, shape, torch.device("cuda"), kind)
    grad_y, grad_h_n, grad_c_n = (*cotangents, None)[:3]
    assert x is not None and weight is not None
    ends = (h0, c0, grad_h_n, grad_c_n) if with_state else (None, None, None, None)

    def run(module: object, to: torch.dtype, poison: bool) -> list[Tensor]:
        wide = gated_cases.wide(to)
        frames = [poison_padding(t, lengths) if poison else t for t in (x, grad_y)]
        h, c, grad_h, grad_c = (None if t is None else t.to(wide if i % 2 else to) for i, t in enumerate(ends))
        inputs = (frames[0].to(to), weight.to(to), None if bias is None else bias.to(to), h, c)
        return gated_cases.both_passes(module, cell, inputs, (frames[1].to(to), grad_h, grad_c), lengths)

    return (
        (run(persistent, kind, True), run(persistent, kind, True)),
        run(gemm, kind, False),
        run(gemm, torch.float64, False),
    )


def _worker(seed: int, first: int, step: int, until: float) -> tuple[Counter[str], list[str]]:
    """Run every `step`-th case from `first` on until a time, on one of the GPUs that CUDA_VISIBLE_DEVICES lists."""
    use_gpu_in_turn(first)
    count: Counter[str] = Counter()
    faults, case = [], first
    while time.monotonic() < until:
        count["cases"] += 1
        for fault in cases(seed, case):
            count["runs"] += 1
            if fault:
                faults.append(fault)
                print(fault, flush=True)
        case += step
    return count, faults


def main(arguments: Sequence[str] | None = None) -> int:
    """Run cases until the time is over, or one case."""
    parser = plain_parser(__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="only this one")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--workers", type=int, default=4)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        raise SystemExit("tools/fuzz.py kernels needs a CUDA GPU; tests/ops/recurrent emulates the kernels without one")
    if options.case is not None:
        faults = [fault for fault in cases(options.seed, options.case) if fault]
        print("\n".join(faults) or f"case {options.case}: right")
        return bool(faults)
    until, workers = time.monotonic() + options.seconds, options.workers
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        jobs = [pool.submit(_worker, options.seed, i, workers, until) for i in range(workers)]
        results = [job.result() for job in jobs]
    total = sum((count for count, _ in results), Counter())
    faults = [fault for _, faults_of_worker in results for fault in faults_of_worker]
    print(f"seed {options.seed}: {total['cases']} cases, {total['runs']} runs, {len(faults)} wrong")
    return bool(faults)
