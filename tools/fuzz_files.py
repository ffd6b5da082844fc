"""More files: containers that FFmpeg reads, tar files of other tools, manifests to check, recurrent language models."""

from __future__ import annotations

import gzip
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch
from fuzz_damage import BYTES, JSON_LINES, LISTS, TAR, TENSORS
from fuzz_targets import RATE_HZ, TINY, WORDS_OF_LM, Target, digest, make_manifest, noise, speech

from ds2.audio.read import audio_info, read_audio
from ds2.data.check import check
from ds2.data.corpora import import_corpus
from ds2.data.manifest import read_manifest
from ds2.data.statistics import statistics
from ds2.lm.recurrent import RecurrentLM, RecurrentShape, load_recurrent, save_recurrent
from ds2.lm.recurrent_training import StateFile, TrainingPosition
from ds2.system.tensor_file import optimizer_tensors
from ds2.text.alphabet import Alphabet

_SECRET_LEVEL = 0.9  # constant: no sound of the containers has such a median


def _container(suffix: str, codec: str) -> Target:
    """Audio in a container, beside a file that only a container which opens others can give the sound of."""

    def make(folder: Path) -> None:
        import av

        soundfile.write(folder / "secret.wav", np.full(RATE_HZ // 2, _SECRET_LEVEL), RATE_HZ, subtype="PCM_16")
        with av.open(str(folder / f"a.{suffix}"), "w") as output:
            stream = output.add_stream(codec, rate=RATE_HZ)
            stream.layout, stream.bit_rate = "mono", 96000
            samples = noise(0.5).astype(np.float32)[None]
            whole = av.AudioFrame.from_ndarray(samples, format="fltp", layout="mono")
            whole.sample_rate = RATE_HZ
            stream.codec_context.open()
            size = stream.codec_context.frame_size or 1024
            even = av.AudioResampler(stream.codec_context.format, "mono", RATE_HZ, frame_size=size)
            for frame in [*even.resample(whole), *even.resample(None)]:
                output.mux(stream.encode(frame))
            output.mux(stream.encode(None))

    def read(folder: Path) -> Any:
        waveform = read_audio(folder / f"a.{suffix}")
        if np.median(waveform) > _SECRET_LEVEL - 0.05:
            raise AssertionError("the sound of another file was read")
        audio_info(folder / f"a.{suffix}")
        return digest([waveform])

    return Target(f"audio {suffix}", make, read, LISTS, f"a.{suffix}")


def _check(folder: Path) -> Any:
    """What `ds2 data check` reports."""
    config, alphabet = TINY, Alphabet.from_config(TINY.alphabet)
    splits = {"train": [*read_manifest(folder / "m.jsonl")] * 17}  # enough for an opinion on pace
    report = check(splits, config.data, config.augment, alphabet, lambda samples: samples // 640)
    return report.format(), statistics(splits["train"]).format()


def _make_webdataset(folder: Path) -> None:
    with tarfile.open(folder / "a.tar", "w") as tar:
        for number, utterance in enumerate(speech(folder / "made")):
            facts = folder / f"{number}.json"
            facts.write_text(json.dumps({"text": utterance.text, "speaker": utterance.speaker}), encoding="utf-8")
            tar.add(utterance.audio_filepath, f"{number}.wav")
            tar.add(facts, f"{number}.json")


def _make_shar(folder: Path) -> None:
    lines = []
    with tarfile.open(folder / "recording.000000.tar", "w") as tar:
        for number, utterance in enumerate(speech(folder / "made")):
            tar.add(utterance.audio_filepath, f"cut-{number}.wav")
            said = {"text": utterance.text, "speaker": utterance.speaker, "language": "en"}
            lines.append(json.dumps({"id": f"cut-{number}", "start": 0, "supervisions": [said]}) + "\n")
    (folder / "cuts.000000.jsonl").write_text("".join(lines), encoding="utf-8")


def _make_packed_shar(folder: Path) -> None:
    _make_shar(folder)
    cuts = folder / "cuts.000000.jsonl"
    cuts.with_name("cuts.000000.jsonl.gz").write_bytes(gzip.compress(cuts.read_bytes()))
    cuts.unlink()


def _imported(format_name: str) -> Callable[[Path], Any]:
    return lambda folder: [(u.name, u.text, u.speaker, u.duration_s) for u in import_corpus(format_name, folder)]


def _make_recurrent(folder: Path) -> None:
    torch.manual_seed(0)
    letters = sorted({" ", *"".join(WORDS_OF_LM)})
    save_recurrent(
        folder / "lm", RecurrentLM(Alphabet(("", *letters)), RecurrentShape(hidden=8, layers=2)), {"step": 1}
    )


def _read_recurrent(folder: Path) -> Any:
    return digest(load_recurrent(folder / "lm").score([" ".join(WORDS_OF_LM), "one", ""]))


def _training(folder: Path) -> tuple[StateFile, RecurrentLM, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = RecurrentLM(Alphabet(("", *sorted({" ", *"".join(WORDS_OF_LM)}))), RecurrentShape(hidden=8, layers=2))
    return StateFile(folder / "state", {"text": "of words"}, 0.0), model, torch.optim.AdamW(model.parameters())


def _make_state(folder: Path) -> None:
    state, model, optimizer = _training(folder)
    torch.autograd.backward(-model.log_probs(torch.tensor([[1], [0]]), torch.tensor([2])).sum())
    optimizer.step()
    state.save(model, optimizer, TrainingPosition(1, 1, 1, 0.1))


def _read_state(folder: Path) -> Any:
    state, model, optimizer = _training(folder)
    position = state.restore(model, optimizer)
    return digest([position, *model.state_dict().values(), *optimizer_tensors(optimizer).values()])


_ROWS = (
    *(_container(*names) for names in (("m4a", "aac"), ("mka", "libopus"), ("ts", "aac"), ("wma", "wmav2"))),
    Target("data check", make_manifest, _check, JSON_LINES, "m.jsonl"),
    Target("import webdataset", _make_webdataset, _imported("webdataset"), TAR, "*.tar"),
    Target("import shar, audio", _make_shar, _imported("shar"), TAR, "*.tar"),
    Target("import shar, cuts", _make_shar, _imported("shar"), JSON_LINES, "cuts*"),
    Target("import shar, packed", _make_packed_shar, _imported("shar"), BYTES, "[cr]*"),
    Target("LM recurrent", _make_recurrent, _read_recurrent, TENSORS, checked=True),
    Target("LM recurrent, training", _make_state, _read_state, TENSORS, checked=True),
)
TARGETS = {row.name: row for row in _ROWS}
