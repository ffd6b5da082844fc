"""Inputs, metadata and tokens.txt that sherpa-onnx needs of an online model of type `nemo_ctc`.

After online-nemo-ctc-model.cc, online-recognizer-ctc-impl.h, features.h and symbol-table.cc of sherpa-onnx 1.13.4; its
features changed in 2.0.1, from those of Kaldi to those of NeMo.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ds2.config.schema import Config
from ds2.export.model import STATES
from ds2.model.checkpoint import LoadedModel
from ds2.model.structure import time_stride
from ds2.text.alphabet import BLANK, Alphabet

VERSIONS = {"kaldi_fbank": "for sherpa-onnx up to 2.0.0", "nemo_fbank": "for sherpa-onnx from 2.0.1 on"}
"""Which of them computes which features, by `features.kind`; nothing in a file can say what it wants."""
STRIDE = 4  # feature frames of an output frame, which its times and endpoints take for granted
_WAY_OUT = "or export for another runtime with --interface plain"


def why_not(config: Config) -> str | None:
    """Say all that keeps sherpa-onnx from running a model of this configuration, and the way out; None if it can."""
    model, features, obstacles = config.model, config.features, list[str]()
    if model.bidirectional:
        obstacles.append(
            "it streams, and model.bidirectional=true needs the end of an utterance first: train with "
            "model.bidirectional=false"
        )
    if features.kind not in VERSIONS:
        obstacles.append(
            f"it computes filter banks, and this model takes features.kind={features.kind}: train with "
            f"features=nemo_fbank ({VERSIONS['nemo_fbank']}) or features=kaldi_fbank ({VERSIONS['kaldi_fbank']})"
        )
    elif (features.window_s, features.step_s) != (0.025, 0.01):
        obstacles.append(
            f"it takes windows of 25 ms every 10 ms, and this model has features.window_s={features.window_s} and "
            f"features.step_s={features.step_s}: train with features={features.kind} as it is"
        )
    stride = time_stride(model)
    if stride != STRIDE:
        obstacles.append(
            f"it takes an output frame for {STRIDE} feature frames of 10 ms, and this model gives one for {stride}, so "
            f"that times and endpoints would be wrong: train with time strides of model.convs whose product is {STRIDE}"
        )
    if not obstacles:
        return None
    return f"sherpa-onnx cannot run this model: {'; '.join(obstacles)}; {_WAY_OUT}"


def metadata(loaded: LoadedModel, chunk_frames: int, states: Mapping[str, Tensor]) -> dict[str, str]:
    """The keys that sherpa-onnx reads; a chunk is as long as it moves on, since the states hold what came before."""
    sizes = {f"{name}_dim{axis}": states[name].shape[axis] for name in STATES[:2] for axis in (1, 2, 3)}
    numbers = {
        "window_size": chunk_frames,
        "chunk_shift": chunk_frames,
        "subsampling_factor": loaded.model.time_stride,
        "vocab_size": len(loaded.alphabet) - 1,  # it counts the blank itself
        **sizes,
    }
    return {key: str(number) for key, number in numbers.items()}


def tail_s(loaded: LoadedModel, chunk_frames: int, delay: int) -> float:
    """Silence that a client sends after the last word: sherpa-onnx drops what does not fill a chunk and a frame.

    Frames up to the last must come out `delay` output frames later, and a chunk runs when one frame more is ready.
    """
    return (delay * loaded.model.time_stride + chunk_frames + 1) * loaded.features.step_s


def tokens(alphabet: Alphabet) -> str:
    """The lines of tokens.txt; a line with a number alone stands for the space."""
    return "".join(
        f"{'<blk>' if label == BLANK else symbol} {label}\n" for label, symbol in enumerate(alphabet.symbols)
    )
