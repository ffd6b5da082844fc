"""Buckets: cut from the last parameter on, launched in order as they fill, whatever backward does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import Mock

import pytest
import torch
from ds2_ops.recurrent.deferred import DeferredGradients
from support.recording import pretend_to_record
from torch import Tensor, nn

from ds2.distributed.communicator import Communicator, Moment, Pending
from ds2.distributed.gradients import Bucket, GradientReducer, split_into_buckets
from ds2.model.norm import SequenceBatchNorm
from ds2.model.pass_context import OWN_PARAMETERS, PassContext, linear
from ds2.training.reductions import NormStatistics

CPU = torch.device("cpu")


class Twins(Communicator):
    """Two ranks that always hold the same: a sum doubles."""

    rank, world = 0, 2

    def __init__(self, *, overlap: bool = True) -> None:
        super().__init__(CPU)
        self.overlap = overlap
        self.started: list[tuple[int, bool]] = []  # elements, and whether backward was still running
        self.in_backward = False
        self._now = 0.0

    @contextmanager
    def backward(self) -> Iterator[None]:
        self.in_backward = True
        yield
        self.in_backward = False

    def sum_(self, tensor: Tensor) -> None:
        tensor.mul_(2)

    def start_sum(self, tensor: Tensor, *, overlapped: bool = False) -> Doubled:
        assert overlapped == self.overlap
        self.started.append((tensor.numel(), self.in_backward))
        self._now += 1.0
        return Doubled(tensor, self._now)


class Doubled:
    """Takes 1.5 s, while the next begins after 1 s: they overlap."""

    def __init__(self, tensor: Tensor, began: float) -> None:
        self.tensor, self.began, self.sent = tensor, began, 2 * tensor

    def wait(self) -> tuple[Moment, Moment]:
        self.tensor.copy_(self.sent)  # a gradient that was added since is lost
        return self.began, self.began + 1.5


class Layer(nn.Linear):
    """A linear layer that computes with the weights of a context."""

    def forward(self, x: Tensor, context: PassContext = OWN_PARAMETERS) -> Tensor:
        return nn.functional.linear(x, context.weight(self.weight), context.weight(self.bias))


class Network(nn.Sequential):
    """Layers of one context."""

    def forward(self, x: Tensor, context: PassContext = OWN_PARAMETERS) -> Tensor:
        for layer in self:
            x = layer(x, context)
        return x


def network() -> Network:
    torch.manual_seed(0)
    return Network(Layer(3, 4), Layer(4, 5), Layer(5, 2))


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_buckets_start_at_the_last_parameter_and_hold_one_type() -> None:
    parameters = [torch.zeros(n) for n in (10, 1, 4, 2)]
    assert [[len(p) for p in group] for group in split_into_buckets(parameters, 20)] == [[2, 4], [1, 10]]
    double = torch.zeros(2, dtype=torch.float64)
    assert [len(group) for group in split_into_buckets([parameters[0], double, parameters[1]], 10**6)] == [1, 1, 1]
    assert split_into_buckets([], 10) == []


def test_what_is_not_trained_is_in_no_bucket_and_computes_as_it_is() -> None:
    model = network()
    model[1].requires_grad_(False)
    reducer = GradientReducer(model.parameters(), Twins(), bucket_bytes=1, overlap=True)
    assert len(reducer.buckets) == 4
    context = reducer.start_pass(last=True)
    assert context.weight(model[1].weight) is model[1].weight and context.sink(model[1].weight) is None


@pytest.mark.parametrize("overlap", [True, False])
def test_sums_are_those_of_all_ranks_and_start_while_backward_runs_where_asked(overlap: bool) -> None:
    plain, model, x = network(), network(), torch.randn(6, 3)
    plain(x).square().sum().backward()
    comm = Twins(overlap=overlap)
    reducer = GradientReducer(model.parameters(), comm, bucket_bytes=40, overlap=overlap)
    for _ in range(2):  # the second step starts from zero again
        comm.started.clear()
        reducer.start_step()
        loss = model(x, reducer.start_pass(last=True)).square().sum()
        with comm.backward():
            loss.backward()
        reducer.finish_step()
        assert all(torch.equal(a, 2 * b) for a, b in zip(gradients(model), gradients(plain), strict=True))
        assert [n for n, _ in comm.started] == [flat.numel() for flat in reducer.buckets]
        assert [during for _, during in comm.started] == [overlap] * len(reducer.buckets)
    assert len(reducer.buckets) >= 3


def test_a_bucket_starts_before_earlier_layers_go_back() -> None:
    model, comm, order = network(), Twins(), list[str]()
    comm.start_sum = lambda tensor, overlapped: order.append("sum") or Doubled(tensor, 0.0)  # type: ignore[method-assign, func-returns-value]
    reducer = GradientReducer(model.parameters(), comm, bucket_bytes=40, overlap=True)
    context = reducer.start_pass(last=True)
    x = torch.randn(2, 3, requires_grad=True)
    y = model[1](model[0](x, context), context)
    y.register_hook(lambda grad: order.append("earlier layers"))
    model[2](y, context).sum().backward()
    assert order[0] == "sum" and order.count("sum") == len(reducer.buckets) > 1


def test_time_that_sums_share_counts_once() -> None:
    reducer = GradientReducer(network().parameters(), Twins(overlap=False), bucket_bytes=1, overlap=False)
    seconds = sum(ended - began for began, ended in reducer.finish_step())
    assert seconds == pytest.approx(len(reducer.buckets) + 0.5)


def test_only_the_last_pass_of_an_accumulated_step_starts_sums() -> None:
    model, comm, x = network(), Twins(), torch.randn(4, 3)
    reducer = GradientReducer(model.parameters(), comm, bucket_bytes=40, overlap=True)
    reducer.start_step()
    model(x, reducer.start_pass(last=False)).sum().backward()
    assert comm.started == []
    once = gradients(model)
    model(x, reducer.start_pass(last=True)).sum().backward()
    assert len(comm.started) == len(reducer.buckets)
    reducer.finish_step()
    assert all(torch.allclose(a, 4 * b) for a, b in zip(gradients(model), once, strict=True))


def test_a_parameter_without_gradient_holds_back_no_rank() -> None:
    model, comm, x = network(), Twins(), torch.randn(4, 3)
    reducer = GradientReducer(model.parameters(), comm, bucket_bytes=1, overlap=True)
    for flat in reducer.buckets:
        flat.fill_(torch.nan)  # of a step before
    reducer.start_step()
    context = reducer.start_pass(last=True)
    model[1](model[0](x, context), context).sum().backward()  # the last layer is not used
    assert comm.started == []  # its buckets come first, on every rank
    reducer.finish_step()
    assert len(comm.started) == len(reducer.buckets)
    assert all(bool((p.grad == 0).all()) for p in model[2].parameters() if p.grad is not None)


def test_rounded_copies_give_what_autocast_gives() -> None:
    plain, model, x = network(), network(), torch.randn(6, 3)
    matrices = [p for p in model.parameters() if p.ndim == 2]
    reducer = GradientReducer(model.parameters(), Communicator(CPU), 40, overlap=True, low_precision=matrices)
    results = []
    contexts: tuple[PassContext, ...] = (OWN_PARAMETERS, reducer.start_pass(last=True))
    for net, context in zip((plain, model), contexts, strict=True):
        with torch.autocast("cpu", torch.bfloat16):
            results.append(net(x, context).float().square().sum())
        results[-1].backward()
    reducer.finish_step()
    assert torch.equal(*results)
    assert all(p.dtype == torch.float32 and isinstance(p, nn.Parameter) for p in model.parameters())
    for ours, theirs in zip(gradients(model), gradients(plain), strict=True):
        assert torch.equal(ours, theirs)


class WithRank(Communicator):
    """One of two ranks; the other has these buckets."""

    rank, world = 0, 2

    def __init__(self, buckets: list[Tensor]) -> None:
        super().__init__(CPU)
        self._others = iter(buckets)

    def start_sum(self, tensor: Tensor, *, overlapped: bool = False) -> Pending:
        tensor += next(self._others)
        return Mock(wait=lambda: (0.0, 0.0))


@pytest.mark.parametrize("bucket_bytes", [40, 10**6])
def test_ranks_that_round_other_parameters_add_the_gradients_of_the_same_parameter(bucket_bytes: int) -> None:
    """As on GPUs of which one runs the layers of ds2_ops and the other torch's, which round weights themselves."""
    x, rounded, of_other = torch.randn(6, 3), [], list[Tensor]()
    for layers in ((0, 1, 2), (0,)):
        model = network()
        low = [model[layer].weight for layer in layers]
        comm = Communicator(CPU) if not of_other else WithRank(of_other)
        reducer = GradientReducer(model.parameters(), comm, bucket_bytes, overlap=True, low_precision=low)
        with torch.autocast("cpu", torch.bfloat16):
            model(x, reducer.start_pass(last=True)).float().square().sum().backward()
        reducer.finish_step()
        rounded.append(low)
        if not of_other:
            alone, of_other = gradients(model), [flat.clone() for flat in reducer.buckets]
    assert len(rounded[0]) != len(rounded[1])
    for both, one in zip(gradients(model), alone, strict=True):
        torch.testing.assert_close(both, 2 * one)


class Product(nn.Module):
    """Its weight's gradient goes to a sink where there is one; `plain` never."""

    def __init__(self, *, plain: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3, generator=torch.Generator().manual_seed(1)))
        self.unused = nn.Parameter(torch.ones(2, 2))
        self.plain = plain

    def forward(self, x: Tensor, context: PassContext) -> Tensor:
        if self.plain:
            return nn.functional.linear(x, context.weight(self.weight))
        return linear(x, [self.weight], None, context)


@pytest.mark.parametrize("passes", [1, 3])
def test_sinks_take_the_gradients_that_autograd_would_bring(passes: int) -> None:
    results = []
    for plain in (True, False):
        model = Product(plain=plain)
        reducer = GradientReducer(
            model.parameters(), Twins(), 10**6, overlap=True, low_precision=list(model.parameters())
        )
        for _ in range(2):  # the second step starts from zero again
            for flat in reducer.buckets:
                flat.fill_(torch.nan)
            reducer.start_step()
            inputs = [
                torch.randn(6, 3, generator=torch.Generator().manual_seed(n)).requires_grad_() for n in range(passes)
            ]
            for number, x in enumerate(inputs):
                with torch.autocast("cpu", torch.bfloat16):
                    loss = model(x, reducer.start_pass(last=number == passes - 1)).float().square().sum()
                loss.backward()
            reducer.finish_step()
        results.append([*gradients(model), *(x.grad for x in inputs if x.grad is not None)])
    assert len(results[0]) == 2 + passes
    assert all(map(torch.equal, *results)) and bool((results[0][1] == 0).all())


def test_buckets_travel_when_what_was_held_back_for_them_has_been_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for recorded in (False, True):
        if recorded:
            pretend_to_record(monkeypatch)
        model, comm = Product(plain=False), Twins()
        reducer = GradientReducer(
            model.parameters(), comm, 10**6, overlap=True, low_precision=list(model.parameters()), dtype=torch.float32
        )
        reducer.start_step()
        x = torch.randn(6, 3, generator=torch.Generator().manual_seed(1))
        model(x, reducer.start_pass(last=True)).square().sum().backward()
        assert len(comm.started) == (0 if recorded else 1)
        reducer.end_pass()
        assert len(comm.started) == 1
        reducer.finish_step()
        results.append(gradients(model))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize(
    ("device", "low"),
    [
        ("cpu", torch.float32),
        pytest.param("cuda", torch.float32, marks=pytest.mark.gpu),
        pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu),
    ],
)
def test_products_of_further_passes_add_up_where_the_gradient_lies(device: str, low: torch.dtype) -> None:
    rows, frames, columns = 64, 96, 40
    parameter = nn.Parameter(torch.zeros(rows, columns, device=device))
    bucket = Bucket([parameter], {parameter}, low, DeferredGradients())
    bucket.flat.fill_(torch.nan)  # of a step before
    where = parameter.grad
    bucket.start_step()
    exact, size = torch.zeros(rows, columns, dtype=torch.float64), torch.zeros(rows, columns, dtype=torch.float64)
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        left = torch.randn(frames, rows, generator=generator).to(device, low).t()
        right = torch.randn(frames, columns, generator=generator).to(device, low)
        bucket.sinks[parameter].add_products([(left, right)])
        bucket.collect([None])
        exact += left.double().cpu() @ right.double().cpu()
        size += left.double().cpu().abs() @ right.double().cpu().abs()
    assert where is parameter.grad and where is not None
    # Products of 16 bits are exact in float32: what is left is its rounding of the sums, each term at most once a sum.
    unit = torch.finfo(torch.float32).eps / 2
    assert bool(((where.double().cpu() - exact).abs() <= 4 * frames * unit * size).all())


def test_parameters_whose_first_use_is_out_of_order_get_their_gradients() -> None:
    plain, model, x = network(), network(), torch.randn(6, 3)
    reducer = GradientReducer(model.parameters(), Twins(), 10**6, overlap=True)
    reducer.start_step()
    context = reducer.start_pass(last=True)
    for net, of in ((plain, OWN_PARAMETERS), (model, context)):
        penalty = sum(of.weight(p).square().sum() for p in net[2].parameters())
        (net(x, of).sum() + penalty).backward()
    reducer.finish_step()
    assert all(torch.equal(a, 2 * b) for a, b in zip(gradients(model), gradients(plain), strict=True))


def test_a_pass_leaves_the_parameters_of_the_model_alone() -> None:
    model = network()
    before = list(model.parameters())
    reducer = GradientReducer(model.parameters(), Twins(), 40, overlap=True, low_precision=[model[0].weight])
    with pytest.raises(RuntimeError):
        model(torch.randn(2, 7), reducer.start_pass(last=True))
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))


def test_a_single_process_sums_nothing() -> None:
    plain, model, x = network(), network(), torch.randn(6, 3)
    plain(x).sum().backward()
    reducer = GradientReducer(model.parameters(), Communicator(CPU), 40, overlap=True)
    model(x, reducer.start_pass(last=True)).sum().backward()
    reducer.finish_step()
    assert all(torch.equal(a, b) for a, b in zip(gradients(model), gradients(plain), strict=True))


def test_an_idle_rank_adds_nothing_to_statistics_and_gets_no_gradient() -> None:
    norm = SequenceBatchNorm(3)
    statistics = NormStatistics(norm, Twins(), shared=True)
    assert norm.reduce is statistics
    own = torch.ones(2, 4)
    statistics.idle = True
    with statistics.during_pass(backward=True):
        total = statistics(torch.ones(3, 2, 4, dtype=torch.float64), own)
    assert total.tolist() == [[[0.0] * 4] * 2] and not own.any()
    statistics.idle = False
    total = statistics(torch.ones(3, 2, 4, dtype=torch.float64), own)
    assert total.tolist() == [[[6.0] * 4] * 2] and bool((own == 3.0).all())


def test_local_statistics_leave_batch_norm_alone_and_average_what_it_keeps() -> None:
    norm = SequenceBatchNorm(2)
    statistics = NormStatistics(norm, WithOther(torch.tensor([1.0, 3.0, 1.0, torch.nan])), shared=False)
    assert norm.reduce is None
    norm.running_mean.copy_(torch.tensor([3.0, -1.0]))
    for backward, last in ((False, False), (True, False)):
        with statistics.during_pass(backward=backward, last=last):
            assert norm.running_mean.tolist() == [3.0, -1.0]  # a further batch of the step is yet to weigh in
    with statistics.during_pass(backward=True, last=True):
        pass
    assert norm.running_mean.tolist() == [2.0, 1.0] and norm.running_var[0] == 1.0
    norm.batches = 3
    norm.forget_broken_averages()  # what broke on the other rank
    assert norm.batches == 0 and norm.running_mean.tolist() == [0.0, 0.0]


class WithOther(Communicator):
    """One of two ranks; the other has these numbers."""

    world = 2

    def __init__(self, numbers: torch.Tensor) -> None:
        super().__init__(CPU)
        self._numbers = numbers

    def sum_(self, tensor: torch.Tensor) -> None:
        tensor += self._numbers
