"""`ds2 cache` as a user calls it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import soundfile

from ds2.cli import main
from ds2.config.schema import DataConfig
from ds2.data.audio_cache import open_audio
from ds2.data.manifest import Utterance


def test_it_shows_and_clears_caches_by_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DS2_CACHE_DIR", str(tmp_path / "own"))
    monkeypatch.setenv("DS2_OPS_CACHE_DIR", str(tmp_path / "kernels"))
    soundfile.write(tmp_path / "a.wav", np.full(22050, 0.1), 22050)
    open_audio([Utterance(tmp_path / "a.wav", 1.0, "a")], DataConfig(work_dir=str(tmp_path / "work")))
    for path in ("own/arpa/m.arpa", "kernels/k.cubin", "kernels/notes.txt"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(bytes(2_000_000))
    where = f"data.work_dir={tmp_path / 'work'}"
    assert main(["cache", where]) == 0
    shown = capsys.readouterr().out
    assert str(tmp_path / "work" / "audio_cache") in shown and "last used" in shown
    assert "kernels         2.0 MB      1 files" in shown and "total           4.0 MB" in shown
    assert main(["cache", "--clear", "audio", "--clear=arpa", where]) == 0
    assert "2.0 MB removed, 1 files" in capsys.readouterr().out
    left = sorted(path.name for path in tmp_path.rglob("*") if path.is_file())
    assert left == ["a.wav", "k.cubin", "notes.txt"]
    with pytest.raises(SystemExit):
        main(["cache", "--clear", "models"])
