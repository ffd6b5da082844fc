"""What sherpa-onnx needs of an online model of type `nemo_ctc`: inputs, metadata and tokens.txt.

After online-nemo-ctc-model.cc, online-recognizer-ctc-impl.h, features.h and symbol-table.cc of sherpa-onnx 1.13.4; its
features changed in 2.0.1, from those of Kaldi to those of NeMo.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ds2.export.model import STATES, ExportError
from ds2.model.checkpoint import LoadedModel
from ds2.text.alphabet import BLANK, Alphabet

VERSIONS = {"kaldi_fbank": "for sherpa-onnx up to 2.0.0", "nemo_fbank": "for sherpa-onnx from 2.0.1 on"}
"""Which of them computes which features, by `features.kind`; nothing in a file can say what it wants."""
FRAME_S = 0.04  # of output, which its times and endpoints take for granted
_WAY_OUT = "or export for another runtime with --interface plain"


def require(loaded: LoadedModel) -> None:
    """Raise ExportError, with the way out, for a model that sherpa-onnx cannot run."""
    config = loaded.config
    if config.model.bidirectional:
        raise ExportError(
            "sherpa-onnx streams, and model.bidirectional=true needs the end of an utterance first: export a "
            f"model trained with model.bidirectional=false, {_WAY_OUT}"
        )
    if config.features.kind not in VERSIONS:
        raise ExportError(
            f"sherpa-onnx computes filter banks, and this model takes features.kind={config.features.kind}: "
            f"train with features=nemo_fbank ({VERSIONS['nemo_fbank']}) or features=kaldi_fbank "
            f"({VERSIONS['kaldi_fbank']}), {_WAY_OUT}"
        )
    if (config.features.window_s, config.features.step_s) != (0.025, 0.01):
        raise ExportError(
            f"sherpa-onnx takes windows of 25 ms every 10 ms, this model has features.window_s="
            f"{config.features.window_s} and features.step_s={config.features.step_s}: train with "
            f"features={config.features.kind} as it is, {_WAY_OUT}"
        )
    if abs(loaded.frame_s - FRAME_S) > 1e-9:
        raise ExportError(
            f"sherpa-onnx takes an output frame for {1000 * FRAME_S:g} ms, and this model gives one every "
            f"{1000 * loaded.frame_s:g} ms, so that times and endpoints would be wrong: train with time strides of "
            f"model.convs whose product is 4, {_WAY_OUT}"
        )


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
