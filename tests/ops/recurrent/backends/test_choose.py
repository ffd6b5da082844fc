"""What the recurrence refuses, and which backend `auto` takes."""

import logging
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from ds2_ops import lstm, recurrence
from ds2_ops.recurrent import calibrate
from ds2_ops.recurrent.backends import choose, persistent
from ds2_ops.recurrent.backends.choose import why_not_unasked
from ds2_ops.recurrent.plan.devices import DEVICES
from ds2_ops.recurrent.plan.problem import DeviceFacts
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


POOR = {
    "little shared memory": (replace(DEVICES["L4"], smem_bytes_per_block=4 << 10), "4 KiB of shared memory a block"),
    "little L2": (replace(DEVICES["L4"], l2_bytes=1 << 10), "0 MiB of L2"),
    "slice": (replace(DEVICES["A100"], name="A100 MIG 1g.5gb", sms=14), "A100 MIG 1g.5gb (14 in all)"),
    "one before Ampere": (replace(DEVICES["A10"], name="T4", capability=(7, 5)), "T4 has compute capability 7.5"),
    "old driver": (RuntimeError("the driver cannot load a kernel built for sm_86"), "the driver cannot load a kernel"),
}


@pytest.mark.parametrize("case", POOR)
def test_a_gpu_that_cannot_run_a_kernel_multiplies_and_says_why(
    case: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gpu, reason = POOR[case]

    def device_facts(index: int) -> DeviceFacts:
        if isinstance(gpu, RuntimeError):
            raise gpu
        return gpu

    monkeypatch.setattr(calibrate, "device_facts", device_facts)
    clear_caches()
    facts = ((5, 8, 4 * 1024), torch.bfloat16, torch.device("cuda", 0), "lstm", None, False, "")
    with caplog.at_level(logging.INFO):
        assert choose._resolve("auto", *facts) == "gemm"
    assert "runs on backend 'gemm': " in caplog.text and reason in caplog.text
    with pytest.raises(RuntimeError, match="backend 'persistent' cannot run this: ") as error:
        choose._resolve("persistent", *facts)
    assert reason in str(error.value)
    clear_caches()


def clear_caches() -> None:
    """Forget what was answered for the GPU of another test."""
    calibrate.choose_tile.cache_clear()
    persistent.why_not.cache_clear()
    choose._resolve.cache_clear()
