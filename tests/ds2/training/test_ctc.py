"""CTC: the frames a transcript needs, values against brute force, and infeasible utterances kept out."""

import itertools
from collections.abc import Callable

import pytest
import torch
from ds2_ops.ctc.loss import ctc_loss
from support import kernel_on_cpu
from support.op_cases import default_dtype

from ds2.text.alphabet import fewest_frames
from ds2.training.ctc import ctc_losses, feasible_rows, reproducible_ctc


def scored(logits: torch.Tensor, frames: torch.Tensor, labels: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """The losses of arguments on the CPU."""
    given = (frames, labels, lengths, feasible_rows(frames, labels, lengths))
    return ctc_losses(logits, *(t.to(logits.device) for t in given))


def by_kernel(
    logits: torch.Tensor,
    labels: torch.Tensor,
    frames: torch.Tensor,
    lengths: torch.Tensor,
    delay_penalty: float = 0.0,
) -> torch.Tensor:
    on_device = (t.to(logits.device) for t in (frames, labels, lengths))
    return ctc_loss(logits, *on_device, delay_penalty=delay_penalty)


Loss = Callable[..., torch.Tensor]
IMPLEMENTATIONS = [
    pytest.param(loss, device, marks=[pytest.mark.gpu] if device == "cuda" else [])
    for loss in (reproducible_ctc, by_kernel)
    for device in ("cpu", "cuda")
]


@pytest.fixture
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let kernels run where the test's device is."""
    if request.getfixturevalue("device") == "cpu":
        kernel_on_cpu.patch(monkeypatch)


def collapse(path: tuple[int, ...]) -> list[int]:
    return [label for label, _ in itertools.groupby(path) if label != 0]


@pytest.mark.parametrize(
    ("labels", "needed"), [([1, 2, 3], 3), ([1, 1, 2], 4), ([1, 1, 1], 5), ([2], 1), ([], 0), ([1, 2, 1], 3)]
)
def test_a_blank_between_equal_neighbours_needs_a_frame(labels: list[int], needed: int) -> None:
    padded, frames = torch.tensor([labels + [1] * (4 - len(labels))] * 7), torch.arange(7)
    assert feasible_rows(frames, padded, torch.tensor([len(labels)] * 7)).tolist() == (frames >= needed).tolist()
    unpadded, length = torch.tensor([labels], dtype=torch.int64), torch.tensor([len(labels)])
    assert feasible_rows(frames[needed : needed + 1], unpadded, length).all()
    assert fewest_frames(labels) == needed
    shortest = min(
        len(path) for n in range(6) for path in itertools.product(range(4), repeat=n) if collapse(path) == labels
    )
    assert shortest == needed


def test_loss_is_minus_the_log_of_the_summed_alignments() -> None:
    logits = torch.randn(4, 1, 3, generator=torch.Generator().manual_seed(1))
    probabilities = logits.double().softmax(-1)[:, 0]
    expected = sum(
        torch.stack([probabilities[t, label] for t, label in enumerate(path)]).prod()
        for path in itertools.product(range(3), repeat=4)
        if collapse(path) == [1, 2]
    )
    losses = scored(logits, torch.tensor([4]), torch.tensor([[1, 2]]), torch.tensor([2]))
    torch.testing.assert_close(losses[0].double(), -torch.log(torch.as_tensor(expected)), rtol=1e-5, atol=1e-6)


def test_an_infeasible_row_is_reported_and_leaves_the_others_alone() -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(3, 2, 4, generator=generator, requires_grad=True)
    labels, lengths = torch.tensor([[1, 1, 1], [1, 2, 0]]), torch.tensor([3, 2])
    losses = scored(logits, torch.tensor([3, 3]), labels, lengths)
    losses.sum().backward()
    alone = logits.detach()[:, 1:].clone().requires_grad_()
    expected = scored(alone, torch.tensor([3]), labels[1:], lengths[1:])
    expected.sum().backward()
    assert feasible_rows(torch.tensor([3, 3]), labels, lengths).tolist() == [False, True]
    assert losses[0] == 0
    assert logits.grad is not None and alone.grad is not None
    assert torch.isfinite(logits.grad).all() and torch.equal(logits.grad[:, 0], torch.zeros(3, 4))
    torch.testing.assert_close(logits.grad[:, 1:], alone.grad)


def test_the_loss_runs_in_fp32_whatever_the_logits_are() -> None:
    logits = torch.randn(5, 1, 3, generator=torch.Generator().manual_seed(3)).bfloat16()
    losses = scored(logits, torch.tensor([5]), torch.tensor([[1]]), torch.tensor([1]))
    assert losses.dtype == torch.float32


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("implementation", "device"), IMPLEMENTATIONS)
@pytest.mark.parametrize(("alphabet", "scale"), [(2, 1), (3, 1), (29, 1), (29, 8), (600, 1)], ids=str)
def test_the_gradient_is_as_near_to_float64_as_that_of_torch(
    alphabet: int, scale: int, implementation: Loss, device: str
) -> None:
    generator = torch.Generator().manual_seed(alphabet)
    logits = 2 * torch.randn(60 * scale, 5, alphabet, generator=generator).to(device)
    labels = torch.randint(1, alphabet, (5, 12 * scale), generator=generator)
    frames, lengths = scale * torch.tensor([60, 33, 40, 7, 25]), scale * torch.tensor([12, 12, 1, 3, 0])
    weights = torch.tensor([1.0, 0.5, 2.0, 0.1, 1.0], device=device)

    def torch_loss(values: torch.Tensor) -> torch.Tensor:
        on_device = labels.to(device)  # with labels on the CPU, torch may hand the work to cuDNN
        return torch.nn.functional.ctc_loss(values.log_softmax(-1), on_device, frames, lengths, reduction="none")

    def results(
        values: torch.Tensor, loss: Callable[[torch.Tensor], torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        values = values.clone().requires_grad_()
        losses = loss(values)
        (losses * weights).sum().backward()
        assert values.grad is not None
        return losses.detach().double(), values.grad.double()

    exact = results(logits.double(), torch_loss)
    stock = results(logits, torch_loss)
    ours = results(logits, lambda values: implementation(values, labels, frames, lengths))
    # What rounding alone explains: the logarithms of alpha and beta grow to the loss L within T frames and are rounded
    # at each, which adds up to a variance of (u L)^2 T / 9 if roundings are independent and uniform; their sum is
    # rounded too. Three standard deviations, of the losses and, through exp, of the occupancies inside the gradient.
    deviation = 3 * torch.finfo(torch.float32).eps / 2 * exact[0].cpu() * torch.sqrt(2 * frames / 9 + 1)
    valid = torch.arange(len(logits))[:, None] < frames
    occupancy = weights.cpu()[:, None] * logits.cpu().double().softmax(-1) * valid[:, :, None] - exact[1].cpu()
    explained = deviation.norm(), (occupancy.norm(dim=(0, 2)) * deviation).norm()
    for wanted, theirs, got, floor in zip(exact, stock, ours, explained, strict=True):
        assert (got - wanted).norm() <= max(2 * (theirs - wanted).norm(), floor)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("implementation", "device"), IMPLEMENTATIONS)
def test_the_gradient_ignores_what_lies_at_padding(implementation: Loss, device: str) -> None:
    logits = torch.randn(9, 2, 4, generator=torch.Generator().manual_seed(4)).to(device)
    frames, labels, lengths = torch.tensor([9, 5]), torch.tensor([[1, 2], [3, 0]]), torch.tensor([2, 1])
    clean, dirty = logits.clone().requires_grad_(), logits.clone()
    dirty[5:, 1] = float("nan")
    dirty.requires_grad_()
    losses = implementation(clean, labels, frames, lengths)
    losses.sum().backward()
    with default_dtype(torch.float64):
        same = implementation(dirty, labels, frames, lengths)
    same.sum().backward()
    assert torch.equal(same, losses)
    assert clean.grad is not None and dirty.grad is not None
    assert torch.equal(clean.grad, dirty.grad)


@pytest.mark.gpu
def test_the_gradient_has_the_same_bits_twice_on_a_gpu() -> None:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(400, 8, 29, generator=generator).cuda()
    labels = torch.randint(1, 4, (8, 90), generator=generator)
    frames, lengths = torch.full((8,), 400), torch.full((8,), 90)
    gradients = []
    for _ in range(5):
        values = logits.clone().requires_grad_()
        scored(values, frames, labels, lengths).sum().backward()
        gradients.append(values.grad)
    assert all(g is not None and torch.equal(g, gradients[0]) for g in gradients)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("implementation", "device"), IMPLEMENTATIONS)
def test_labels_beyond_the_longest_scored_transcript_are_only_padding(implementation: Loss, device: str) -> None:
    logits = torch.randn(6, 2, 4, generator=torch.Generator().manual_seed(6)).to(device)
    frames, lengths = torch.tensor([6, 6]), torch.tensor([2, 0])  # the second row was infeasible, with five labels
    gradients = []
    for labels in (torch.tensor([[1, 2, 0, 0, 0], [3, 3, 3, 3, 3]]), torch.tensor([[1, 2], [3, 3]])):
        values = logits.clone().requires_grad_()
        implementation(values, labels, frames, lengths).sum().backward()
        gradients.append(values.grad)
    assert gradients[0] is not None and gradients[1] is not None
    assert torch.equal(gradients[0], gradients[1])


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("implementation", "device"), IMPLEMENTATIONS[2:])
def test_the_kernels_pass_on_what_is_not_finite_and_know_the_empty_utterance(implementation: Loss, device: str) -> None:
    logits = torch.randn(6, 4, 5, generator=torch.Generator().manual_seed(7))
    logits[3, 1, 2] = float("nan")
    frames, lengths = torch.tensor([6, 6, 0, 1]), torch.tensor([2, 2, 0, 2])
    losses = implementation(logits.to(device), torch.tensor([[1, 2]] * 4), frames, lengths).cpu()
    assert losses[0].isfinite() and losses[1].isnan() and losses[2] == 0 and losses[3] == torch.inf


def first_frames(path: tuple[int, ...]) -> list[int]:
    """The frame in which each label of a path begins."""
    return [t for t, label in enumerate(path) if label != 0 and (t == 0 or path[t - 1] != label)]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("implementation", "device"), IMPLEMENTATIONS)
@pytest.mark.parametrize("penalty", [0.02, 0.7])
def test_a_delay_penalty_weighs_each_alignment_by_the_first_frames_of_its_labels(
    penalty: float, implementation: Loss, device: str
) -> None:
    generator = torch.Generator().manual_seed(8)
    logits = torch.randn(6, 5, 3, generator=generator)
    labels = torch.tensor([[1, 2, 1], [1, 1, 0], [2, 0, 0], [1, 2, 2], [0, 0, 0]])
    frames, lengths = torch.tensor([6, 5, 1, 6, 4]), torch.tensor([3, 2, 1, 3, 0])
    weights = torch.tensor([1.0, 0.5, 2.0, 0.1, 1.0])
    exact = logits.double().requires_grad_()
    log_probs, expected = exact.log_softmax(-1), []
    for row in range(5):
        length, target = int(frames[row]), labels[row, : int(lengths[row])].tolist()
        paths = [path for path in itertools.product(range(3), repeat=length) if collapse(path) == target]
        scores = [
            sum(log_probs[t, row, label] for t, label in enumerate(path))
            + penalty * sum((length - 1) / 2 - t for t in first_frames(path))
            for path in paths
        ]
        expected.append(-torch.logsumexp(torch.stack(scores), 0))
    losses = torch.stack(expected)
    (losses * weights).sum().backward()
    values = logits.to(device).requires_grad_()
    ours = implementation(values, labels, frames, lengths, penalty)
    (ours * weights.to(device)).sum().backward()
    assert values.grad is not None and exact.grad is not None
    torch.testing.assert_close(ours.detach().cpu().double(), losses.detach(), rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(values.grad.cpu().double(), exact.grad, rtol=1e-5, atol=2e-6)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("implementation", "device"), IMPLEMENTATIONS)
def test_a_delay_penalty_ignores_padding_and_infeasible_rows(implementation: Loss, device: str) -> None:
    logits = torch.randn(9, 3, 4, generator=torch.Generator().manual_seed(9)).to(device)
    frames, labels, lengths = torch.tensor([9, 5, 0]), torch.tensor([[1, 2], [3, 0], [1, 1]]), torch.tensor([2, 1, 0])
    clean, dirty = logits.clone().requires_grad_(), logits.clone()
    dirty[5:, 1] = float("nan")
    dirty.requires_grad_()
    for values in (clean, dirty):
        losses = implementation(values, labels, frames, lengths, 0.3)
        assert losses.isfinite().all() and losses[2] == 0
        losses.sum().backward()
    assert clean.grad is not None and dirty.grad is not None
    assert torch.equal(clean.grad, dirty.grad) and torch.equal(clean.grad[:, 2], torch.zeros_like(clean.grad[:, 2]))


def test_the_loss_of_training_takes_the_penalty_on_a_cpu() -> None:
    logits = torch.randn(4, 2, 3, generator=torch.Generator().manual_seed(10))
    labels, lengths, frames = torch.tensor([[1, 2], [1, 1]]), torch.tensor([2, 2]), torch.tensor([4, 2])
    feasible = feasible_rows(frames, labels, lengths)
    losses = ctc_losses(logits, frames, labels, lengths, feasible, delay_penalty=0.1)
    assert losses[0] == reproducible_ctc(logits, labels, frames, torch.tensor([2, 0]), 0.1)[0] and losses[1] == 0


def test_labels_are_learned_earlier_with_a_penalty() -> None:
    starts = []
    for penalty in (0.0, 0.5):
        logits = torch.zeros(20, 1, 3, requires_grad=True)
        optimizer = torch.optim.Adam([logits], lr=0.1)
        targets = torch.tensor([20]), torch.tensor([[1, 2]]), torch.tensor([2]), torch.tensor([True])
        for _ in range(200):
            optimizer.zero_grad()
            ctc_losses(logits, *targets, delay_penalty=penalty).sum().backward()
            optimizer.step()
        starts.append(int((logits[:, 0].argmax(1) == 2).nonzero()[0]))
    assert starts[1] < starts[0]
