"""Batches of the loader: what they hold, and that workers, cache, resume and interrupts change no bit of them."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import resource
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

from ds2.audio.read import AudioError
from ds2.config.schema import AugmentConfig, Config, DataConfig
from ds2.data.loader import Batch, LoaderError, SpeechLoader, worker_count
from ds2.data.manifest import Utterance, write_manifest
from ds2.text.alphabet import Alphabet, AlphabetError

RATE = 16000
PLAN = [[3, 1, 0], [2], [5, 4], [7, 6], [8, 9, 10, 11]]
AUGMENT = AugmentConfig(speed=[0.9, 1.0, 1.1], gain_db=[-6.0, 6.0], noise_probability=0.5)


@pytest.fixture
def utterances(tmp_path: Path) -> list[Utterance]:
    """Twelve files of noise, 0.10 to 0.21 s, with texts of different lengths."""
    rng = np.random.default_rng(0)
    records = []
    for number in range(12):
        path = tmp_path / f"utt{number}.wav"
        samples = 1600 + 160 * number
        soundfile.write(path, 0.1 * rng.standard_normal(samples), RATE, subtype="PCM_16")
        records.append(Utterance(path, samples / RATE, "ab" * (1 + number % 3)))
    return records


def make_config(tmp_path: Path, workers: int = 0, cache: str = "disk", augment: AugmentConfig = AUGMENT) -> Config:
    data = DataConfig(work_dir=str(tmp_path / "work"), workers=workers, cache=cache)
    return Config(data=data, augment=augment, device="cpu", run_dir="unused")


def alphabet(config: Config) -> Alphabet:
    return Alphabet.from_config(config.alphabet)


def loader_of(utterances: list[Utterance], config: Config, *, training: bool = True) -> SpeechLoader:
    device = torch.device(config.device)
    if not training:
        return SpeechLoader(utterances, config.data, device)
    return SpeechLoader(utterances, config.data, device, alphabet(config), config.augment, config.train.seed)


def batches(utterances: list[Utterance], config: Config, epoch: int = 1, *, training: bool = True) -> list[Batch]:
    loader = loader_of(utterances, config)
    if not training:
        loader = SpeechLoader(utterances, config.data, torch.device("cpu"), alphabet(config))
    return list(loader.epoch(PLAN, epoch))


def assert_same(first: list[Batch], second: list[Batch]) -> None:
    assert len(first) == len(second)
    for a, b in zip(first, second, strict=True):
        for name in ("waveforms", "sample_lengths", "labels", "label_lengths", "indices"):
            assert torch.equal(getattr(a, name), getattr(b, name)), name


def test_batches_hold_the_padded_utterances_of_the_plan(tmp_path: Path, utterances: list[Utterance]) -> None:
    config = make_config(tmp_path)
    seen = batches(utterances, config, training=False)
    assert [batch.indices.tolist() for batch in seen] == PLAN
    for batch in seen:
        assert (
            batch.waveforms.dtype == torch.float32 and batch.labels.dtype == batch.sample_lengths.dtype == torch.int64
        )
        for row, index in enumerate(batch.indices.tolist()):
            expected, _ = soundfile.read(utterances[index].audio_filepath, dtype="float32")
            length = int(batch.sample_lengths[row])
            assert np.array_equal(batch.waveforms[row, :length].numpy(), expected)
            assert not batch.waveforms[row, length:].any()
            labels = batch.labels[row, : int(batch.label_lengths[row])].tolist()
            assert alphabet(config).decode(labels) == utterances[index].text
        assert batch.waveforms.shape[1] == int(batch.sample_lengths.max())
        assert batch.labels.shape[1] == int(batch.label_lengths.max())


@pytest.mark.parametrize(("workers", "cache"), [(0, "none"), (1, "disk"), (2, "disk"), (1, "none")])
def test_workers_and_cache_change_no_bit(workers: int, cache: str, tmp_path: Path, utterances: list[Utterance]) -> None:
    expected = batches(utterances, make_config(tmp_path), epoch=2)
    assert_same(expected, batches(utterances, make_config(tmp_path, workers, cache), epoch=2))


def test_epochs_differ_and_a_resume_sees_the_rest_of_the_same_epoch(
    tmp_path: Path, utterances: list[Utterance]
) -> None:
    config = make_config(tmp_path, workers=2)
    loader = loader_of(utterances, config)
    state = torch.get_rng_state()
    first, second = list(loader.epoch(PLAN, 1)), list(loader.epoch(PLAN, 2))
    assert torch.equal(state, torch.get_rng_state())
    assert any(not torch.equal(a.sample_lengths, b.sample_lengths) for a, b in zip(first, second, strict=True))
    assert_same(second[2:], list(loader.epoch(PLAN[2:], 2)))
    assert_same(first, batches(utterances, make_config(tmp_path), epoch=1))


@pytest.mark.parametrize("workers", [0, 2])
def test_epochs_in_one_go_are_the_epochs_one_by_one(tmp_path: Path, utterances: list[Utterance], workers: int) -> None:
    loader = loader_of(utterances, make_config(tmp_path, workers=workers))
    one_by_one = [*loader.epoch(PLAN[2:], 1), *loader.epoch(PLAN, 2), *loader.epoch(PLAN[:1], 3)]
    assert_same(one_by_one, list(loader.epochs([(1, PLAN[2:]), (2, PLAN), (3, PLAN[:1])])))


def test_an_epoch_may_be_left_early(tmp_path: Path, utterances: list[Utterance]) -> None:
    config = make_config(tmp_path, workers=2)
    loader = loader_of(utterances, config)
    started = loader.epoch(PLAN, 1)
    next(started)
    started.close()
    assert_same(batches(utterances, make_config(tmp_path), epoch=3), list(loader.epoch(PLAN, 3)))


def test_closing_ends_the_workers_and_the_next_epoch_has_new_ones(tmp_path: Path, utterances: list[Utterance]) -> None:
    others = set(multiprocessing.active_children())
    loader = loader_of(utterances, make_config(tmp_path, workers=2))
    running = loader.epoch(PLAN, 1)
    next(running)
    cycle = [loader, running]
    cycle.append(cycle)  # type: ignore[arg-type]  # as a trainer, which only a garbage collection would free
    loader.close()
    assert set(multiprocessing.active_children()) == others
    assert_same(batches(utterances, make_config(tmp_path), epoch=3), list(loader.epoch(PLAN, 3)))
    loader.close()


def test_an_interrupt_of_the_group_leaves_the_workers_running(tmp_path: Path, utterances: list[Utterance]) -> None:
    config = make_config(tmp_path, workers=2)
    others = set(multiprocessing.active_children())
    loader = loader_of(utterances, config)
    running = loader.epoch(PLAN, 1)
    seen = [next(running), next(running)]  # one of each worker: both have started
    workers = set(multiprocessing.active_children()) - others
    assert len(workers) == 2
    for worker in workers:
        assert worker.pid is not None
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            os.kill(worker.pid, number)
    seen += running
    assert_same(batches(utterances, make_config(tmp_path)), seen)


def test_full_shared_memory_ends_the_run(tmp_path: Path, utterances: list[Utterance]) -> None:
    loader = loader_of(utterances, make_config(tmp_path, workers=1))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))  # of what workers allocate, too
    try:
        with pytest.raises(LoaderError, match="give shared memory more room"):
            next(loader.epoch(PLAN, 1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def kill(process: multiprocessing.process.BaseProcess) -> None:
    process.kill()
    process.join()


def test_batches_of_workers_that_are_killed_are_made_by_new_ones(
    tmp_path: Path, utterances: list[Utterance], caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config(tmp_path, workers=2)
    others, handler = set(multiprocessing.active_children()), signal.getsignal(signal.SIGCHLD)
    loader = loader_of(utterances, config)
    running = loader.epochs([(1, PLAN), (2, PLAN)])
    arrived = [next(running), next(running)]
    one, two = set(multiprocessing.active_children()) - others
    kill(one)  # in an epoch, one of two
    assert signal.getsignal(signal.SIGCHLD) is handler
    arrived += running
    assert not two.is_alive()
    assert_same([*batches(utterances, make_config(tmp_path)), *batches(utterances, make_config(tmp_path), 2)], arrived)
    for worker in set(multiprocessing.active_children()) - others:
        kill(worker)  # between two epochs, both
    assert_same(batches(utterances, make_config(tmp_path), epoch=3), list(loader.epoch(PLAN, 3)))
    assert caplog.text.count("a process that loads audio ended: new ones make its batches again") == 2


@pytest.mark.slow
def test_a_batch_that_kills_each_worker_ends_the_loader_by_name(
    tmp_path: Path, utterances: list[Utterance], monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = loader_of(utterances, make_config(tmp_path, workers=1))
    read = type(loader.audio).__getitem__
    first, arrived = PLAN[-1][0], tmp_path / "arrived"

    def deadly(audio: Any, position: int) -> Any:
        if position == first:
            while not arrived.exists():  # the batches before are with the parent, which would make them again
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        return read(audio, position)

    monkeypatch.setattr(type(loader.audio), "__getitem__", deadly)
    running = loader.epoch(PLAN, 1)
    for _ in PLAN[:-1]:
        next(running)
    arrived.touch()
    name = utterances[first].source or utterances[first].name
    with pytest.raises(LoaderError, match=rf"killed twice before the batch of {re.escape(name)} and .*data\.workers=1"):
        next(running)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_unreadable_utterance_reaches_the_trainer_by_name(
    workers: int, tmp_path: Path, utterances: list[Utterance]
) -> None:
    utterances[5].audio_filepath.write_bytes(b"no audio")
    config = make_config(tmp_path, workers, cache="none")
    seen, message = [], ""
    try:  # not pytest.raises, which keeps the workers alive through the traceback
        for batch in loader_of(utterances, config).epoch(PLAN, 1):
            seen.append(batch.indices.tolist())
    except AudioError as error:
        message = str(error)
    assert seen == PLAN[:2]
    assert "utt5.wav" in message and "Traceback" not in message


def test_recorded_noise_is_mixed_in(tmp_path: Path, utterances: list[Utterance]) -> None:
    rng = np.random.default_rng(1)
    soundfile.write(tmp_path / "hum.wav", 0.5 * rng.standard_normal(RATE), RATE)
    (tmp_path / "noise.jsonl").write_text(json.dumps({"audio_filepath": "hum.wav", "duration": 1.0, "text": ""}) + "\n")
    manifests = [str(tmp_path / "noise.jsonl")]
    augment = AugmentConfig(noise_probability=1.0, noise_snr_db=[10.0, 10.0], noise=manifests)
    clean = batches(utterances, make_config(tmp_path), training=False)
    noisy = batches(utterances, make_config(tmp_path, augment=augment))
    for a, b in zip(clean, noisy, strict=True):
        added = b.waveforms - a.waveforms
        ratio_db = 10 * torch.log10(a.waveforms.square().sum(1) / added.square().sum(1))
        torch.testing.assert_close(ratio_db, torch.full_like(ratio_db, 10.0), rtol=0, atol=0.05)


def test_noise_rooms_and_codecs_end_with_their_epochs(tmp_path: Path, utterances: list[Utterance]) -> None:
    calm = AugmentConfig(speed=[0.9, 1.0, 1.1], gain_db=[-6.0, 6.0])
    for noisy in (
        replace(calm, noise_probability=1.0), replace(calm, room_probability=1.0), replace(calm, codec_probability=1.0),
    ):  # fmt: skip
        always, ending, never = (
            make_config(tmp_path, augment=augment) for augment in (noisy, replace(noisy, noisy_epochs=2), calm)
        )
        assert_same(batches(utterances, ending, 2), batches(utterances, always, 2))
        assert_same(batches(utterances, ending, 3), batches(utterances, never, 3))
        heard = [torch.cat([b.waveforms.flatten() for b in batches(utterances, c, 3)]) for c in (always, never)]
        assert not torch.equal(*heard)


def test_labels_stop_at_unknown_characters_and_are_empty_without_an_alphabet(
    tmp_path: Path, utterances: list[Utterance]
) -> None:
    utterances[4] = Utterance(utterances[4].audio_filepath, utterances[4].duration_s, "naïve")
    config = make_config(tmp_path)
    with pytest.raises(AlphabetError, match=r"utt4: .*ï"):
        loader_of(utterances, config)
    for batch in loader_of(utterances, config, training=False).epoch(PLAN, 1):
        assert batch.labels.shape == (len(batch.indices), 0)
        assert not batch.label_lengths.any()


def test_batches_fit_ctc_loss(tmp_path: Path, utterances: list[Utterance]) -> None:
    for loaded in batches(utterances, make_config(tmp_path), training=False):
        batch = loaded.to("cpu")
        log_probs = torch.randn(20, len(batch.indices), 29).log_softmax(-1)
        frames = torch.full((len(batch.indices),), 20)
        losses = torch.nn.functional.ctc_loss(
            log_probs, batch.labels, frames, batch.label_lengths, reduction="none", zero_infinity=False
        )
        assert torch.isfinite(losses).all()


def test_worker_count_follows_the_cores() -> None:
    assert worker_count(0, on_gpu=True) == 0 and worker_count(3, on_gpu=False) == 3
    assert 1 <= worker_count(-1, on_gpu=True) <= 8
    assert worker_count(-1, on_gpu=False) == 0


@pytest.mark.gpu
def test_batches_for_a_gpu_are_pinned(tmp_path: Path, utterances: list[Utterance]) -> None:
    config = make_config(tmp_path, workers=2)
    config.device = "cuda"
    for batch in loader_of(utterances, config).epoch(PLAN, 1):
        assert batch.waveforms.is_pinned() and batch.labels.is_pinned()
        moved = batch.to("cuda")
        assert moved.waveforms.is_cuda and moved.labels.is_cuda and not moved.sample_lengths.is_cuda
        assert torch.equal(moved.waveforms.cpu(), batch.waveforms)


def test_a_program_that_fails_in_mid_epoch_ends_although_its_workers_ignore_sigterm(
    tmp_path: Path, utterances: list[Utterance]
) -> None:
    write_manifest(tmp_path / "all.jsonl", utterances)
    program = f"""
import sys
from dataclasses import replace
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from typing import Any
from ds2.data.manifest import read_manifest
from test_loader import PLAN, loader_of, make_config
config = make_config(Path({str(tmp_path)!r}), workers=2)
loader = loader_of(read_manifest({str(tmp_path / "all.jsonl")!r}), config)
running = loader.epoch(PLAN, 1)
next(running)
raise RuntimeError("on purpose")
"""
    ended = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=1200)
    assert ended.returncode == 1 and "on purpose" in ended.stderr
