"""What the recurrence refuses, and which backend `auto` takes."""

import logging
from collections.abc import Callable

import pytest
import torch
from ds2_ops import lstm, recurrence
from ds2_ops.recurrent.backends.choose import why_not_unasked
from support.op_cases import CPU, CUDA, draw
from torch import Tensor
from torch.autograd import forward_ad


def example(**changes: object) -> dict[str, object]:
    return {"x": torch.zeros(3, 2, 4), "weight_hh": torch.zeros(4, 4), **changes}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (example(x=torch.zeros(3, 4)), ValueError, r"x has shape \(3, 4\), expected \(T, B, H\)"),
        (example(x=torch.zeros(3, 2, 4, dtype=torch.long)), TypeError, "x is torch.int64, allowed are torch.bfloat16"),
        (example(weight_hh=torch.zeros(4, 5)), ValueError, r"weight_hh has shape \(4, 5\), .* \(4, 4\)"),
        (example(weight_hh=torch.zeros(4, 4).double()), TypeError, "weight_hh is torch.float64 but x is torch.float32"),
        (example(weight_hh=torch.zeros(4, 4, device="meta")), ValueError, "weight_hh is on meta but x is on cpu"),
        (example(h0=torch.zeros(1, 2, 4)), ValueError, r"h0 has shape \(1, 2, 4\), expected \(B, H\) = \(2, 4\)"),
        (example(h0=torch.zeros(2, 4).half()), TypeError, "h0 is torch.float16 but x is torch.float32"),
        (example(lengths=torch.tensor([1])), ValueError, r"lengths has shape \(1,\), expected \(B,\) = \(2,\)"),
        (example(lengths=torch.tensor([1.0, 2.0])), TypeError, "lengths is torch.float32, allowed are torch.int32"),
        (example(lengths=torch.tensor([1, 4])), ValueError, r"lengths\[1\] is 4, allowed are 0 to T = 3"),
        (example(lengths=torch.tensor([-1, 3])), ValueError, r"lengths\[0\] is -1"),
        (example(nonlinearity="relu6"), ValueError, "'relu6', allowed are .* did you mean 'relu'"),
        (example(backend="persistant"), ValueError, "did you mean 'persistent'"),
        (example(clip=0.0), ValueError, "clip is 0.0, allowed is a positive"),
        (example(clip=float("inf")), ValueError, "cell='relu'"),
        (example(max_sms=0), ValueError, "max_sms is 0"),
        (example(backend="persistent"), RuntimeError, "'persistent' cannot run this: .* on cpu.*backend='cpu'"),
    ],
)
def test_bad_input_is_refused_with_the_way_out(
    arguments: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        recurrence(**arguments)


@pytest.mark.parametrize("op", [recurrence, lstm])
def test_forward_mode_derivatives_are_right_or_refused(op: Callable[..., tuple[Tensor, ...]]) -> None:
    gates = 4 if op is lstm else 1
    float64 = {"device": CPU, "dtype": torch.float64}
    x, weight_hh = draw(1, 5, 2, 3 * gates, **float64), draw(2, 3 * gates, 3, **float64)
    tangent = draw(3, *x.shape, **float64)
    # Central differences err by the square of their step, and by rounding over it.
    expected = (op(x + 1e-6 * tangent, weight_hh)[0] - op(x - 1e-6 * tangent, weight_hh)[0]) / 2e-6
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, tangent)
        for backend in ("auto", "gemm", "reference"):
            found = forward_ad.unpack_dual(op(dual, weight_hh, backend=backend)[0]).tangent
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)
        with pytest.raises(RuntimeError, match="no forward-mode derivative: use backend='gemm'"):
            op(dual, weight_hh, backend="persistent")


@pytest.mark.gpu
def test_cpu_backend_refuses_gpu_tensors() -> None:
    with pytest.raises(RuntimeError, match="backend 'cpu' cannot run tensors on cuda"):
        recurrence(torch.zeros(3, 2, 4, device=CUDA), torch.zeros(4, 4, device=CUDA), backend="cpu")


@pytest.mark.gpu
def test_auto_logs_its_choice_once(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.zeros(3, 2, 77, device=CUDA, dtype=torch.float64)
    with caplog.at_level(logging.INFO, logger="ds2_ops"):
        for _ in range(3):
            recurrence(x, x.new_zeros(77, 77))
    assert len([record for record in caplog.records if "H 77" in record.getMessage()]) == 1


@pytest.mark.parametrize(
    ("dtype", "precision", "leaves"),
    [
        (torch.bfloat16, "highest", False),
        (torch.float32, "highest", True),
        (torch.float32, "high", False),
    ],
)
def test_auto_leaves_tf32_to_those_who_allow_it(dtype: torch.dtype, precision: str, leaves: bool) -> None:
    reason = why_not_unasked(dtype, precision)
    assert (reason is not None and "TF32" in reason) if leaves else reason is None
