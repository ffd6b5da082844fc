"""`ds2 cache`: shows and clears the caches on this disk."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ds2_ops.jit.build import cache_dir as kernel_dir

from ds2.commands.common import ALL_SETTINGS, Parser, with_search_path
from ds2.commands.compose import compose_config
from ds2.system.files import cache_dir, remove_stale


@dataclass(frozen=True)
class Cache:
    """A cache: its folder, the suffixes of its files, a description."""

    name: str
    folder: Path
    suffixes: tuple[str, ...]
    about: str

    def files(self) -> list[Path]:
        return [path for path in self.folder.glob("*") if path.suffix in self.suffixes]


def caches(work_dir: Path) -> list[Cache]:
    """Return all caches; the audio cache is that of a `data.work_dir`."""
    return [
        Cache("audio", work_dir / "audio_cache", (".audio", ".pcm"), "decoded audio; data.cache_gb bounds it"),
        Cache("kernels", kernel_dir(), (".cubin",), "compiled kernels; $DS2_OPS_CACHE_DIR"),
        Cache("arpa", cache_dir() / "arpa", (".arpa",), "language models as decode=native reads them; $DS2_CACHE_DIR"),
    ]


def make_parser() -> Parser:
    """Return the parser of `ds2 cache`."""
    names = [cache.name for cache in caches(Path())]
    parser = Parser(
        prog="ds2 cache",
        description="caches on this disk; whatever is cleared is made again when needed",
        settings=ALL_SETTINGS,
    )
    parser.add_argument(
        "--clear", action="append", choices=[*names, "all"], default=[], help="clear this cache; may be repeated"
    )
    parser.add_argument("overrides", nargs="*", help="data.work_dir=... or recipe=...: whose audio (default corpora)")
    return parser


def run(arguments: Sequence[str]) -> int:
    """`ds2 cache [--clear CACHE] [OVERRIDE ...]`: 0."""
    options = make_parser().parse_args(with_search_path(arguments))
    total = 0
    for cache in caches(Path(compose_config([*options.overrides, "run_dir=unused"]).data.work_dir)):
        files = cache.files()
        if cache.name in options.clear or "all" in options.clear:
            freed = sum(_remove(path) for path in files)
            remove_stale(cache.folder)
            print(f"{cache.name:<8} {freed / 1e6:10.1f} MB removed, {len(files)} files of {cache.folder}")
            continue
        stats = [path.stat() for path in files]
        size = sum(stat.st_size for stat in stats)
        total += size
        used = time.strftime(", last used %F", time.localtime(max(stat.st_mtime for stat in stats))) if stats else ""
        print(f"{cache.name:<8} {size / 1e6:10.1f} MB {len(files):6d} files{used}  {cache.folder}\n{'':9}{cache.about}")
    print(f"{'total':<8} {total / 1e6:10.1f} MB")
    return 0


def _remove(path: Path) -> int:
    """Remove a file and return its size; processes that have it open can still read it."""
    with suppress(FileNotFoundError):  # another process was faster
        size = path.stat().st_size
        path.unlink()
        return size
    return 0
