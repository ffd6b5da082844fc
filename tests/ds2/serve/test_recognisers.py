"""Several recogniser processes on one address: the same answers, counted together; the end of one ends no other."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.serving import (
    CONFIG,
    WAIT_S,
    Running,
    alone,
    connect,
    printed_port,
    speech,
    start_server,
    text_alone,
    texts_though_killed,
    until,
    words,
)
from websockets.exceptions import ConnectionClosed, InvalidHandshake

from ds2.commands.serve import describe_turns
from ds2.config.schema import DecodeConfig
from ds2.recognition.recogniser import Recogniser
from ds2.serve.http import bind, share
from ds2.serve.limits import Limits
from ds2.serve.processes import Recognisers


def children(pid: int) -> list[int]:
    """Processes of Python's `spawn` that this one began, without its resource tracker."""
    pids = []
    for number in filter(str.isdigit, os.listdir("/proc")):
        try:
            status = Path(f"/proc/{number}/status").read_text()
            command = Path(f"/proc/{number}/cmdline").read_bytes()
        except OSError:
            continue
        if re.search(rf"PPid:\s+{pid}\b", status) and b"spawn_main" in command and "State:\tZ" not in status:
            pids.append(int(number))
    return pids


@pytest.mark.parametrize("processes", ["--recognisers", "--workers"])
def test_a_signal_at_its_first_line_ends_a_server(make_model: Callable[..., Path], processes: str) -> None:
    code = (
        "import io, os, signal, sys\nfrom ds2 import cli\n"
        "class Output(io.StringIO):\n"
        "    write = lambda _, text: text.startswith('ds2 serve: ') and os.kill(os.getpid(), signal.SIGTERM)\n"
        "sys.stdout = Output()\nsys.exit(cli.main())"
    )
    command = [sys.executable, "-c", code, "serve", str(make_model()), "--device", "cpu", "--port", "0", processes, "2"]
    run = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False, timeout=WAIT_S)
    assert run.returncode == 0, run.stderr


def lives(pid: int) -> bool:
    """Whether a process runs; one that nobody waits for, as in a container without an init, has ended all the same."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


@pytest.fixture
def running(
    make_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Running, subprocess.Popen[str]]]:
    """A server of two recognisers, each with a worker, for 80 sessions."""
    model = str(make_model())
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    command = [sys.executable, "-m", "ds2.cli", "serve", model, "--device", "cpu", "--recognisers", "2"]
    command += ["--workers", "2", "--sessions", "80", "--port", "0"]  # either takes all, as chance may spread them
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        port = printed_port(server)
        recogniser = Recogniser.load(model, device="cpu", decode=DecodeConfig())
        yield Running(recogniser, port, server.terminate), server
        server.terminate()
        assert server.wait(WAIT_S) == 0
        assert not counted_in(tmp_path)
    finally:
        server.kill()


def counted_in(temporary: Path) -> list[Path]:
    """Folders of counts that are there."""
    return list(temporary.glob(".ds2-serve.*"))


def test_all_get_their_own_words_and_are_counted_together(running: tuple[Running, subprocess.Popen[str]]) -> None:
    server, process = running
    sources = [speech(seed, 0.4 + 0.02 * seed) for seed in range(24)]
    wanted = [
        [(word.text, round(word.start_s, 3), round(word.end_s, 3)) for word in alone(server.recogniser, data).words]
        for data in sources
    ]

    async def all_at_once() -> list[list[tuple[str, float, float]]]:
        return await asyncio.gather(*(words(server.websocket, data) for data in sources))

    assert asyncio.run(all_at_once()) == wanted
    assert [len(children(one)) for one in children(process.pid)] == [1, 1]
    until(lambda: server.metric("ds2_sessions") == 0)
    for _ in range(8):  # whoever is asked
        assert server.metric("ds2_words_total") == sum(map(len, wanted))
    one_is_killed(server, process)


def one_is_killed(server: Running, process: subprocess.Popen[str]) -> None:
    """It takes its own clients only, and another begins."""
    data = speech(6, 1.0)
    first, second = children(process.pid)
    texts = asyncio.run(texts_though_killed(server, data, 32, first))
    assert texts == {None, text_alone(server.recogniser, data)}
    until(lambda: len(now := children(process.pid)) == 2 and first not in now and second in now)
    until(lambda: all(len(children(one)) == 1 for one in children(process.pid)))
    until(lambda: server.metric("ds2_sessions") == 0)
    assert " ".join(word for word, *_ in asyncio.run(words(server.websocket, data))) == text_alone(
        server.recogniser, data
    )


@pytest.mark.slow
def test_one_that_stays_stopped_is_replaced(make_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ds2.serve.processes._STUCK_S", 1.0)
    make = functools.partial(Recogniser.load, make_model(), device="cpu", decode=DecodeConfig())
    bound = bind("127.0.0.1", 0)
    server = Recognisers(make, Limits(), share(bound), 2, 1)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    stopped, _ = server.processes()
    assert stopped.pid is not None
    try:
        os.kill(stopped.pid, signal.SIGSTOP)
        until(lambda: stopped not in server.processes() and len(server.processes()) == 2)
        assert stopped.exitcode == -signal.SIGKILL
    finally:
        stopped.kill()
        server.end()
        thread.join(WAIT_S)
        bound.close()
    assert not thread.is_alive()


@pytest.mark.slow
def test_a_replaced_model_ends_a_server_in_order_before_it_answers_with_two(make_model: Callable[..., Path]) -> None:
    model, data = make_model(), speech(3, 1.0)
    server = start_server(str(model), "--recognisers", "2", "--workers", "2", "--sessions", "80", "--idle-s", "600")
    try:
        port, recogniser = printed_port(server), Recogniser.load(model, device="cpu", decode=DecodeConfig())
        os.replace(shutil.copy(model, model.with_name("new.safetensors")), model)

        async def speak() -> set[Any]:
            held = [await connect(f"ws://127.0.0.1:{port}/") for _ in range(16)]
            for ws in held:
                await ws.send(CONFIG)
                await ws.send(data)
                await ws.recv()
            os.kill(children(server.pid)[0], signal.SIGKILL)
            answers = set[Any]()
            for ws in held:
                try:
                    text = json.loads(await ws.recv()).get("text")
                    await ws.recv()
                except ConnectionClosed as closed:
                    code = closed.rcvd.code if closed.rcvd else 0
                    answers |= {(text, code)} if code == 1012 else {None}
            return answers

        assert asyncio.run(speak()) == {None, (text_alone(recogniser, data), 1012)}
        _, errors = server.communicate(timeout=WAIT_S)
        assert (server.returncode, "Traceback" in errors) == (2, False)
        assert f"{model} was replaced after this server had started" in errors
    finally:
        server.kill()


@pytest.mark.slow
def test_all_end_with_the_process_that_began_them_and_the_next_tidies_up(
    running: tuple[Running, subprocess.Popen[str]], make_model: Callable[..., Path], tmp_path: Path
) -> None:
    server, process = running
    recognisers = children(process.pid)
    workers = [one for other in recognisers for one in children(other)]
    process.kill()
    process.wait()
    until(lambda: not any(lives(one) for one in [*recognisers, *workers]))

    async def refused() -> None:
        with pytest.raises((OSError, InvalidHandshake)):
            await connect(server.websocket)

    asyncio.run(refused())
    process.returncode = 0  # the fixture ends what has ended
    assert len(counted_in(tmp_path)) == 1
    refuses_a_bidirectional(make_model)


@pytest.mark.slow
def test_what_cannot_begin_says_why(make_model: Callable[..., Path]) -> None:
    refuses_a_bidirectional(make_model)


def refuses_a_bidirectional(make_model: Callable[..., Path]) -> None:
    model = str(make_model("model.bidirectional=true", "model.row_convs=0", "model.max_lookahead_ms=0"))
    command = [sys.executable, "-m", "ds2.cli", "serve", model, "--device", "cpu", "--recognisers", "2", "--port", "0"]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert finished.returncode == 2 and "bidirectional" in finished.stderr and "Traceback" not in finished.stderr


def test_recognisers_that_use_a_gpu_in_turns_have_a_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    assert "4 recognisers use cuda:0 in turns" in describe_turns(4, torch.device("cuda:0"))
    assert not describe_turns(4, torch.device("cpu"))
    (tmp_path / "control").touch()  # where the service listens
    assert not describe_turns(4, torch.device("cuda:0"))
