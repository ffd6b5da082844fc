"""A run folder is there when something is in it, and not before."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ds2.cli import main
from ds2.distributed.communicator import Communicator
from ds2.system.tensor_file import CheckpointError
from ds2.training.run_folder import make_folder, sole_use


@pytest.mark.parametrize(
    "refused", ["batching=auto", "data.train=[none.jsonl]", "model.backend=persistent", "train.freeze=[nothing]"]
)
def test_a_refused_run_leaves_nothing(
    refused: str, tiny_overrides: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path.relative_to(tmp_path) for path in tmp_path.rglob("*")}
    overrides = [*tiny_overrides, "device=cpu", refused, f"run_dir={tmp_path / 'runs' / 'of' / 'mine'}"]
    assert main(["train", *overrides]) == 2
    assert capsys.readouterr().err.startswith("ds2: ")
    assert {path.relative_to(tmp_path) for path in tmp_path.rglob("*")} == before


def test_what_was_there_and_what_was_left_stay(tmp_path: Path) -> None:
    comm = Communicator(torch.device("cpu"))
    for folder, left in ((tmp_path / "empty", ""), (tmp_path / "new" / "run", "log.jsonl")):
        (tmp_path / "empty").mkdir(exist_ok=True)
        with pytest.raises(KeyError), make_folder(folder), sole_use(folder, comm):
            (folder / left).touch()
            raise KeyError
    assert not list((tmp_path / "empty").iterdir())
    assert {path.name for path in (tmp_path / "new" / "run").iterdir()} == {"lock", "log.jsonl"}


def test_the_lock_of_a_folder_that_goes_away_is_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(*_: object) -> None:
        (tmp_path / "lock").unlink()  # by the job that failed, between our opening of the file and our locking it

    monkeypatch.setattr("fcntl.lockf", late)
    with (
        pytest.raises(CheckpointError, match="start this one again"),
        sole_use(tmp_path, Communicator(torch.device("cpu"))),
    ):
        pass
