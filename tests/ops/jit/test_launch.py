"""Launches: arguments and settings that reach the driver, what errors say; on a GPU, what the driver makes of them."""

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from ds2_ops.jit import runtime
from ds2_ops.jit.build import build
from ds2_ops.jit.launch import Launch, Source, launch_on, names, parameters, run, translation_unit
from support.op_cases import CUDA
from torch import Tensor

SCALE = parameters("const float* x, double* y,\n    int count, float by, double bias")


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load nothing, on a GPU that is not here."""
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(runtime, "set_current", lambda index: None)
    monkeypatch.setattr(runtime, "device_name", lambda index: "the GPU")
    monkeypatch.setattr(runtime, "load", lambda source, index: "kernel")
    monkeypatch.setattr(runtime, "config", lambda *given: given)


@pytest.mark.usefixtures("without_gpu")
def test_a_failed_launch_names_search_and_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("out of something")

    monkeypatch.setattr(runtime, "load", refuse)
    with pytest.raises(RuntimeError, match="trace of 2 hypotheses failed on the GPU: out of something"):
        run(Launch(Source("", ()), threads=64), [], lambda: "trace of 2 hypotheses", torch.device("cuda", 0))


@pytest.mark.usefixtures("without_gpu")
def test_a_launch_that_the_driver_refuses_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = pytest.importorskip("cuda.bindings.driver")
    monkeypatch.setattr(runtime, "launch", lambda *_: driver.CUresult.CUDA_ERROR_INVALID_VALUE)
    message = "it failed on the GPU: launch of 6 blocks x 64 threads, cluster 2, 8 B .*: CUDA_ERROR_INVALID_VALUE"
    with pytest.raises(RuntimeError, match=message):
        launch_on(Launch(Source("", ()), 64, grid=6, cluster=2, smem_bytes=8), [], lambda: "it", 0, 0)


@pytest.mark.usefixtures("without_gpu")
def test_threads_that_launch_a_kernel_at_once_give_their_own_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    launch, both, read = Launch(Source("", parameters("int n")), 32), threading.Barrier(2), []

    def slow(config: object, kernel: object, addresses: int) -> int:
        both.wait(10)  # both have written
        read.append(ctypes.c_int.from_address(ctypes.c_void_p.from_address(addresses).value or 0).value)
        return 0

    monkeypatch.setattr(runtime, "launch", slow)
    threads = [threading.Thread(target=launch_on, args=(launch, [n], lambda: "it", 0, 0)) for n in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(read) == [1, 2]


@pytest.mark.usefixtures("without_gpu")
def test_another_device_is_the_current_one_while_it_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[object] = []

    @contextmanager
    def device(index: int) -> Iterator[None]:
        log.append(index)
        yield
        log.append("left")

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(runtime, "launch", lambda *_: log.append("launched"))
    for index in (0, 3):
        run(Launch(Source("", ()), 32), [], lambda: "it", torch.device("cuda", index))
    assert log == ["launched", 3, "launched", "left"]


def test_the_driver_is_told_how_to_launch() -> None:
    driver = pytest.importorskip("cuda.bindings.driver")
    plain = runtime.config(6, 64, 1, 0, False, False, 0)
    assert (plain.gridDimX, plain.gridDimY, plain.blockDimX, plain.blockDimZ, plain.numAttrs) == (6, 1, 64, 1, 0)
    given = runtime.config(12, 96, 4, 1024, True, True, 7)
    assert (given.gridDimX, given.blockDimX, given.sharedMemBytes, int(given.hStream)) == (12, 96, 1024, 7)
    names, values = driver.CUlaunchAttributeID, {attribute.id: attribute.value for attribute in given.attrs}
    cluster = values[names.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION].clusterDim
    assert (cluster.x, cluster.y, cluster.z) == (4, 1, 1)
    assert values[names.CU_LAUNCH_ATTRIBUTE_COOPERATIVE].cooperative == 1
    assert values[names.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION].programmaticStreamSerializationAllowed
    assert given.numAttrs == len(values) == 3


_HERE = parameters("int* found, int first, float by, long long more")
_HERE_SOURCE = Source(
    """extern "C" __global__ void ds2_kernel(int* found, int first, float by, long long more) {
        unsigned size = 1;
        #if __CUDA_ARCH__ >= 900
        asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(size));
        #endif
        if (threadIdx.x == 0) found[blockIdx.x] = first + int(by * blockIdx.x) + int(more >> 32) + 1000 * size;
    }""",
    _HERE,
)


@pytest.mark.gpu
@pytest.mark.parametrize("cooperative", [False, True])
@pytest.mark.parametrize("cluster", [1, *(pytest.param(size, marks=pytest.mark.hopper) for size in (4, 16))])
def test_blocks_clusters_and_arguments_are_those_asked_for(cluster: int, cooperative: bool) -> None:
    found = torch.zeros(33, dtype=torch.int32, device=CUDA)
    launch = Launch(_HERE_SOURCE, threads=64, grid=32, cluster=cluster, smem_bytes=1024, cooperative=cooperative)
    run(launch, [found, 7, 2.0, 5 << 32], lambda: "it", found.device)
    assert found.tolist() == [*(12 + 2 * block + 1000 * cluster for block in range(32)), 0]


@pytest.mark.gpu
def test_blocks_that_must_all_run_are_refused_where_the_gpu_cannot_hold_them() -> None:
    found = torch.zeros(10**5, dtype=torch.int32, device=CUDA)
    arguments = [found, 7, 0.0, 0]
    run(Launch(_HERE_SOURCE, 1024, grid=10**5), arguments, lambda: "it", found.device)
    assert (found == 1007).all()
    with pytest.raises(RuntimeError, match=r"it failed on .*: launch of 100000 blocks x 1024 .*TOO_LARGE"):
        run(Launch(_HERE_SOURCE, 1024, grid=10**5, cooperative=True), arguments, lambda: "it", found.device)


_LETS_FOLLOW = Source(
    """extern "C" __global__ void ds2_kernel(long long* times, int us) {
        long long now, start;
        asm volatile("griddepcontrol.launch_dependents;");
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
        do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)); while (now - start < 1000ll * us);
        times[0] = now;
    }""",
    parameters("long long* times, int us"),
)
_FOLLOWS = Source(
    """extern "C" __global__ void ds2_kernel(long long* times) {
        long long start;
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
        asm volatile("griddepcontrol.wait;" ::: "memory");
        times[1] = start;
        times[2] = *(volatile long long*)times;
    }""",
    parameters("long long* times"),
)


@pytest.mark.gpu
@pytest.mark.since_hopper
@pytest.mark.parametrize("graphed", [False, True])
@pytest.mark.parametrize("early", [False, True])
def test_a_kernel_starts_before_the_one_ahead_has_ended_only_where_it_is_to(early: bool, graphed: bool) -> None:
    times = torch.zeros(3, dtype=torch.int64, device=CUDA)

    def both() -> None:
        run(Launch(_LETS_FOLLOW, 32), [times, 2000], lambda: "it", times.device)
        run(Launch(_FOLLOWS, 32, early=early), [times], lambda: "it", times.device)

    both()  # loads the kernels
    graph = torch.cuda.CUDAGraph()
    if graphed:
        with torch.cuda.graph(graph):
            both()
    times.zero_()
    (graph.replay if graphed else both)()
    ahead_ended, started, seen = times.tolist()
    assert seen == ahead_ended > 0
    assert (started < ahead_ended) == early


@pytest.mark.gpu
def test_threads_that_launch_a_kernel_at_once_get_their_own_results() -> None:
    launch, count = Launch(_HERE_SOURCE, threads=32), 2000
    begin = threading.Barrier(2)
    results: list[Tensor] = []

    def many(first: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            found = torch.zeros(count, dtype=torch.int32, device=CUDA)
            begin.wait(60)
            for place in range(count):
                address = found.data_ptr() + 4 * place
                run(launch, [address, first + place, 0.0, 0], lambda: "it", found.device)
            torch.cuda.current_stream().synchronize()
        results.append(found - 1000 - first)

    run_together(lambda: many(0), lambda: many(10**6))
    assert len(results) == 2
    for found in results:
        assert found.tolist() == list(range(count))


def run_together(*work: Callable[[], None]) -> None:
    threads = [threading.Thread(target=one) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.gpu
def test_a_threads_first_call_to_cuda_may_be_a_launch() -> None:
    found, launch = torch.zeros(2, dtype=torch.int32, device=CUDA), Launch(_HERE_SOURCE, threads=32)
    stream, wrong = torch.cuda.Stream(), list[Exception]()
    torch.cuda.synchronize()

    def one() -> None:
        try:
            launch_on(launch, [found.data_ptr(), 7, 0.0, 0], lambda: "a new thread", 0, stream.cuda_stream)
        except RuntimeError as error:
            wrong.append(error)

    thread = threading.Thread(target=one)
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert not wrong and found[0] == 1007


def test_parameters_are_written_once() -> None:
    assert names(SCALE) == "x, y, count, by, bias"
    source = translation_unit(
        "a.cuh", SCALE, f"    f({names(SCALE)});\n", ahead="using A = int;\n", launch_bounds="64, 1"
    )
    assert source.text == (
        '#include "a.cuh"\nusing A = int;\n'
        'extern "C" __global__ void __launch_bounds__(64, 1) '
        "ds2_kernel(const float* x, double* y, int count, float by, double bias) {\n"
        "    f(x, y, count, by, bias);\n}\n"
    )
    assert "__launch_bounds__" not in translation_unit("a.cuh", SCALE, "").text


def test_arguments_take_the_types_of_their_parameters() -> None:
    source, x = translation_unit("a.cuh", SCALE, ""), torch.zeros(3)
    assert source.numbers([12, 0, 1, 0.0, 0.0])[0] == 12
    numbers = source.numbers([x, None, True, 2, 1.5])
    assert numbers == [x.data_ptr(), 0, 1, 2, 1.5]
    packed = source.pack(numbers)
    kinds = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_float, ctypes.c_double)
    addresses = (ctypes.c_void_p * len(kinds)).from_address(packed.addresses)
    read = [kind.from_address(address).value for kind, address in zip(kinds, addresses, strict=True)]
    assert read == [x.data_ptr(), None, 1, 2.0, 1.5]


def test_launches_at_once_have_memory_of_their_own() -> None:
    source = translation_unit("a.cuh", SCALE, "")
    first, second = (source.pack([12 * n, 0, n, 0.0, 0.0]) for n in (1, 2))
    assert (first.memory[0], second.memory[0]) == (12, 24)
    source.take_back(first)
    assert source.pack([36, 0, 3, 0.0, 0.0]) is first
    assert second.memory[0] == 24


def test_wrong_arguments_are_refused() -> None:
    source = translation_unit("a.cuh", SCALE, "")
    with pytest.raises(ValueError, match="4 arguments for the kernel's 5 parameters: pass x, y, count, by, bias"):
        source.numbers([None, None, 1, 2.0])
    with pytest.raises(TypeError, match=r"1\.5 is not a pointer: pass a tensor"):
        source.numbers([1.5, None, 1, 2.0, 0.0])
    with pytest.raises(TypeError, match=r"2\.5 is not an integer"):
        source.numbers([None, None, 2.5, 2.0, 0.0])
    with pytest.raises(TypeError, match="is not a number"):
        source.numbers([None, None, 2, torch.zeros(1), 0.0])


def test_a_unit_without_parameters_compiles(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    monkeypatch.setenv("DS2_OPS_CACHE_DIR", str(tmp_path))
    assert build(translation_unit("ptx/sync.cuh", (), "").text).code.startswith(b"\x7fELF")
