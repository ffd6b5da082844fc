"""Writes a model as a file of another program, with a description of it inside, and what sherpa-onnx needs."""

import io
import json
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds2.config.schema import Config
from ds2.export.model import STATES, Exported, TorchModel
from ds2.model.checkpoint import LoadedModel
from ds2.model.structure import time_stride
from ds2.system import UserError
from ds2.system.files import atomic_file, write_text
from ds2.system.machine import VERSION
from ds2.text.alphabet import BLANK, Alphabet

DESCRIPTION = "ds2"  # the entry of a file's metadata that holds the description, JSON
TOKENS = "tokens.txt"
_SHERPA_VERSIONS = {"kaldi_fbank": "for sherpa-onnx up to 2.0.0", "nemo_fbank": "for sherpa-onnx from 2.0.1 on"}
"""The versions of sherpa-onnx by the `features.kind` that they compute; a file cannot state which it needs."""
_SHERPA_STRIDE = 4  # feature frames per output frame that sherpa-onnx assumes for its times and endpoints
_MAX_STEPS = 2000  # of frames and layers in a program of torch; each takes some 60 ms to export
_WAY_OUT = "or export for another runtime with --interface plain"


def why_not_sherpa(config: Config) -> str | None:
    """Say all that keeps sherpa-onnx from running a model of this configuration, and the way out; None if it can."""
    model, features, obstacles = config.model, config.features, list[str]()
    if model.bidirectional:
        obstacles.append(
            "it streams, and model.bidirectional=true needs the end of an utterance first: train with "
            "model.bidirectional=false"
        )
    if features.kind not in _SHERPA_VERSIONS:
        obstacles.append(
            f"it computes filter banks, and this model takes features.kind={features.kind}: train with "
            f"features=nemo_fbank ({_SHERPA_VERSIONS['nemo_fbank']}) or "
            f"features=kaldi_fbank ({_SHERPA_VERSIONS['kaldi_fbank']})"
        )
    elif (features.window_s, features.step_s) != (0.025, 0.01):
        obstacles.append(
            f"it takes windows of 25 ms every 10 ms, and this model has features.window_s={features.window_s} and "
            f"features.step_s={features.step_s}: train with features={features.kind} as it is"
        )
    stride = time_stride(model)
    if stride != _SHERPA_STRIDE:
        obstacles.append(
            f"it takes an output frame for {_SHERPA_STRIDE} feature frames of 10 ms, and this model gives one for "
            f"{stride}, so that times and endpoints would be wrong: train with time strides of model.convs whose "
            f"product is {_SHERPA_STRIDE}"
        )
    if not obstacles:
        return None
    return f"sherpa-onnx cannot run this model: {'; '.join(obstacles)}; {_WAY_OUT}"


def sherpa_metadata(loaded: LoadedModel, chunk_frames: int, states: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the keys that sherpa-onnx reads. Chunks do not overlap: the states hold the frames before a chunk."""
    sizes = {f"{name}_dim{axis}": states[name].shape[axis] for name in STATES[:2] for axis in (1, 2, 3)}
    numbers = {
        "window_size": chunk_frames,
        "chunk_shift": chunk_frames,
        "subsampling_factor": loaded.model.time_stride,
        "vocab_size": len(loaded.alphabet) - 1,  # sherpa-onnx adds the blank
        **sizes,
    }
    return {key: str(number) for key, number in numbers.items()}


def sherpa_tokens(alphabet: Alphabet) -> str:
    """Return the lines of tokens.txt; a line with a number alone stands for the space."""
    return "".join(
        f"{'<blk>' if label == BLANK else symbol} {label}\n" for label, symbol in enumerate(alphabet.symbols)
    )


def export_onnx(
    loaded: LoadedModel, path: Path, *, for_sherpa: bool = True, chunk_s: float = 0.16, int8: bool = False
) -> dict[str, Any]:
    """Write a model as ONNX, and its tokens.txt beside it; return the description that the file holds.

    Args:
        loaded: on the CPU.
        for_sherpa: the input is filter banks, as sherpa-onnx computes them; else samples.
        chunk_s: of a stream, seconds.
        int8: matrices in 8 bits, and their inputs rounded to 8 bits at run time.

    Raises:
        UserError: sherpa-onnx cannot run the model, a chunk too short, or a file that cannot be written.
        ImportError: onnx is not installed, or for int8 onnxruntime.
    """
    from ds2.export.onnx_operations import OPSET, OnnxOperations

    if int8:
        from onnxruntime.quantization import QuantType, quantize_dynamic
    if for_sherpa and (reason := why_not_sherpa(loaded.config)):
        raise UserError(reason)
    exported = Exported.of(loaded, from_samples=not for_sherpa, chunk_s=chunk_s)
    example, ops = exported.example(1), OnnxOperations()
    outputs, delay = exported.write(ops, {name: ops.input(name) for name in example})
    described = _describe(loaded, exported, delay) | {"opset": OPSET}
    metadata = {DESCRIPTION: json.dumps(described)}
    if for_sherpa:
        metadata |= sherpa_metadata(loaded, exported.chunk, example)
    types: dict[str, tuple[bool, list[int | str]]] = {
        name: (x.dtype.is_floating_point, ["B", *x.shape[1:]] if exported.chunk or x.dim() == 1 else ["B", "N"])
        for name, x in example.items()
    }
    types |= {f"next_{name}": types[name] for name in STATES if name in types}
    types |= {"log_probs": (True, ["B", "T", len(loaded.alphabet)]), "frames": (False, ["B"])}
    model = ops.model(list(example), outputs, types, metadata)
    with _written(path, loaded) as partial:
        if int8:
            with _without_advice():
                quantize_dynamic(
                    model,
                    partial,
                    op_types_to_quantize=["MatMul"],
                    weight_type=QuantType.QInt8,
                    per_channel=True,  # a scale for each output: their weights may differ in size by hundreds
                    extra_options={"EnableSubgraph": True},
                )
        else:
            partial.write_bytes(model.SerializeToString())
    return described


def export_torch(loaded: LoadedModel, path: Path, *, chunk_s: float = 0.16) -> dict[str, Any]:
    """Write a model of samples as an exported program of torch, its tokens.txt beside it.

    Arguments, result and errors as `export_onnx`; a bidirectional model and a chunk of too many steps are errors too.
    The description is its extra file.
    """
    if loaded.config.model.bidirectional:
        raise UserError(
            "torch.export cannot follow a recurrence over utterances of any length, which model.bidirectional=true "
            "needs: --to onnx --interface plain can, or export a model trained with model.bidirectional=false"
        )
    exported = Exported.of(loaded, from_samples=True, chunk_s=chunk_s)
    frames = exported.chunk // (loaded.features.step_samples * loaded.model.time_stride)
    layers = sum(len(module.layers) for module in exported.network.modules)
    if frames * layers > _MAX_STEPS:
        raise UserError(
            f"a chunk of {1000 * chunk_s:g} ms has {frames} frames in {layers} recurrent layers, and torch.export "
            f"writes each of these {frames * layers} steps, of which {_MAX_STEPS} are allowed: give --chunk-ms "
            f"{1000 * loaded.frame_s * (_MAX_STEPS // layers):g} or less, or --to onnx --interface plain"
        )
    module = TorchModel(exported).eval()
    batch = torch.export.Dim("batch", min=1)
    example = exported.example(2)
    program = torch.export.export(module, tuple(example.values()), dynamic_shapes=({0: batch},) * len(example))
    described = _describe(loaded, exported, module.delay) | {
        "inputs": {name: list(tensor.shape[1:]) for name, tensor in example.items()}
    }
    content = io.BytesIO()  # torch's own writer of files aborts the process where the disk is full
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "No complete tensor found")  # of weights that are not on the CPU
        torch.export.save(program, content, extra_files={DESCRIPTION: json.dumps(described)})
    with _written(path, loaded) as partial:
        partial.write_bytes(content.getbuffer())
    return described


def _describe(loaded: LoadedModel, exported: Exported, delay: int) -> dict[str, Any]:
    """Describe what a client must know: how long a chunk is, what frames and labels mean, how late words come."""
    per_s = loaded.features.sample_rate_hz if exported.from_samples else 1 / loaded.features.step_s
    described: dict[str, Any] = {
        "ds2": VERSION,
        "signal": "samples" if exported.from_samples else "log energies",
        "sample_rate_hz": loaded.features.sample_rate_hz,
        "chunk": exported.chunk,
        "chunk_s": exported.chunk / per_s,
        "frame_s": loaded.frame_s,
        "lag_frames": delay,
        "symbols": ["<blk>", *loaded.alphabet.symbols[1:]],
    }
    if not exported.from_samples:
        described["runs"] = _SHERPA_VERSIONS[loaded.features.kind]
        # The silence that a client sends after the last word: the last frame comes out `delay` output frames late, and
        # sherpa-onnx runs a chunk only when one frame more is ready.
        described["tail_s"] = (delay * loaded.model.time_stride + exported.chunk + 1) * loaded.features.step_s
    return described


@contextmanager
def _written(path: Path, loaded: LoadedModel) -> Iterator[Path]:
    """Yield where to write the file, then write the tokens beside it."""
    content, tokens_file = sherpa_tokens(loaded.alphabet), path.with_name(TOKENS)
    try:
        if tokens_file.exists() and tokens_file.read_text(encoding="utf-8", errors="replace") != content:
            raise UserError(f"{tokens_file} is of another model: choose another folder with --out, or remove it")
        with atomic_file(path) as partial:
            yield partial
        write_text(tokens_file, content)
    except OSError as error:
        raise UserError(f"{path} could not be written ({error}): choose another place with --out") from error


@contextmanager
def _without_advice() -> Iterator[None]:
    """Hide onnxruntime's advice to optimise the graph first, and its warnings of parameters that are not needed."""

    def wanted(record: logging.LogRecord) -> bool:
        return not any(known in record.getMessage() for known in ("pre-processing", "Quantization parameters"))

    root = logging.getLogger()
    root.addFilter(wanted)
    try:
        yield
    finally:
        root.removeFilter(wanted)
