"""Batch norm's kernels against float64, from their own source on the CPU, and on a GPU where there is one."""

from __future__ import annotations

import ds2_ops.batch_norm.op
import pytest
import torch
from ds2_ops.batch_norm.op import RunningStatistics, batch_norm, batch_norm_reference, why_not
from ds2_ops.batch_norm.rows import Rows
from support.kernel_on_cpu import patch_run
from support.op_cases import assert_same_bits, default_dtype
from torch import Tensor

EPS = 1e-5


class Case:
    """Data of a case, its float64 answers, and how far float32 sums and the type's rounding may lie from them."""

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: str, *, ragged: bool, clip: float | None = None
    ) -> None:
        generator = torch.Generator().manual_seed(sum(shape))
        draw = lambda *size: torch.randn(*size, generator=generator, dtype=torch.float64)  # noqa: E731
        channels = shape[-1]
        self.clip, self.device = clip, device
        self.x = (draw(*shape) * 2 + draw(channels)).to(dtype)
        self.grad_y = draw(*shape).to(dtype)
        self.weight, self.bias = (draw(channels) / 4 + 1).float(), draw(channels).float()
        if ragged:  # (B, F, T, C): what lies past a length is anything
            self.lengths: Tensor | None = torch.randint(0, shape[2] + 1, shape[:1], generator=generator).int()
            self.lengths[0] = shape[2]
            self.valid = (torch.arange(shape[2]) < self.lengths[:, None])[:, None].expand(shape[:3])
            self.x[~self.valid] = float("nan")
        else:  # (T, B, C): zeros past a length
            self.lengths = None
            last = torch.randint(1, shape[0] + 1, shape[1:2], generator=generator)
            last[0] = shape[0]
            self.valid = torch.arange(shape[0])[:, None] < last
            self.x[~self.valid] = 0.0
            self.grad_y[~self.valid] = 0.0
        if clip is not None:  # no gradient where rounding decides on which side of a corner the output lies
            parts = (self.x.double(), self.weight.double(), self.bias.double(), self.valid)
            free, *_ = batch_norm_reference(*parts, eps=EPS)
            margin = torch.finfo(dtype).eps * (1 + free.abs())
            self.grad_y[(free.abs() < margin) | ((free - clip).abs() < margin)] = 0.0
        inputs = [t.double().requires_grad_() for t in (self.x, self.weight, self.bias)]
        y, mean, var = batch_norm_reference(*inputs, self.valid, eps=EPS, clip=clip)
        self.gradients = torch.autograd.grad(y, inputs, self.grad_y.double())
        self.y, self.mean, self.var = y.detach(), mean.detach(), var.detach()
        self.dtype_error = torch.finfo(dtype).eps / 2

    @property
    def count(self) -> Tensor:
        return self.valid.sum().int().view(1).to(self.device)

    def run(self, running: RunningStatistics | None = None) -> tuple[Tensor, list[Tensor]]:
        to = lambda t: t.to(self.device)  # noqa: E731
        inputs = [to(t).clone().requires_grad_() for t in (self.x, self.weight, self.bias)]
        lengths = None if self.lengths is None else to(self.lengths)
        y = batch_norm(*inputs, self.count, eps=EPS, lengths=lengths, clip=self.clip, running=running)
        return y.detach(), list(torch.autograd.grad(y, inputs, to(self.grad_y)))

    def check(self, y: Tensor, gradients: list[Tensor]) -> None:
        """Compare with float64.

        Statistics are float64 sums of sums of up to 8 numbers in float32: a variance is wrong by at most 8 u of the
        mean square, u = 2^-24, as the mean is by 8 u of the root of it; what follows from them takes some ten
        operations in float32, then the type's own rounding.
        """
        u, dtype = 2.0**-24, self.dtype_error
        spread = 1 + float((self.mean.square() / (self.var + EPS)).max())
        wide = 16 * u * spread
        valid, y, grad_x = self.valid, y.cpu().double(), gradients[0].cpu().double()
        scale = float(self.y.abs().max())
        assert (y - self.y)[valid].abs().max() <= (wide + dtype) * scale + wide
        expected = self.gradients[0]
        difference = torch.where(valid[..., None], grad_x - expected, 0.0).abs()
        assert difference.max() <= (dtype + 4 * wide) * float(expected[valid].abs().max())
        if self.lengths is not None:
            assert (y[~valid] == 0).all() and (grad_x[~valid] == 0).all()
        for got, wanted, size in zip(gradients[1:], self.gradients[1:], (3.0, 1.0), strict=True):
            terms = float(self.valid.sum()) * float(self.grad_y.abs().max()) * size
            assert (got.cpu().double() - wanted).abs().max() <= wide * terms


@pytest.fixture(params=["cpu", "cpu, backwards", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where the kernels run; on a CPU from their own source, whose threads take turns from the first or last one on."""
    device, _, backwards = request.param.partition(", ")
    if device == "cpu":
        patch_run(monkeypatch, ds2_ops.batch_norm.op, backwards=bool(backwards))
    return device


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("shape", "ragged", "clip"),
    [
        ((9, 3, 40), False, None),
        ((70, 3, 72), False, None),
        ((1, 1, 8), False, None),
        ((3, 5, 9, 32), True, 1.5),
        ((2, 7, 131, 8), True, None),
        ((300, 4, 96), False, 2.0),
    ],
)
def test_values_and_gradients(
    shape: tuple[int, ...], ragged: bool, clip: float | None, dtype: torch.dtype, device: str
) -> None:
    case = Case(shape, dtype, device, ragged=ragged, clip=clip)
    first = case.run()
    case.check(*first)
    with default_dtype(torch.float64):
        second = case.run()
    for one, other in zip((first[0], *first[1]), (second[0], *second[1]), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("rows", [1, 63, 64, 1400, 22_400, 1_800_000])
@pytest.mark.parametrize("channels", [8, 32, 72, 1152, 4000])
@pytest.mark.parametrize("sms", [1, 14, 132, 170])
def test_chunks_cover_all_rows_and_follow_the_multiprocessors(rows: int, channels: int, sms: int) -> None:
    of_rows = Rows("bfloat16", rows, channels, sms)
    chunk_rows, chunks = of_rows.chunk
    assert chunks == 1 or chunks * of_rows.columns <= 2 * sms
    assert (chunks - 1) * chunk_rows < rows <= chunks * chunk_rows


def test_what_the_kernels_cannot_do_is_named() -> None:
    assert "need a CUDA GPU" in str(why_not(torch.float32, 8, torch.device("cpu")))
    assert "float64" in str(why_not(torch.float64, 8, torch.device("cuda")))
    assert "12 channels" in str(why_not(torch.bfloat16, 12, torch.device("cuda")))


def test_tensors_of_another_dtype_are_refused() -> None:
    x, weight, count = torch.zeros(4, 2, 8), torch.ones(8), torch.tensor([8], dtype=torch.int32)
    with pytest.raises(TypeError, match=r"count is torch\.int64, expected torch\.int32"):
        batch_norm(x, weight, weight, count.long(), eps=EPS)
    with pytest.raises(TypeError, match=r"bias is torch\.bfloat16, expected torch\.float32"):
        batch_norm(x.bfloat16(), weight, weight.bfloat16(), count, eps=EPS)


def test_running_averages_and_sums_over_ranks(device: str) -> None:
    case = Case((70, 3, 72), torch.float32, device, ragged=False)
    running = RunningStatistics(torch.full((72,), 3.0, device=device), torch.full((72,), 5.0, device=device), 0.25)
    alone = case.run(running)
    torch.testing.assert_close(running.mean.cpu().double(), 3.0 + 0.25 * (case.mean - 3.0))
    torch.testing.assert_close(running.var.cpu().double(), 5.0 + 0.25 * (case.var - 5.0))
    # two ranks that hold the same: all sums double, and what follows from them stays
    inputs = [t.to(device).clone().requires_grad_() for t in (case.x, case.weight, case.bias)]

    def twice(chunks: Tensor, own: Tensor | None) -> Tensor:
        total = chunks.sum(0, keepdim=True)
        if own is not None:
            own.copy_(total[0])
        return 2 * total

    def as_two() -> tuple[Tensor, ...]:
        y = batch_norm(*inputs, 2 * case.count, eps=EPS, reduce=twice)
        return y, *torch.autograd.grad(y, inputs, case.grad_y.to(device))

    y, *gradients = as_two()
    torch.testing.assert_close(y, alone[0], rtol=1e-6, atol=1e-6)
    for one, other in zip(gradients, alone[1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-5)
    with default_dtype(torch.float64):
        assert_same_bits(as_two(), (y, *gradients))
