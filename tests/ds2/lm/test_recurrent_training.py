"""Training of a recurrent language model goes on from its state as if it had not stopped, however it was stopped."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
import torch
from support.forked import exit_status, kill_lm_training
from torch import Tensor

from ds2.cli import main
from ds2.commands.lm import run
from ds2.lm.recurrent import RecurrentLM, RecurrentShape
from ds2.lm.recurrent_training import (
    StateFile,
    TrainingPosition,
    TrainingProgress,
    TrainingSettings,
    TrainingText,
    train,
)
from ds2.system import UserError
from ds2.system.files import sole_writer
from ds2.system.tensor_file import CheckpointError, load, save
from ds2.text.alphabet import Alphabet

AB = Alphabet(("", " ", "a", "b"))
LINES = [["a", "b", "b"], ["b"], ["a", "<space>", "a", "b"]] * 8
SETTINGS = TrainingSettings(epochs=3, batch_tokens=32, join=2, warmup_steps=3)
SIZES = ["--hidden", "8", "--layers", "2", "--epochs", "3", "--batch-tokens", "64", "--join", "2", "--device", "cpu"]


def trained(
    state: StateFile | None = None, most: int = 10**9, device: str = "cpu"
) -> tuple[RecurrentLM, TrainingProgress]:
    """A model after at most so many steps of this start, with dropout."""
    torch.manual_seed(1)
    model = RecurrentLM(AB, RecurrentShape(hidden=16, layers=2, dropout=0.3)).to(device)
    remaining = [most]

    def stop() -> bool:
        remaining[0] -= 1
        return remaining[0] < 0

    torch.seed()  # what a process drew before says nothing
    return model, train(model, TrainingText.of(iter(LINES), AB), SETTINGS, lambda _: None, stop=stop, state=state)


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_training_that_was_stopped_ends_with_the_same_weights(tmp_path: Path, device: str) -> None:
    whole, passed = trained(device=device)
    assert passed.step > 9  # of three epochs
    for at in (1, passed.step // 3, passed.step // 3 + 1, passed.step - 1):
        state = StateFile(tmp_path / f"{at}.state", {}, 0.0)
        _, first = trained(state, at, device)
        assert first.step == at and state.path.is_file()
        model, second = trained(state, device=device)
        assert (second.step, second.epoch) == (passed.step, passed.epoch) and second.elapsed_s > first.elapsed_s
        assert_same(model.state_dict(), whole.state_dict())


def test_a_state_is_saved_at_its_interval(tmp_path: Path) -> None:
    states = [StateFile(tmp_path / name, {}, every_s) for name, every_s in (("often", 1e-9), ("never", 0.0))]
    for state in states:
        trained(state)
    assert [state.path.is_file() for state in states] == [True, False]
    states[0].remove()
    states[0].remove()
    assert states[0].restore(*_fresh()) == TrainingPosition()


def test_a_killed_training_continues_and_leaves_no_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "t.txt"
    text.write_text("the cat sat\non the mat\n" * 20, encoding="utf-8")
    command = ["lm", "train", str(text), *SIZES, "--save-minutes", "1e-9", "--output"]
    assert main([*command, str(tmp_path / "whole.safetensors")]) == 0
    [steps] = re.findall(r"after (\d+) steps", capsys.readouterr().out)
    model = tmp_path / "killed.safetensors"
    for at in (5, 3, 0, 4):  # steps of each start
        assert exit_status(kill_lm_training, at, [*command, str(model)]) == -signal.SIGKILL
        assert not model.exists()
    assert main([*command, str(model)]) == 0
    output = capsys.readouterr().out
    assert f"on from {model}.state" in output and f"after {steps} steps" in output
    assert_same(load(model)[0], load(tmp_path / "whole.safetensors")[0])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["killed.safetensors", "t.txt", "whole.safetensors"]


@pytest.mark.parametrize(
    ("changes", "named"),
    [(["--hidden", "16"], "--hidden"), (["--seed", "2"], "--seed"), (["--symbols", " acehmnost"], "alphabet, text")],
)
def test_the_state_of_another_training_is_refused(tmp_path: Path, changes: list[str], named: str) -> None:
    text, model = tmp_path / "t.txt", tmp_path / "m.safetensors"
    text.write_text("the cat sat\non the mat\n" * 4, encoding="utf-8")
    command = ["train", str(text), "--output", str(model), *SIZES]
    state = tmp_path / "m.safetensors.state"
    _save_one_step(state, command)
    with pytest.raises(CheckpointError, match=f"training with another {named}: .*delete this file"):
        run([*command, *changes])
    text.write_text("the hat\n", encoding="utf-8")
    with pytest.raises(CheckpointError, match="another text: use the same"):
        run(command)
    state.unlink()
    run([*command, *changes])


def test_a_second_training_of_a_model_is_refused(tmp_path: Path) -> None:
    text, model = tmp_path / "t.txt", tmp_path / "m.safetensors"
    text.write_text("the cat sat\n", encoding="utf-8")
    command = ["train", str(text), "--output", str(model), *SIZES]
    with sole_writer(model), pytest.raises(UserError, match=r"m\.safetensors is written by another process"):
        run(command)
    assert not model.exists()
    run(command)


def test_epochs_and_rate_may_change(tmp_path: Path) -> None:
    text, model = tmp_path / "t.txt", tmp_path / "m.safetensors"
    text.write_text("the cat sat\non the mat\n" * 4, encoding="utf-8")
    command = ["train", str(text), "--output", str(model), *SIZES]
    _save_one_step(tmp_path / "m.safetensors.state", command)
    run([*command, "--epochs", "5", "--learning-rate", "1e-3"])
    assert load(model)[1]["facts"]["epoch"] == 5


def test_a_damaged_state_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.state"
    trained(StateFile(path, {}, 0.0), 2)
    whole = path.read_bytes()
    tensors, metadata = load(path)
    damages = {
        "digest": lambda: path.write_bytes(whole[:-3] + bytes([whole[-3] ^ 1]) + whole[-2:]),
        "not a whole safetensors file": lambda: path.write_bytes(whole[:-100]),
        "not the state of `ds2 lm train`": lambda: save(path, tensors, {**metadata, "kind": "trainer"}),
        "negative count": lambda: save(path, tensors, {**metadata, "position": {"epoch": 0}}),
        "position.step": lambda: save(path, tensors, {**metadata, "position": {"step": "1"}}),
        "classifier.bias": lambda: save(
            path, {name: value for name, value in tensors.items() if name != "model.classifier.bias"}, metadata
        ),
        "momenta": lambda: save(
            path, {name: value for name, value in tensors.items() if name != "optimizer.0.exp_avg"}, metadata
        ),
    }
    for message, damage in damages.items():
        damage()
        with pytest.raises(CheckpointError, match=rf"m\.state: .*{re.escape(message)}.*delete this file to start"):
            trained(StateFile(path, {}, 0.0))


def _fresh() -> tuple[RecurrentLM, torch.optim.Optimizer]:
    model = RecurrentLM(AB, RecurrentShape(hidden=16, layers=2))
    return model, torch.optim.AdamW(model.parameters())


def _save_one_step(state: Path, command: list[str]) -> None:
    """Leave the state of a command that was killed at its second step."""
    assert exit_status(kill_lm_training, 2, ["lm", *command, "--save-minutes", "1e-9"]) == -signal.SIGKILL
    assert state.is_file()
