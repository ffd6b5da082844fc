"""What a wheel must hold: the checkout's modules, kernel headers and configuration, in folders of any depth."""

import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from tools import check_wheel


def test_a_wheel_without_a_nested_header_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = check_wheel.expected()
    lost = "ds2_ops/csrc/recurrent/cells.cuh"
    assert lost in paths
    for absent, status in ((set(), 0), ({lost}, 1)):
        wheel = tmp_path / f"ds2_speech-{status}-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            for path in paths - absent:
                archive.writestr(path, "")
        monkeypatch.setattr(sys, "argv", ["check_wheel.py", str(wheel)])
        assert check_wheel.main() == status
        assert (f"{wheel.name} lacks {lost}" in capsys.readouterr().err) == bool(absent)


def test_a_folder_that_is_no_checkout_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"holds no \*\.py: is .* a checkout"):
        check_wheel.expected(tmp_path)


def test_the_build_takes_whole_packages_and_leaves_nothing_out() -> None:
    wheel = tomllib.loads((check_wheel.ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"][
        "wheel"
    ]
    assert {"ds2", "ops/ds2_ops"} <= set(wheel["packages"])
    assert wheel["force-include"]["conf"] == "ds2/conf"
    assert not {"exclude", "include", "only-include"} & wheel.keys()
