"""CPU seconds of a recogniser's process per 1,000 chunks of 0.2 s, without the network and the search kernel.

    PYTHONPATH=.:ops:tests python docs/log/2026-11-27/chunks.py greedy|beam STREAMS ROUNDS

All streams' chunks arrive at once, as messages of eight workers; the answers are packed, and their hash is printed. The
network is a table of logits. The kernels run from their source on the CPU (`tests/support/kernel_on_cpu.py`).
"""

import functools
import gc
import hashlib
import json
import random
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from ds2_ops.ctc import align, beam
from support import kernel_on_cpu

import ds2
from ds2.audio.features import Features
from ds2.config.schema import ConvConfig, DecodeConfig, FeaturesConfig, ModelConfig
from ds2.decoding import alignment
from ds2.decoding.beam.kernel_search import KernelSearch
from ds2.decoding.methods import make_decoder
from ds2.model.acoustic import AcousticModel
from ds2.recognition.recogniser import Recogniser
from ds2.recognition.session import Endpoints
from ds2.serve import processes
from ds2.serve.engine import Engine
from ds2.serve.limits import Limits
from ds2.text.alphabet import Alphabet

METHOD, STREAMS, ROUNDS = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
KINDS, WORKERS, SAMPLES = 64, 8, 3200  # different speech; samples of a chunk
ALPHABET = Alphabet(("", " ", *"abcdefghijklmnopqrstuvwxyz'"))
excluded_s = 0.0


def without(function):
    """Count a function's CPU seconds in `excluded_s`."""

    @functools.wraps(function)
    def run(*args, **options):
        global excluded_s  # noqa: PLW0603
        start_s = time.thread_time()
        try:
            return function(*args, **options)
        finally:
            excluded_s += time.thread_time() - start_s

    return run


def make_recogniser():
    model_config = ModelConfig(
        convs=[ConvConfig(kernel=[11, 5], stride=[4, 2], channels=4)],
        hidden=16, depth=1, skip=1, row_convs=1, row_conv_context=8, bidirectional=False,
    )  # fmt: skip
    features = Features(FeaturesConfig(), 16000)
    model = AcousticModel(model_config, features.bins, len(ALPHABET), features.step_s).eval()
    options = DecodeConfig(method=METHOD, beam=8, alpha=0.5, beta=1.0)
    decoder = make_decoder(options, ALPHABET, features.step_s * model.time_stride, torch.device("cpu"))
    if METHOD == "beam":
        kernel_on_cpu.patch(pytest.MonkeyPatch())
        for module in (beam, align):
            module.run = without(module.run)
        decoder.search.kernel = KernelSearch(decoder.search.fusion, decoder.search.options)
        alignment.force_align = alignment.align_on_gpu
    return Recogniser(model, features, ALPHABET, decoder, torch.device("cpu"))


def speech(draw, frames):
    """Labels and loudness of words, 1.2 s of pause after each 14 to 25 of them."""
    path, loud = [], []
    while len(path) < frames:
        for _ in range(draw.randrange(14, 26)):
            for character in "".join(draw.choice("etaoinshrdlu") for _ in range(draw.randrange(2, 8))) + " ":
                path += [ALPHABET.symbols.index(character)] + [0] * draw.randrange(1, 4)
        loud += [1.0] * (len(path) - len(loud)) + [0.0] * 60
        path += [0] * 60
    return path[:frames], loud[:frames]


class Socket:
    """A worker's end as `WorkerLink` uses it."""

    def __init__(self):
        self.arriving, self.sent = [], []

    def setblocking(self, blocking):
        pass

    def fileno(self):
        return 1

    def recv(self, size):
        if not self.arriving:
            raise BlockingIOError
        return self.arriving.pop(0)

    def send(self, data):
        self.sent.append(bytes(data))
        return len(data)

    def put(self, message):
        data = processes.pack([message])
        self.arriving += [data[first : first + (1 << 20)] for first in range(0, len(data), 1 << 20)]


def audio_message(sounds, number, worker, calls):
    """The next chunk of each of a worker's streams."""
    apart = "lengths" not in processes.AcceptWaveforms.__dataclass_fields__  # before the change
    message = processes.AcceptWaveforms([], [], [], *([[]] if apart else [[], bytearray()]))
    for session in range(worker + 1, STREAMS + 1, WORKERS):
        samples = sounds[session % KINDS][number * SAMPLES : (number + 1) * SAMPLES].tobytes()
        message.calls.append(next(calls))
        message.sessions.append(session)
        message.arrived_s.append(time.monotonic())
        if apart:
            message.samples.append(samples)
        else:
            message.lengths.append(SAMPLES)
            message.samples.extend(samples)
    return message


def main():
    torch.set_num_threads(1)
    draw, noise = random.Random(1), np.random.default_rng(0)
    logits, sounds = [], []
    for _ in range(KINDS):
        path, loud = speech(draw, 10 * ROUNDS + 200)
        own = noise.normal(0, 0.3, (len(path), len(ALPHABET))).astype(np.float32)
        own[np.arange(len(path)), path] += 9.0
        logits.append(torch.from_numpy(own))
        sound = noise.normal(0, 0.1, 320 * len(path)) * np.repeat(np.array(loud) + 0.003, 320)
        sounds.append(sound.clip(-1, 1).astype(np.float32))
    table, blocks_of = torch.stack(logits), torch.zeros(2 * STREAMS + 64, dtype=torch.int64)
    engine = Engine(recogniser := make_recogniser(), Limits(sessions=STREAMS + 8))
    network = recogniser.session().runner.network

    def run(features, state, slots, blocks, ends, *, edges):
        blocks = blocks if edges else blocks_of[slots]
        blocks_of[slots] = blocks + 1
        frames = blocks[:, None] * network.frames + torch.arange(network.frames) - network.delay
        return table[(slots % KINDS)[:, None], frames.clamp_min(0)].transpose(0, 1).contiguous()

    network.run, recogniser.features.of_rows = without(run), lambda *_: torch.zeros(1)
    sockets = [Socket() for _ in range(WORKERS)]
    links = [processes.WorkerLink(engine, socket) for socket in sockets]
    answers = [processes.Unpacker(processes._TO_WORKER) for _ in sockets]
    for session in range(1, STREAMS + 1):
        sockets[(session - 1) % WORKERS].put(processes.OpenSession(0, session, 16000, Endpoints(), {}, [], False))
    for link in links:
        link.receive()
    calls, digest, first, cpu_s, finals = iter(range(1, 1 << 30)), hashlib.sha256(), ROUNDS // 4, 0.0, 0
    for number in range(ROUNDS):
        for worker, socket in enumerate(sockets):
            socket.put(audio_message(sounds, number, worker, calls))
        if number == first:  # as the server's own tuning of collections
            gc.collect()
            gc.freeze()
            gc.disable()
        start_s, before_s = time.thread_time(), excluded_s
        waiting = engine.turn([], [chunk for link in links for chunk in link.receive()])
        while waiting:
            waiting = engine.turn(waiting, [])
        if number >= first:
            cpu_s += time.thread_time() - start_s - (excluded_s - before_s)
        for socket, unpacker in zip(sockets, answers, strict=True):
            for message in (message for data in socket.sent for message in unpacker.accept(data)):
                assert not isinstance(message, processes.Failure), message
                finals += isinstance(message, processes.Answer)
                digest.update(repr(message).encode())
            socket.sent.clear()
    row = {"method": METHOD, "streams": STREAMS, "us_per_chunk": round(1e6 * cpu_s / STREAMS / (ROUNDS - first), 1)}
    print(
        json.dumps(
            row | {"finals": finals, "answers": digest.hexdigest()[:12], "tree": Path(ds2.__file__).parents[1].name}
        )
    )


main()
