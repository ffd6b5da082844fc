"""RNN, LSTM and GRU beside torch.nn's: weights, outputs, gradients, ragged and packed batches; what is refused."""

from __future__ import annotations

from typing import Any

import ds2_ops
import pytest
import torch
from ds2_ops import GRU, LSTM, RNN
from ds2_ops.recurrent import modules
from support.op_cases import CPU, CUDA, assert_same_bits, draw, relative_error
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

KINDS = [
    pytest.param(RNN, nn.RNN, {}, id="tanh"),
    pytest.param(RNN, nn.RNN, {"nonlinearity": "relu"}, id="relu"),
    pytest.param(LSTM, nn.LSTM, {}, id="lstm"),
    pytest.param(GRU, nn.GRU, {}, id="gru"),
]
each_kind = pytest.mark.parametrize(("ours", "theirs", "options"), KINDS)
LENGTHS = torch.tensor([4, 6, 1])
T, B, K, H = 6, 3, 5, 7


def pair(ours: type, theirs: type, options: dict[str, Any], **more: Any) -> tuple[nn.Module, nn.Module]:
    """Our module and torch's, in float64, with torch's weights."""
    backend = more.pop("backend", "cpu")
    torch.manual_seed(0)
    peer = theirs(K, H, dtype=torch.float64, **options, **more)
    module = ours(K, H, dtype=torch.float64, backend=backend, **options, **more)
    module.load_state_dict(peer.state_dict())
    return module, peer


def flat(result: Any) -> list[Tensor]:
    """All tensors of what a module returns."""
    output, last = result
    return [
        output.data if isinstance(output, PackedSequence) else output,
        *(last if isinstance(last, tuple) else [last]),
    ]


def state(module: nn.Module, batch: int = B) -> Any:
    """First states for a module."""
    shape = (module.num_layers * (2 if module.bidirectional else 1), batch, H)
    h, c = (draw(seed, *shape, device=CPU, dtype=torch.float64) for seed in (8, 9))
    return (h, c) if isinstance(module, nn.LSTM) else h


def assert_close(results: list[Tensor], expected: list[Tensor]) -> None:
    """Both round sums of some tens of terms, over six frames and two layers, in float64."""
    for our, their in zip(results, expected, strict=True):
        assert our.shape == their.shape and our.dtype == their.dtype
        assert relative_error(our, their) <= 1e-13


@each_kind
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_outputs_and_gradients_are_those_of_torch(
    ours: type, theirs: type, options: dict[str, Any], bidirectional: bool, bias: bool
) -> None:
    module, peer = pair(ours, theirs, options, num_layers=2, bidirectional=bidirectional, bias=bias)
    assert list(module.state_dict()) == list(peer.state_dict())
    x = draw(1, T, B, K, device=CPU, dtype=torch.float64)
    packed = pack_padded_sequence(x, LENGTHS, enforce_sorted=False)
    results = []
    for run in (
        lambda: flat(module(x, state(module), LENGTHS)),
        lambda: flat((pad_packed_sequence((r := peer(packed, state(peer)))[0], total_length=T)[0], r[1])),
    ):
        owner = module if not results else peer
        outputs = run()
        gradients = torch.autograd.grad([t.sin().sum() for t in outputs], list(owner.parameters()))
        results.append([*outputs, *gradients])
    assert_close(*results)


@each_kind
@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_layouts_and_empty_utterances(ours: type, theirs: type, options: dict[str, Any], backend: str) -> None:
    module, peer = pair(ours, theirs, options, bidirectional=True, backend=backend)
    batch_first, _ = pair(ours, theirs, options, bidirectional=True, backend=backend, batch_first=True)
    x = draw(1, T, B, K, device=CPU, dtype=torch.float64)
    expected = flat(peer(x))
    assert_close(flat(module(x)), expected)
    assert_close(flat(batch_first(x.transpose(0, 1))), [expected[0].transpose(0, 1), *expected[1:]])
    assert_close(flat(module(x[:, 0])), flat(peer(x[:, 0])))
    lengths, first = torch.tensor([6, 0, 2]), state(module)
    y, *last = flat(module(x, first, lengths))
    swapped, *_ = flat(batch_first(x.transpose(0, 1), first, lengths))
    assert_same_bits([swapped.transpose(0, 1)], [y])
    assert not y[2:, 2].any() and not y[:, 1].any()
    for before, after in zip(first if isinstance(first, tuple) else [first], last, strict=True):
        assert torch.equal(after[:, 1], before[:, 1])
    for row in (0, 2):
        alone = peer(x[: lengths[row], row, None], _rows(first, row))
        assert relative_error(y[: lengths[row], row], alone[0][:, 0]) <= 1e-13


def _rows(first: Any, row: int) -> Any:
    parts = [part[:, row, None].contiguous() for part in (first if isinstance(first, tuple) else [first])]
    return tuple(parts) if len(parts) > 1 else parts[0]


@each_kind
@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_no_utterances_and_a_list_of_states(ours: type, theirs: type, options: dict[str, Any], backend: str) -> None:
    module, peer = pair(ours, theirs, options, bidirectional=True, backend=backend)
    x = draw(1, T, B, K, device=CPU, dtype=torch.float64)
    y, *last = flat(module(x[:, :0], state(module, 0)))
    assert y.shape == (T, 0, 2 * H) and all(states.shape == (2, 0, H) for states in last)
    if isinstance(peer, nn.LSTM):
        assert_close(flat(module(x, list(state(module)))), flat(peer(x, state(peer))))


@each_kind
def test_under_autocast_states_of_empty_utterances_have_the_dtype_of_the_output(
    ours: type, theirs: type, options: dict[str, Any]
) -> None:
    module, _ = pair(ours, theirs, options, backend="torch")
    x, first = torch.randn(T, B, K), state(module.float())
    first = tuple(h.float() for h in first) if isinstance(first, tuple) else first.float()
    with torch.autocast("cpu", torch.bfloat16):
        y, *last = flat(module(x, first, torch.tensor([6, 0, 2])))
    assert {states.dtype for states in last} == {y.dtype}


@each_kind
def test_first_states_of_another_form_are_refused(ours: type, theirs: type, options: dict[str, Any]) -> None:
    module, peer = pair(ours, theirs, options, num_layers=2)
    x = draw(1, T, B, K, device=CPU, dtype=torch.float64)
    packed = pack_padded_sequence(x, LENGTHS, enforce_sorted=False)
    more = torch.zeros(3, B, H, dtype=torch.float64)
    is_lstm = isinstance(peer, nn.LSTM)
    for inputs in (x, packed):
        with pytest.raises(ValueError, match=r"hx has shape \(3, 3, 7\), expected \(L D, B, H\) = \(2, 3, 7\)"):
            module(inputs, (more, more) if is_lstm else more)
        with pytest.raises(TypeError, match=r"expected for (LSTM is the pair of h and c|(RNN|GRU) is one tensor)"):
            module(inputs, more[:2] if is_lstm else (more[:2], more[:2]))


@each_kind
@pytest.mark.parametrize("enforce_sorted", [False, True])
def test_packed_sequences(ours: type, theirs: type, options: dict[str, Any], enforce_sorted: bool) -> None:
    module, peer = pair(ours, theirs, options, bidirectional=True)
    x = draw(1, T, B, K, device=CPU, dtype=torch.float64)
    lengths = torch.tensor([6, 6, 2]) if enforce_sorted else torch.tensor([2, 6, 6])
    packed = pack_padded_sequence(x, lengths, enforce_sorted=enforce_sorted)
    result, expected = module(packed, state(module)), peer(packed, state(peer))
    assert_close(flat(result), flat(expected))
    for one, other in zip(result[0][1:], expected[0][1:], strict=True):
        assert one is other is None or torch.equal(one, other)


@each_kind
def test_gradients_by_finite_differences(ours: type, theirs: type, options: dict[str, Any]) -> None:
    module, _ = pair(ours, theirs, options, bidirectional=True)
    names, weights = zip(*module.named_parameters(), strict=True)

    def op(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        return tuple(
            flat(torch.func.functional_call(module, dict(zip(names, weights, strict=True)), (x, None, LENGTHS)))
        )

    x = draw(1, T, B, K, device=CPU, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(op, (x, *(w.detach().requires_grad_() for w in weights)), fast_mode=True)


def test_dropout_lies_between_layers_in_training_only() -> None:
    module = LSTM(K, H, 2, dropout=1.0, backend="cpu")
    x = torch.randn(T, B, K)
    y, _ = module(x)
    assert torch.equal(y[0, 0], y[0, 1]), "the second layer got zeros"
    y, _ = module.eval()(x)
    assert not torch.equal(y[0, 0], y[0, 1])


def test_auto_on_a_cpu_is_torch() -> None:
    module, peer = pair(LSTM, nn.LSTM, {}, backend="auto")
    x = draw(1, T, B, K, device=CPU, dtype=torch.float64)
    assert_same_bits(flat(module(x)), flat(peer(x)))


def test_wrong_arguments_say_what_is_allowed() -> None:
    with pytest.raises(ValueError, match="did you mean 'torch'"):
        LSTM(K, H, backend="torhc")
    with pytest.raises(ValueError, match="proj_size is 3, backend 'gemm' has no projections: use 'torch'"):
        LSTM(K, H, proj_size=3, backend="gemm")
    x = torch.randn(T, B, K)
    with pytest.raises(ValueError, match=r"lengths\[1\] is 7, allowed are 0 to T = 6"):
        GRU(K, H)(x, None, torch.tensor([1, 7, 2]))
    with pytest.raises(ValueError, match="the packed sequence has its own"):
        GRU(K, H)(pack_padded_sequence(x, torch.tensor([3, 2, 1])), None, LENGTHS)


def test_the_package_lists_its_public_names() -> None:
    assert set(ds2_ops.__all__) <= set(dir(ds2_ops))
    assert all(getattr(ds2_ops, name).__doc__ for name in ds2_ops.__all__)


@pytest.mark.gpu
@each_kind
@pytest.mark.parametrize("bidirectional", [False, True])
def test_on_a_gpu_errors_are_at_most_twice_those_of_cudnn(
    ours: type, theirs: type, options: dict[str, Any], bidirectional: bool
) -> None:
    torch.manual_seed(0)
    exact = theirs(64, 256, 2, bidirectional=bidirectional, dtype=torch.float64, **options)
    x = torch.randn(12, 9, 64, dtype=torch.float64)
    truth = flat(exact(x))
    results = []
    for make in (ours, theirs):
        module = make(64, 256, 2, bidirectional=bidirectional, **options).to(CUDA, torch.bfloat16)
        module.load_state_dict({name: w.bfloat16() for name, w in exact.state_dict().items()})
        results.append(flat(module(x.to(CUDA, torch.bfloat16))))
    for our, their, true in zip(*results, truth, strict=True):
        assert relative_error(our, true) <= 2 * relative_error(their, true)


@pytest.mark.gpu
def test_a_kernel_is_planned_for_the_utterances_of_a_packed_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its frames, which differ from batch to batch, would be a new plan each time."""
    asked: list[tuple[int, int]] = []
    real = modules.why_not

    def why_not(frames: int, batch: int, *others: Any) -> str | None:
        asked.append((frames, batch))
        return real(frames, batch, *others)

    monkeypatch.setattr(modules, "why_not", why_not)
    x = torch.randn(T, B, 64, device=CUDA, dtype=torch.bfloat16)
    for batch_first in (False, True):
        module = LSTM(64, 64, batch_first=batch_first, device=CUDA, dtype=torch.bfloat16)
        own = x.transpose(0, 1) if batch_first else x
        padded, _ = module(own, None, LENGTHS)
        packed, _ = module(pack_padded_sequence(own, LENGTHS, batch_first, enforce_sorted=False))
        assert torch.equal(pad_packed_sequence(packed, batch_first)[0], padded)
    assert asked == [(T, B)] * 4
