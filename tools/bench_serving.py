"""Latency under real-time sources, N at once, until the 98th percentile passes a limit; a table and a plot.

    ds2 serve MODEL --sessions 256 &
    python tools/bench_serving.py AUDIO... --streams 1 8 16 32 64                     # clients of that server
    python tools/bench_serving.py AUDIO... --model MODEL --streams 64 256 1024        # the recogniser alone, in process

Clients speak Vosk's WebSocket, each with a file of its own in turn, and begin at random within a chunk. Latency counts
from when a chunk would have been spoken, so a server that cannot keep up shows. In process, what has arrived when the
recogniser becomes free is the next batch, as in `ds2.serve.batcher`; `--one-at-a-time` hears each source by itself.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import json
import random
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from websockets.asyncio.client import connect

from ds2.audio.read import read_audio
from ds2.commands.decode_options import resolve_options
from ds2.config.device import resolve_device
from ds2.model.checkpoint import find_model, load_model
from ds2.recognition.recogniser import Recogniser
from ds2.recognition.session import Live, decode_sessions, results
from ds2.serve.http import gc_tuning

RATE_HZ = 16000
_LATE_S = 5.0  # behind by so much, a measurement ends: the recogniser cannot keep up


async def stream(url: str, data: bytes, chunk_s: float, seconds: float, spread_s: float, found: list[float]) -> None:
    """Send a file again and again, as fast as it is spoken."""
    size = round(chunk_s * RATE_HZ) * 2
    async with connect(url, max_size=None, open_timeout=120, ping_interval=None) as ws:
        await ws.send(json.dumps({"config": {"sample_rate": RATE_HZ}}))
        await asyncio.sleep(1.0 + random.random() * max(spread_s, chunk_s))
        start_s, at = time.perf_counter(), random.randrange(len(data) // 2) * 2
        for number in range(round(seconds / chunk_s)):
            spoken_s = start_s + number * chunk_s
            await asyncio.sleep(max(0.0, spoken_s - time.perf_counter()))
            piece = (data + data)[at : at + size]
            at = (at + size) % len(data)
            await ws.send(piece)
            await ws.recv()
            found.append(time.perf_counter() - spoken_s)
            if found[-1] > _LATE_S:
                break
        await ws.send('{"eof" : 1}')
        await ws.recv()


async def _clients(url: str, audio: Sequence[bytes], streams: int, *times: float) -> list[float]:
    found: list[float] = []
    await asyncio.gather(*(stream(url, audio[n % len(audio)], *times, found) for n in range(streams)))
    return found


def _process(url: str, audio: Sequence[bytes], streams: int, *times: float) -> list[float]:
    return asyncio.run(_clients(url, audio, streams, *times))


def over_sockets(
    url: str, audio: Sequence[bytes], streams: int, chunk_s: float, seconds: float, spread_s: float, processes: int
) -> list[float]:
    """Latencies of all chunks, seconds, of clients in several processes."""
    shares = [len(range(first, streams, processes)) for first in range(min(processes, streams))]
    with ProcessPoolExecutor(len(shares)) as pool:
        running = [pool.submit(_process, url, audio, share, chunk_s, seconds, spread_s) for share in shares]
        return [value for one in running for value in one.result()]


def in_process(
    recogniser: Recogniser, audio: Sequence[bytes], streams: int, chunk_s: float, seconds: float, alone: bool
) -> tuple[list[float], list[int]]:
    """Latencies of all chunks, seconds, and sizes of batches."""
    draw, size = random.Random(0), round(chunk_s * RATE_HZ)
    sounds = [np.frombuffer(data, "<i2").astype(np.float32) / 32768 for data in audio]
    lives = [recogniser.live(sample_rate_hz=RATE_HZ) for _ in range(streams)]
    places = [draw.randrange(len(sounds[n % len(sounds)])) for n in range(streams)]
    start_s = time.perf_counter() + 0.1
    due = [(start_s + draw.random() * chunk_s, n) for n in range(streams)]
    heapq.heapify(due)
    latencies, sizes = list[float](), list[int]()
    while due and due[0][0] < start_s + seconds:
        now_s = time.perf_counter()
        if due[0][0] > now_s:
            time.sleep(due[0][0] - now_s)
            continue
        if now_s - due[0][0] > _LATE_S:
            latencies.append(now_s - due[0][0])
            break
        arrived: list[tuple[float, int]] = []
        while due and due[0][0] <= now_s and not (alone and arrived):
            arrived.append(heapq.heappop(due))
        for arrived_s, n in arrived:
            sound = sounds[n % len(sounds)]
            lives[n].accept_waveform(_next(sound, places[n], size))
            places[n] = (places[n] + size) % len(sound)
            heapq.heappush(due, (arrived_s + chunk_s, n))
        batch = [lives[n] for _, n in arrived]
        _hear(batch)
        sizes.append(len(batch))
        answered_s = time.perf_counter()
        latencies += [answered_s - arrived_s for arrived_s, _ in arrived]
    return latencies, sizes


def _next(sound: NDArray[np.float32], at: int, size: int) -> NDArray[np.float32]:
    piece = sound[at : at + size]
    return piece if len(piece) == size else np.concatenate([piece, sound[: size - len(piece)]])


def _hear(batch: Sequence[Live]) -> None:
    while any(live.is_ready() for live in batch):
        decode_sessions(batch)
    results(batch)
    for live in batch:
        live.segments.clear()


def plot(path: Path, rows: Sequence[tuple[int, Sequence[float]]], limit_ms: float, title: str) -> None:
    """Latency over streams."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for index, name in enumerate(("p50", "p95", "p98", "p99")):
        axes.plot([streams for streams, _ in rows], [values[index] for _, values in rows], marker="o", label=name)
    axes.axhline(limit_ms, color="grey", linestyle=":")
    axes.set(xlabel="streams", ylabel="ms from a chunk's end to its answer", title=title, ylim=(0, 2 * limit_ms))
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser(description="latency under real-time sources")
    parser.add_argument("audio", nargs="+")
    parser.add_argument("--url", default="ws://127.0.0.1:2700/")
    parser.add_argument("--model", type=Path, help="hear in this process instead of asking a server")
    parser.add_argument("--decode", nargs="*", default=[], help="of --model: decode.KEY=VALUE ...")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="auto", help="of --model")
    parser.add_argument("--one-at-a-time", action="store_true")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 16, 32, 64])
    parser.add_argument("--chunk-s", type=float, default=0.2)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--spread-s", type=float, default=0.0, help="within which clients begin, a chunk at least")
    parser.add_argument("--processes", type=int, default=1, help="of clients")
    parser.add_argument("--limit-ms", type=float, default=200.0, help="of p98: past it no more streams are tried")
    parser.add_argument("--plot", type=Path)
    given = parser.parse_args()
    waveforms = (np.clip(read_audio(path, RATE_HZ) * 32767, -32768, 32767) for path in given.audio)
    audio = [waveform.astype("<i2").tobytes() for waveform in waveforms]
    recogniser = None
    if given.model:
        device, file = resolve_device(given.device), find_model(given.model)
        loaded = load_model(file, device)
        recogniser = Recogniser.of(loaded, resolve_options(given.decode, file, loaded.config), device, given.precision)
        recogniser.session().runner.prepare(max(given.streams))
        in_process(recogniser, audio, max(given.streams), given.chunk_s, 2.0, alone=False)  # what is built once
    print("| streams | p50 ms | p95 ms | p98 ms | p99 ms | slowest ms | mean batch |\n|---|---|---|---|---|---|---|")
    rows = []
    for streams in given.streams:
        batch = ""
        if recogniser is not None:
            with gc_tuning():
                found, sizes = in_process(recogniser, audio, streams, given.chunk_s, given.seconds, given.one_at_a_time)
            batch = f"{np.mean(sizes):.1f}"
        else:
            times = (given.chunk_s, given.seconds, given.spread_s)
            found = over_sockets(given.url, audio, streams, *times, given.processes)
        values = (1000 * np.percentile(found, [50, 95, 98, 99, 100])).tolist()
        rows.append((streams, values))
        print(f"| {streams} | " + " | ".join(f"{value:.0f}" for value in values) + f" | {batch} |", flush=True)
        if values[2] > given.limit_ms:
            break
    if given.plot:
        plot(given.plot, rows, given.limit_ms, "one at a time" if given.one_at_a_time else "Batch Dispatch")


if __name__ == "__main__":
    main()
