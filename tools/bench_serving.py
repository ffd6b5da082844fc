"""Latency of a server under real-time clients: from a chunk's sending to its answer, for N streams at once.

    ds2 serve MODEL --sessions 256 &
    python tools/bench_serving.py AUDIO... --streams 1 8 16 32 64

Clients speak Vosk's WebSocket, each with a file of its own in turn, and begin at random within a chunk. A client that
gets its answer late sends its next chunk late, which is counted as lag: a server that cannot keep up shows there.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time

import numpy as np
from websockets.asyncio.client import connect

from ds2.audio.read import read_audio

RATE_HZ = 16000


async def stream(url: str, data: bytes, chunk_s: float, seconds: float, found: list[float]) -> float:
    """Send a file again and again, as fast as it is spoken; return the lag at the end, seconds."""
    size = round(chunk_s * RATE_HZ) * 2
    async with connect(url, max_size=None, open_timeout=60) as ws:
        await ws.send(json.dumps({"config": {"sample_rate": RATE_HZ}}))
        await asyncio.sleep(random.random() * chunk_s)
        start_s, count, at = time.perf_counter(), round(seconds / chunk_s), 0
        lag_s = 0.0
        for number in range(count):
            lag_s = time.perf_counter() - start_s - number * chunk_s
            await asyncio.sleep(max(0.0, -lag_s))
            piece = data[at : at + size]
            at = at + size if at + size < len(data) else 0
            sent_s = time.perf_counter()
            await ws.send(piece)
            await ws.recv()
            found.append(time.perf_counter() - sent_s)
        await ws.send('{"eof" : 1}')
        await ws.recv()
        return max(0.0, lag_s)


async def measure(url: str, audio: list[bytes], streams: int, chunk_s: float, seconds: float) -> str:
    """One row of the table."""
    found: list[float] = []
    tasks = (stream(url, audio[index % len(audio)], chunk_s, seconds, found) for index in range(streams))
    lags = await asyncio.gather(*tasks)
    p50, p95, p98, p99 = (1000 * np.percentile(found, [50, 95, 98, 99])).tolist()
    return f"| {streams} | {p50:.0f} | {p95:.0f} | {p98:.0f} | {p99:.0f} | {1000 * max(lags):.0f} |"


def main() -> None:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser(description="latency of a server under real-time clients")
    parser.add_argument("audio", nargs="+")
    parser.add_argument("--url", default="ws://127.0.0.1:2700/")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 16, 32, 64])
    parser.add_argument("--chunk-s", type=float, default=0.2)
    parser.add_argument("--seconds", type=float, default=20.0)
    given = parser.parse_args()
    waveforms = (np.clip(read_audio(path, RATE_HZ) * 32767, -32768, 32767) for path in given.audio)
    audio = [waveform.astype("<i2").tobytes() for waveform in waveforms]
    print("| streams | p50 ms | p95 ms | p98 ms | p99 ms | largest lag ms |\n|---|---|---|---|---|---|")
    for streams in given.streams:
        print(asyncio.run(measure(given.url, audio, streams, given.chunk_s, given.seconds)), flush=True)


if __name__ == "__main__":
    main()
