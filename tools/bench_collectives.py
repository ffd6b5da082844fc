"""Time sums over ranks by size: ours beside MPI's own all-reduce and, on GPUs, NCCL's, so that a slow link is seen.

    mpirun -n 4 python tools/bench_collectives.py                     # host memory
    mpirun -n 4 python tools/bench_collectives.py --device cuda       # GPU memory: through MPI and through NCCL

Bus bandwidth is 2 (N - 1) / N x bytes / time: what each rank's link carries when nothing is sent twice. `same bits`
says whether two runs on equal input agreed bit for bit on every rank. The fit at the end, time = latency + bytes /
bandwidth, is what tools/predict_scaling.py takes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor

from ds2.config.device import resolve_device
from ds2.config.schema import CommConfig
from ds2.distributed.communicator import Communicator
from ds2.distributed.launch import connect
from ds2.distributed.mpi import library_version
from ds2.system.machine import git_commit

Sum = Callable[[Tensor], object]


def time_sum(comm: Communicator, call: Sum, elements: int, device: torch.device, repeats: int) -> tuple[float, bool]:
    """Median seconds of the slowest rank, and whether two sums of equal input agree bit for bit."""
    generator = torch.Generator().manual_seed(comm.rank)
    given = torch.randn(elements, generator=generator).to(device)
    tensor, results, times_s = given.clone(), [], []
    for run in range(repeats + 2):
        tensor.copy_(given)
        _wait(device)
        MPI.COMM_WORLD.Barrier()
        began = time.perf_counter()
        call(tensor)
        _wait(device)
        times_s.append(time.perf_counter() - began)
        if run < 2:
            results.append(tensor.clone())
    same = all(comm.allgather(torch.equal(results[0], results[1])))
    return max(comm.allgather(statistics.median(times_s[2:]))), same


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def mpi_own(tensor: Tensor) -> None:
    """MPI_Allreduce, through host memory as it comes."""
    host = tensor.cpu().numpy()
    MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, host)
    tensor.copy_(torch.from_numpy(host))


def ours(comm: Communicator) -> Sum:
    """The sum that gradients take."""
    return lambda tensor: comm.start_sum(tensor).wait()


def measure(comm: Communicator, name: str, call: Sum, args: argparse.Namespace) -> list[dict[str, Any]]:
    """All sizes of one way."""
    rows = []
    for kib in args.kib:
        seconds, same = time_sum(comm, call, kib * 256, comm.device, args.repeats)
        bus = 2 * (comm.world - 1) / comm.world * kib * 1024 / seconds
        rows.append({"way": name, "kib": kib, "us": 1e6 * seconds, "bus_gb_per_s": bus / 1e9, "same_bits": same})
        if comm.rank == 0:
            bits = "yes" if same else "NO"
            print(f"{name:<16}{kib:>9}{1e6 * seconds:>12.1f}{bus / 1e9:>12.3f}{bits:>11}", flush=True)
    return rows


def fit(rows: list[dict[str, Any]]) -> tuple[float, float]:
    """Latency (s) and bus bandwidth (byte/s) of time = latency + bytes / bandwidth, by least relative squares."""
    seconds = np.array([row["us"] for row in rows]) * 1e-6
    loads = np.array([row["bus_gb_per_s"] for row in rows]) * 1e9 * seconds  # bytes over each link
    design = np.stack([np.ones_like(loads), loads], 1) / seconds[:, None]
    (latency_s, per_byte_s), *_ = np.linalg.lstsq(design, np.ones_like(seconds), rcond=None)
    return max(float(latency_s), 0.0), 1 / max(float(per_byte_s), 1e-15)


def main() -> None:
    """Parse, run each way, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--kib", nargs="+", type=int, default=[4, 64, 1024, 4096, 25600])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, help="JSON file of all rows")
    args = parser.parse_args()
    resolve_device(args.device)
    rows: dict[str, list[dict[str, Any]]] = {}
    for backend in ("mpi", "nccl") if args.device != "cpu" else ("mpi",):
        with connect(CommConfig(backend=backend, timeout_s=120), args.device) as comm:
            if comm.rank == 0 and not rows:
                print(f"{comm.world} ranks on {comm.device.type}, {library_version()}, commit {git_commit()}")
                print(f"{'way':<16}{'KiB':>9}{'us':>12}{'bus GB/s':>12}{'same bits':>11}", flush=True)
            if backend == "mpi":
                rows["MPI's own"] = measure(comm, "MPI's own", mpi_own, args)
                rows["ours over MPI"] = measure(comm, "ours over MPI", ours(comm), args)
            else:
                rows["NCCL's own"] = measure(comm, "NCCL's own", comm.sum_, args)
                rows["ours over NCCL"] = measure(comm, "ours over NCCL", ours(comm), args)
            rank, world = comm.rank, comm.world
    if rank == 0:
        fits = {way: fit(found) for way, found in rows.items()}
        for way, (latency_s, bandwidth) in fits.items():
            print(f"{way}: latency {1e6 * latency_s:.1f} us, bus bandwidth {bandwidth / 1e9:.3f} GB/s at {world} ranks")
        if args.out:
            args.out.write_text(json.dumps({"ranks": world, "rows": rows, "fits": fits}, indent=1))


if __name__ == "__main__":
    main()
