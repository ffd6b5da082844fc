"""Latency with N real-time sources at once, until the 98th percentile passes a limit.

    ds2 serve MODEL --sessions 256 &
    python tools/bench.py serving AUDIO... --streams 1 8 16 32 64
    python tools/bench.py serving AUDIO... --streams 2000 --processes 8 --seconds 3600

Clients use Vosk's WebSocket protocol, take the files in turn, and begin at random within a chunk. Latency counts from
the end of a chunk in the source's time, so a server that cannot keep up shows.

Clients begin at one of 16 places of their file. Those of the same file and place have the same audio, so they must get
the same text: the last lines count those that differ from the most frequent text, and show five.
"""

import asyncio
import json
import random
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from benchmarks.common import RATE_HZ, Table, facts
from dispatch import new_parser, parse
from websockets.asyncio.client import connect

from ds2.audio.read import read_audio
from ds2.config.device import resolve_device

CHUNK_S = 0.2  # of audio that a client sends at once
_LATE_S = 5.0  # a client ends when the server is this far behind
_PLACES = 16  # of a file, where streams begin


@dataclass
class Replies:
    """The replies to one client."""

    number: int  # of its file
    place: int  # of its file, where it began
    latencies: list[float] = field(default_factory=list)  # of its chunks, seconds
    texts: list[str] = field(default_factory=list)


async def stream(url: str, audio: Sequence[bytes], number: int, seconds: float, spread_s: float) -> Replies:
    """Send a file again and again in real time."""
    data, size = audio[number], round(CHUNK_S * RATE_HZ) * 2
    replies = Replies(number, random.randrange(_PLACES))
    async with connect(url, max_size=None, open_timeout=120, ping_interval=None) as ws:
        await ws.send(json.dumps({"config": {"sample_rate": RATE_HZ}}))
        await asyncio.sleep(1.0 + random.random() * max(spread_s, CHUNK_S))
        start_s, at = time.perf_counter(), replies.place * (len(data) // 2 // _PLACES) * 2
        for chunk in range(round(seconds / CHUNK_S)):
            spoken_s = start_s + chunk * CHUNK_S
            await asyncio.sleep(max(0.0, spoken_s - time.perf_counter()))
            piece = data[at : at + size]
            await ws.send(piece + data[: size - len(piece)])
            at = (at + size) % len(data)
            replies.texts.append(json.loads(await ws.recv()).get("text", ""))
            replies.latencies.append(time.perf_counter() - spoken_s)
            if replies.latencies[-1] > _LATE_S:
                break
        await ws.send('{"eof" : 1}')
        replies.texts.append(json.loads(await ws.recv()).get("text", ""))
    replies.texts = [" ".join(filter(None, replies.texts))]
    return replies


async def _clients(url: str, audio: Sequence[bytes], streams: int, *times: float) -> list[Replies]:
    return await asyncio.gather(*(stream(url, audio, n % len(audio), *times) for n in range(streams)))


def _process(url: str, audio: Sequence[bytes], streams: int, *times: float) -> list[Replies]:
    return asyncio.run(_clients(url, audio, streams, *times))


def over_sockets(url: str, audio: Sequence[bytes], streams: int, processes: int, *times: float) -> list[Replies]:
    """The replies to clients in several processes."""
    shares = [len(range(first, streams, processes)) for first in range(min(processes, streams))]
    with ProcessPoolExecutor(len(shares)) as pool:
        running = [pool.submit(_process, url, audio, share, *times) for share in shares]
        return [replies for one in running for replies in one.result()]


def other_texts(clients: Sequence[Replies]) -> list[str]:
    """The texts of clients, each after the most frequent one of the same audio, where the two differ."""
    texts: defaultdict[tuple[int, int, int], Counter[str]] = defaultdict(Counter)
    for replies in clients:
        texts[replies.number, replies.place, len(replies.latencies)][replies.texts[0]] += 1
    differing: list[str] = []
    for counts in texts.values():
        (usual, _), *others = counts.most_common()
        for text, count in others:
            differing += [f"{usual}\n{text}"] * count
    return differing


def worst_minute(clients: Sequence[Replies]) -> float:
    """The largest 98th percentile of the latencies of a minute, counted from the clients' starts, seconds."""
    minutes: defaultdict[int, list[float]] = defaultdict(list)
    for replies in clients:
        for chunk, latency_s in enumerate(replies.latencies):
            minutes[int(chunk * CHUNK_S / 60)].append(latency_s)
    return max(float(np.percentile(latencies, 98)) for latencies in minutes.values())


def main(arguments: list[str] | None = None) -> int:
    """Measure each number of streams."""
    parser = new_parser(__doc__)
    parser.add_argument("audio", nargs="+")
    parser.add_argument("--url", default="ws://127.0.0.1:2700/")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 16, 32, 64])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--spread-s", type=float, default=0.0, help="within which clients begin, a chunk at least")
    parser.add_argument("--processes", type=int, default=1, help="of clients")
    parser.add_argument("--limit-ms", type=float, default=200.0, help="of p98: beyond it no more streams are tried")
    options = parse(parser, arguments)
    waveforms = (np.clip(read_audio(path, RATE_HZ) * 32767, -32768, 32767) for path in options.audio)
    audio = [waveform.astype("<i2").tobytes() for waveform in waveforms]
    facts(options, resolve_device("auto"), f"chunks of {CHUNK_S:g} s, {options.url}")
    percentiles = {"p50": 50, "p95": 95, "p98": 98, "p99": 99, "slowest": 100}
    columns = {f"{name} ms": f"{{{name}:.0f}}" for name in percentiles}
    table = Table({"streams": "{streams}", **columns, "p98 of the worst minute ms": "{minute:.0f}"})
    differ: list[str] = []
    for streams in options.streams:
        clients = over_sockets(options.url, audio, streams, options.processes, options.seconds, options.spread_s)
        differ += other_texts(clients)
        latencies = [seconds for replies in clients for seconds in replies.latencies]
        row: dict[str, Any] = {"streams": streams, "minute": 1000 * worst_minute(clients)}
        row |= {name: 1000 * float(np.percentile(latencies, percent)) for name, percent in percentiles.items()}
        table.print_row(row)
        if row["p98"] > options.limit_ms:
            break
    print(f"texts that differ from those of other streams of the same audio: {len(differ)}", *differ[:5], sep="\n")
    return 0
