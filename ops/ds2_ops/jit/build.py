"""From a translation unit to machine code: NVRTC, and a cache on disk.

A kernel is named by its translation unit: a few lines that include headers of ``csrc`` and define one extern "C"
function called ``ds2_kernel``. Building needs no GPU, no nvcc and no host compiler.
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

ENTRY = "ds2_kernel"
LAUNCH_REGISTERS = "DS2_LAUNCH_REGISTERS"  # a constant of sources whose kernels must be compiled to so many a thread
_CSRC = Path(__file__).parents[1] / "csrc"
_INCLUDE = re.compile(r'^ *# *include +"([^"]+)"', re.MULTILINE)
_MAGIC = b"ds2_ops cubin 3\n"


@dataclass(frozen=True)
class Binary:
    """A compiled kernel and what the assembler said about it: registers, bytes of local memory a thread, losses.

    What does not fit into registers lies in local memory, and what they cannot hold: arrays indexed at run time, which
    are no spills to the assembler but cost as much. ``loss`` is what it calls a potential loss of performance, such as
    matrix instructions that wait for each other, or nothing.
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


def debug_waits() -> bool:
    """True if $DS2_OPS_DEBUG is set: kernels then bound every wait, say who waits for whom, and trap."""
    return os.environ.get("DS2_OPS_DEBUG", "0") not in ("", "0")


def build(source: str, arch: str = "sm_90a") -> Binary:
    """Compile one translation unit, or read it from the disk cache.

    Many ranks may build the same kernel at once: each compiles privately and publishes by an atomic rename. A cache
    folder that cannot be written costs a warning and a rebuild per process; a damaged entry is rebuilt.

    Args:
        source: CUDA C++ that defines ``ds2_kernel`` and may include any header of ``csrc``.
        arch: real architecture, for example "sm_90a".

    Returns:
        The cubin and its resource use.

    Raises:
        RuntimeError: NVRTC or cuda-core is missing, the source does not compile (the compiler's log is quoted), or a
            header was changed since this process read it.
    """
    entry = cache_dir() / f"{key(source, arch)}.cubin"
    try:
        return _decode(entry.read_bytes())
    except (OSError, ValueError):
        pass  # absent, unreadable or damaged: build it
    binary = _compile(source, arch, _defines())
    if _read_headers() != _headers():
        raise RuntimeError(f"headers in {_CSRC} changed since this process read them: it must be started again")
    try:
        _publish(entry, _encode(binary))
    except OSError as error:
        _warn_unwritable(str(entry.parent), str(error))
    return binary


def key(source: str, arch: str = "sm_90a") -> str:
    """Hash of everything that decides the machine code; arguments as of :func:`build`."""
    digest = hashlib.sha256()
    for part in (compiler_version(), arch, *_defines(), source):
        digest.update(part.encode() + b"\0")
    for name, text in sorted(_included(source).items()):
        digest.update(f"{name}\0{text}\0".encode())
    return digest.hexdigest()


def _defines() -> Sequence[str]:
    return ("DS2_DEBUG_WAIT",) if debug_waits() else ()


def _included(source: str) -> dict[str, str]:
    """Name and text of each header of ``csrc`` that a source includes, by itself or through another header."""
    headers, found, named = _headers(), dict[str, str](), _INCLUDE.findall(source)
    while named:
        name = named.pop()
        if name in headers and name not in found:
            found[name] = headers[name]
            named += _INCLUDE.findall(headers[name])
    return found


@functools.cache
def sources_digest() -> str:
    """Short hash of the compiler and all headers of ``csrc``: which version of the kernels this is."""
    texts = "\0".join(f"{name}\0{text}" for name, text in sorted(_headers().items()))
    return hashlib.sha256(f"{compiler_version()}\0{texts}".encode()).hexdigest()[:16]


@functools.cache
def _headers() -> dict[str, str]:
    return _read_headers()


def _read_headers() -> dict[str, str]:
    return {path.relative_to(_CSRC).as_posix(): path.read_text() for path in _CSRC.rglob("*.cuh")}


@functools.cache
def compiler_version() -> str:
    """Name NVRTC and cuda-core and their versions; RuntimeError, which says what to install, where they are missing."""
    try:
        from cuda.bindings import nvrtc
        from cuda.core import __version__ as core_version
    except ImportError as error:
        raise RuntimeError(
            "the persistent kernels need cuda-core, cuda-bindings and nvidia-cuda-nvrtc, which are not installed: "
            "pip install 'ds2-speech[gpu]', or use backend='gemm'"
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


def check_registers(source: str, registers: int) -> None:
    """Raise RuntimeError where a source says how many registers a thread starts with and was compiled to others.

    What `setmaxnreg` gives some warps, others have given back; a kernel compiled to fewer registers than were counted
    on would wait for ever.
    """
    expected = re.search(rf"{LAUNCH_REGISTERS} = (\d+)", source)
    if expected and int(expected[1]) != registers:
        raise RuntimeError(
            f"{compiler_version()} compiled a kernel to {registers} registers a thread; its warps count on "
            f"{expected[1]} to share out: pip install 'nvidia-cuda-nvrtc>=13.0,<13.1', or use backend='gemm'"
        )


def _encode(binary: Binary) -> bytes:
    about = {key: value for key, value in asdict(binary).items() if key != "code"}
    about["sha256"] = hashlib.sha256(binary.code).hexdigest()
    return _MAGIC + json.dumps(about).encode() + b"\n" + binary.code


def _decode(data: bytes) -> Binary:
    if not data.startswith(_MAGIC):
        raise ValueError("not a cache entry")
    about_line, _, code = data[len(_MAGIC) :].partition(b"\n")
    about = json.loads(about_line)
    if about.pop("sha256") != hashlib.sha256(code).hexdigest():
        raise ValueError("damaged cache entry")
    return Binary(code, **about)


def _publish(entry: Path, data: bytes) -> None:
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
        f"compiled kernels cannot be kept in {folder} ({error}); every process builds its own. "
        "Set DS2_OPS_CACHE_DIR to a folder that can be written.",
        RuntimeWarning,
        stacklevel=4,
    )
