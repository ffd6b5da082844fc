"""All kernels but those of recurrence and convolution compile for every architecture that they are launched on."""

import pytest
from ds2_ops import peers
from ds2_ops.batch_norm.rows import NUMBERS, Rows
from ds2_ops.classifier import classify_launch
from ds2_ops.convolution import block_launch
from ds2_ops.ctc import align, beam, denominator, paths
from ds2_ops.jit.build import build
from ds2_ops.jit.launch import Source
from ds2_ops.optimizer import ADAMW, NESTEROV, SQUARES
from ds2_ops.recurrent.backends.persistent import transposition
from ds2_ops.recurrent.plan.devices import DEVICES
from ds2_ops.recurrent.primitives import _move_launch
from ds2_ops.row_convolution import chain_launch
from ds2_ops.spectrum import log_power_launch
from support.compiled import report

CAPABILITIES = sorted({device.capability for device in DEVICES.values()})
QUICK = ((8, 0), (9, 0), CAPABILITIES[-1])
SMEM_BYTES = min(device.smem_bytes_per_block for device in DEVICES.values())


def sources() -> dict[str, Source]:
    """Kernels by name, for the least shared memory of a block."""
    channels = {dtype: 32 if dtype == "float16" else 1152 for dtype in NUMBERS}
    of_rows = {dtype: Rows(dtype, 10_000, channels[dtype], 132, 4, 50, clipped=True) for dtype in NUMBERS}
    kernels = ("sum_rows", "normalise", "sum_gradients", "backward_rows")
    return {f"{name} {dtype}": rows.launch(name).source for dtype, rows in of_rows.items() for name in kernels} | {
        "squares": SQUARES,
        "nesterov": NESTEROV,
        "adamw": ADAMW,
        "align": align.plan(300, SMEM_BYTES).source,
        "loss": paths.plan(300, 29, SMEM_BYTES).source,
        "loss slopes": paths.SLOPES,
        "denominator": denominator.plan(3000, 500, 30_000, 29, SMEM_BYTES, 16).source,
        "denominator shares": denominator.SHARES,
        "search": beam.plan(32, 29, 4, "word", SMEM_BYTES)[0].source,
        "trace": beam.TRACE,
        "append": beam.APPEND,
        "sum of 2 ranks": peers._sum_source(2),
        "sum of 8 ranks": peers._sum_source(8),
        "await ranks": peers.AWAIT,
        "add of ranks": peers.ADD,
        "transposition of 2 bytes": transposition(2),
        "transposition of 4 bytes": transposition(4),
        "layout": _move_launch("bfloat16").source,
    }


def early_sources() -> dict[str, Source]:
    """Kernels that start before the one before them has ended: from 9.0 on, elsewhere a library runs."""
    launches = {f"spectrum {size}": log_power_launch(size, size // 2, 1) for size in (160, 320, 1024)}
    launches |= {f"classifier {width}": classify_launch("Bf16", width, 1) for width in (36, 1152, 1536)}
    launches |= {
        f"lookahead {n}, {tau}": chain_launch("Bf16", n, tau, True, 1) for n, tau in ((5, 3), (1, 19), (10, 3))
    }
    launches |= {name: block_launch(name, 1) for name in ("join", "flatten", "windows")}
    return {name: launch.source for name, launch in launches.items()}


@pytest.mark.parametrize(
    "capability",
    [
        pytest.param(one, marks=[] if one in QUICK else pytest.mark.slow, id="{}.{}".format(*one))
        for one in CAPABILITIES
    ],
)
def test_kernels_compile_without_spills(capability: tuple[int, int]) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    arch = "sm_90a" if capability == (9, 0) else "sm_{}{}".format(*capability)
    kernels = sources() | (early_sources() if capability >= (9, 0) else {})
    local_bytes = {name: report(source.text, arch).local_bytes for name, source in kernels.items()}
    stack = 8 if capability == (10, 0) else 0  # the compiler sets these aside in some kernels for 10.0 and uses none
    if capability == (12, 0):
        assert local_bytes.pop("lookahead 10, 3") == 64  # it spills a little there
    assert not {name: count for name, count in local_bytes.items() if count > stack}


def test_the_compiler_says_what_is_recorded() -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    binary = build(NESTEROV.text, "sm_80")
    assert report(NESTEROV.text, "sm_80") == (binary.registers, binary.local_bytes, binary.loss)
