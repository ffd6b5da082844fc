"""The kernel cache without a GPU: hits, damage, folders that cannot be written, many builders, clear errors."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ds2_ops.jit import build, runtime

pytest.importorskip("cuda.bindings.nvrtc")

SOURCE = 'extern "C" __global__ void ds2_kernel(float* x) { x[threadIdx.x] *= 2.0f; }'


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DS2_OPS_CACHE_DIR", str(tmp_path / "kernels"))
    return tmp_path / "kernels"


def forbid_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_again(*_: object) -> build.Binary:
        raise AssertionError("compiled again")

    monkeypatch.setattr(build, "_compile", compile_again)


def test_second_build_reads_the_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = build.build(SOURCE)
    assert first.code.startswith(b"\x7fELF")
    assert first.registers > 0
    assert first.local_bytes == 0
    assert len(list(cache.iterdir())) == 1
    forbid_compiling(monkeypatch)
    assert build.build(SOURCE) == first


@pytest.mark.parametrize("damage", [b"", b"not a cache entry", None])
def test_damaged_entry_is_rebuilt(cache: Path, damage: bytes | None) -> None:
    first = build.build(SOURCE)
    (entry,) = cache.iterdir()
    whole = entry.read_bytes()
    entry.write_bytes(whole[:-100] + bytes(100) if damage is None else damage)
    assert build.build(SOURCE) == first
    assert entry.read_bytes() == whole


def test_all_that_decides_the_code_is_in_the_key(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build.build(SOURCE)
    build.build(SOURCE + "\n")
    monkeypatch.setenv("DS2_OPS_DEBUG", "1")
    build.build(SOURCE)
    assert len(list(cache.iterdir())) == 3


def test_a_header_in_a_folder_is_compiled_and_in_the_key(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    csrc = tmp_path / "csrc"
    (csrc / "inner").mkdir(parents=True)
    (csrc / "outer.cuh").write_text('#include "inner/number.cuh"\n')
    (csrc / "other.cuh").write_text("of no concern to this source\n")
    monkeypatch.setattr(build, "_CSRC", csrc)
    source = '#include "outer.cuh"\n' + SOURCE.replace("2.0f", "NUMBER")
    binaries = []
    for number in ("2.0f", "3.0f"):
        (csrc / "inner/number.cuh").write_text(f"constexpr float NUMBER = {number};\n")
        build._headers.cache_clear()  # one process never sees its headers change
        binaries.append(build.build(source))
    (csrc / "other.cuh").write_text("nor is its change\n")
    build._headers.cache_clear()
    binaries.append(build.build(source))
    (csrc / "inner/number.cuh").rename(csrc / "number.cuh")
    build._headers.cache_clear()
    with pytest.raises(RuntimeError, match=r"inner/number\.cuh"):
        build.build(source)
    build._headers.cache_clear()
    assert binaries[0].code != binaries[1].code == binaries[2].code
    assert len(list(cache.iterdir())) == 2


def test_what_the_compiler_read_is_what_the_key_says(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code of another header under the former one's key would be loaded by every process after this."""
    header = tmp_path / "csrc" / "number.cuh"
    header.parent.mkdir()
    header.write_text("constexpr float NUMBER = 2.0f;\n")
    monkeypatch.setattr(build, "_CSRC", header.parent)
    build._headers.cache_clear()
    source = '#include "number.cuh"\n' + SOURCE.replace("2.0f", "NUMBER")
    build.key(source)
    header.write_text("constexpr float NUMBER = 3.0f;\n")
    with pytest.raises(RuntimeError, match=r"headers in .*csrc changed since this process read them"):
        build.build(source)
    build._headers.cache_clear()
    assert not cache.exists()


def test_every_kernel_header_is_found() -> None:
    assert {"ptx/sync.cuh", "recurrent/cluster.cuh", "ctc/beam.cuh"} <= build._headers().keys()


def test_every_include_of_a_header_is_one_that_is_found() -> None:
    for text in build._headers().values():
        lines = [line for line in text.splitlines() if line.lstrip().startswith("#include")]
        assert len(lines) == len(build._INCLUDE.findall(text))
        assert set(build._INCLUDE.findall(text)) <= build._headers().keys()


def test_folder_that_cannot_be_written_costs_a_warning(cache: Path) -> None:
    cache.write_text("a file where the folder should be")
    build._warn_unwritable.cache_clear()
    with pytest.warns(RuntimeWarning, match=re.escape(str(cache)) + ".*DS2_OPS_CACHE_DIR"):
        binary = build.build(SOURCE)
    assert binary.code.startswith(b"\x7fELF")


def test_many_processes_at_once_share_one_entry(cache: Path) -> None:
    # build.py alone, as a top-level module: its package would import torch first.
    program = f"import hashlib, build; print(hashlib.sha256(build.build({SOURCE!r}).code).hexdigest())"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(build.__file__).parent), *sys.path])}
    builders = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(2)
    ]
    hashes = {builder.communicate()[0] for builder in builders}
    assert [builder.returncode for builder in builders] == [0, 0]
    assert len(hashes) == 1
    assert [entry.suffix for entry in cache.iterdir()] == [".cubin"]


def test_source_that_does_not_compile_shows_the_log(cache: Path) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)NVRTC cannot build this kernel for sm_90a.*undefined_name"):
        build.build(SOURCE.replace("2.0f", "undefined_name"))
    assert not cache.exists()


@pytest.mark.parametrize("package", ["cuda.bindings", "cuda.core"])
def test_missing_package_is_named(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    for needs_cuda in (lambda: build.build(SOURCE), lambda: runtime.smem_bytes_per_block(0)):
        build.compiler_version.cache_clear()
        runtime._driver.cache_clear()
        with pytest.raises(RuntimeError, match=r"cuda-core.*nvidia-cuda-nvrtc.*backend='gemm'"):
            needs_cuda()


def test_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("DS2_OPS_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert build.cache_dir() == tmp_path / "ds2_ops"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert build.cache_dir() == Path.home() / ".cache" / "ds2_ops"
