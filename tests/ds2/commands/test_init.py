"""`ds2 init`: the folder that it writes works as its README says."""

from __future__ import annotations

import errno
import re
import shlex
from pathlib import Path

import pytest

from ds2.cli import main
from ds2.commands.compose import compose_config, with_search_path
from ds2.data.corpora import synthetic
from ds2.system.files import write_text


def commands() -> list[list[str]]:
    """The commands of the README in the working folder, without remarks."""
    lines = re.findall(r"^    ds2 (.*)$", Path("README.md").read_text(encoding="utf-8"), re.MULTILINE)
    return [shlex.split(line, comments=True) for line in lines]


@pytest.mark.parametrize("recipe", ["synthetic", "librispeech_5h_sherpa"])
def test_the_recipe_extends_ours(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["init", str(tmp_path / "new"), "--recipe", recipe]) == 0
    monkeypatch.chdir(tmp_path / "new")
    ours = compose_config([f"recipe={recipe}", "run_dir=runs/mine"])
    assert compose_config(with_search_path(["--config-dir", "conf", "recipe=mine"])) == ours


def test_own_manifests_take_the_place_of_the_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_text(Path(".git/HEAD"), "ref: refs/heads/main\n")  # a new repository is empty too
    assert main(["init", "."]) == 0
    recipe = Path("conf/recipe/mine.yaml")
    text = recipe.read_text(encoding="utf-8")
    recipe.write_text(re.sub(r"^# (data:|  \w+: )", r"\1", text, flags=re.MULTILINE), encoding="utf-8")
    data = compose_config(with_search_path(["--config-dir", "conf", "recipe=mine"])).data
    assert (data.prepare, data.train) == ("", ["corpora/mine/train.jsonl"])
    assert (data.dev, data.test) == (["corpora/mine/dev.jsonl"], ["corpora/mine/test.jsonl"])


@pytest.mark.parametrize(("folder", "place"), [("it's mine", "it's mine"), ("-dash", "./-dash"), ("-", "./-")])
def test_the_next_command_works_in_any_folder(
    folder: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "--", folder]) == 0
    next_command = capsys.readouterr().out.splitlines()[-1].removeprefix("next: ")
    assert shlex.split(next_command)[:2] == ["cd", place]


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "README.md").write_text("mine")
    assert main(["init", str(tmp_path)]) == 2
    assert main(["init", str(tmp_path / "README.md")]) == 2
    assert capsys.readouterr().err.count("is not empty: ds2 init writes into a new or empty folder") == 2
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]
    assert (tmp_path / "README.md").read_text() == "mine"


def test_after_a_full_disk_the_same_command_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "new"

    def write(path: Path, content: str) -> None:
        if path.name == "mine.yaml":
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        write_text(path, content)

    with monkeypatch.context() as full:
        full.setattr("ds2.commands.init.write_text", write)
        assert main(["init", str(folder)]) != 0
    assert (folder / "README.md").is_file()
    assert main(["init", str(folder)]) == 0
    assert (folder / "conf" / "recipe" / "mine.yaml").is_file()
    (folder / "empty").touch()
    assert main(["init", str(folder)]) == 2


@pytest.mark.slow
def test_the_commands_of_the_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["init", str(tmp_path / "new")]) == 0
    monkeypatch.chdir(tmp_path / "new")
    monkeypatch.setattr(synthetic, "UTTERANCES", {"train": 60, "dev": 10, "test": 10})
    lines = commands()
    assert [line[0] for line in lines] == ["data", "train", "evaluate"]
    for line in lines:
        quick = ["train.max_steps=2", "data.workers=0", "device=cpu"] if line[0] == "train" else []
        assert main([*line, *quick]) == 0, line
    assert Path("runs/mine/best-evaluation/test/report.txt").is_file()
