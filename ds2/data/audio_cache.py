"""Decoded audio on disk, utterance by utterance, for whatever list they stand in; damage is seen and mended."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ds2.audio.read import AudioError
from ds2.audio.shard import check_members, member_of
from ds2.config.schema import DataConfig
from ds2.data import cache_file
from ds2.data.cache_build import SUFFIX, decode, find_cheap, summary, write_cheap, write_files
from ds2.data.cache_file import CacheError, CacheFile, cache_bytes
from ds2.data.manifest import Utterance
from ds2.system.files import remove_stale

log = logging.getLogger(__name__)

_SPARE_BYTES = 256 << 20  # left free on the disk for checkpoints and logs
_NOWHERE = -1


class AudioStore(Sequence[NDArray[np.float32]]):
    """Waveforms (N,) float32 of utterances by position: from cache files, or decoded at each access.

    Both ways give the same bits: what is decoded is rounded to 16 bits too, so losing the cache never changes a run.

    Args:
        utterances: what to read.
        sample_rate_hz: rate of the waveforms returned.
        files: that hold some of them.
        places: (U, 2) which file and which row in it each utterance has; file -1 decodes. None decodes all.
    """

    def __init__(
        self,
        utterances: Sequence[Utterance],
        sample_rate_hz: int,
        files: Sequence[CacheFile] = (),
        places: NDArray[np.int64] | None = None,
    ) -> None:
        self.utterances = utterances
        self.sample_rate_hz = sample_rate_hz
        self.files = files
        self._places = np.full((len(utterances), 2), _NOWHERE) if places is None else places

    def __len__(self) -> int:
        return len(self.utterances)

    @property
    def cached(self) -> int:
        """How many utterances are read from the cache."""
        return int((self._places[:, 0] != _NOWHERE).sum())

    def __getitem__(self, position: int) -> NDArray[np.float32]:  # type: ignore[override]  # no slices
        """Return the waveform of one utterance; raises AudioError naming it where it must be decoded and cannot be."""
        file, row = self._places[position].tolist()
        pcm = None if file == _NOWHERE else self._cached(self.files[file], row, position)
        if pcm is None:
            pcm = decode(self.utterances[position], self.sample_rate_hz)
        waveform = pcm.astype(np.float32)
        waveform *= np.float32(1 / 32768)  # in place: one mixed-type multiplication takes ten times as long
        return waveform

    def _cached(self, file: CacheFile, row: int, position: int) -> NDArray[np.int16] | None:
        """The samples that the cache holds, or None, with a word, where they are damaged: then they are decoded."""
        try:
            return file.samples(row)
        except CacheError as error:
            log.warning(
                "audio cache %s is damaged: the samples of %s: %s. They are decoded again; the file is removed, the "
                "next start builds a new one. Check the disk",
                file.path,
                self.utterances[position].name,
                error,
            )
            file.discard()
            return None


def open_audio(utterances: Sequence[Utterance], data: DataConfig) -> AudioStore:
    """Return the audio of utterances as `data.cache` says, decoding into `data.work_dir` what is not cached there.

    What is cached depends on files, segment and rate alone: any list of utterances finds what others left. Where there
    is no room for all (`data.cache_gb`, the disk), what others used longest ago goes, and the rest is decoded at every
    access, with a warning; so it is where the folder cannot be written. Any number of processes may call this at once:
    each builds privately and publishes by rename. Let one rank call it before the others to build only once.

    Members of shards are read where they are, whatever `data.cache` says: they are cheap to read as ds2 writes them.

    Raises:
        AudioError: utterances cannot be read, or shards are damaged; names them.
    """
    if problems := check_members(u.audio_filepath for u in utterances):
        raise AudioError("\n".join(problems))
    if data.cache == "none" or not utterances:
        return AudioStore(utterances, data.sample_rate_hz)
    folder, keys = Path(data.work_dir) / "audio_cache", content_keys(utterances, data.sample_rate_hz)
    files = _open_files(folder)
    missing = {key: u for key, u in zip(keys, utterances, strict=True) if not member_of(u.audio_filepath)}
    for key in _known(files, keys, cheap_too=data.cache == "auto"):
        missing.pop(key, None)
    if missing:
        try:
            _extend(folder, files, keys, missing, data)
        except OSError as error:
            log.warning(
                "audio cache %s not written (%s): every epoch decodes its audio again. Free the disk, set "
                "data.work_dir to a larger one, or silence this with data.cache=none",
                folder,
                error,
            )
        files = _open_files(folder)
    places = _places(files, keys)
    used = sorted(set(places[:, 0].tolist()) - {_NOWHERE})
    for file in used:
        with suppress(OSError):  # a cache that others filled for all to read
            os.utime(files[file].path)
    kept = np.full(len(files) + 1, _NOWHERE)
    kept[used] = np.arange(len(used))
    places[:, 0] = kept[places[:, 0]]
    return AudioStore(utterances, data.sample_rate_hz, [files[file] for file in used], places)


def content_keys(utterances: Sequence[Utterance], sample_rate_hz: int) -> list[bytes]:
    """Hash what the samples of each depend on: its file's path, size and time of change, the segment, the rate.

    Raises:
        AudioError: a file is not there.
    """
    stats: dict[Path, tuple[int, int]] = {}
    keys = []
    for u in utterances:
        member = member_of(u.audio_filepath)
        file = member[0] if member else u.audio_filepath
        if file not in stats:
            try:
                stat = file.stat()
            except OSError as error:
                raise AudioError(f"{u.audio_filepath}: {error.strerror} ({u.source or u.name})") from error
            stats[file] = (stat.st_size, stat.st_mtime_ns)
        facts = [sample_rate_hz, str(u.audio_filepath.absolute()), *stats[file], u.offset_s, u.duration_s]
        keys.append(hashlib.sha256(json.dumps(facts).encode()).digest()[: cache_file.KEY_BYTES])
    return keys


def _open_files(folder: Path) -> list[CacheFile]:
    files = []
    for path in sorted(folder.glob("*" + SUFFIX)) if folder.is_dir() else []:
        try:
            files.append(CacheFile(path))
        except CacheError as error:
            log.warning("audio cache %s is damaged and built again: %s. Check the disk", path, error)
            with suppress(OSError):
                path.unlink()
    return files


def _places(files: Sequence[CacheFile], keys: Sequence[bytes], *, cheap_too: bool = False) -> NDArray[np.int64]:
    """(U, 2): file and row of each key, -1 of those that no file has."""
    wanted = np.frombuffer(b"".join(keys), "<i8").reshape(-1, 2)
    places = np.full((len(keys), 2), _NOWHERE)
    if not files:
        return places
    held, counts = np.concatenate([f.keys for f in files]), np.concatenate([f.counts for f in files])
    rows = np.concatenate([np.stack([np.full(len(f.keys), n), np.arange(len(f.keys))], 1) for n, f in enumerate(files)])
    chosen = slice(None) if cheap_too else counts > 0
    held, rows = held[chosen], rows[chosen]
    order = np.argsort(held[:, 0], kind="stable")
    at = np.searchsorted(held[order, 0], wanted[:, 0])
    inside = np.flatnonzero(at < len(order))
    found = inside[(held[order[at[inside]]] == wanted[inside]).all(axis=1)]
    places[found] = rows[order[at[found]]]
    return places


def _known(files: Sequence[CacheFile], keys: Sequence[bytes], *, cheap_too: bool) -> list[bytes]:
    found = _places(files, keys, cheap_too=cheap_too)[:, 0] != _NOWHERE
    return [key for key, there in zip(keys, found, strict=True) if there]


def _extend(
    folder: Path,
    files: Sequence[CacheFile],
    keys: Sequence[bytes],
    missing: dict[bytes, Utterance],
    data: DataConfig,
) -> None:
    """Decode what is missing and not cheap to read into new files, as far as there is room.

    Raises:
        AudioError: some cannot be read; names the first of them and counts the rest. What could be is kept.
        OSError: the folder cannot be written.
    """
    total = len(missing)
    cheap, errors = find_cheap(missing, data.sample_rate_hz) if data.cache == "auto" else (set(), [])
    if errors:
        raise AudioError(summary(errors, total))
    folder.mkdir(parents=True, exist_ok=True)
    remove_stale(folder)
    if cheap:
        write_cheap(folder, [key for key in missing if key in cheap])
    costly = {key: utterance for key, utterance in missing.items() if key not in cheap}
    used = {file for file, _ in _places(files, keys).tolist()}
    fitting = _make_room(folder, {file.path for n, file in enumerate(files) if n in used}, costly, data)
    if fitting and (errors := write_files(folder, fitting, data.sample_rate_hz)):
        raise AudioError(summary(errors, total))


def _make_room(
    folder: Path, used: set[Path], wanted: Mapping[bytes, Utterance], data: DataConfig
) -> dict[bytes, Utterance]:
    """Return the utterances, in order, that the cache can take, once what is in no use went as far as it must."""
    needed = {key: cache_bytes(round(u.duration_s * data.sample_rate_hz), 1) for key, u in wanted.items()}
    for old in folder.glob("*.pcm"):  # of versions that kept a file for each list
        old.unlink()
    sizes, ages = {}, {}
    for path in folder.glob("*" + SUFFIX):
        with suppress(OSError):  # another process removed it meanwhile
            sizes[path], ages[path] = path.stat().st_size, path.stat().st_mtime
    limit = 1e9 * data.cache_gb if data.cache_gb else float("inf")
    room = min(limit - sum(sizes.values()), shutil.disk_usage(folder).free - _SPARE_BYTES)
    for path in sorted(sizes.keys() - used, key=lambda path: ages[path]):
        if sum(needed.values()) <= room:
            break
        with suppress(OSError):
            path.unlink()
            room += sizes[path]
            log.info("audio cache: %s, %.1f MB, made room for newer ones", path, sizes[path] / 1e6)
    fitting, left = {}, room
    for key, utterance in wanted.items():
        if needed[key] > left:
            break
        fitting[key] = utterance
        left -= needed[key]
    if len(fitting) < len(wanted):
        log.warning(
            "audio cache %s: no room for %d of %d utterances: they need %.2f GB, there are %.2f (data.cache_gb=%g; "
            "%.2f GB of the disk are to spare): every epoch decodes them again. Raise data.cache_gb, free the disk, "
            "set data.work_dir to a larger one, or silence this with data.cache=none",
            folder,
            len(wanted) - len(fitting),
            len(wanted),
            sum(needed.values()) / 1e9,
            max(0.0, room) / 1e9,
            data.cache_gb,
            _SPARE_BYTES / 1e9,
        )
    return fitting
