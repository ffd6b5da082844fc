"""Commands start, and refuse, without what they may not need: torch takes seconds to import."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.ds2.distributed.test_launch import LAUNCHERS


@pytest.mark.parametrize(
    ("command", "status"),
    [
        (["--help"], 0),
        (["train", "--help"], 0),
        (["train", "model.hiden=3"], 2),
        (["data", "split", "none.jsonl", "--out", "parts"], 2),
        (["wer", "none.txt", "none.txt"], 2),
    ],
    ids=["help", "keys", "wrong-key", "no-manifest", "no-text"],
)
def test_no_torch_before_it_is_needed(command: list[str], status: int) -> None:
    code = f"import sys\nfrom ds2.cli import main\nprint(main({command!r}), 'torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == f"{status} False", run.stderr


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_warn_once(rank: int) -> None:
    ranks = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400"}
    command = [sys.executable, "-m", "ds2.cli", "data", "normalise", "alphabet.case=upper", "alphabet.case=lower", "a"]
    run = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | ranks)
    assert run.stderr.count("alphabet.case=upper has no effect") == (rank == 0)


def test_the_end_does_not_wait_for_a_last_collection() -> None:
    code = (
        "import atexit, gc\nfrom ds2.cli import main\natexit.register(lambda: print(gc.get_freeze_count() > 0))\n"
        "main(['wer', 'none', 'none'])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.stdout == "True\n"


def test_libraries_are_imported_without_collections() -> None:
    code = (
        "import gc, sys\nfrom types import SimpleNamespace\nfrom ds2.cli import main\n"
        "note = lambda name, *_: print(gc.isenabled()) if name == 'ds2.commands.wer' else None\n"
        "sys.meta_path.insert(0, SimpleNamespace(find_spec=note))\nmain(['wer', 'none', 'none'])\nprint(gc.isenabled())"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.stdout == "False\nTrue\n", run.stderr


def test_triton_gets_its_last_collection() -> None:
    code = (
        "import atexit, gc, sys\nfrom ds2.cli import main\natexit.register(lambda: print(gc.get_freeze_count()))\n"
        "sys.modules['triton'] = sys\nmain(['wer', 'none', 'none'])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.stdout == "0\n"


def test_loading_a_model_imports_no_compiler_and_training_alone_no_mpi(
    make_model: Callable[..., Path], recording: Path
) -> None:
    kinds = (["model.cell=lstm"], ["model.start=even"], ["model.norm=rms"], [])
    models = [str(make_model(*kind).rename(recording.with_name(f"{at}.safetensors"))) for at, kind in enumerate(kinds)]
    code = (
        f"import sys\nfrom ds2.recognition.recogniser import Recogniser\nfor model in {models}:\n"
        f"    Recogniser.load(model).transcribe({str(recording)!r})\n"
        "print({'torch._dynamo', 'triton'} & {*sys.modules})\n"
        "import ds2.training.loop, ds2.training.trainer\nfrom ds2.config.schema import CommConfig\n"
        "from ds2.distributed.launch import connect\n"
        "with connect(CommConfig(), 'cpu'): print('mpi4py' in sys.modules)"
    )
    alone = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    run = subprocess.run([sys.executable, "-c", code], env=alone, capture_output=True, text=True, check=False)
    assert run.stdout == "set()\nFalse\n", run.stderr


@pytest.mark.parametrize(
    ("variables", "spins"), [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")]
)
def test_waiting_threads_leave_cores_to_others_unless_the_user_says_how(variables: dict[str, str], spins: str) -> None:
    others = {key: value for key, value in os.environ.items() if key not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    code = "import os\nfrom ds2.cli import main\nmain(['wer', 'none', 'none'])\nprint(os.environ.get('GOMP_SPINCOUNT'))"
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, env={**others, **variables}, capture_output=True, text=True, check=False)
    assert run.stdout == f"{spins}\n"


def test_a_command_without_standard_streams_works_and_its_files_get_other_numbers(tmp_path: Path) -> None:
    code = "import sys\nfrom ds2.cli import main\nstatus = main(['version'])\n" + (
        f"file = open({str(tmp_path / 'a')!r}, 'w')\nprint(status, file.fileno() > 2, file=file)"
    )
    subprocess.run(["sh", "-c", '"$0" -c "$1" <&- >&- 2>&-', sys.executable, code], check=True)
    assert (tmp_path / "a").read_text() == "0 True\n"
