"""Time sums over ranks by size: ours, MPI's own all-reduce and, on GPUs, NCCL's; a slow link shows.

    mpirun -n 4 python tools/bench.py collectives                     # host memory
    mpirun -n 4 python tools/bench.py collectives --device cuda       # GPU memory: through MPI and through NCCL

Bus bandwidth is 2 (N - 1) / N x bytes / time: the load of each rank's link if nothing is sent twice. `same bits`:
whether two runs on equal input agreed bit for bit on every rank. `bench.py predict` reads the fit at the end: time =
latency + bytes / bandwidth.
"""

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.common import Table, facts, wait
from dispatch import new_parser, parse
from mpi4py import MPI
from torch import Tensor

from ds2.config.device import resolve_device
from ds2.config.schema import CommConfig
from ds2.distributed.communicator import Communicator
from ds2.distributed.launch import connect
from ds2.distributed.mpi import library_version
from ds2.system.files import write_json

Sum = Callable[[Tensor], object]
REPEATS = 7


def time_sum(comm: Communicator, call: Sum, elements: int, device: torch.device) -> tuple[float, bool]:
    """Median seconds of the slowest rank, and whether two sums of equal input agree bit for bit."""
    generator = torch.Generator().manual_seed(comm.rank)
    values = torch.randn(elements, generator=generator).to(device)
    tensor, results, times_s = values.clone(), [], []
    for run in range(REPEATS + 2):
        tensor.copy_(values)
        wait(device)
        MPI.COMM_WORLD.Barrier()
        began = time.perf_counter()
        call(tensor)
        wait(device)
        times_s.append(time.perf_counter() - began)
        if run < 2:
            results.append(tensor.clone())
    same = all(comm.allgather(torch.equal(results[0], results[1])))
    return max(comm.allgather(statistics.median(times_s[2:]))), same


def mpi_own(tensor: Tensor) -> None:
    """MPI_Allreduce through host memory."""
    host = tensor.cpu().numpy()
    MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, host)
    tensor.copy_(torch.from_numpy(host))


def fit(rows: list[dict[str, Any]]) -> tuple[float, float]:
    """Latency (s) and bus bandwidth (byte/s) of time = latency + bytes / bandwidth, by least relative squares."""
    seconds = np.array([row["us"] for row in rows]) * 1e-6
    loads = np.array([row["bus_gb_per_s"] for row in rows]) * 1e9 * seconds  # bytes over each link
    design = np.stack([np.ones_like(loads), loads], 1) / seconds[:, None]
    (latency_s, per_byte_s), *_ = np.linalg.lstsq(design, np.ones_like(seconds), rcond=None)
    return max(float(latency_s), 0.0), 1 / max(float(per_byte_s), 1e-15)


def main(arguments: list[str] | None = None) -> int:
    """Time every way; rank 0 prints and writes."""
    parser = new_parser(__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--kib", nargs="+", type=int, default=[4, 64, 1024, 4096, 25600])
    parser.add_argument("--out", type=Path, help="JSON file of all rows")
    options = parse(parser, arguments)
    resolve_device(options.device)
    columns = {"way": "{way}", "KiB": "{kib}", "us": "{us:.1f}", "bus GB/s": "{bus_gb_per_s:.3f}"}
    rows: dict[str, list[dict[str, Any]]] = {}
    table, head = None, {}
    for backend in ("mpi", "nccl") if options.device != "cpu" else ("mpi",):
        with connect(CommConfig(backend=backend, timeout_s=120), options.device) as comm:
            if comm.rank == 0 and not rows:
                head = facts(options, comm.device, f"sums over {comm.world} ranks, {library_version()}")
                table = Table(columns | {"same bits": "{same_bits}"})
            own, name = (mpi_own, "MPI") if backend == "mpi" else (comm.sum_, "NCCL")
            ours = (f"ours over {name}", lambda tensor: comm.start_sum(tensor).wait())
            for way, call in ((f"{name}'s own", own), ours):
                for kib in options.kib:
                    seconds, same = time_sum(comm, call, kib * 256, comm.device)
                    row = {"way": way, "kib": kib, "us": 1e6 * seconds, "same_bits": same}
                    row["bus_gb_per_s"] = 2 * (comm.world - 1) / comm.world * kib * 1024 / seconds / 1e9
                    rows.setdefault(way, []).append(row)
                    if table:
                        table.print_row(row)
            rank, world = comm.rank, comm.world
    if rank == 0:
        fits = {way: fit(rows_of_way) for way, rows_of_way in rows.items()}
        for way, (latency_s, bandwidth) in fits.items():
            print(f"{way}: latency {1e6 * latency_s:.1f} us, bus bandwidth {bandwidth / 1e9:.3f} GB/s at {world} ranks")
        if options.out:
            write_json(options.out, {**head, "ranks": world, "rows": rows, "fits": fits})
    return 0
