"""A server under clients of every kind for minutes: its memory and file descriptors must stay where they are.

    python tools/soak_serving.py MODEL AUDIO... --minutes 10 [decode.KEY=VALUE ...]

Some clients speak without end, some come and go, some vanish, upload, send rubbish or hot words. Every so often the
server's resident memory, open files and threads are printed; after the first third they may not grow by more than a
tenth and a few. Those that behave must get answers, and a recording the same words every time. Exit status 1 otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from websockets.asyncio.client import connect
from websockets.exceptions import WebSocketException

from ds2.audio.read import read_audio

RATE_HZ, CHUNK = 16000, 6400  # bytes: 0.2 s
RUBBISH = ['{"config": 7}', "[", "\0", '{"config": {"sample_rate": 3}}', '{"eof": 1}']
CONFIG: dict[str, Any] = {"sample_rate": RATE_HZ, "words": True}


class Soak:
    """Clients of one server."""

    def __init__(self, port: int, audio: list[bytes], ends_s: float, hot: bool) -> None:
        self.url, self.port, self.audio, self.ends_s, self.hot = f"ws://127.0.0.1:{port}/", port, audio, ends_s, hot
        self.texts: dict[int, set[str]] = {}
        self.count = {"answers": 0, "sessions": 0, "rubbish": 0, "vanished": 0}

    @property
    def going(self) -> bool:
        """Whether clients shall go on."""
        return time.monotonic() < self.ends_s

    async def talk(self, data: bytes, config: dict[str, Any], pace: float) -> str:
        """One session; `pace` is how many times as fast as it is spoken."""
        texts = []
        async with connect(self.url, open_timeout=60) as ws:
            await ws.send(json.dumps({"config": CONFIG | config}))
            for start in range(0, len(data), CHUNK):
                await ws.send(data[start : start + CHUNK])
                texts.append(json.loads(await ws.recv()).get("text"))
                self.count["answers"] += 1
                await asyncio.sleep(0.2 / pace)
            await ws.send('{"eof" : 1}')
            texts.append(json.loads(await ws.recv())["text"])
        self.count["sessions"] += 1
        return " ".join(filter(None, texts))

    async def comes_and_goes(self) -> None:
        """Recordings, whose words must be the same each time."""
        while self.going:
            index = random.randrange(len(self.audio))
            self.texts.setdefault(index, set()).add(await self.talk(self.audio[index], {}, 4.0))

    async def endless(self) -> None:
        """One session for all the time."""
        while self.going:
            await self.talk(b"".join(self.audio) * 50, {}, 1.0 if self.going else 100.0)

    async def expects(self) -> None:
        """Sessions with hot words of their own."""
        while self.going:
            words = {"".join(random.choices("abcdefgh", k=6)): 2.0 for _ in range(5)}
            await self.talk(random.choice(self.audio), {"hot_words": words} if self.hot else {}, 8.0)

    async def vanishes(self) -> None:
        """Connections that are cut."""
        while self.going:
            ws = await connect(self.url)
            await ws.send(random.choice(self.audio)[:20_000])
            ws.transport.abort()
            self.count["vanished"] += 1
            await asyncio.sleep(0.3)

    async def rubbish(self) -> None:
        """Messages that are refused."""
        while self.going:
            with contextlib.suppress(WebSocketException, OSError):
                async with connect(self.url) as ws:
                    await ws.send(random.choice(RUBBISH))
                    await ws.send(b"\1")
                    while True:
                        await ws.recv()
            self.count["rubbish"] += 1
            await asyncio.sleep(0.5)

    async def run(self) -> None:
        """All of them until the end."""
        kinds = [self.comes_and_goes] * 4 + [self.endless, self.expects, self.vanishes, self.rubbish]
        tasks = [asyncio.create_task(kind()) for kind in kinds]
        await asyncio.sleep(max(0.0, self.ends_s - time.monotonic()))
        for task in tasks[4:]:
            task.cancel()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        for error in found:
            if isinstance(error, Exception):
                raise error


def usage(pid: int) -> tuple[float, int, int]:
    """Resident memory in MiB, open files and threads of a process and those that it began."""
    begun = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    memory, files, threads = zip(*(_usage(one) for one in [pid, *map(int, begun)]), strict=True)
    return sum(memory), sum(files), sum(threads)


def _usage(pid: int) -> tuple[float, int, int]:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return int(status["VmRSS"].split()[0]) / 1024, files, int(status["Threads"])


async def watch(soak: Soak, pid: int, seconds: float) -> list[tuple[float, int, int]]:
    """Run the clients and print what the server takes."""
    found, clients, start_s = list[tuple[float, int, int]](), asyncio.create_task(soak.run()), time.monotonic()
    print("| minute | MiB | files | threads | answers | sessions |\n|---|---|---|---|---|---|")
    while not clients.done():
        await asyncio.wait([clients], timeout=seconds / 40)
        found.append(usage(pid))
        memory, files, threads = found[-1]
        if len(found) % 4 == 1:
            minutes = (time.monotonic() - start_s) / 60
            counts = f"{soak.count['answers']} | {soak.count['sessions']}"
            print(f"| {minutes:.1f} | {memory:.0f} | {files} | {threads} | {counts} |", flush=True)
    await clients
    return found


def main() -> int:
    """Start a server, load it, and say what it took."""
    parser = argparse.ArgumentParser(description="a server under clients of every kind")
    parser.add_argument("model")
    parser.add_argument("audio", nargs="+", help="recordings, then decode.KEY=VALUE of the server")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--port", type=int, default=2790)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", default="0")
    given = parser.parse_args()
    decode = [argument for argument in given.audio if argument.startswith("decode.")]
    names = [argument for argument in given.audio if argument not in decode]
    audio = [(np.clip(read_audio(name, RATE_HZ), -1, 1) * 32767).astype("<i2").tobytes() for name in names]
    command = [sys.executable, "-m", "ds2.cli", "serve", given.model, *decode, "--port", str(given.port)]
    server = subprocess.Popen(
        [*command, "--device", given.device, "--idle-s", "5", "--workers", given.workers],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        print(server.stdout.readline().strip())
        time.sleep(1.0)
        soak = Soak(given.port, audio, time.monotonic() + 60 * given.minutes, bool(decode))
        found = asyncio.run(watch(soak, server.pid, 60 * given.minutes))
    finally:
        server.terminate()
        ended = server.wait(60)
    third = len(found) // 3
    first, last = (np.median(found[at], axis=0) for at in (slice(third, 2 * third), slice(2 * third, None)))
    same = all(len(texts) == 1 for texts in soak.texts.values())
    flat = all(after <= 1.1 * before + 8 for before, after in zip(first, last, strict=True))
    print(f"{soak.count}; words of a recording always the same: {same}; server ended with {ended}")
    print(f"median of the second and of the last third: {first.round(1).tolist()} and {last.round(1).tolist()}")
    return 0 if same and flat and ended in (0, 143, -15) else 1


if __name__ == "__main__":
    sys.exit(main())
