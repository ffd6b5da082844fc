"""Every file reader of ds2, with files for it so small that it reads thousands of damaged ones in minutes."""

import gzip
import hashlib
import json
import math
import random
import tarfile
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch
from fuzzing.damage import BYTES, JSON_LINES, LISTS, NUMBERS, TAR, TENSORS, TEXT, WORDS, Damage
from support.corpora_cases import librispeech, write_text
from torch import Tensor

from ds2.audio.features import Features
from ds2.audio.read import audio_info, read_audio
from ds2.commands.compose import compose_config
from ds2.commands.wer import read_texts
from ds2.config.convert import declared_settings
from ds2.config.schema import Config, DataConfig, ModelConfig
from ds2.data.audio_cache import open_audio
from ds2.data.check import check
from ds2.data.corpora import import_corpus
from ds2.data.manifest import Utterance, format_statistics, read_manifest, statistics, write_manifest
from ds2.decoding.methods import make_decoder
from ds2.lm.files import load_ngram, save_ngram, write_arpa
from ds2.lm.kneser_ney import estimate
from ds2.lm.recurrent import RecurrentLM, RecurrentShape, load_recurrent, save_recurrent
from ds2.lm.recurrent_training import StateFile, TrainingPosition
from ds2.model.acoustic import AcousticModel
from ds2.model.checkpoint import load_model, prepare_model
from ds2.recognition.settings import decode_settings, save_settings, tuned_file
from ds2.system.tensor_file import optimizer_tensors
from ds2.text.alphabet import Alphabet
from ds2.text.pieces import read_pieces
from ds2.training.optim import make_optimizer
from ds2.training.state import TrainState, prepare_state, read_state

RATE_HZ = 16000
_SECRET_LEVEL = 0.9  # constant: no sound of the containers has such a median
CPU = torch.device("cpu")
WORDS_OF_LM = ("one", "two", "three", "four")
_MODEL = ModelConfig(hidden=16, depth=2, skip=1, row_convs=1, row_conv_context=1)
TINY = Config(model=_MODEL, data=DataConfig(workers=0), run_dir="x")


@dataclass(frozen=True)
class Target:
    """One kind of input and what reads it."""

    name: str
    make: Callable[[Path], None]  # writes undamaged files into an empty folder
    read: Callable[[Path], Any]  # returns a value that is compared
    damages: tuple[Damage, ...]
    only: str = "*"  # glob of the files that are damaged
    checked: bool = False  # the format has checksums: a read that succeeds returns what was written


def digest(values: Iterable[Any]) -> str:
    """A short name of arrays, tensors and whatever has a repr."""
    total = hashlib.sha256()
    for value in values:
        array = value.numpy() if isinstance(value, Tensor) else value
        total.update(array.tobytes() if isinstance(array, np.ndarray) else repr(array).encode())
    return total.hexdigest()[:16]


def digest_of_samples(waveform: np.ndarray) -> str:
    """As `digest`, of samples that must be within full scale."""
    if not (np.isfinite(waveform).all() and np.abs(waveform).max() <= 1.0):
        raise AssertionError("samples beyond full scale were let through")
    return digest([waveform])


def noise(seconds: float, seed: int = 0) -> np.ndarray:
    """Seeded noise with a tone in it."""
    rng = np.random.default_rng(seed)
    time_s = np.arange(int(RATE_HZ * seconds)) / RATE_HZ
    return 0.1 * rng.standard_normal(len(time_s)).clip(-3, 3) + 0.3 * np.sin(2 * np.pi * 440 * time_s)


def _audio(container: str, subtype: str) -> Target:
    def make(folder: Path) -> None:
        soundfile.write(folder / "audio", noise(0.3), RATE_HZ, format=container, subtype=subtype)

    def read(folder: Path) -> Any:
        audio_info(folder / "audio")
        return digest_of_samples(read_audio(folder / "audio"))

    return Target(f"audio {container.lower()} {subtype.lower()}", make, read, BYTES)


def speech(folder: Path) -> list[Utterance]:
    utterances = []
    for number in range(3):
        path = folder / "wav" / f"speaker{number}" / f"u{number}.wav"
        path.parent.mkdir(parents=True)
        soundfile.write(path, noise(0.2, number), RATE_HZ)
        utterances.append(Utterance(path, 0.2, f"{WORDS_OF_LM[number]} two", speaker=f"speaker{number}"))
    return utterances


def make_manifest(folder: Path) -> None:
    write_manifest(folder / "m.jsonl", speech(folder))


def _make_kaldi(folder: Path) -> None:
    spoken = speech(folder)
    write_text(folder / "wav.scp", *(f"r{n} {u.audio_filepath}" for n, u in enumerate(spoken)))
    write_text(folder / "segments", *(f"u{n} r{n} 0.0 0.15" for n in range(len(spoken))))
    write_text(folder / "text", *(f"u{n} {u.text}" for n, u in enumerate(spoken)))
    write_text(folder / "utt2spk", *(f"u{n} {u.speaker}" for n, u in enumerate(spoken)))


def _make_an4(folder: Path) -> None:
    spoken = speech(folder)
    write_text(folder / "etc" / "an4_train.fileids", *(f"{u.speaker}/u{n}" for n, u in enumerate(spoken)))
    write_text(folder / "etc" / "an4_train.transcription", *(f"<s> {u.text} </s> (u{n})" for n, u in enumerate(spoken)))


def _make_csv(folder: Path) -> None:
    spoken = speech(folder)
    rows = (f'{u.audio_filepath.relative_to(folder)},"{u.text}",{u.speaker}' for u in spoken)
    write_text(folder / "table.csv", "wav_filename,transcript,speaker", *rows)


def _make_deepspeech(folder: Path) -> None:
    samples = []
    for utterance in speech(folder):
        wav = utterance.audio_filepath.relative_to(folder)
        write_text(folder / wav.with_suffix(".txt"), utterance.text)
        samples.append({"wav_path": str(wav), "transcript_path": str(wav.with_suffix(".txt"))})
    (folder / "m.json").write_text(json.dumps({"root_path": str(folder), "samples": samples}))


def _imported(format_name: str, inside: str = "", part: str = "") -> Callable[[Path], Any]:
    return lambda f: [(u.name, u.text, u.speaker, u.duration_s) for u in import_corpus(format_name, f / inside, part)]


def _parts_of_model() -> tuple[AcousticModel, Features, Alphabet]:
    torch.manual_seed(0)
    alphabet, features = Alphabet.from_config(TINY.alphabet), Features(TINY.features, RATE_HZ)
    return AcousticModel(TINY.model, features.bins, len(alphabet)), features, alphabet


def make_model(folder: Path) -> None:
    prepare_model(folder / "best.safetensors", *_parts_of_model(), TINY, {"wer": 0.5, "epoch": 1})()


def _read_model(folder: Path) -> Any:
    loaded = load_model(folder / "best.safetensors")
    tensors = (*loaded.model.state_dict().values(), *loaded.features.state_dict().values())
    return digest([*tensors, loaded.alphabet.symbols, loaded.config])


def _train_state() -> TrainState:
    model, features, _ = _parts_of_model()
    state = TrainState(model, features, make_optimizer(model, TINY.optim))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    state.optimizer.step()
    return state


def _read_state(folder: Path) -> Any:
    state = _train_state()
    state.load(*read_state(folder, TINY, _train_state()), average_decay=0.0)
    tensors = (tensor for part in state.tensors().values() for tensor in part.values())
    return digest([*tensors, asdict(state.progress)])


def _make_cache(folder: Path) -> None:
    make_manifest(folder)
    _read_cache(folder)


def _read_cache(folder: Path) -> Any:
    return digest(open_audio(read_manifest(folder / "m.jsonl"), DataConfig(work_dir=str(folder), cache="disk")))


def _language_model() -> Any:
    draw = random.Random(0)
    return estimate([[draw.choice(WORDS_OF_LM) for _ in range(draw.randint(1, 6))] for _ in range(60)], 3).model


def _read_lm(name: str, folder: Path) -> Any:
    lm = load_ngram(folder / name)
    scores = [score for words in (WORDS_OF_LM, ["none", "one", "one"], []) for score in lm.sentence(list(words))]
    if not all(map(math.isfinite, scores)):
        raise AssertionError(f"scores that are no log-probs: {scores}")
    return digest(scores)


def _make_tuned(folder: Path) -> None:
    options = replace(TINY.decode, method="beam", alpha=0.7, hot_words=["one"], confidence=[1.5, -0.5])
    save_settings(options, tuned_file(folder / "best.safetensors"))


def _read_tuned(folder: Path) -> Any:
    options = decode_settings(folder / "best.safetensors", TINY)
    make_decoder(replace(options, lm=""), Alphabet.from_config(TINY.alphabet), 0.02, CPU)
    return options


KEYS = tuple(key for key, (_, kind) in declared_settings().items() if not is_dataclass(kind))


def _override(draw: random.Random, _: bytes) -> bytes:
    values = (*NUMBERS, *WORDS, "[1,2]", "[nan]", "[-1,1]", "{a:1}", "100000", "-5", "1e9", "0.5")
    return f"{draw.choice(KEYS)}={draw.choice(values)}".encode()


def _read_override(folder: Path) -> None:
    """Build what `ds2 train` builds before it reads data, without memory for the weights."""
    config = compose_config([(folder / "override").read_bytes().decode()])
    alphabet, features = Alphabet.from_config(config.alphabet), Features(config.features, config.data.sample_rate_hz)
    with torch.device("meta"):
        model = AcousticModel(config.model, features.bins, len(alphabet), config.features.step_s)
    make_optimizer(model, config.optim)
    make_decoder(replace(config.decode, lm=""), alphabet, 0.02, CPU)


def _texts(folder: Path) -> Any:
    return [read_texts(folder / "m.jsonl", ids=ids, hypotheses=True) for ids in (False, True)]


def _container(suffix: str, codec: str) -> Target:
    """Audio in a container; beside it a file that must not be read, whatever the damaged container refers to."""

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
    splits = {"train": [*read_manifest(folder / "m.jsonl")] * 17}  # enough for a check of the pace
    report = check(splits, config.data, config.augment, alphabet, lambda samples: samples // 640)
    return report.format(), format_statistics(statistics(splits["train"]))


def _make_webdataset(folder: Path) -> None:
    with tarfile.open(folder / "a.tar", "w") as tar:
        for number, utterance in enumerate(speech(folder / "made")):
            facts = folder / f"{number}.json"
            facts.write_text(json.dumps({"text": utterance.text, "speaker": utterance.speaker}), encoding="utf-8")
            tar.add(utterance.audio_filepath, f"{number}.wav")
            tar.add(facts, f"{number}.json")


def _make_shar(folder: Path, *, packed: bool = False) -> None:
    cuts = []
    with tarfile.open(folder / "recording.000000.tar", "w") as tar:
        for number, utterance in enumerate(speech(folder / "made")):
            tar.add(utterance.audio_filepath, f"cut-{number}.wav")
            supervision = {"text": utterance.text, "speaker": utterance.speaker, "language": "en"}
            cuts.append(json.dumps({"id": f"cut-{number}", "start": 0, "supervisions": [supervision]}) + "\n")
    content = "".join(cuts).encode()
    (folder / f"cuts.000000.jsonl{'.gz' * packed}").write_bytes(gzip.compress(content, mtime=0) if packed else content)


def _recurrent() -> RecurrentLM:
    torch.manual_seed(0)
    return RecurrentLM(Alphabet(("", *sorted({" ", *"".join(WORDS_OF_LM)}))), RecurrentShape(hidden=8, layers=2))


def _read_recurrent(folder: Path) -> Any:
    return digest(load_recurrent(folder / "lm").score([" ".join(WORDS_OF_LM), "one", ""]))


def _training(folder: Path) -> tuple[StateFile, RecurrentLM, torch.optim.Optimizer]:
    model = _recurrent()
    return StateFile(folder / "state", {"text": "of words"}, 0.0), model, torch.optim.AdamW(model.parameters())


def _make_lm_state(folder: Path) -> None:
    state, model, optimizer = _training(folder)
    torch.autograd.backward(-model.log_probs(torch.tensor([[1], [0]]), torch.tensor([2])).sum())
    optimizer.step()
    state.save(model, optimizer, TrainingPosition(1, 1, 1, 0.1))


def _read_lm_state(folder: Path) -> Any:
    state, model, optimizer = _training(folder)
    position = state.restore(model, optimizer)
    return digest([position, *model.state_dict().values(), *optimizer_tensors(optimizer).values()])


_SOUNDS = "WAV/PCM_16 WAV/FLOAT FLAC/PCM_16 OGG/OPUS OGG/VORBIS CAF/ALAC_16 MP3/MPEG_LAYER_III NIST/PCM_16 AIFF/PCM_16"
TARGETS = (
    *(_audio(*sound.split("/")) for sound in f"{_SOUNDS} AU/PCM_16 W64/PCM_16".split()),
    Target("manifest", make_manifest, lambda f: read_manifest(f / "m.jsonl"), JSON_LINES, "m.jsonl"),
    Target("texts to score", make_manifest, _texts, JSON_LINES, "m.jsonl"),
    Target("import kaldi", _make_kaldi, _imported("kaldi"), TEXT, "[!w]*"),
    Target("import an4", _make_an4, _imported("an4", part="train"), TEXT, "etc/*"),
    Target("import librispeech", lambda f: librispeech(f, "dev-clean"),
           _imported("librispeech", part="dev-clean"), TEXT, "dev-clean/10/7/*.txt"),
    Target("import csv", _make_csv, _imported("csv", "table.csv"), TEXT, "table.csv"),
    Target("import deepspeech_pytorch", _make_deepspeech, _imported("deepspeech_pytorch", "m.json"), TEXT, "m.json"),
    Target("model file", make_model, _read_model, TENSORS, checked=True),
    Target("trainer state", lambda f: prepare_state(f, _train_state(), TINY)(), _read_state, TENSORS, checked=True),
    Target("audio cache", _make_cache, _read_cache, BYTES, "audio_cache/*", checked=True),
    Target("LM binary", lambda f: save_ngram(_language_model(), f / "lm"), partial(_read_lm, "lm"), TENSORS),
    Target("LM ARPA", lambda f: write_arpa(_language_model(), f / "lm.arpa"), partial(_read_lm, "lm.arpa"), TEXT),
    Target("pieces", lambda f: write_text(f / "p.txt", "on", "tw", "▁", "e", "n", "o"),
           lambda f: read_pieces(f / "p.txt"), TEXT),
    Target("tuned settings", _make_tuned, _read_tuned, TEXT),
    Target("overrides", lambda f: (f / "override").write_text("model.depth=2"), _read_override, (_override,)),
    *(_container(*names) for names in (("m4a", "aac"), ("mka", "libopus"), ("ts", "aac"), ("wma", "wmav2"))),
    Target("data check", make_manifest, _check, JSON_LINES, "m.jsonl"),
    Target("import webdataset", _make_webdataset, _imported("webdataset"), TAR, "*.tar"),
    Target("import shar, audio", _make_shar, _imported("shar"), TAR, "*.tar"),
    Target("import shar, cuts", _make_shar, _imported("shar"), JSON_LINES, "cuts*"),
    Target("import shar, packed", partial(_make_shar, packed=True), _imported("shar"), BYTES, "[cr]*"),
    Target("LM recurrent", lambda f: save_recurrent(f / "lm", _recurrent(), {"step": 1}), _read_recurrent, TENSORS,
           checked=True),
    Target("LM recurrent, training", _make_lm_state, _read_lm_state, TENSORS, checked=True),
)  # fmt: skip
