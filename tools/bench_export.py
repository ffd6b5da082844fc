"""An exported model in sherpa-onnx beside `ds2 transcribe`: words, WER, size and speed of fp32 and int8.

    python tools/bench_export.py runs/an4 corpora/an4/test.jsonl     # a model that sherpa-onnx can run
    python tools/bench_export.py --shape model=rnn_8 features=nemo_fbank   # size and speed of random weights

Speed is that of one thread, one stream, features and decoding included: seconds of work for a second of audio.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import sherpa_onnx
import soundfile
import torch
from numpy.typing import NDArray

from ds2.audio.features import Features
from ds2.audio.read import read_audio
from ds2.commands.compose import compose_config
from ds2.config.schema import DecodeConfig
from ds2.data.manifest import read_manifest
from ds2.export.files import export_onnx
from ds2.model.acoustic import AcousticModel
from ds2.model.checkpoint import LoadedModel, load_model
from ds2.recognition.recogniser import Recogniser
from ds2.scoring.wer import ErrorCounts, word_errors
from ds2.text.alphabet import Alphabet

SILENCE_S = 3.0  # after the last word, for both


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="+", help="a model and a manifest; or with --shape overrides")
    parser.add_argument("--shape", action="store_true")
    parser.add_argument("--chunk-ms", type=float, default=160.0)
    given = parser.parse_args()
    loaded = untrained(given.what) if given.shape else load_model(Path(given.what[0]))
    print(f"{loaded.model.parameter_count / 1e6:.2f} M parameters, chunks of {given.chunk_ms:g} ms, one thread")
    with tempfile.TemporaryDirectory() as folder:
        for int8 in (False, True):
            file = Path(folder) / f"model{'.int8' * int8}.onnx"
            described = export_onnx(loaded, file, chunk_s=given.chunk_ms / 1000, int8=int8)
            theirs = sherpa_onnx.OnlineRecognizer.from_nemo_ctc(str(file.with_name("tokens.txt")), str(file), 1)
            named = f"{'int8' if int8 else 'fp32'}: {file.stat().st_size / 2**20:.1f} MiB"
            if given.shape:
                _, work_s = heard(theirs, np.random.default_rng(0).normal(0, 0.1, 20 * 16000).astype(np.float32))
                print(f"{named}, real-time factor {work_s / (20 + SILENCE_S):.4f}")
            else:
                compare(named, theirs, loaded, Path(given.what[0]), Path(given.what[1]), described)


def compare(
    named: str, theirs: Any, loaded: LoadedModel, model: Path, manifest: Path, described: dict[str, Any]
) -> None:
    """Print what both write of a manifest's utterances, with the same silence behind them and without ours."""
    ours = Recogniser.load(model, device="cpu", decode=DecodeConfig())
    errors = [ErrorCounts(), ErrorCounts()]
    differ, differ_at_ends, work_s, audio_s, ours_s, count = 0, 0, 0.0, 0.0, 0.0, 0
    for utterance in read_manifest(manifest):
        samples = read_audio(utterance.audio_filepath, loaded.features.sample_rate_hz)
        text, spent_s = heard(theirs, samples, described["tail_s"])
        plain, padded = own(ours, samples)
        reference = loaded.alphabet.normalise(utterance.text)[0]
        begun_s = time.perf_counter()
        next(own(ours, samples))
        ours_s += time.perf_counter() - begun_s
        errors = [total + word_errors(reference, one) for total, one in zip(errors, (text, plain), strict=True)]
        differ, differ_at_ends = differ + (text != padded), differ_at_ends + (text != plain)
        work_s, audio_s, count = work_s + spent_s, audio_s + len(samples) / loaded.features.sample_rate_hz, count + 1
    wers = ", ".join(f"{name} {100 * e.rate:.2f} %" for name, e in zip(("sherpa-onnx", "ds2"), errors, strict=True))
    print(
        f"{named}, real-time factor {work_s / audio_s:.4f} (ds2 {ours_s / audio_s:.4f}); WER {wers}; of {count} "
        f"utterances {differ} differ in words where both hear the silence, {differ_at_ends} where ds2 hears the end"
    )


def own(ours: Recogniser, samples: NDArray[np.float32]) -> Iterator[str]:
    """What ds2 writes, without and with silence behind."""
    with tempfile.TemporaryDirectory() as folder:
        for seconds in (0.0, SILENCE_S):
            silence = np.zeros(round(seconds * ours.features.sample_rate_hz), np.float32)
            path = Path(folder) / "sound.wav"
            soundfile.write(path, np.concatenate([samples, silence]), ours.features.sample_rate_hz, subtype="FLOAT")
            yield ours.transcribe(path).text


def heard(theirs: Any, samples: NDArray[np.float32], silence_s: float = SILENCE_S) -> tuple[str, float]:
    """What sherpa-onnx writes, and the seconds that it took."""
    stream, begun_s = theirs.create_stream(), time.perf_counter()
    for part in (samples, np.zeros(round(silence_s * 16000), np.float32)):
        stream.accept_waveform(16000, part)
    stream.input_finished()
    while theirs.is_ready(stream):
        theirs.decode_stream(stream)
    return " ".join(theirs.get_result(stream).split()), time.perf_counter() - begun_s


def untrained(overrides: list[str]) -> LoadedModel:
    """A model of random weights, with the strides that sherpa-onnx asks for."""
    strides = "model.convs=[{kernel:[41,11],stride:[2,2],channels:32},{kernel:[21,11],stride:[2,2],channels:32}]"
    config = compose_config([strides, *overrides, "run_dir=none", "data.train=[none]", "data.dev=[none]"])
    torch.manual_seed(0)
    features, alphabet = Features(config.features, 16000), Alphabet.from_config(config.alphabet)
    model = AcousticModel(config.model, features.bins, len(alphabet), config.features.step_s)
    return LoadedModel(model.eval(), features, alphabet, config, {"metrics": {}})


if __name__ == "__main__":
    main()
