"""What all tests share: a tiny corpus of tone words, the smallest configuration that learns it, unhurried examples."""

from __future__ import annotations

import gc
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from ds2.config.schema import Config
from ds2.data.manifest import Utterance, read_manifest, write_manifest
from support.tiny import RATE_HZ, compose_once, tiny_overrides_in, write_untrained

with suppress(ImportError):  # a GPU machine may lack it: no GPU test draws examples
    from hypothesis import HealthCheck, settings

    # Examples have no deadline: the machine may be busy. They are the same on every run, so that a failure repeats;
    # other examples: DS2_FUZZ_SEED=7 python -m pytest --hypothesis-seed=7.
    settings.register_profile(
        "no_deadline",
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
        derandomize="DS2_FUZZ_SEED" not in os.environ,
    )
    settings.load_profile("no_deadline")

TONES_HZ = {"a": 400.0, "b": 900.0, "c": 1700.0}


def write_tones(path: Path, text: str, rng: np.random.Generator) -> float:
    """Write one tone of 0.15 s a letter, a pause of 0.08 s after each; returns the duration in seconds."""
    parts = []
    for letter in text:
        time_s = np.arange(int(0.15 * RATE_HZ)) / RATE_HZ
        tone = np.zeros_like(time_s) if letter == " " else np.sin(2 * np.pi * TONES_HZ[letter] * time_s)
        parts += [0.3 * tone, np.zeros(int(0.08 * RATE_HZ))]
    samples = np.concatenate(parts)
    soundfile.write(path, samples + 0.001 * rng.standard_normal(len(samples)), RATE_HZ)
    return len(samples) / RATE_HZ


_CACHES = itertools.count()


@pytest.fixture(scope="module", autouse=True)
def _what_stays_is_looked_through_once() -> Iterator[None]:
    """Freeze what the tests of a file leave, such as imports and reports: each training and server looks through it."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _the_same_draws_on_every_run() -> None:
    """Seed what a test draws without a generator of its own, so that one that fails fails again."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _cache_of_its_own(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what a test converts out of the user's cache; few tests make the folder."""
    monkeypatch.setenv("DS2_CACHE_DIR", str(tmp_path_factory.getbasetemp() / f"cache{next(_CACHES)}"))


@pytest.fixture
def cache_of_english(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Expand the language model of English, which takes seconds, once for all tests and workers."""
    base = tmp_path_factory.getbasetemp()
    folder = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    monkeypatch.setenv("DS2_CACHE_DIR", str(folder / "cache_of_english"))


@pytest.fixture(scope="session")
def tone_manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A manifest of ten utterances of two to five letters."""
    folder = tmp_path_factory.mktemp("tones")
    rng = np.random.default_rng(5)
    utterances = []
    for index in range(10):
        text = "".join(rng.choice(list("abc"), size=2 + index % 4))
        path = folder / f"tones{index}.wav"
        utterances.append(Utterance(path, write_tones(path, text, rng), text, speaker=f"s{index % 2}"))
    write_manifest(folder / "tones.jsonl", utterances)
    return folder / "tones.jsonl"


@pytest.fixture
def tone_lexicon(tone_manifest: Path, tmp_path: Path) -> Path:
    """Two phones, such as A1 A2, for each letter of the tone corpus."""
    texts = sorted({utterance.text for utterance in read_manifest(tone_manifest)})
    lines = (f"{text} {' '.join(f'{letter.upper()}1 {letter.upper()}2' for letter in text)}\n" for text in texts)
    (tmp_path / "tones.txt").write_text("".join(lines), encoding="utf-8")
    return tmp_path / "tones.txt"


@pytest.fixture
def tiny_overrides(tone_manifest: Path, tmp_path: Path) -> list[str]:
    """Overrides of a model of a few thousand parameters on the tone corpus."""
    return tiny_overrides_in(tmp_path, tone_manifest)


@pytest.fixture
def tiny_config(tone_manifest: Path, tmp_path: Path) -> Callable[..., Config]:
    """Compose the tiny configuration with further overrides; it works and runs below `tmp_path`."""

    def compose(*overrides: str) -> Config:
        everywhere = tiny_overrides_in(Path("FOLDER"), tone_manifest)
        config = compose_once(*everywhere, *overrides)
        config.data.work_dir = config.data.work_dir.replace("FOLDER", str(tmp_path))
        config.run_dir = config.run_dir.replace("FOLDER", str(tmp_path))
        return config

    return compose


@pytest.fixture
def make_model(tiny_config: Callable[..., Config], tmp_path: Path) -> Callable[..., Path]:
    """Write a model that was never trained, see `write_untrained`."""

    def make(*overrides: str) -> Path:
        return write_untrained(tiny_config(*overrides), tmp_path / "model.safetensors")

    return make


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    """Three seconds of tones that change."""
    time_s = np.arange(3 * RATE_HZ) / RATE_HZ
    pitch_hz = np.repeat(np.random.default_rng(4).uniform(200, 3000, size=30), len(time_s) // 30)
    soundfile.write(tmp_path / "recording.wav", 0.4 * np.sin(2 * np.pi * pitch_hz * time_s), RATE_HZ)
    return tmp_path / "recording.wav"
