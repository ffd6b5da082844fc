"""Workers end with the block that they work for, in the middle of what they do."""

from __future__ import annotations

import multiprocessing
import signal
import subprocess
import sys
import time
from multiprocessing.connection import wait as wait_for
from pathlib import Path

import pytest

from ds2.system.signals import STOP_SIGNALS, StopHandler, Stopped, handle_signals, time_limit, worker_processes


def wait(folder: Path, number: int) -> None:
    (folder / str(number)).touch()
    time.sleep(3600)


@pytest.mark.parametrize("reason", [KeyboardInterrupt(), Stopped(signal.SIGTERM), ValueError()], ids=repr)
def test_an_exception_in_the_block_kills_the_workers(tmp_path: Path, reason: BaseException) -> None:
    others = set(multiprocessing.active_children())
    with pytest.raises(type(reason)), worker_processes(2) as pool:
        futures = [pool.submit(wait, tmp_path, number) for number in range(9)]
        while not list(tmp_path.iterdir()):
            time.sleep(0.01)
        workers = set(multiprocessing.active_children()) - others
        raise reason
    assert len(workers) == 2
    for worker in workers:  # not its exit code: who asks second, this thread or the pool's, is told none
        assert wait_for([worker.sentinel], timeout=300), "it goes on"
    assert not any(future.done() and not (future.cancelled() or future.exception()) for future in futures)


def test_workers_ignore_an_interrupt_of_the_process_group(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys, time\nfrom ds2.system.signals import worker_processes\n"
        "if __name__ == '__main__':\n"
        "    signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # background jobs ignore it
        "    with worker_processes(1) as pool:\n        pool.submit(time.sleep, 0).result()\n"
        "        pool.submit(time.sleep, 60)\n        os.killpg(0, signal.SIGINT)\n"
    )
    script = tmp_path / "group.py"
    script.write_text(code, encoding="utf-8")
    run = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False, start_new_session=True
    )
    assert run.stderr.count("Traceback") == 1 and "KeyboardInterrupt" in run.stderr, run.stderr


def test_workers_ignore_an_interrupt_while_they_start(tmp_path: Path) -> None:
    script = tmp_path / "start.py"
    script.write_text(
        "import os, signal\nfrom ds2.system.signals import worker_processes\n"
        "if __name__ == '__main__':\n"
        "    with worker_processes(2) as pool:\n        print(pool.submit(abs, -7).result())\n"
        "else:\n    os.kill(os.getpid(), signal.SIGINT)\n",  # a worker reads this file before `init_worker` is called
        encoding="utf-8",
    )
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert (run.stdout, run.stderr, run.returncode) == ("7\n", "", 0)


def test_a_live_source_ends_at_a_signal_after_the_current_item() -> None:
    ends, given = StopHandler(), iter(range(9))
    with handle_signals(STOP_SIGNALS, ends):
        found = []
        for number in ends.until_stopped(lambda: next(given)):
            if number == 2:
                signal.raise_signal(signal.SIGTERM)
            found.append(number)
        assert found == [0, 1, 2]
        with pytest.raises(Stopped):  # the second
            signal.raise_signal(signal.SIGINT)


def test_a_time_limit_ends_with_its_block() -> None:
    with time_limit(60.0, TimeoutError()):
        assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 60
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0), "an alarm without a handler would kill the process later"
