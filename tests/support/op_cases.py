"""What the op tests share: where an op runs, random inputs, gradients of everything, and the measure of error."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from ds2_ops.recurrent.backends.reference import recurrence_reference
from torch import Tensor

CPU = torch.device("cpu")
CUDA = torch.device("cuda")


def on_gpu(backend: str) -> object:
    """A (device, backend) parameter that only runs under the gpu mark."""
    return pytest.param(CUDA, backend, marks=pytest.mark.gpu, id=f"cuda-{backend}")


def on_cpu(backend: str) -> object:
    """A (device, backend) parameter that always runs."""
    return pytest.param(CPU, backend, id=f"cpu-{backend}")


def draw(seed: int, *shape: int, device: torch.device, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """Random normal numbers, the same on every device."""
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale
    return numbers.to(device=device, dtype=dtype)


def away_from_kinks(
    x: Tensor, weight_hh: Tensor, h0: Tensor | None, nonlinearity: str, clip: float, margin: float = 0.1
) -> Tensor:
    """Push x where a pre-activation is near 0 or clip: there, rounding alone decides whether a gradient passes."""
    state = torch.zeros_like(x[0]) if h0 is None else h0.double().cpu()
    for t in range(len(x)):
        recurrent = state @ weight_hh.double().cpu().T
        for kink in (0.0, clip):
            x[t] += torch.where((x[t] + recurrent - kink).abs() < margin, 2 * margin, 0.0)
        _, state = recurrence_reference(x[None, t], weight_hh.double().cpu(), state, cell=nonlinearity, clip=clip)
    return x


def ragged_lengths(frames: int, batch: int) -> Tensor:
    """Lengths from T down to 0, so that a full and an empty utterance are among them where B >= 2."""
    return torch.linspace(frames, 0, batch).long() if batch > 1 else torch.tensor([frames])


def poison_padding(x: Tensor, lengths: Tensor) -> Tensor:
    """Copy of x (T, B, ...) with NaN in every frame at or after its utterance's length."""
    padding = torch.arange(x.shape[0])[:, None] >= lengths.cpu()
    return x.masked_fill(padding.to(x.device)[:, :, None], float("nan"))


def outputs_and_gradients(
    op: Callable[..., Tensor | tuple[Tensor, ...]], inputs: Sequence[Tensor | None], cotangents: Sequence[Tensor]
) -> list[Tensor]:
    """Outputs of op(*inputs), then the gradient of every input that is not None, for the given output gradients."""
    leaves = [None if t is None else t.detach().clone().requires_grad_() for t in inputs]
    outputs = op(*leaves)
    outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
    gradients = torch.autograd.grad(outputs, [t for t in leaves if t is not None], list(cotangents))
    return [t.detach() for t in (*outputs, *gradients)]


def relative_error(value: Tensor, truth: Tensor) -> float:
    """Relative root mean square error; the absolute one where the truth is all zero."""
    difference = (value.double().cpu() - truth.double().cpu()).norm()
    scale = truth.double().norm().item()
    return difference.item() / (scale if scale else 1.0)


def assert_same_bits(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
    """Every pair of tensors is equal to the bit, and none holds NaN."""
    for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        assert torch.equal(one, other), f"tensor {index} differs by {(one - other).abs().max().item()}"


def assert_replays(step: Callable[[], Sequence[Tensor]], change: Callable[[], object] = lambda: None) -> None:
    """A CUDA graph of a step has the bits of the step twice, also after a change of what it reads."""
    step()  # builds the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    change()
    for _ in range(2):
        graph.replay()
        assert_same_bits(captured, step())


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make tensors in another type where the code names none, as a notebook may have set it."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def nan_filled_memory() -> Iterator[None]:
    """Fill every newly allocated tensor with NaN, so that what an op forgets to write shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
