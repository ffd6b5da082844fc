"""`ds2 info`: the content of a model file, or the layers, parameters, lookahead and memory of a configuration."""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from torch import nn

from ds2.audio.features import Features
from ds2.commands.common import ALL_SETTINGS, Parser
from ds2.commands.compose import compose_config, with_search_path
from ds2.config.schema import Config, ConfigError, ModelConfig
from ds2.export.files import why_not_sherpa
from ds2.model.acoustic import AcousticModel
from ds2.model.checkpoint import LoadedModel, find_model, load_model
from ds2.model.shipped import folder_of
from ds2.model.structure import lookahead_parts_ms, module_plan
from ds2.recognition.session import describe_delays
from ds2.recognition.settings import tuned_file
from ds2.text.alphabet import Alphabet

_LABELS_SHOWN = 20
_GATE_VALUES = 6  # gates, output and the state before, kept a unit and frame


def make_parser() -> Parser:
    parser = Parser(
        prog="ds2 info",
        settings=ALL_SETTINGS,
        usage="%(prog)s MODEL | %(prog)s [OVERRIDE ...] [--config-dir DIR]",
        description="what a model file or run folder holds; or the model that overrides describe: model=rnn_8",
    )
    parser.add_argument("what", nargs="*", help="a model file or run folder; or overrides, KEY=VALUE or GROUP=CHOICE")
    return parser


def run(arguments: Sequence[str]) -> None:
    """`ds2 info MODEL` or `ds2 info [OVERRIDE...]`."""
    words = make_parser().parse_args(with_search_path(arguments)).what
    named = [word for word in words if "=" not in word or Path(word).exists()]  # a sweep has folders with = in the name
    if named:
        if len(words) > 1:
            raise ConfigError(
                f"{named[0]!r} is no override (KEY=VALUE); with a model there are no other arguments: ds2 info MODEL"
            )
        _show_file(Path(named[0]))
        return
    config = compose_config(words)
    features = Features(config.features, config.data.sample_rate_hz)
    labels = len(Alphabet.from_config(config.alphabet))
    print(summary(AcousticModel(config.model, features.bins, labels, config.features.step_s)))
    print(f"{_live(config)}\n\nexport      {why_not_sherpa(config) or 'sherpa-onnx runs models of this configuration'}")


def _show_file(path: Path) -> None:
    if not folder_of(path).exists():
        raise ConfigError(
            f"there is no model {str(path)!r}: give a model file or a run folder, or overrides such as model=rnn_8"
        )
    file = find_model(path)
    loaded = load_model(file)
    print(f"{file}\n\n{contents(loaded)}")
    tuned = tuned_file(file)
    print(f"tuned       {tuned if tuned.is_file() else 'no decoder settings beside it (`ds2 lm tune` writes them)'}\n")
    print(summary(loaded.model))
    print(_live(loaded.config))


def _live(config: Config) -> str:
    return f"live        {'needs a unidirectional model' if config.model.bidirectional else describe_delays(config)}"


def summary(model: AcousticModel) -> str:
    """Describe a model for `ds2 info`: layers, totals, lookahead, and the activation memory of a second in training."""
    config = model.config
    rows = [("layer", "output", "parameters")]
    bins = model.bins
    for index, conv in enumerate(model.convs):
        shape = config.convs[index]
        (kernel_f, kernel_t), (stride_f, stride_t) = shape.kernel, shape.stride
        bins = -(-bins // stride_f)
        name = f"convolution {index + 1}: {kernel_f} x {kernel_t}, stride {stride_f} x {stride_t}"
        name += ", causal" * shape.causal
        rows.append((name, f"{shape.channels} x {bins}", f"{_count(conv):,}"))
    described = [(_module_name(config, index, model), _count(m)) for index, m in enumerate(model.recurrent_modules)]
    for (name, count), group in groupby(described):
        times = len(list(group))
        rows.append((f"{times} x {name}" if times > 1 else name, str(config.hidden), f"{count * times:,}"))
    for number, intermediate in model.heads.items():
        labels = len(intermediate.get_parameter("classifier.bias"))
        rows.append((f"classifier after module {number}, in training", f"{labels} labels", f"{_count(intermediate):,}"))
    head = _count(model.classifier) + (_count(model.norm) if model.norm is not None else 0)
    rows.append(("classifier", f"{model.labels} labels", f"{head:,}"))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    table = [f"{a:{widths[0]}}  {b:{widths[1]}}  {c:>{widths[2]}}" for a, b, c in rows]
    parts = lookahead_parts_ms(config, model.step_s)
    ahead = " + ".join(f"{part:g} ms {name}" for name, part in parts.items())
    limit = f"{config.max_lookahead_ms:g} ms" if config.max_lookahead_ms else "any"
    memory = [activation_bytes_per_s(model, size) / 2**20 for size in (2, 4)]
    return "\n".join(
        [
            *table,
            "",
            f"layers      {model.layers_total} ({len(config.convs)} convolutions, {config.depth} recurrent, "
            f"{config.row_convs} row convolutions, 1 fully connected)",
            f"parameters  {model.parameter_count:,}",
            f"lookahead   {model.lookahead_ms:g} ms = {ahead}; allowed {limit}; the last feature window's overlap "
            "(window_s - step_s) comes on top",
            f"output      one frame every {model.step_s * model.time_stride * 1000:g} ms",
            f"activations {memory[0]:.2f} MiB (bf16), {memory[1]:.2f} MiB (fp32) kept for backward per second of audio",
        ]
    )


def contents(loaded: LoadedModel) -> str:
    """Describe for `ds2 info` what a model file holds besides weights: scores, data, features, labels."""
    config, alphabet, metrics = loaded.config, loaded.alphabet, loaded.metadata["metrics"]
    scores = [f"{name.upper()} {100 * metrics[name]:.2f} %" for name in ("wer", "cer") if name in metrics]
    dev = loaded.dev if scores else None
    rules = [f"case {alphabet.case}", f"unknown characters {alphabet.unknown}"]
    rules += [f"{key} {value}" for key, value in alphabet.rules().items()]
    if alphabet.replace:
        rules.append(f"{len(alphabet.replace)} replacements")
    symbols = alphabet.symbols[1:]
    whole = alphabet.has_pieces or any(len(symbol) > 1 for symbol in symbols)  # pieces, phones
    labels = [repr(symbol) for symbol in symbols] if whole else [repr("".join(symbols))]
    shown = " ".join(labels[:_LABELS_SHOWN]) + (" ..." if len(labels) > _LABELS_SHOWN else "")
    features, data = config.features, config.data
    rows = {
        "scores": (", ".join(scores) or "none") + (f" on {dev.describe()}" if dev else ""),
        "trained": f"epoch {metrics.get('epoch', '?')}, step {metrics.get('step', '?')}, "
        f"commit {str(metrics.get('git_commit', 'unknown'))[:12]}, run folder {config.run_dir}",
        "init from": config.checkpoint.init_from or "nothing",
        "train": ", ".join(data.train),
        "dev": ", ".join(data.dev) or "none",
        "features": f"{features.kind}, {1000 * features.window_s:g} ms every {1000 * features.step_s:g} ms, "
        f"{loaded.features.bins} bins, audio at {data.sample_rate_hz} Hz",
        "labels": f"{len(alphabet)} with the blank: {shown}",
        "transcripts": ", ".join(rules),
        "decoder": config.decode.method,
    }
    if dev and (warning := dev.warning()):
        rows["warning"] = warning
    return "\n".join(f"{key:<12}{value}" for key, value in rows.items())


def activation_bytes_per_s(model: AcousticModel, value_bytes: int) -> float:
    """Estimate what a training step keeps for its backward pass, per second of (padded) audio.

    The rule, in values a frame: the features; of each convolution 3 outputs (before batch norm, after it, clipped);
    of each recurrent layer 2 H (before batch norm, after the recurrence), 4 H when bidirectional (both directions and
    their sum); of a cell with gates its normalised input and 6 H a direction; H for each row convolution, and for
    a residual sum that neither a row convolution nor a bidirectional sum stands before; the classifier's input after
    batch norm, under bf16 before it too, and the log-probs, in float32. Without batch norm what stands before it falls
    away. RMS norm keeps its output, as a GPU computes it. Dropout adds a layer's input and its mask. Weights, gradients
    and workspace are not in it. A value has 2 bytes under bf16 autocast, 4 in fp32.
    """
    config, frames_per_s, bins = model.config, 1 / model.step_s, model.bins
    norm = int(config.batch_norm or config.norm == "rms")
    conv_bytes = frames_per_s * bins * 4  # the masked features, float32
    for conv in config.convs:
        frames_per_s /= conv.stride[1]
        bins = -(-bins // conv.stride[0])
        conv_bytes += frames_per_s * conv.channels * bins * (2 + int(config.batch_norm)) * value_bytes
    width, hidden = (config.convs[-1].channels if config.convs else 1) * bins, config.hidden
    values = 0.0
    for module, (layers, row_convs) in zip(model.recurrent_modules, module_plan(config), strict=True):
        for _ in range(layers):
            values += _layer_values(config, width, norm)
            width = hidden
        values += hidden * max(row_convs, int(bool(module.residual) and not config.bidirectional))
    head_bytes = 4 * (hidden * (norm + int(value_bytes < 4)) + model.labels)
    return conv_bytes + frames_per_s * (values * value_bytes + head_bytes)


def _layer_values(config: ModelConfig, width: int, norm: int) -> float:
    directions = 2 if config.bidirectional else 1
    dropped = 1.25 * width if config.dropout else 0.0  # the mask is a byte
    if config.cell == "rnn":
        # bidirectional: both directions and their sum
        normalised = width if config.norm == "rms" else config.hidden
        return norm * normalised + config.hidden * (1 if directions == 1 else 3) + dropped
    return width * (norm + directions - 1) + config.hidden * directions * _GATE_VALUES + dropped


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _module_name(config: ModelConfig, index: int, model: AcousticModel) -> str:
    layers, row_convs = module_plan(config)[index]
    module = model.recurrent_modules[index]
    direction = "bidirectional " if config.bidirectional else ""
    name = f"module: {layers} {direction}{config.cell}"
    if row_convs:
        name += f", {row_convs} row convolution{'s' * (row_convs > 1)} of {config.row_conv_context + 1} taps"
    return name + (", skip" if module.residual else "")
