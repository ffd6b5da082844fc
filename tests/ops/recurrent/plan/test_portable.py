"""Tiles for GPUs other than Hopper's, without a GPU: they fit each of them, and compile for its architecture."""

from dataclasses import replace

import pytest
from ds2_ops.recurrent.cells import CELLS
from ds2_ops.recurrent.plan.choose import choose, largest_grid_hidden, space
from ds2_ops.recurrent.plan.devices import DEVICES
from ds2_ops.recurrent.plan.problem import Design, DeviceFacts, DoesNotFit, Problem
from hypothesis import given
from hypothesis import strategies as st
from support.compiled import assert_no_spills
from support.persistent_cases import one_a_kernel

OTHERS = {name: device for name, device in DEVICES.items() if device.capability != (9, 0)}
CAPABILITIES = sorted({device.capability for device in DEVICES.values()})


@given(
    name=st.sampled_from(sorted(OTHERS)),
    hidden=st.integers(1, 3000),
    batch=st.integers(1, 200),
    dtype=st.sampled_from(["bfloat16", "float16", "float32"]),
    cell=st.sampled_from(sorted(CELLS)),
    backward=st.booleans(),
)
def test_every_launch_fits_the_gpu_and_covers_the_problem(
    name: str, hidden: int, batch: int, dtype: str, cell: str, backward: bool
) -> None:
    device = OTHERS[name]
    try:
        choices = space(Problem(batch, hidden, dtype, cell, backward), device)
    except DoesNotFit as reason:
        assert "backend='gemm'" in str(reason) and name in str(reason)
        return
    for choice in choices:
        launch = choice.launch
        assert launch.cluster == 1 and launch.smem_bytes <= device.smem_bytes_per_block
        assert launch.threads * 32 <= device.registers
        if choice.design is Design.PORTABLE:
            assert launch.cooperative and launch.grid <= device.sms
            assert choice.rows * launch.grid >= hidden * (1 if backward else CELLS[cell].gates)
            assert 4 * choice.exchange_words <= device.l2_bytes // 2
        else:
            assert choice.design is Design.UNITS and not launch.cooperative


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_largest_that_fits_and_one_past_it(name: str, dtype: str) -> None:
    device = OTHERS[name]
    for cell in ("relu", "lstm" if dtype == "bfloat16" else "gru_after"):
        largest = largest_grid_hidden(Problem(4, 1, dtype, cell, False), device, device.sms)
        assert largest >= (1280 if cell == "relu" else 480)
        for backward in (False, True):
            assert choose(Problem(4, largest, dtype, cell, backward), device).design is Design.PORTABLE
        with pytest.raises(DoesNotFit, match=rf"on {name} .* KiB .* MiB of L2, keep at most .*{largest} x {largest} "):
            for backward in (False, True):
                choose(Problem(4, largest + 1, dtype, cell, backward), device)


def test_a_slice_of_a_gpu_holds_what_its_multiprocessors_do() -> None:
    slice_of_gpu = replace(DEVICES["A100"], name="A100 MIG 1g.5gb", sms=14, l2_bytes=5 << 20)
    assert choose(Problem(8, 256, "bfloat16", "lstm", False), slice_of_gpu).launch.grid <= 14
    with pytest.raises(DoesNotFit, match=r"14 multiprocessors that may be used on A100 MIG 1g.5gb \(14 in all\)"):
        choose(Problem(8, 1024, "bfloat16", "lstm", False), slice_of_gpu)


@given(
    capability=st.sampled_from(CAPABILITIES),
    sms=st.integers(1, 20),
    smem_kib=st.integers(0, 227),
    l2_kib=st.integers(0, 6 << 10),
    registers=st.sampled_from([32_768, 65_536]),
    clusters=st.dictionaries(st.sampled_from([2, 4, 8, 16]), st.integers(0, 2)),
    hidden=st.integers(1, 1500),
    batch=st.integers(1, 100),
    dtype=st.sampled_from(["bfloat16", "float32"]),
    cell=st.sampled_from(sorted(CELLS)),
    backward=st.booleans(),
)
def test_a_gpu_with_too_little_of_anything_gets_tiles_that_fit_or_a_reason(
    capability: tuple[int, int],
    sms: int,
    smem_kib: int,
    l2_kib: int,
    registers: int,
    clusters: dict[int, int],
    hidden: int,
    batch: int,
    dtype: str,
    cell: str,
    backward: bool,
) -> None:
    poor = DeviceFacts("poor", capability, sms, smem_kib << 10, clusters, 1980, l2_kib << 10, registers)
    try:
        choices = space(Problem(batch, hidden, dtype, cell, backward), poor)
    except DoesNotFit as reason:
        assert "backend='gemm'" in str(reason) and "on poor" in str(reason)
        return
    for choice in choices:
        launch = choice.launch
        assert launch.smem_bytes <= poor.smem_bytes_per_block
        assert launch.threads * 32 <= poor.registers
        assert launch.grid <= sms or not launch.cooperative
        assert launch.cluster == 1 or clusters[launch.cluster] * launch.cluster >= launch.cluster
        if choice.design is Design.PORTABLE:
            assert 4 * choice.exchange_words <= poor.l2_bytes // 2


def test_a_slice_of_a_hopper_gpu_has_fewer_clusters() -> None:
    slice_of_gpu = replace(DEVICES["H100"], name="H100 MIG 1g.10gb", sms=16, l2_bytes=6 << 20, active_clusters={8: 1})
    chosen = choose(Problem(8, 512, "bfloat16", "relu", True), slice_of_gpu)
    assert chosen.launch.grid <= 16 and chosen.launch.cluster <= 8
    with pytest.raises(DoesNotFit, match=r"16 multiprocessors that may be used on H100 MIG 1g.10gb .*backend='gemm'"):
        choose(Problem(8, 1152, "bfloat16", "lstm", True), slice_of_gpu)


def test_a_slice_of_a_hopper_gpu_without_clusters_has_the_portable_design() -> None:
    slice_of_gpu = replace(DEVICES["H100"], name="H100 MIG 1g.10gb", sms=16, l2_bytes=6 << 20, active_clusters={2: 0})
    assert {c.design for c in space(Problem(8, 96, "bfloat16", "relu", True), slice_of_gpu)} == {
        Design.UNITS,
        Design.PORTABLE,
    }
    for backward in (False, True):
        choices = space(Problem(8, 512, "bfloat16", "relu", backward), slice_of_gpu)
        assert {c.design for c in choices} == {Design.PORTABLE}
        assert all(c.launch.cluster == 1 and c.launch.grid <= 16 for c in choices)
    largest = largest_grid_hidden(Problem(4, 1, "bfloat16", "relu", False), slice_of_gpu, 16)
    assert largest >= 512
    with pytest.raises(DoesNotFit, match=rf"\(16 in all\), with 227 KiB .* keep at most {largest} x {largest} weights"):
        choose(Problem(4, largest + 64, "bfloat16", "relu", True), slice_of_gpu)
    with pytest.raises(DoesNotFit, match=r"H100 MIG 1g.10gb has none: run one direction after the other"):
        choose(Problem(4, 256, "bfloat16", "relu", False, directions=2), slice_of_gpu)


def test_large_batches_leave_room_in_a_small_cache() -> None:
    small, large = (choose(Problem(64, 256, "float32", "lstm", True), DEVICES[name]) for name in ("RTX 3090", "L40S"))
    assert small.groups < large.groups
    assert small.work.tiles > large.work.tiles


def test_both_directions_follow_one_another() -> None:
    with pytest.raises(DoesNotFit, match=r"L4 has 8\.9: run one direction after the other"):
        choose(Problem(4, 256, "bfloat16", "relu", False, directions=2), DEVICES["L4"])


def test_hopper_keeps_its_designs() -> None:
    for name in ("H100", "H200"):
        designs = {c.design for c in space(Problem(8, 512, "bfloat16", "lstm", True), DEVICES[name])}
        assert Design.PORTABLE not in designs and Design.CLUSTER in designs


# All tiles of the sizes of the benchmarks; the largest sizes, where weights fill the registers.
PROBLEMS = [
    Problem(4, 1152, "bfloat16", "relu", True),
    Problem(4, 1152, "bfloat16", "relu", False),
    *(Problem(16, 1024, "bfloat16", "lstm", backward) for backward in (False, True)),
    *(Problem(8, 512, "bfloat16", "gru_after", backward) for backward in (False, True)),
    *(Problem(20, 1024, "bfloat16", "gru_before", backward) for backward in (False, True)),
    *(Problem(8, 640, "float32", "lstm", backward) for backward in (False, True)),
    *(Problem(8, 513, "float16", "gru_after", backward) for backward in (False, True)),
    *(Problem(4, 2560, "bfloat16", "tanh", backward) for backward in (False, True)),
    *(Problem(4, 1280, "float32", "tanh", backward) for backward in (False, True)),
]


@pytest.mark.parametrize(
    "capability",
    [
        pytest.param(one, marks=[] if one == (8, 0) else pytest.mark.slow, id="{}.{}".format(*one))
        for one in CAPABILITIES
    ],
)
def test_tiles_compile_without_spills(capability: tuple[int, int]) -> None:
    # As many multiprocessors as most, and as much shared memory as any. 9.0 is for kernels that are tried out there.
    device = replace(DEVICES["H200"], name="any", capability=(8, 0) if capability == (9, 0) else capability)
    for problem in PROBLEMS:
        choices = one_a_kernel(space(problem, device))
        assert_no_spills((c for c in choices if c.design is Design.PORTABLE), "sm_{}{}".format(*capability))


@pytest.mark.parametrize("arch", ["sm_80", pytest.param("sm_120", marks=pytest.mark.slow)])
@pytest.mark.parametrize("cell", ["relu", "lstm", "gru_after", "gru_before"])
def test_tiles_of_one_block_compile_without_spills(arch: str, cell: str) -> None:
    for dtype, hidden in (("bfloat16", 96), ("float32", 48)):
        for backward in (False, True):
            choices = one_a_kernel(space(Problem(8, hidden, dtype, cell, backward), DEVICES["A100"]))
            assert_no_spills((c for c in choices if c.design is Design.UNITS), arch)
