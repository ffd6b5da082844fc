"""A signal ends a run in whatever phase it comes, and the run goes on from there with the unbroken run's losses."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dispatch import variables_of_ranks
from support.launch import mpirun
from support.rank_runs import arguments, clean
from support.run_log import losses
from support.serving import until
from support.tiny import compose_once, tiny_overrides_in

from ds2.audio.features import Features
from ds2.cli import main
from ds2.config.schema import Config
from ds2.data import audio_cache, splits
from ds2.lm import recurrent_training
from ds2.lm.recurrent import load_recurrent
from ds2.recognition.recogniser import Recogniser
from ds2.system.tensor_file import load
from ds2.training import run_folder, trainer
from ds2.training.loop import train
from ds2.training.run_folder import RunFiles
from ds2.training.trainer import Trainer

MakeConfig = Callable[..., Config]


def signalled(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, number: int = signal.SIGTERM) -> list[str]:
    """Let the first call of a function bring a real signal before it does its work; returns the calls seen."""
    calls: list[str] = []
    healthy = getattr(owner, name)

    def call(*arguments: Any, **options: Any) -> Any:
        calls.append(name)
        if len(calls) == 1:
            os.kill(os.getpid(), number)
        return healthy(*arguments, **options)

    monkeypatch.setattr(owner, name, call)
    return calls


@pytest.mark.parametrize(
    ("owner", "name", "number"),
    [
        (splits, "read_manifests", signal.SIGTERM),
        (audio_cache, "reads_cheaply", signal.SIGINT),
        (Features, "estimate", signal.SIGUSR1),
        (trainer, "make_optimizer", signal.SIGTERM),
    ],
    ids=["manifests", "audio-cache", "statistics", "model"],
)
def test_preparation_ends_at_once(
    tiny_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, number: int
) -> None:
    signalled(monkeypatch, owner, name, number)
    steps = signalled(monkeypatch, Trainer, "step")
    assert train(tiny_config(), tmp_path / "run") == 128 + number
    assert steps == []
    assert not list(tmp_path.rglob("*.partial"))
    monkeypatch.undo()
    assert train(tiny_config("train.max_steps=1"), tmp_path / "run") == 0


def test_an_importer_ends_at_once(tiny_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = signalled(monkeypatch, splits, "prepare")
    config = tiny_config(f"data.train=[{tmp_path / 'none.jsonl'}]", "data.prepare=synthetic")
    assert train(config, tmp_path / "run") == 143
    assert calls == ["prepare"] and not (tmp_path / "run" / "log.jsonl").exists()


@pytest.fixture(scope="module")
def whole(tone_manifest: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder of two epochs that nothing stopped."""
    folder = tmp_path_factory.mktemp("whole")
    train(compose_once(*tiny_overrides_in(folder, tone_manifest), "train.epochs=2"), folder / "run")
    return folder / "run"


@pytest.mark.parametrize(
    ("owner", "name", "steps"),
    [
        (Recogniser, "recognise", 3),
        (run_folder, "prepare_state", 3),
        (run_folder, "prepare_model", 3),
        (RunFiles, "keep_last", 3),
    ],
    ids=["evaluation", "saving", "best-model", "last-model"],
)
def test_evaluation_and_saving_end_and_lose_no_step(
    tiny_config: MakeConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    whole: Path,
    owner: Any,
    name: str,
    steps: int,
) -> None:
    broken = tmp_path / "broken"
    signalled(monkeypatch, owner, name)
    assert train(tiny_config("train.epochs=2"), broken) == 143
    assert load(broken / "trainer.safetensors")[1]["progress"]["step"] == steps
    monkeypatch.undo()
    assert train(tiny_config("train.epochs=2"), broken) == 0
    assert losses(broken) == losses(whole)
    one, other = load(whole / "trainer.safetensors")[0], load(broken / "trainer.safetensors")[0]
    assert all(torch.equal(one[key], other[key]) for key in one)
    assert not list(tmp_path.rglob("*.partial"))


def test_a_language_model_in_training_is_written_as_far_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "t.txt").write_text("the cat sat\non the mat\n" * 20, encoding="utf-8")
    model = tmp_path / "lm.safetensors"
    sizes = ["--hidden", "8", "--layers", "1", "--epochs", "50", "--batch-tokens", "64", "--device", "cpu"]
    steps = signalled(monkeypatch, recurrent_training, "pad_texts")
    assert main(["lm", "train", str(tmp_path / "t.txt"), "--output", str(model), *sizes]) == 143
    said = capsys.readouterr()
    assert len(steps) == 1 and "after 1 step" in said.out and "ds2: stopped by SIGTERM" in said.err
    load_recurrent(model)


@pytest.mark.slow
def test_a_signal_to_one_rank_ends_all_in_every_phase(tiny_overrides: list[str], tmp_path: Path) -> None:
    folders = [tmp_path / phase for phase in ("statistics", "evaluation", "saving")]
    for folder in folders:
        run = mpirun(2, "rank_job.py", f"signal:{folder.name}", *clean(tiny_overrides, folder)[1:])
        assert run.returncode == 143, run.stdout
        assert "SIGTERM" in run.stdout and "Traceback" not in run.stdout
    run = mpirun(2, "rank_job.py", *arguments(*(clean(tiny_overrides, folder) for folder in folders)))
    assert run.returncode == 0, run.stdout
    assert all(len(losses(folder)) == 9 for folder in folders)


def test_sigterm_ends_other_commands_with_143_and_no_traceback(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\nfrom ds2 import cli\nfrom ds2.commands import wer\n"
        "def work(arguments):\n"
        "    try:\n        os.kill(os.getpid(), signal.SIGTERM)\n        signal.pause()\n"
        "    finally:\n        os.kill(os.getpid(), signal.SIGTERM)\n        print('closed', flush=True)\n"
        "wer.run = work\nsys.exit(cli.main(['wer']))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout, run.stderr) == (143, "closed\n", "ds2: stopped by SIGTERM\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("module", ["ds2.commands.common", "ds2.commands.doctor"])
def test_a_signal_while_libraries_load_ends_a_command_at_once(module: str, number: int) -> None:
    code = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # ignored where the tests run in the background
        "from ds2 import cli\n"
        "class Loading:\n"
        "    def find_spec(self, name, *_):\n"
        f"        if name == {module!r}: os.kill(os.getpid(), {number}); print('went on', flush=True)\n"
        "sys.meta_path.insert(0, Loading())\nsys.exit(cli.main(['doctor']))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout, run.stderr) == (-number, "", "")


_DROPPED = {
    "a finalizer": "Finalizer()",
    "a hook of fork": "os.register_at_fork(after_in_parent=stop)\n    os.fork() or os._exit(0)",
    "a function that C calls": "soundfile.SoundFile(File(), 'w', 8000, 1, 'PCM_16', format='WAV').write([0.0])",
}


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
@pytest.mark.parametrize("place", _DROPPED)
@pytest.mark.parametrize("command", ["doctor", "preparation of training"])
def test_a_signal_ends_a_command_also_where_python_drops_exceptions(command: str, place: str, name: str) -> None:
    with_interrupts = "    with Interrupts() as ends, ends.at_once():\n    "
    code = (
        "import io, os, signal, sys, time, soundfile\nfrom ds2 import cli\nfrom ds2.commands import doctor\n"
        "from ds2.training.stopping import Interrupts\n"
        f"def stop(*_):\n    os.kill(os.getpid(), signal.{name})\n    print('dropped', flush=True)\n"
        "class Finalizer:\n    __del__ = stop\n"
        "class File(io.BytesIO):\n    write = stop\n"
        f"def block():\n    {_DROPPED[place]}\n    time.sleep(300)\n"
        f"def work(arguments):\n{'' if command == 'doctor' else with_interrupts}    block()\n"
        "doctor.run = work\nsys.argv = ['ds2', 'doctor']\nsys.exit(cli.main())"
    )
    run = ended(code)
    message = "interrupted" if (command, name) == ("doctor", "SIGINT") else f"stopped by {name}"
    assert (run.returncode, run.stdout, run.stderr) == (128 + signal.Signals[name], "", f"ds2: {message}\n")


def test_ctrl_c_at_the_end_of_python_prints_nothing() -> None:
    run = ended(
        "import atexit, os, signal, sys\nfrom ds2 import cli\nfrom ds2.commands import doctor\n"
        "def late():\n    os.kill(os.getpid(), signal.SIGINT)\n    print('went on')\n"
        "doctor.run = lambda _: atexit.register(late) and 0\nsys.argv = ['ds2', 'doctor']\nsys.exit(cli.main())"
    )
    assert (run.returncode, run.stdout, run.stderr) == (-signal.SIGINT, "", "")


def test_a_signal_ends_a_rank_that_waits_for_one_that_never_joins(tiny_overrides: list[str]) -> None:
    variables = variables_of_ranks(2)[0]
    command = [sys.executable, "-m", "ds2.cli", "train", *tiny_overrides]
    with subprocess.Popen(command, env={**os.environ, **variables}, stderr=subprocess.PIPE, text=True) as rank:
        until(lambda: listens(int(variables["MASTER_PORT"])))
        rank.terminate()
        try:
            _, errors = rank.communicate(timeout=120)
        finally:
            rank.kill()
    assert (rank.returncode, errors) == (-signal.SIGTERM, "")


def listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def ended(code: str) -> subprocess.CompletedProcess[str]:
    """Run code as a program in the foreground: where the tests run in the background, SIGINT is ignored."""
    foreground = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    command = [sys.executable, "-c", foreground + code]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_workers_end_with_their_process_whatever_they_are_doing(tone_manifest: Path, number: int) -> None:
    code = (
        "import sys, time, torch\nfrom ds2 import cli\nfrom ds2.commands import doctor\n"
        "from ds2.config.schema import DataConfig\nfrom ds2.data import audio_cache\n"
        "from ds2.data.loader import SpeechLoader\n"
        "from ds2.data.manifest import read_manifest\n"
        "def stuck(*_):\n    print('reading', flush=True)\n    time.sleep(3600)\n"
        "audio_cache.decode = stuck\n"
        "def work(arguments):\n"
        "    data = DataConfig(cache='none', workers=1)\n"
        "    loader = SpeechLoader(read_manifest(sys.argv[1]), data, torch.device('cpu'))\n"
        "    for _ in loader.epoch([[0]], 1): pass\n"
        "doctor.run = work\nsys.exit(cli.main(['doctor']))"
    )
    command = [sys.executable, "-c", code, str(tone_manifest)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "reading\n"
        process.send_signal(number)
        process.communicate(timeout=300)  # returns when the worker, which has the pipes too, is gone: it sleeps an hour
    assert process.returncode == (143 if number == signal.SIGTERM else -9)
