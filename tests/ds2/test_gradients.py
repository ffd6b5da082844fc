"""Buckets: cut from the last parameter on, launched in order as they fill, whatever backward does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from ds2.distributed import Communicator, Moment
from ds2.gradients import GradientReducer, NormStatistics, in_buckets
from ds2.metrics import StepTimer
from ds2.norm import SequenceBatchNorm

CPU = torch.device("cpu")


class Twins(Communicator):
    """Two ranks that always hold the same: a sum doubles."""

    rank, world = 0, 2

    def __init__(self) -> None:
        super().__init__(CPU)
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

    def start_sum(self, tensor: Tensor) -> Doubled:
        self.started.append((tensor.numel(), self.in_backward))
        self._now += 1.0
        return Doubled(tensor, self._now)


class Doubled:
    """Takes 1.5 s, while the next begins after 1 s: they overlap."""

    def __init__(self, tensor: Tensor, began: float) -> None:
        self.tensor, self.began = tensor, began

    def wait(self) -> tuple[Moment, Moment]:
        self.tensor.mul_(2)
        return self.began, self.began + 1.5


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5), nn.Linear(5, 2))


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_buckets_start_at_the_last_parameter_and_hold_one_type() -> None:
    parameters = [nn.Parameter(torch.zeros(n)) for n in (10, 1, 4, 2)]
    frozen = nn.Parameter(torch.zeros(3), requires_grad=False)
    assert [[len(p) for p in group] for group in in_buckets([*parameters, frozen], 20)] == [[2, 4], [1, 10]]
    double = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    assert [len(group) for group in in_buckets([parameters[0], double, parameters[1]], 10**6)] == [1, 1, 1]
    assert in_buckets([], 10) == []


@pytest.mark.parametrize("overlap", [True, False])
def test_sums_are_those_of_all_ranks_and_start_while_backward_runs_where_asked(overlap: bool) -> None:
    plain, model, x = network(), network(), torch.randn(6, 3)
    plain(x).square().sum().backward()
    comm = Twins()
    reducer = GradientReducer(list(model.parameters()), comm, bucket_bytes=40, overlap=overlap)
    timer = StepTimer(CPU)
    for _ in range(2):  # the second step starts from zero again
        comm.started.clear()
        reducer.zero()
        reducer.arm()
        with comm.backward():
            model(x).square().sum().backward()
        reducer.finish(timer)
        assert all(torch.equal(a, 2 * b) for a, b in zip(gradients(model), gradients(plain), strict=True))
        assert [n for n, _ in comm.started] == [flat.numel() for flat in reducer.buckets]
        assert [during for _, during in comm.started] == [overlap] * len(reducer.buckets)
    assert len(reducer.buckets) >= 3


def test_time_that_sums_share_counts_once() -> None:
    model = network()
    reducer = GradientReducer(list(model.parameters()), Twins(), bucket_bytes=1, overlap=False)
    timer = StepTimer(CPU)
    reducer.finish(timer)
    assert timer.means(1)["allreduce_total"] == pytest.approx(len(reducer.buckets) + 0.5)


def test_only_the_armed_pass_of_an_accumulated_step_starts_sums() -> None:
    model, comm, x = network(), Twins(), torch.randn(4, 3)
    reducer = GradientReducer(list(model.parameters()), comm, bucket_bytes=40, overlap=True)
    reducer.zero()
    model(x).sum().backward()
    assert comm.started == []
    once = gradients(model)
    reducer.arm()
    model(x).sum().backward()
    assert len(comm.started) == len(reducer.buckets)
    reducer.finish(StepTimer(CPU))
    assert all(torch.allclose(a, 4 * b) for a, b in zip(gradients(model), once, strict=True))


def test_a_parameter_without_gradient_holds_back_no_rank() -> None:
    model, comm, x = network(), Twins(), torch.randn(4, 3)
    reducer = GradientReducer(list(model.parameters()), comm, bucket_bytes=1, overlap=True)
    reducer.zero()
    reducer.arm()
    model[1](model[0](x)).sum().backward()  # the last layer is not used
    assert comm.started == []  # its buckets come first, on every rank
    reducer.finish(StepTimer(CPU))
    assert len(comm.started) == len(reducer.buckets)
    assert all(bool((p.grad == 0).all()) for p in model[2].parameters() if p.grad is not None)


def test_a_single_process_keeps_plain_gradients() -> None:
    model = network()
    reducer = GradientReducer(list(model.parameters()), Communicator(CPU), 40, overlap=True)
    model(torch.randn(2, 3)).sum().backward()
    reducer.finish(StepTimer(CPU))
    assert len(gradients(model)) == 6 and reducer.buckets == []
    reducer.zero()
    assert gradients(model) == []


def test_an_idle_rank_adds_nothing_to_statistics_and_gets_no_gradient() -> None:
    norm = SequenceBatchNorm(3)
    statistics = NormStatistics(norm, Twins(), shared=True)
    packed = torch.ones(7, dtype=torch.float64)
    statistics(packed)
    assert packed.tolist() == [2.0] * 7 and norm.reduce is statistics
    statistics.idle = True
    with statistics.passing(backward=True):
        packed = torch.ones(6, dtype=torch.float64)
        statistics(packed)
    assert packed.tolist() == [0.0] * 6


def test_local_statistics_leave_batch_norm_alone_and_average_what_it_keeps() -> None:
    norm = SequenceBatchNorm(2)
    statistics = NormStatistics(norm, Twins(), shared=False)
    norm.running_mean.copy_(torch.tensor([3.0, -1.0]))
    statistics.end_step()
    assert norm.reduce is None and norm.running_mean.tolist() == [3.0, -1.0]
