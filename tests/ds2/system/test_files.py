"""Files that are whole or not there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ds2.system.files import whole_file, write_text


def test_an_error_leaves_the_old_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "file.txt"
    write_text(path, "old\n")
    with pytest.raises(RuntimeError, match="on purpose"), whole_file(path) as partial:
        partial.write_text("half")
        assert path.read_text() == "old\n"
        raise RuntimeError("on purpose")
    assert path.read_text() == "old\n"
    assert os.listdir(path.parent) == ["file.txt"]


def test_two_writers_at_once_and_the_last_wins(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    with whole_file(path) as outer:
        outer.write_text("first begun, last done")
        write_text(path, "last begun, first done")
        assert path.read_text() == "last begun, first done"
    assert path.read_text() == "first begun, last done"
    assert os.listdir(tmp_path) == ["file.txt"]


def test_permissions_are_those_of_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    with whole_file(tmp_path / "whole") as partial:
        (tmp_path / "private").touch(mode=0o600)
        (tmp_path / "private").replace(partial)
    assert (tmp_path / "whole").stat().st_mode == (tmp_path / "plain").stat().st_mode
