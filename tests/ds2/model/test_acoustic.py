"""The acoustic model: what padding, depth and configuration may and may not do to it."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from ds2_ops.recurrent.cells import CELLS
from torch import Tensor

from ds2.commands.info import activation_bytes_per_s, summary
from ds2.config.schema import ConfigError, ConvConfig, ModelConfig
from ds2.model.acoustic import AcousticModel
from ds2.model.structure import min_weight_count, module_plan

BINS, LABELS = 21, 5
VARIANTS: dict[str, dict[str, Any]] = {
    "rnn": {},
    "no skip": {"skip": 0},
    "projection": {"skip_first": "projection"},
    "no batch norm": {"batch_norm": False},
    "rms": {"norm": "rms"},
    "rms, lstm": {"norm": "rms", "cell": "lstm"},
    "tanh": {"nonlinearity": "tanh"},
    "lstm": {"cell": "lstm"},
    "gru": {"cell": "gru", "skip": 0},
    "gru, reset before": {"cell": "gru_before"},
    "no convolutions": {"convs": []},
    "causal first": {"convs": [ConvConfig([7, 5], [2, 2], 3, causal=True), ConvConfig([5, 3], [2, 1], 4)]},
    "nothing ahead": {
        "convs": [ConvConfig([7, 5], [2, 3], 3, causal=True), ConvConfig([5, 3], [2, 2], 4, causal=True)],
        "row_convs": 0,
    },
    "inner classifiers": {"intermediate": [2, 1]},
}
BIDIRECTIONAL: dict[str, dict[str, Any]] = {
    f"bidirectional {cell}": {"cell": cell, "bidirectional": True, "row_convs": 0}
    for cell in ("rnn", "gru", "gru_before")
}


def make(bins: int = BINS, **overrides: Any) -> AcousticModel:
    torch.manual_seed(3)
    convs = [ConvConfig([7, 5], [2, 2], 3), ConvConfig([5, 3], [2, 1], 4)]
    fields: dict[str, Any] = {"convs": convs, "hidden": 12, "depth": 5, "skip": 2, "row_convs": 4}
    fields |= {"row_conv_context": 2, "max_lookahead_ms": 0.0} | overrides
    return AcousticModel(ModelConfig(**fields), bins, LABELS)


def settled(model: AcousticModel) -> AcousticModel:
    """A model in float64 and evaluation mode whose running averages and row convolutions are not the initial ones."""
    model.double().train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "row_convs" in name:
                parameter.normal_()
        model(torch.randn(4, model.bins, 50).double(), torch.tensor([50, 40, 30, 20]))
    return model.eval()


@pytest.mark.parametrize("variant", [*VARIANTS, *BIDIRECTIONAL])
def test_padding_and_batch_mates_never_change_an_utterance(variant: str) -> None:
    model = settled(make(**(VARIANTS | BIDIRECTIONAL)[variant]))
    features, lengths = torch.randn(4, BINS, 90).double(), torch.tensor([90, 61, 7, 1])
    for row, length in enumerate(lengths.tolist()):
        features[row, :, length:] = [math.nan, 1e30, math.inf, -1e30][row]
    batched, output_lengths = model(features, lengths)
    for row, length in enumerate(lengths.tolist()):
        alone, alone_lengths = model(features[row : row + 1, :, :length], lengths[row : row + 1])
        frames = int(output_lengths[row])
        assert int(alone_lengths) == frames == alone.shape[0] == model.output_frames(length)
        torch.testing.assert_close(
            batched[:frames, row].log_softmax(-1), alone[:, 0].log_softmax(-1), atol=1e-9, rtol=0
        )
        assert not batched[frames:, row].any()


@pytest.mark.parametrize("variant", [*VARIANTS, *BIDIRECTIONAL])
def test_padding_never_changes_training(variant: str) -> None:
    """Loss, gradients and running averages are those of the same batch padded less."""
    lengths = torch.tensor([31, 20])
    features = torch.randn(2, BINS, 31)
    garbage = torch.full((2, BINS, 20), 1e4)
    results = []
    for padded in (features, torch.cat([features, garbage], 2)):
        model = make(**(VARIANTS | BIDIRECTIONAL)[variant]).double()
        logits, output_lengths = model(padded.double(), lengths)
        valid = torch.arange(len(logits))[:, None] < output_lengths
        # the gradient that a loss sends to padding must not matter either
        (logits * torch.where(valid, 1.0, 100.0)[:, :, None]).square().mean(2).sum().backward()
        gradients = {name: p.grad for name, p in model.named_parameters()}
        results.append((gradients, dict(model.named_buffers())))
    torch.testing.assert_close(results[0], results[1])


@pytest.mark.parametrize("variant", VARIANTS)
def test_lookahead_is_what_the_model_says(variant: str) -> None:
    model = settled(make(**VARIANTS[variant]))
    features = torch.randn(1, BINS, 100).double()
    changed = features.clone()
    changed[:, :, 60:] += 1.0
    before, _ = model(features, torch.tensor([100]))
    after, _ = model(changed, torch.tensor([100]))
    differs = (before != after).flatten(1).any(1)
    first = int(differs.nonzero()[0])
    ahead = int(model.lookahead_ms / 10)
    assert first == -(-(60 - ahead) // model.time_stride)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        (torch.tensor([10, 11]), r"lengths are \[10, 11\], allowed are 0 to T = 10"),
        (torch.tensor([-1, 3]), r"lengths are \[-1, 3\]"),
        (torch.tensor([10]), r"expected integers of shape \(B,\) = \(2,\) on the CPU or on cpu"),
        (torch.tensor([1.0, 2.0]), r"lengths are torch\.float32"),
    ],
)
def test_bad_lengths_are_named(lengths: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()(torch.zeros(2, BINS, 10), lengths)


def test_bad_bins_are_named() -> None:
    with pytest.raises(ValueError, match=r"features have shape \(2, 20, 10\), expected \(B, F, T\) with F = 21"):
        make()(torch.zeros(2, 20, 10), torch.tensor([10, 10]))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"max_lookahead_ms": 190.0},
            r"looks 200 ms ahead \(convolutions 40 \+ row convolutions 160 ms\).*row_convs.*causal: true",
        ),
        ({"max_lookahead_ms": 800.0, "bidirectional": True}, r"bidirectional inf.*model\.max_lookahead_ms=0"),
        ({"convs": [ConvConfig([4, 5])]}, r"model\.convs\[0\]\.kernel is \[4, 5\], allowed are two odd sizes"),
        ({"convs": [ConvConfig([5, 5], [2, 0])]}, r"model\.convs\[0\]\.stride=\[2, 0\]: allowed are 2 numbers from 1"),
        ({"convs": [ConvConfig([5, 3], [2, 4])]}, r"stride is \[2, 4\].*from 1 to the kernel's, here \[5, 3\]"),
        ({"convs": [ConvConfig(channels=0)]}, r"model\.convs\[0\]\.channels=0"),
        ({"depth": 0}, r"model\.depth=0: allowed are numbers from 1"),
        ({"skip": -1}, r"model\.skip=-1: allowed are numbers from 0"),
        ({"dropout": 1.0}, r"model\.dropout=1\.0: allowed are numbers from 0 to below 1"),
        ({"clip": 0.0}, r"model\.clip=0\.0"),
        ({"depth": 2, "intermediate": [1]}, r"allowed is \[\]: this model has one module, which has the classifier"),
        ({"hidden": 1_000_000}, r"GiB of weights in fp32, this machine has .*model\.hidden=1000000"),
        ({"convs": [ConvConfig([99, 99], channels=65_536)] * 2}, r"GiB of weights in fp32.*model\.convs"),
    ],
)
def test_a_config_that_cannot_work_is_refused(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**overrides)


def test_a_nonlinearity_that_changes_states_before_a_stream_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    logistic = replace(CELLS["tanh"], activate_=lambda pre, clip: pre.sigmoid_())
    monkeypatch.setitem(CELLS, "tanh", logistic)
    with pytest.raises(ConfigError, match=r"model\.nonlinearity=tanh has f\(0\) = 0\.5, allowed is 0.*bidirectional"):
        make(nonlinearity="tanh")
    make(nonlinearity="tanh", bidirectional=True)  # runs whole utterances
    make(cell="lstm", nonlinearity="tanh")  # does not use it


def test_row_convolutions_spread_evenly() -> None:
    def plan(depth: int, skip: int, row_convs: int = 10) -> list[tuple[int, int]]:
        return module_plan(ModelConfig(depth=depth, skip=skip, row_convs=row_convs))

    assert plan(8, 4) == [(4, 5), (4, 5)]
    assert plan(40, 4) == [(4, 1)] * 10
    assert plan(7, 3, 2) == [(3, 0), (3, 1), (1, 1)]
    assert plan(3, 0, 1) == [(1, 0), (1, 0), (1, 1)]
    for depth in (24, 48, 88):
        counts = [row_convs for _, row_convs in plan(depth, 4)]
        assert sum(counts) == 10
        assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize(("depth", "norm"), [(8, "batch"), (48, "batch"), (48, "rms"), (88, "batch")])
def test_activations_and_gradients_survive_depth(depth: int, norm: str) -> None:
    model = make(bins=40, convs=[], hidden=64, depth=depth, skip=4, norm=norm)
    outputs: list[float] = []
    layers = [layer for module in model.recurrent_modules for layer in module.recurrent]  # type: ignore[union-attr]
    for layer in layers:
        layer.register_forward_hook(
            lambda module, inputs, output: outputs.append(output.detach().square().mean().item())
        )
    logits, lengths = model(torch.randn(4, 40, 60), torch.tensor([60, 60, 50, 40]))
    labels = torch.randint(1, LABELS, (4, 10))
    loss = torch.nn.functional.ctc_loss(logits.log_softmax(-1), labels, lengths, torch.full((4,), 10))
    loss.backward()  # type: ignore[no-untyped-call]
    assert max(outputs) < 100 * min(outputs)
    for name in ("weight_ih", "weight_hh"):
        norms = [float(getattr(layer, name).grad.norm()) for layer in layers]
        assert max(norms) < 50 * min(norms)


def test_parameters_start_as_documented_and_the_seed_decides_them() -> None:
    first, second = make().state_dict(), make().state_dict()
    torch.testing.assert_close(first, second, atol=0, rtol=0)
    for name, value in first.items():
        if "row_convs" in name:
            assert value[:, 0].eq(1).all()
            assert not value[:, 1:].any()
    assert "convs.0.bias" not in first and not make(batch_norm=False).state_dict()["convs.0.bias"].any()


@pytest.mark.parametrize("variant", ["rnn", "no batch norm", "rms"])
def test_logits_are_float32_under_autocast(variant: str) -> None:
    model, features, lengths = make(**VARIANTS[variant]), torch.randn(2, BINS, 30), torch.tensor([30, 20])
    with torch.autocast("cpu", torch.bfloat16):
        logits, _ = model(features, lengths)
    assert logits.dtype == torch.float32


@pytest.mark.parametrize("variant", ["rnn", "no skip", "no batch norm", "no convolutions", "bidirectional rnn"])
def test_activation_memory_is_what_autograd_keeps(variant: str) -> None:
    model = make(**({"hidden": 64} | (VARIANTS | BIDIRECTIONAL)[variant]))
    own = {tensor.untyped_storage().data_ptr() for tensor in model.state_dict().values()}
    kept: dict[int, tuple[int, Tensor]] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        of_weights = tensor.shape[-2:] == (64, 64)  # both directions' side by side
        if storage.data_ptr() not in own and not of_weights:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)  # kept alive: an address must not be used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(torch.randn(2, BINS, 400), torch.tensor([400, 380]))[0].log_softmax(-1).sum()
    assert loss.requires_grad
    measured = sum(size for size, _ in kept.values())
    assert measured == pytest.approx(activation_bytes_per_s(model, value_bytes=4) * 2 * 4.0, rel=0.02)


@pytest.mark.parametrize("variant", [*VARIANTS, *BIDIRECTIONAL])
def test_weights_are_counted_before_they_are_made(variant: str) -> None:
    model = make(**(VARIANTS | BIDIRECTIONAL)[variant])
    counted = {name: p for name, p in model.named_parameters() if name.startswith("convs") or "weight_" in name}
    first = "recurrent_modules.0.recurrent.0."
    expected = sum(p.numel() for name, p in counted.items() if p.ndim > 1 and not name.startswith(first))
    expected += sum(p.numel() for name, p in counted.items() if name.startswith(first) and "weight_hh" in name)
    assert min_weight_count(model.config) == expected


def test_summary_states_what_counts() -> None:
    model = make()
    text = summary(model)
    assert "12 (2 convolutions, 5 recurrent, 4 row convolutions, 1 fully connected)" in text
    assert f"{model.parameter_count:,}" in text
    assert "200 ms = 40 ms convolutions + 160 ms row convolutions" in text
    assert "module: 2 rnn, 1 row convolution of 3 taps, skip" in text
    assert "taps" not in summary(make(row_convs=0))
    causal = summary(make(**VARIANTS["causal first"]))
    assert "convolution 1: 7 x 5, stride 2 x 2, causal " in causal
    assert "convolution 2: 5 x 3, stride 2 x 1 " in causal
    assert "180 ms = 20 ms convolutions" in causal


def test_a_batch_without_a_frame_has_no_output() -> None:
    model = AcousticModel(ModelConfig(hidden=8, depth=2, skip=1, row_convs=1), 161, 5).eval()
    logits, lengths = model(torch.zeros(2, 161, 0), torch.zeros(2, dtype=torch.int64))
    assert logits.shape == (0, 2, 5) and lengths.tolist() == [0, 0]


def test_a_plain_start_is_that_of_torch_with_whole_branches() -> None:
    starts = {
        start: AcousticModel(ModelConfig(hidden=48, depth=4, skip=2, row_convs=1, start=start), BINS, LABELS)
        for start in ("plain", "damped", "even")
    }
    layers = {
        start: [layer for m in model.recurrent_modules for layer in m.recurrent] for start, model in starts.items()
    }
    for layer in layers["plain"] + layers["even"]:
        assert 0.9 * 48**-0.5 < float(layer.weight_hh.detach().abs().max()) <= 48**-0.5
    assert all(bool((layer.norm.weight == 1).all()) for layer in layers["plain"])
    assert all(torch.equal(*(layers[start][i].norm.weight for start in ("even", "damped"))) for i in range(4))
    assert all(torch.equal(layer.weight_hh, 0.5 * torch.eye(48)) for layer in layers["damped"])


@pytest.mark.parametrize(("norm", "scaled"), [("batch", "norm.weight"), ("rms", "weight_ih")])
def test_the_last_layer_of_each_of_two_branches_starts_smaller(norm: str, scaled: str) -> None:
    even, plain = (make(norm=norm, start=start).state_dict() for start in ("even", "plain"))
    smaller = [f"recurrent_modules.{last}.{scaled}" for last in ("1.recurrent.1", "2.recurrent.0")]
    assert even.keys() == plain.keys() > {*smaller}
    for name, value in even.items():
        torch.testing.assert_close(value, plain[name] * 2**-0.5 if name in smaller else plain[name])


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_why_torch_names_the_device_not_the_cell(cell: str) -> None:
    model = AcousticModel(ModelConfig(cell=cell, hidden=8, depth=1, skip=0), bins=20, labels=5)
    assert "need a CUDA GPU" in (model.why_torch("bf16") or "")
