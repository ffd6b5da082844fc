"""From a translation unit to machine code: NVRTC, and a cache on disk.

A kernel is named by its translation unit: a few lines that include headers of ``csrc`` and define one extern "C"
function ``ds2_kernel``. Building needs no GPU, no nvcc and no host compiler.
"""

import functools
import hashlib
import io
import json
import os
import re
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ds2_ops.install import install_command

ENTRY = "ds2_kernel"
LAUNCH_REGISTERS = "DS2_LAUNCH_REGISTERS"  # a constant in some sources: registers that a thread must be compiled to
_CSRC = Path(__file__).parents[1] / "csrc"
_INCLUDE = re.compile(r'^ *# *include +"([^"]+)"', re.MULTILINE)
_MAGIC = b"ds2_ops cubin 3\n"


@dataclass(frozen=True)
class Binary:
    """A compiled kernel and the assembler's report on it.

    Attributes:
        code: the cubin, or PTX.
        registers: of a thread.
        local_bytes: local memory of a thread. It holds spilled registers, and arrays indexed at run time, which
            the assembler does not count as spills although they cost as much.
        loss: the assembler's warning of lost performance, such as matrix instructions that wait for each other; or "".
    """

    code: bytes
    registers: int
    local_bytes: int
    loss: str


def cache_dir() -> Path:
    """Folder of compiled kernels: $DS2_OPS_CACHE_DIR, else ds2_ops under $XDG_CACHE_HOME or ~/.cache."""
    if chosen := os.environ.get("DS2_OPS_CACHE_DIR"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ds2_ops"


def build(source: str, arch: str = "sm_90a") -> Binary:
    """Compile one translation unit, or read it from the disk cache.

    Many ranks may build the same kernel at once: each compiles privately and publishes by an atomic rename. A cache
    folder that cannot be written costs a warning and a rebuild per process; a damaged entry is rebuilt.

    Args:
        source: CUDA C++ that defines ``ds2_kernel`` and may include any header of ``csrc``.
        arch: real architecture, for example "sm_90a"; or a virtual one, "compute_80", whose result is PTX.

    Returns:
        The cubin and its resource use; of PTX that is not known, and 0.

    Raises:
        RuntimeError: NVRTC or cuda-core is missing, the source does not compile (the compiler's log is quoted), or a
            header was changed since this process read it.
    """
    entry = cache_dir() / f"{key(source, arch)}.cubin"
    try:
        return _decode(entry.read_bytes())
    except (OSError, ValueError):
        pass  # absent, unreadable or damaged: build it
    compiled = _to_ptx if arch.startswith("compute_") else _compile
    binary = compiled(source, arch, _defines())
    if _read_headers() != _headers():
        raise RuntimeError(f"headers in {_CSRC} changed since this process read them: start it again")
    try:
        publish(entry, _encode(binary))
    except OSError as error:
        _warn_unwritable(str(entry.parent), str(error))
    return binary


def key(source: str, arch: str = "sm_90a") -> str:
    """Hash of everything that decides the machine code; arguments as for :func:`build`."""
    digest = hashlib.sha256()
    for part in (compiler_version(), arch, *_defines(), source):
        digest.update(part.encode() + b"\0")
    for name, text in sorted(_included(source).items()):
        digest.update(f"{name}\0{text}\0".encode())
    return digest.hexdigest()


def _defines() -> Sequence[str]:
    """With $DS2_OPS_DEBUG set, kernels bound every wait, report who waits for whom, and trap."""
    return () if os.environ.get("DS2_OPS_DEBUG", "0") in ("", "0") else ("DS2_DEBUG_WAIT",)


def _included(source: str) -> dict[str, str]:
    """Name and text of each header of ``csrc`` that a source includes, directly or through another header."""
    headers, included, pending = _headers(), dict[str, str](), _INCLUDE.findall(source)
    while pending:
        name = pending.pop()
        if name in headers and name not in included:
            included[name] = headers[name]
            pending += _INCLUDE.findall(headers[name])
    return included


@functools.cache
def sources_digest() -> str:
    """Short hash of the compiler and all headers of ``csrc``, which names this version of the kernels."""
    texts = "\0".join(f"{name}\0{text}" for name, text in sorted(_headers().items()))
    return hashlib.sha256(f"{compiler_version()}\0{texts}".encode()).hexdigest()[:16]


@functools.cache
def _headers() -> dict[str, str]:
    return _read_headers()


def _read_headers() -> dict[str, str]:
    return {path.relative_to(_CSRC).as_posix(): path.read_text() for path in _CSRC.rglob("*.cuh")}


@functools.cache
def compiler_version() -> str:
    """Return the versions of NVRTC and cuda-core; RuntimeError with the package to install where they are missing."""
    try:
        from cuda.bindings import nvrtc
        from cuda.core import __version__ as core_version
    except ImportError as error:
        raise RuntimeError(
            "the persistent kernels need cuda-core, cuda-bindings and nvidia-cuda-nvrtc, which are not installed: "
            f"{install_command('gpu')}, or use backend='gemm'"
        ) from error
    try:
        status, major, minor = nvrtc.nvrtcVersion()
    except RuntimeError as error:
        raise RuntimeError(f"the NVRTC library does not load ({error}): pip install nvidia-cuda-nvrtc") from error
    return f"nvrtc {major}.{minor} {status} through cuda-core {core_version}"


def _compile(source: str, arch: str, defines: Sequence[str]) -> Binary:
    from cuda.core import Program, ProgramOptions

    options = ProgramOptions(
        name=ENTRY,
        arch=arch,
        std="c++17",
        include_path=str(_CSRC),
        define_macro=list(defines) or None,
        ptxas_options=["-v"],
        no_cache=True,  # a hit in the compiler's own cache comes without its report
    )
    log = io.StringIO()
    try:
        code = bytes(Program(source, "c++", options).compile("cubin", logs=log).code)
    except Exception as error:
        raise RuntimeError(f"NVRTC cannot build this kernel for {arch}: {error}\n{log.getvalue()}\n{source}") from error
    report = log.getvalue()
    registers = re.search(r"Used (\d+) registers", report)
    if registers is None:
        raise RuntimeError(f"NVRTC reports no resource use for {ENTRY} on {arch}; its log was: {report!r}")
    check_registers(source, int(registers[1]))
    frames = re.findall(r"(\d+) bytes stack frame", report)
    losses = re.findall(r"Potential Performance Loss: (.*)", report)
    return Binary(code, int(registers[1]), sum(map(int, frames)), " ".join(losses))


def _to_ptx(source: str, arch: str, defines: Sequence[str]) -> Binary:
    from cuda.bindings import nvrtc  # cuda-core asks a driver before it makes PTX

    options = [f"--gpu-architecture={arch}", "--std=c++17", f"--include-path={_CSRC}", *(f"-D{d}" for d in defines)]
    _, program = nvrtc.nvrtcCreateProgram(source.encode(), ENTRY.encode(), 0, [], [])
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    failed = int(status) != 0
    log, ptx = (nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog), (nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX)
    size, get = log if failed else ptx
    text = b" " * size(program)[1]
    get(program, text)
    nvrtc.nvrtcDestroyProgram(program)
    if failed:
        raise RuntimeError(f"NVRTC cannot build this kernel for {arch}: {text.decode()}\n{source}")
    return Binary(text, 0, 0, "")


def check_registers(source: str, registers: int, compiler: str | None = None) -> None:
    """Raise RuntimeError where a source names the registers of a thread and was compiled to another number.

    `setmaxnreg` moves registers from some warps to others. A kernel with fewer registers than its source assumes would
    wait for ever.
    """
    expected = re.search(rf"{LAUNCH_REGISTERS} = (\d+)", source)
    if expected and int(expected[1]) != registers:
        raise RuntimeError(
            f"{compiler or compiler_version()} compiled a kernel to {registers} registers a thread, its source needs "
            f"{expected[1]}: pip install 'nvidia-cuda-nvrtc>=13.0,<13.1', or use backend='gemm'"
        )


def _encode(binary: Binary) -> bytes:
    report = {key: value for key, value in asdict(binary).items() if key != "code"}
    report["sha256"] = hashlib.sha256(binary.code).hexdigest()
    return _MAGIC + json.dumps(report).encode() + b"\n" + binary.code


def _decode(data: bytes) -> Binary:
    if not data.startswith(_MAGIC):
        raise ValueError("not a cache entry")
    line, _, code = data[len(_MAGIC) :].partition(b"\n")
    report = json.loads(line)
    if report.pop("sha256") != hashlib.sha256(code).hexdigest():
        raise ValueError("damaged cache entry")
    return Binary(code, **report)


def publish(entry: Path, data: bytes) -> None:
    """Write a file of the cache so that other processes see all of it or none; OSError where that is not possible."""
    entry.parent.mkdir(parents=True, exist_ok=True)
    handle, private = tempfile.mkstemp(dir=entry.parent, prefix=entry.stem[:16], suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(private, entry)
    except BaseException:
        os.unlink(private)
        raise


@functools.cache
def _warn_unwritable(folder: str, error: str) -> None:
    warnings.warn(
        f"compiled kernels cannot be written to {folder} ({error}): every process builds its own. "
        "Set DS2_OPS_CACHE_DIR to a writable folder.",
        RuntimeWarning,
        stacklevel=4,
    )
