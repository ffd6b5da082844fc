"""A user to whom much is forbidden: each command names the file or folder and the way out, or does without it.

Root is made such a user by taking away what lets it pass permissions.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.launch import SUPPORT

BOUND = "-dac_override,-dac_read_search"
NOBODY = 65534
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() == 0 and shutil.which("setpriv") is None, reason="root needs setpriv (util-linux)"),
]
Run = Callable[..., list[tuple[int, str]]]


@pytest.fixture
def forbidden(tmp_path: Path) -> Iterator[Path]:
    """A folder of another owner, or at least one that cannot be written, with a trained run in it if `fill` is."""
    folder = tmp_path / "forbidden"
    folder.mkdir()
    yield folder
    folder.chmod(0o700)


@pytest.fixture
def run(tmp_path: Path, forbidden: Path) -> Run:
    """Run commands without HOME, with the folder forbidden and the cache folder in it."""

    def start(*commands: list[str]) -> list[tuple[int, str]]:
        forbidden.chmod(0o555)
        if os.geteuid() == 0:
            os.chown(forbidden, NOBODY, NOBODY)
        prefix = ["setpriv", f"--bounding-set={BOUND}", f"--inh-caps={BOUND}"] if os.geteuid() == 0 else []
        kept = {name: value for name, value in os.environ.items() if name not in ("HOME", "XDG_CACHE_HOME")}
        environment = {**kept, "DS2_CACHE_DIR": str(forbidden / "cache"), "PYTHONDONTWRITEBYTECODE": "1"}
        job = [*prefix, sys.executable, str(SUPPORT / "many_commands.py"), json.dumps(commands)]
        done = subprocess.run(job, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
        found = [tuple(json.loads(line)) for line in done.stdout.splitlines()]
        assert len(found) == len(commands), done.stdout + done.stderr
        return found

    return start


def test_what_may_not_be_written_is_named_or_done_without(
    run: Run, forbidden: Path, tiny_overrides: list[str], tone_manifest: Path, make_model: Callable[..., Path],
    recording: Path, tmp_path: Path,
) -> None:  # fmt: skip
    text, model, arpa = tmp_path / "t.txt", str(make_model()), tmp_path / "t.arpa"
    text.write_text("a b c\nb c a\n" * 20)
    train = ["train", *tiny_overrides, "train.epochs=1"]
    build, lone = ["lm", "build", str(text), "--order", "2", "--output"], ["--device", "cpu"]
    cases = [
        ([*train, f"run_dir={forbidden / 'run'}"], 2, f"run folder {forbidden / 'run'} cannot be written"),
        ([*train, f"data.work_dir={forbidden / 'work'}"], 0, "every epoch decodes its audio again"),
        (["evaluate", model, str(tone_manifest), *lone, "--out", str(forbidden / "report")], 2, f"{forbidden}/report"),
        ([*build, str(forbidden / "t.lm")], 2, f"{forbidden}/t.lm could not be written"),
        ([*build, str(tmp_path / "t.lm"), "--temp-dir", str(forbidden)], 2, "choose another folder with --temp-dir"),
        ([*build, str(tmp_path / "t.lm"), "--arpa", str(arpa)], 0, "wrote"),
        (["transcribe", model, str(recording), *lone, "decode=beam", f"decode.lm={tmp_path / 't.lm'}"], 0, ""),
        (["transcribe", model, str(recording), *lone, "decode=native", f"decode.lm={tmp_path / 't.lm'}"], 0,
         "set DS2_CACHE_DIR to a folder with enough space"),
        (["data", "prepare", "recipe=synthetic", f"data.work_dir={forbidden / 'corpus'}"], 2, f"{forbidden}/corpus"),
        (["data", "filter", str(tone_manifest), str(forbidden / "m.jsonl")], 2, f"{forbidden}"),
        (["doctor"], 0, ""),
    ]  # fmt: skip
    for (command, status, told), found in zip(cases, run(*(case[0] for case in cases)), strict=True):
        assert found[0] == status and told in found[1] and "Traceback" not in found[1], (command, found)
    assert not list(tmp_path.rglob("*.partial"))


def test_what_may_not_be_read_is_named(
    run: Run, tiny_overrides: list[str], tone_manifest: Path, make_model: Callable[..., Path], tmp_path: Path
) -> None:
    model, manifest, audio = make_model(), tmp_path / "m.jsonl", tmp_path / "a.wav"
    shutil.copy(tone_manifest, manifest)
    shutil.copy(next(tone_manifest.parent.glob("*.wav")), audio)
    closed = tmp_path / "closed.safetensors"
    shutil.copy(model, closed)
    for path in (closed, manifest, audio):
        path.chmod(0)
    lone = ["--device", "cpu"]
    cases = [
        (["info", str(closed)], f"{closed} cannot be read: Permission denied"),
        (["evaluate", str(closed), str(tone_manifest), *lone], f"{closed} cannot be read: Permission denied"),
        (["evaluate", str(model), str(manifest), *lone], f"{manifest}: Permission denied"),
        (["train", *tiny_overrides, f"data.train=[{manifest}]"], f"{manifest}: Permission denied"),
        (["align", str(model), str(manifest), *lone], f"{manifest}: Permission denied"),
        (["transcribe", str(model), str(audio), *lone], f"{audio}: Permission denied"),
        (["wer", str(manifest), str(manifest)], f"{manifest}: Permission denied"),
        (["lm", "build", str(manifest), "--output", str(tmp_path / "t.lm")], "Permission denied"),
    ]
    for (command, told), found in zip(cases, run(*(case[0] for case in cases)), strict=True):
        assert found[0] != 0 and told in found[1] and "Traceback" not in found[1], (command, found)


def test_a_run_folder_of_another_user_is_refused_whatever_of_it_is_closed(
    run: Run, tiny_overrides: list[str], tmp_path: Path
) -> None:
    train = ["train", *tiny_overrides, "train.epochs=1"]
    theirs = tmp_path / "run"
    assert run(train)[0][0] == 0
    again = ["train", *tiny_overrides, "train.epochs=2"]
    for name, told in (
        ("trainer.safetensors", "trainer.safetensors cannot be read: Permission denied"),
        ("log.jsonl", "log.jsonl"),
        ("lock", "lock"),
    ):
        (theirs / name).chmod(0)
        ((status, said),) = run(again)
        assert status == 2 and told in said and "Permission denied" in said and "Traceback" not in said, said
        (theirs / name).chmod(0o600)
    assert run(again)[0][0] == 0  # and nothing of it was lost
