"""The denominator of CTC-CRF: each implementation against all paths one by one, float64, and its own padding."""

import itertools
import math

import numpy as np
import pytest
import torch
from ds2_ops.ctc import denominator
from ds2_ops.ctc.denominator import Denominator, LabelGraph, denominator_reference, round_weights
from support import kernel_on_cpu
from support.compiled import report
from support.kernel_on_cpu import H200_SMEM_BYTES
from support.op_cases import assert_same_bits, default_dtype
from torch import Tensor

# By products of sparse matrices on the CPU, by kernels that are emulated there, and by both on a GPU.
WAYS = [
    pytest.param(kernels, device, marks=[pytest.mark.gpu] if device == "cuda" else [], id=f"{name}-{device}")
    for kernels, name in ((False, "products"), (True, "kernels"))
    for device in ("cpu", "cuda")
]


@pytest.fixture
def ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, device = request.getfixturevalue("kernels"), request.getfixturevalue("device")
    if kernels and device == "cpu":
        kernel_on_cpu.patch(monkeypatch)
    elif not kernels:
        monkeypatch.setattr(Denominator, "why_not", lambda self, device: "not asked for")


def random_graph(seed: int, labels: int, parents: int, children: int, arcs: int) -> LabelGraph:
    """A start, `parents` nodes of each label with arcs to all labels, `children` nodes of each of these, some without
    arcs, and others with up to `arcs`."""
    draw = np.random.default_rng(seed)
    of_parents = np.repeat(np.arange(1, labels), parents)
    parent_nodes = 1 + np.arange(len(of_parents))
    child_parents = np.repeat(parent_nodes, children)
    node_labels = np.concatenate(([0], of_parents, of_parents[child_parents - 1]))
    nodes, full = len(node_labels), len(of_parents) + 1
    by_label = [np.flatnonzero(node_labels == label) for label in range(labels)]
    towards = np.stack([draw.choice(by_label[max(label, 1)], nodes) for label in range(labels)], 1)
    towards[full:] = towards[child_parents]
    sources, targets, weights = [], [], []
    for node in range(nodes):
        chosen = np.arange(1, labels)
        if node >= full:
            chosen = draw.choice(chosen, draw.integers(0, min(arcs, labels - 1) + 1), replace=False)
        sources += [node] * len(chosen)
        targets += towards[node, chosen].tolist()
        weights += (draw.dirichlet(np.ones(len(chosen))) * (0.4 if node >= full else 0.9)).tolist()
    return LabelGraph(
        node_labels,
        draw.uniform(0.05, 0.1, nodes),
        np.array(sources),
        np.array(targets),
        round_weights(np.array(weights)),
        np.concatenate((np.arange(full), child_parents)),
        np.concatenate((np.zeros(full), round_weights(draw.uniform(0.3, 0.6, nodes - full)))),
        0,
    )


def as_automaton(graph: LabelGraph, labels: int) -> tuple[Tensor, Tensor, Tensor, int]:
    """The tables of `denominator_reference`; without an arc a label's weight is 0."""
    nodes = len(graph.labels)
    weights, following = torch.zeros(nodes, labels, dtype=torch.float64), torch.zeros(nodes, labels, dtype=torch.int64)
    for source, target, weight in zip(graph.sources, graph.targets, graph.weights, strict=True):
        weights[source, graph.labels[target]] += weight
        following[source, graph.labels[target]] = int(target)
    inherits = torch.from_numpy(graph.shares)[:, None] * weights[graph.parents]
    following = torch.where(inherits > 0, following[graph.parents], following)
    return weights + inherits, following, torch.from_numpy(graph.ends), graph.start


def with_gradient(function: object, logits: Tensor, frames: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    values = logits.clone().requires_grad_()
    sums = function(values, frames)  # type: ignore[operator]
    (sums * weights).sum().backward()
    assert values.grad is not None
    return sums.detach().double().cpu(), values.grad.double().cpu()


def test_the_reference_is_the_sum_over_all_paths() -> None:
    graph = random_graph(1, labels=4, parents=1, children=2, arcs=2)
    weights, following, ends, start = as_automaton(graph, 4)
    logits = torch.randn(5, 3, 4, generator=torch.Generator().manual_seed(1)).double()
    frames = torch.tensor([5, 2, 0])
    probs = logits.softmax(-1)
    for utterance, length in enumerate(frames.tolist()):
        total = 0.0
        for path in itertools.product(range(4), repeat=length):
            state, product = start, 1.0
            for label in (label for label, _ in itertools.groupby(path) if label):
                product *= float(weights[state, label])
                state = int(following[state, label])
            emitted = math.prod(float(probs[t, utterance, label]) for t, label in enumerate(path))
            total += product * float(ends[state]) * emitted
        got = denominator_reference(logits, frames, weights, following, ends, start)[utterance]
        assert float(got) == pytest.approx(math.log(total), rel=1e-12)


@pytest.mark.parametrize("children", [0, 2])
def test_products_in_float64_are_the_reference(children: int) -> None:
    graph = random_graph(2, labels=5, parents=2, children=children, arcs=3)
    logits = 2 * torch.randn(12, 4, 5, generator=torch.Generator().manual_seed(2)).double()
    frames, weights = torch.tensor([12, 7, 1, 0]), torch.tensor([1.0, 0.5, 2.0, 1.0]).double()
    automaton = as_automaton(graph, 5)
    exact = with_gradient(lambda x, n: denominator_reference(x, n, *automaton), logits, frames, weights)
    ours = with_gradient(Denominator(graph, 5), logits, frames, weights)
    for got, wanted in zip(ours, exact, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-12)
    values = logits[:5, :3].clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: Denominator(graph, 5)(x, torch.tensor([5, 3, 1])), values)


@pytest.mark.usefixtures("ways")
@pytest.mark.parametrize(("kernels", "device"), WAYS)
@pytest.mark.parametrize(
    ("labels", "parents", "children", "length", "spread"),
    [(2, 1, 0, 60, 1), (5, 2, 3, 60, 1), (29, 1, 4, 40, 3), (40, 1, 0, 30, 1), (40, 2, 30, 9, 10)],
    ids=str,
)
def test_rounding_alone_explains_the_error(
    labels: int, parents: int, children: int, length: int, spread: int, kernels: bool, device: str
) -> None:
    graph = random_graph(labels, labels, parents, children, 6)
    logits = spread * torch.randn(length, 4, labels, generator=torch.Generator().manual_seed(labels))
    frames = torch.tensor([length, length - 5, 1, 0])
    weights = torch.tensor([1.0, 0.5, 2.0, 1.0])
    exact = with_gradient(Denominator(graph, labels), logits.double(), frames, weights.double())
    moved = (logits.to(device), frames.to(device), weights.to(device))
    sums, gradient = with_gradient(Denominator(graph, labels), *moved)
    # A frame multiplies by one probability, which the rounding of the log-softmax changes by a few ulps of its
    # logarithm, and adds positive numbers: the parent's children, then the arcs. Each sum and each product rounds once.
    most = np.bincount(graph.targets).max() + np.bincount(graph.parents).max() + 8
    log_probs = logits.double().log_softmax(-1).abs().amax(-1).max()
    frame_error = torch.finfo(torch.float32).eps / 2 * (float(most) + 4 * float(log_probs))
    relative = frames * frame_error + torch.finfo(torch.float32).eps * (1 + exact[0].abs())
    assert ((sums - exact[0]).abs() <= relative).all()
    assert ((gradient - exact[1]).abs().amax((0, 2)) <= 3 * weights * relative).all()


@pytest.mark.usefixtures("ways")
@pytest.mark.parametrize(("kernels", "device"), WAYS)
def test_padding_is_not_read_and_has_no_gradient(kernels: bool, device: str) -> None:
    graph = random_graph(3, labels=4, parents=1, children=2, arcs=2)
    logits = torch.randn(9, 3, 4, generator=torch.Generator().manual_seed(3)).to(device)
    frames, weights = torch.tensor([9, 5, 0], device=device), torch.ones(3, device=device)
    dirty = logits.clone()
    dirty[5:, 1] = dirty[:, 2] = float("nan")
    clean = with_gradient(Denominator(graph, 4), logits, frames, weights)
    with default_dtype(torch.float64):
        assert_same_bits(with_gradient(Denominator(graph, 4), dirty, frames, weights), clean)
    assert not clean[1][5:, 1].any() and not clean[1][:, 2].any()


@pytest.mark.usefixtures("ways")
@pytest.mark.parametrize(("kernels", "device"), WAYS)
def test_scores_far_below_the_smallest_float_are_scaled(kernels: bool, device: str) -> None:
    graph = random_graph(4, labels=30, parents=1, children=1, arcs=3)
    logits = torch.zeros(400, 2, 30)
    logits[:, :, 7] = 9.0  # one label all the time: every arc costs e^9
    frames, weights = torch.tensor([400, 399]), torch.ones(2)
    exact = with_gradient(Denominator(graph, 30), logits.double(), frames, weights.double())
    sums, gradient = with_gradient(Denominator(graph, 30), logits.to(device), frames.to(device), weights.to(device))
    torch.testing.assert_close(sums, exact[0], rtol=0, atol=400 * 50 * 1.2e-7)
    torch.testing.assert_close(gradient, exact[1], rtol=0, atol=3 * 400 * 50 * 1.2e-7)


@pytest.mark.usefixtures("ways")
@pytest.mark.parametrize(("kernels", "device"), WAYS)
def test_what_is_not_finite_is_passed_on(kernels: bool, device: str) -> None:
    graph = random_graph(5, labels=4, parents=1, children=2, arcs=2)
    logits = torch.randn(6, 2, 4, generator=torch.Generator().manual_seed(5))
    logits[3, 0, 1] = float("nan")
    sums = Denominator(graph, 4)(logits.to(device), torch.tensor([6, 6], device=device)).cpu()
    with pytest.raises(TypeError, match=r"frames is torch\.int32, expected torch\.int64"):
        Denominator(graph, 4)(logits, torch.tensor([6, 6], dtype=torch.int32))
    assert sums[0].isnan() and sums[1].isfinite()


@pytest.mark.gpu
def test_kernels_on_a_gpu_give_the_same_bits_twice_and_in_a_cuda_graph() -> None:
    graph = random_graph(6, labels=29, parents=6, children=25, arcs=8)
    logits = torch.randn(300, 16, 29, generator=torch.Generator().manual_seed(6)).cuda().requires_grad_()
    frames, function = torch.arange(285, 301).cuda(), Denominator(graph, 29)
    assert function.why_not(logits.device) is None

    def both() -> tuple[Tensor, Tensor]:
        sums = function(logits, frames)
        return sums.detach(), torch.autograd.grad(sums.sum(), logits)[0]

    first = both()
    for _ in range(3):
        assert all(map(torch.equal, both(), first))
    torch.cuda.synchronize()
    recording = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recording):
        recorded = both()
    recording.replay()
    torch.cuda.synchronize()
    assert all(map(torch.equal, recorded, first))


def test_arcs_that_do_not_fit_on_chip_and_rows_of_many_arcs_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = random_graph(9, labels=80, parents=1, children=2, arcs=5)
    assert np.bincount(graph.targets).max() > 32
    logits = torch.randn(8, 2, 80, generator=torch.Generator().manual_seed(9))
    frames, weights = torch.tensor([8, 6]), torch.ones(2)
    sizes = denominator.plan(len(graph.labels), len(graph.parent_nodes), 0, 80, H200_SMEM_BYTES).smem_bytes
    exact = with_gradient(Denominator(graph, 80), logits.double(), frames, weights.double())
    for smem_bytes in (sizes, sizes + 2000, H200_SMEM_BYTES):
        kernel_on_cpu.patch(monkeypatch, smem_bytes=smem_bytes)
        for got, wanted in zip(with_gradient(Denominator(graph, 80), logits, frames, weights), exact, strict=True):
            torch.testing.assert_close(got, wanted, rtol=0, atol=2e-5)


@pytest.mark.parametrize("backwards", [False, True])
def test_threads_may_take_turns_in_any_order(backwards: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = random_graph(7, labels=12, parents=1, children=8, arcs=5)
    logits = torch.randn(8, 2, 12, generator=torch.Generator().manual_seed(7))
    arguments = (logits, torch.tensor([8, 6]), torch.ones(2))
    kernel_on_cpu.patch(monkeypatch)
    wanted = with_gradient(Denominator(graph, 12), *arguments)
    kernel_on_cpu.patch(monkeypatch, backwards=backwards)
    assert all(map(torch.equal, with_gradient(Denominator(graph, 12), *arguments), wanted))


@pytest.mark.parametrize("nodes", [30, 5092, 20_000])
def test_kernels_compile_without_spills(nodes: int) -> None:
    launch = denominator.plan(nodes, 500, 30_000, 29, H200_SMEM_BYTES, 16)
    assert (launch.grid, launch.threads) == (32, min(1024, -(-nodes // 32) * 32))
    compiled = report(launch.source.text)
    if nodes < 10_000:
        assert compiled.local_bytes == 0
    assert compiled.registers * launch.threads <= 65536
    assert report(denominator.SHARES.text).local_bytes == 0


def test_graphs_that_do_not_fit_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"a graph of 40000 nodes over 29 labels needs .* at most about 27"):
        denominator.plan(40_000, 500, 10**6, 29, H200_SMEM_BYTES)
    function = Denominator(random_graph(8, labels=3, parents=1, children=0, arcs=0), 3)
    assert "need a CUDA GPU" in str(function.why_not(torch.device("cpu")))
    kernel_on_cpu.patch(monkeypatch)
    assert function.why_not(torch.device("cpu")) is None
    kernel_on_cpu.patch(monkeypatch, smem_bytes=100)
    assert "a block has 100" in str(function.why_not(torch.device("cpu")))
