"""Model files: weights, feature statistics, alphabet, configuration and metrics in one safetensors file."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ds2.audio.features import Features
from ds2.config.convert import config_from_dict
from ds2.config.schema import Config
from ds2.data.splits import ScoredData
from ds2.model.acoustic import AcousticModel
from ds2.model.shipped import FOLDER, WEIGHTS, folder_of, looks_like_model, names
from ds2.system import UserError, tensor_file
from ds2.system.plain import FieldError, from_plain
from ds2.system.tensor_file import WAY_OUT, CheckpointError, read_metadata, with_prefix, without_prefix
from ds2.text.alphabet import Alphabet

_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)  # types that weights may be stored in


@dataclass
class _ModelHeader:
    """The metadata of a model file."""

    format: int
    kind: str
    config: dict[str, Any]
    alphabet: dict[str, Any]
    metrics: dict[str, Any]


@dataclass
class LoadedModel:
    """All that recognition needs, in evaluation mode."""

    model: AcousticModel
    features: Features
    alphabet: Alphabet
    config: Config
    metadata: dict[str, Any]
    dev: ScoredData | None = None  # what its scores were measured on; None in files of versions that did not say

    @property
    def frame_s(self) -> float:
        """Seconds from one output frame to the next."""
        return self.features.step_s * self.model.time_stride

    @property
    def trained_precision(self) -> str:
        """fp32 or bf16; `auto` in files of versions that did not store the resolved precision."""
        return str(self.metadata["metrics"].get("precision", self.config.train.precision))


def prepare_model(
    path: Path,
    model: AcousticModel,
    features: Features,
    alphabet: Alphabet,
    config: Config,
    metrics: Mapping[str, Any],
    check: Callable[[], None] = lambda: None,
) -> Callable[[], None]:
    """Copy a model, and return the function that writes its file; see `ds2.system.tensor_file.prepare_save`."""
    tensors = with_prefix("model", model.state_dict()) | with_prefix("features", features.state_dict())
    parts = {"config": asdict(config), "alphabet": alphabet.to_dict(), "metrics": dict(metrics)}
    return tensor_file.prepare_save(path, tensors, {"kind": "model", **parts}, check)


def find_model(path: Path) -> Path:
    """Return the model file of a path: the file itself, or the best, else the last, model of a run folder.

    The path may be the name of a model that comes with ds2.
    """
    path = folder_of(path)
    if not path.exists():
        raise CheckpointError(f"there is no checkpoint {path}: {_way_out()}")
    if path.suffix in (".onnx", ".pt2"):
        raise CheckpointError(
            f"{path} is written by `ds2 export` for other programs: give the model that it was made of"
        )
    if not path.is_dir():
        return path
    for name in WEIGHTS:
        if (path / name).is_file():
            return path / name
    shipped = f", or {FOLDER / path}, which comes with ds2" if str(path) in names() else ""  # and is hidden by this one
    raise CheckpointError(f"{path} has no {' or '.join(WEIGHTS)}: give a model file or a run folder{shipped}")


def _way_out() -> str:
    return f"give a run folder, its best.safetensors, or one of {', '.join(names())}, which comes with ds2"


def load_model(path: Path | str, device: torch.device | str = "cpu") -> LoadedModel:
    """Load a model file, or the best one of a run folder.

    Raises:
        CheckpointError: no such file, not a ds2 model, damaged metadata, or weights that do not fit its own
            config, are not floats, or are NaN, infinite or otherwise impossible.
    """
    file = find_model(Path(path))
    if not looks_like_model(str(file)):
        raise CheckpointError(f"{file} is not a model of ds2: {_way_out()}")
    kind = read_metadata(file).get("kind")  # first: the digest of an n-gram model does not cover its tensors
    if kind != "model":
        raise CheckpointError(f"{file} is of kind {kind}, not a model: give {' or '.join(WEIGHTS)}")
    tensors, metadata = tensor_file.load(file)
    try:
        header = from_plain(_ModelHeader, metadata, "metadata")
        config, alphabet = config_from_dict(header.config), Alphabet.from_dict(header.alphabet)
        measured_on = header.metrics.get("dev")
        dev = None if measured_on is None else from_plain(ScoredData, measured_on, "metadata.metrics.dev")
        _check_tensors(config, len(alphabet), tensors)
        features = Features(config.features, config.data.sample_rate_hz)
        portable = replace(config.model, backend="auto")  # this machine may lack the backend of the training
        model = AcousticModel(portable, features.bins, len(alphabet), config.features.step_s)
    except (FieldError, UserError) as error:
        raise CheckpointError(f"{file}: {error}; {WAY_OUT}") from error
    model.load_state_dict(without_prefix("model", tensors))
    features.load_state_dict(without_prefix("features", tensors))
    return LoadedModel(model.to(device).eval(), features.to(device).eval(), alphabet, config, metadata, dev)


def _check_tensors(config: Config, labels: int, tensors: Mapping[str, Tensor]) -> None:
    """Compare the tensors of a file with its config, before anything of the size that the config names is allocated.

    Raises:
        CheckpointError: a tensor is missing, is not expected, or has another shape, another type or values that no
            training gives.
        ConfigError: the config cannot work.
    """
    layers = len(config.model.convs) + config.model.depth + config.model.row_convs
    if layers > len(tensors):  # each layer has at least one tensor
        raise CheckpointError(f"config.model: has {layers} layers, but there are {len(tensors)} tensors")
    features = Features(config.features, config.data.sample_rate_hz)  # of bounded size
    with torch.device("meta"), _WithoutDraws():
        model = AcousticModel(config.model, features.bins, labels, config.features.step_s)
    expected = with_prefix("model", model.state_dict()) | with_prefix("features", features.state_dict())
    for name in sorted({*expected, *tensors}):
        shape = tuple(tensors[name].shape) if name in tensors else "missing"
        expected_shape = tuple(expected[name].shape) if name in expected else "no such tensor"
        if shape != expected_shape:
            raise CheckpointError(
                f"{name}: weights do not fit the config, the tensor is {shape}, expected {expected_shape}"
            )
    for name, tensor in tensors.items():
        dtypes = _FLOATS if expected[name].is_floating_point() else (expected[name].dtype,)
        if tensor.dtype not in dtypes:
            allowed = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise CheckpointError(f"{name}: is {str(tensor.dtype).removeprefix('torch.')}, expected {allowed}")
        if problem := _bad_values(name, tensor):
            raise CheckpointError(f"{name}: {problem}; take a checkpoint from before the training diverged")


class _WithoutDraws(TorchFunctionMode):
    """Skips random first values: on "meta" PyTorch imports its compiler and Triton for them, which takes seconds."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func in (Tensor.normal_, Tensor.uniform_) else func(*args, **(kwargs or {}))


def _bad_values(name: str, tensor: Tensor) -> str:
    """Why no training gives these values, or nothing."""
    if not bool(torch.isfinite(tensor.float()).all()):  # float64 values beyond float32 would become infinite
        return "holds NaN or infinite values"
    smallest = float(tensor.min()) if tensor.numel() else 0.0
    if name == "features.std" and smallest <= 0:
        return f"holds a standard deviation of {smallest:g}, all must be above 0"
    if name.endswith((".running_var", "_extra_state")) and smallest < 0:
        return f"holds {smallest:g}, variances and counts must not be negative"
    return ""
