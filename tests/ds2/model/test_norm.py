"""Sequence-wise batch norm against torch's on the valid frames alone, RMS norm against its equation; gradcheck."""

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from ds2_ops.batch_norm import op
from ds2_ops.batch_norm.rows import Rows
from torch import Tensor

from ds2.model.norm import RmsNorm, SequenceBatchNorm
from ds2.model.ragged import Count

LENGTHS = [7, 4, 1]


def padded(frames: int = 9, hidden: int = 5, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """(T, B, H) data that is 0 past each length, and the (T, B) mask."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(frames, len(LENGTHS), hidden, generator=generator, dtype=dtype) * 3 + 2
    valid = torch.arange(frames)[:, None] < torch.tensor(LENGTHS)
    return x * valid[:, :, None], valid


def count() -> Count:
    return Count(torch.tensor(LENGTHS), 9 * len(LENGTHS))


def all_of(positions: int) -> Count:
    return Count(torch.tensor(positions), positions)


def test_training_equals_torch_on_valid_frames() -> None:
    x, valid = padded()
    norm = SequenceBatchNorm(5).double()
    twin = torch.nn.BatchNorm1d(5).double()
    with torch.no_grad():
        twin.weight.copy_(norm.weight.uniform_(0.5, 2.0))
        twin.bias.copy_(norm.bias.normal_())
    x.requires_grad_()
    grad_y = torch.randn_like(x) * valid[:, :, None]
    y = norm(x, count())
    y.backward(grad_y)
    grad_x, x.grad = x.grad, None
    expected = twin(x[valid])
    expected.backward(grad_y[valid])
    torch.testing.assert_close(y[valid], expected)
    assert grad_x is not None
    assert x.grad is not None
    torch.testing.assert_close(grad_x[valid], x.grad[valid])
    torch.testing.assert_close(norm.weight.grad, twin.weight.grad)
    torch.testing.assert_close(norm.bias.grad, twin.bias.grad)


def test_rms_norm_is_its_equation_and_keeps_zeros() -> None:
    x, valid = padded()
    norm = RmsNorm()
    y = norm(x)
    torch.testing.assert_close(y, x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt())
    assert not y[~valid].any()
    assert torch.autograd.gradcheck(norm, (x.requires_grad_(),))


def test_rms_norm_of_bf16_sums_in_float32() -> None:
    x = torch.randn(2, 4096, dtype=torch.bfloat16)
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt()
    # one rounding to bf16 of the result, whose half unit in the last place is 2^-9
    torch.testing.assert_close(RmsNorm()(x).double(), exact, rtol=2**-8, atol=0)


def test_convolution_layout_shares_statistics_over_frequency() -> None:
    x = torch.randn(2, 3, 4, 6, dtype=torch.float64, requires_grad=True)
    norm, twin = SequenceBatchNorm(3).double(), torch.nn.BatchNorm2d(3).double()
    y, expected = norm(x, all_of(48)), twin(x)
    torch.testing.assert_close(y, expected)
    grad_y = torch.randn_like(x)
    (grad,) = torch.autograd.grad(y, x, grad_y)
    (expected_grad,) = torch.autograd.grad(expected, x, grad_y)
    torch.testing.assert_close(grad, expected_grad)


@pytest.mark.parametrize("training", [True, False])
def test_gradients_do_not_depend_on_memory_formats(training: bool) -> None:
    values, grad = torch.randn(2, 1, 3, 2, 4, dtype=torch.float64)
    norm, formats = (
        SequenceBatchNorm(3).double().train(training),
        (torch.contiguous_format, torch.channels_last),
    )
    results = []
    for of_x, of_grad in itertools.product(formats, formats):
        x = values.clone(memory_format=of_x).requires_grad_()
        inputs = (x, *norm.parameters())
        results.append(torch.autograd.grad(norm(x, all_of(8)), inputs, grad.clone(memory_format=of_grad)))
    for result in results[1:]:
        torch.testing.assert_close(result, results[0])


def test_gradcheck_through_padding() -> None:
    x, valid = padded()
    norm = SequenceBatchNorm(5).double()

    def function(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        masked = x * valid[:, :, None]
        y: Tensor = torch.func.functional_call(norm, {"weight": weight, "bias": bias}, (masked, count()))
        return y * valid[:, :, None]

    inputs = (x.requires_grad_(), norm.weight, norm.bias)
    assert torch.autograd.gradcheck(function, inputs, eps=1e-6, atol=1e-6)


def test_running_averages_take_the_first_batch_fully() -> None:
    norm = SequenceBatchNorm(2, momentum=0.1)
    first, second = torch.tensor([[1.0, 2.0], [3.0, 2.0]]), torch.tensor([[5.0, 0.0]] * 6)
    norm(first, all_of(2))
    torch.testing.assert_close(norm.running_mean, torch.tensor([2.0, 2.0]))
    torch.testing.assert_close(norm.running_var, torch.tensor([1.0, 0.0]))
    norm(second, all_of(6))  # the second of two weighs 1 / 2, not yet the momentum
    torch.testing.assert_close(norm.running_mean, torch.tensor([3.5, 1.0]))
    torch.testing.assert_close(norm.running_var, torch.tensor([0.5, 0.0]))


def test_the_state_dict_carries_the_number_of_batches() -> None:
    norm, resumed = SequenceBatchNorm(2), SequenceBatchNorm(2)
    for seed in (1, 2, 3):
        norm(torch.randn(4, 2, generator=torch.Generator().manual_seed(seed)), all_of(4))
    resumed.load_state_dict(norm.state_dict())
    x = torch.randn(4, 2)
    assert resumed.batches == 3
    norm(x, all_of(4)), resumed(x, all_of(4))
    assert torch.equal(norm.running_var, resumed.running_var)


def test_averages_that_a_broken_batch_got_into_start_anew() -> None:
    norm = SequenceBatchNorm(2)
    norm(torch.tensor([[1.0, torch.inf], [2.0, 3.0]]), all_of(2))
    norm.forget_broken_averages()
    norm(torch.tensor([[1.0, 1.0], [3.0, 5.0]]), all_of(2))
    norm.forget_broken_averages()  # of another layer: these stay
    torch.testing.assert_close(norm.running_mean, torch.tensor([2.0, 3.0]))


def test_a_batch_without_valid_positions_breaks_no_averages() -> None:
    norm = SequenceBatchNorm(2)
    y = norm(torch.zeros(4, 2), Count(torch.tensor([0]), 4))
    assert bool(torch.isfinite(torch.cat([y.flatten(), norm.running_mean, norm.running_var])).all())


def test_evaluation_uses_the_running_averages_only() -> None:
    x, valid = padded(dtype=torch.float32)
    norm = SequenceBatchNorm(5)
    norm(x, count())
    norm.eval()
    expected = (x - x[valid].mean(0)) / torch.sqrt(x[valid].var(0, correction=0) + norm.eps)
    torch.testing.assert_close(norm(x), expected)


def test_a_large_mean_does_not_swamp_the_variance() -> None:
    x = torch.randn(4000, 1, 3) + 30.0
    y = SequenceBatchNorm(3)(x, all_of(4000))
    expected = torch.nn.BatchNorm1d(3)(x[:, 0].double().float())
    torch.testing.assert_close(y[:, 0], expected, atol=2e-3, rtol=0)


def test_bf16_keeps_statistics_in_float32() -> None:
    x, valid = padded(dtype=torch.float32)
    norm = SequenceBatchNorm(5)
    y = norm(x.bfloat16(), count())
    assert y.dtype == torch.bfloat16
    assert norm.running_mean.dtype == torch.float32
    torch.testing.assert_close(norm.running_mean, x.bfloat16().float()[valid].mean(0))


def test_reduce_makes_two_ranks_equal_one_batch() -> None:
    x = torch.randn(8, 3, 4, dtype=torch.float64, requires_grad=True)
    grad_y = torch.randn_like(x)
    barrier, vectors = threading.Barrier(2, timeout=600), [torch.empty(0)] * 2

    def rank(index: int) -> tuple[Tensor, Tensor]:
        def reduce(chunks: Tensor, own: Tensor | None) -> Tensor:
            vectors[index] = chunks.clone()
            barrier.wait()
            total = vectors[0] + vectors[1]
            barrier.wait()
            return total

        norm = SequenceBatchNorm(4).double()
        norm.reduce = reduce
        part = x.detach().chunk(2)[index].requires_grad_()
        y = norm(part, all_of(12))
        (grad_x,) = torch.autograd.grad(y, part, grad_y.chunk(2)[index])
        return y, grad_x

    with ThreadPoolExecutor(2) as pool:
        ranks = list(pool.map(rank, (0, 1)))
    whole = SequenceBatchNorm(4).double()(x, all_of(24))
    (whole_grad_x,) = torch.autograd.grad(whole, x, grad_y)
    torch.testing.assert_close(torch.cat([y for y, _ in ranks]), whole)
    torch.testing.assert_close(torch.cat([grad_x for _, grad_x in ranks]), whole_grad_x)


def test_positions_of_all_ranks_are_summed_once() -> None:
    asked: list[int] = []

    def reduce(chunks: Tensor, own: Tensor | None) -> Tensor:
        asked.append(chunks.numel())
        return 3 * chunks

    of_ranks = Count(torch.tensor([3, 2]), 10)
    totals = [of_ranks.over_ranks(reduce) for _ in range(2)]
    assert asked == [1] and totals[0] is totals[1] and totals[0].dtype == torch.int32
    assert totals[0].tolist() == [15] and of_ranks.over_ranks(None) is of_ranks.valid


@pytest.mark.parametrize("frames_of_others", [0, 5])
def test_a_rank_without_frames_adds_no_position(frames_of_others: int) -> None:
    of_ranks = Count(torch.tensor([0, 0]), 10)
    total = of_ranks.over_ranks(lambda chunks, own: chunks + frames_of_others)
    assert total.tolist() == [max(1, frames_of_others)]


@pytest.mark.parametrize("fused", [False, True])
def test_ranks_ask_for_the_same_sums_whatever_kernels_they_run(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Tensor] = []

    def reduce(chunks: Tensor, own: Tensor | None) -> Tensor:
        asked.append(chunks.sum(0))
        return 2 * asked[-1][None]

    def launch(rows: Rows, kernel: str, lengths: Tensor | None, partial: Tensor, *arguments: object) -> None:
        """What these kernels add up, in as many chunks."""
        if kernel == "sum_rows":
            partial[:] = torch.stack([flat, flat.square()]).sum(1) / len(partial)
        elif kernel == "sum_gradients":
            partial[:] = torch.stack([grad_y, grad_y * (flat - mean)]).sum(1) / len(partial)

    monkeypatch.setattr(SequenceBatchNorm, "fused", lambda norm, x: fused)
    monkeypatch.setattr(op, "_run", launch)
    monkeypatch.setattr(op, "multiprocessors", lambda device: 4)
    x, _ = padded(hidden=8, dtype=torch.float32)
    x.requires_grad_()
    flat, grad_y = x.detach().flatten(0, 1), torch.randn(27, 8)
    mean = flat.sum(0) / sum(LENGTHS)
    norm, of_ranks = SequenceBatchNorm(8), count()
    norm.reduce = reduce
    norm(x, of_ranks).backward(grad_y.view_as(x))
    norm(x, of_ranks)  # another layer of the batch asks no more how many positions there are
    positions, sums, of_gradients, again = asked
    assert positions.tolist() == [sum(LENGTHS)]
    torch.testing.assert_close(sums, torch.stack([flat, flat.square()]).sum(1).double(), rtol=1e-5, atol=1e-3)
    wanted = torch.stack([grad_y, grad_y * (flat - mean)]).sum(1).double()
    torch.testing.assert_close(of_gradients, wanted, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(again, sums)


def test_training_without_a_count_says_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"call \.eval\(\)"):
        SequenceBatchNorm(3)(torch.randn(2, 1, 3))
