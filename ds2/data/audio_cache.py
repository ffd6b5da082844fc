"""Decoded audio on disk: one file of 16-bit samples for a list of utterances, built once; damage is seen and mended."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from ds2.audio.read import AudioError, read_audio
from ds2.config.schema import DataConfig
from ds2.data import cache_file
from ds2.data.cache_file import CacheError, CacheFile, CacheWriter, cache_bytes
from ds2.data.manifest import Utterance
from ds2.system.files import sweep, whole_file
from ds2.system.machine import usable_cores

log = logging.getLogger(__name__)

_CHUNK = 16  # utterances a thread takes at a time
_ERRORS_NAMED = 10
_SPARE_BYTES = 256 << 20  # left free on the disk for checkpoints and logs


class AudioStore(Sequence[NDArray[np.float32]]):
    """Waveforms (N,) float32 of utterances by position: from the cache file, or decoded at each access.

    Both ways give the same bits: what is decoded is rounded to 16 bits too, so losing the cache never changes a run.

    Args:
        utterances: what to read.
        sample_rate_hz: rate of the waveforms returned.
        cache: of the same utterances and rate; None decodes.
    """

    def __init__(self, utterances: Sequence[Utterance], sample_rate_hz: int, cache: CacheFile | None = None) -> None:
        self.utterances = utterances
        self.sample_rate_hz = sample_rate_hz
        self.cache = cache

    def __len__(self) -> int:
        return len(self.utterances)

    def __getitem__(self, position: int) -> NDArray[np.float32]:  # type: ignore[override]  # no slices
        """Return the waveform of one utterance; raises AudioError naming it where it must be decoded and cannot be."""
        pcm = self._cached(self.cache, position) if self.cache else None
        if pcm is None:
            pcm = _decode(self.utterances[position], self.sample_rate_hz)
        waveform = pcm.astype(np.float32)
        waveform *= np.float32(1 / 32768)  # in place: one mixed-type multiplication takes ten times as long
        return waveform

    def _cached(self, cache: CacheFile, position: int) -> NDArray[np.int16] | None:
        """The samples that the cache holds, or None, with a word, where they are damaged: then it is built anew."""
        try:
            return cache.samples(position)
        except CacheError as error:
            log.warning(
                "audio cache %s is damaged: the samples of %s: %s. They are decoded again; the file is removed, the "
                "next start builds a new one. Check the disk",
                cache.path,
                self.utterances[position].name,
                error,
            )
            cache.discard()
            return None


def open_audio(utterances: Sequence[Utterance], data: DataConfig) -> AudioStore:
    """Return the audio of utterances as `data.cache` says, building a missing cache under `data.work_dir`.

    Where the cache cannot be written (disk full, folder not writable) the reason is logged as a warning and every
    access decodes. Any number of processes may call this at once: each builds privately and publishes by rename. Let
    one rank call it before the others to build only once.

    Raises:
        AudioError: utterances cannot be read; names them.
    """
    if data.cache == "none" or not utterances:
        return AudioStore(utterances, data.sample_rate_hz)
    key = _content_key(utterances, data.sample_rate_hz)
    path = Path(data.work_dir) / "audio_cache" / f"{key.hex()[:24]}.pcm"
    if path.is_file():
        try:
            return AudioStore(utterances, data.sample_rate_hz, CacheFile(path, len(utterances), key))
        except CacheError as error:
            log.warning("audio cache %s is damaged and built again: %s. Check the disk", path, error)
    try:
        build_cache(utterances, data.sample_rate_hz, path, key)
        return AudioStore(utterances, data.sample_rate_hz, CacheFile(path, len(utterances), key))
    except (OSError, CacheError) as error:
        log.warning(
            "audio cache %s not written (%s): every epoch decodes its audio again. Free the disk, set "
            "data.work_dir to a larger one, or silence this with data.cache=none",
            path,
            error,
        )
        return AudioStore(utterances, data.sample_rate_hz)


def build_cache(utterances: Sequence[Utterance], sample_rate_hz: int, path: Path, key: bytes) -> None:
    """Decode utterances in parallel into the cache file `path` of their `key`, which appears whole or not at all.

    Threads, not processes: decoding and resampling leave the interpreter lock, and nothing need be forked or pickled.

    Raises:
        AudioError: some cannot be read; names the first of them and counts the rest.
        OSError: too little space, or the folder cannot be written.
    """
    started = time.monotonic()
    path.parent.mkdir(parents=True, exist_ok=True)
    sweep(path.parent)
    samples = round(sum(u.duration_s for u in utterances) * sample_rate_hz)
    _require_space(path.parent, cache_bytes(samples, len(utterances)))
    errors: dict[int, AudioError] = {}

    def decode_chunk(first: int) -> None:
        for position in range(first, min(first + _CHUNK, len(utterances))):
            try:
                pcm = _decode(utterances[position], sample_rate_hz)
            except AudioError as error:
                errors[position] = error
                continue
            writer.add(position, pcm)
            progress.update()

    threads = ThreadPoolExecutor(max_workers=usable_cores())
    progress = tqdm(total=len(utterances), desc="decoding audio", unit="utt", disable=None)
    try:
        with whole_file(path) as partial, partial.open("wb") as file:
            writer = CacheWriter(file, len(utterances), key)
            for _ in threads.map(decode_chunk, range(0, len(utterances), _CHUNK)):
                pass
            if errors:
                raise AudioError(_summary(errors, len(utterances)))
            writer.finish()
    except BaseException:
        threads.shutdown(cancel_futures=True)
        raise
    finally:
        threads.shutdown()
        progress.close()
    elapsed_s = time.monotonic() - started
    log.info(
        "audio cache %s: %d utterances, %.1f MB, %.1f s", path, len(utterances), path.stat().st_size / 1e6, elapsed_s
    )


def _decode(utterance: Utterance, sample_rate_hz: int) -> NDArray[np.int16]:
    waveform = read_audio(utterance.audio_filepath, sample_rate_hz, utterance.offset_s, utterance.duration_s)
    pcm: NDArray[np.int16] = np.clip(np.rint(waveform * 32768), -32768, 32767).astype(np.int16)
    return pcm


def _content_key(utterances: Sequence[Utterance], sample_rate_hz: int) -> bytes:
    """Hash what the samples depend on: each file's path, size and time of change, the segment, the rate."""
    digest = hashlib.sha256(json.dumps([cache_file.VERSION, sample_rate_hz]).encode())
    stats: dict[Path, tuple[int, int]] = {}
    for u in utterances:
        if u.audio_filepath not in stats:
            try:
                stat = u.audio_filepath.stat()
            except OSError as error:
                raise AudioError(f"{u.audio_filepath}: {error.strerror} ({u.source or u.name})") from error
            stats[u.audio_filepath] = (stat.st_size, stat.st_mtime_ns)
        digest.update(json.dumps([str(u.audio_filepath), *stats[u.audio_filepath], u.offset_s, u.duration_s]).encode())
    return digest.digest()


def _require_space(folder: Path, needed_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed_bytes + _SPARE_BYTES > free:
        raise OSError(
            errno.ENOSPC,
            f"needs {needed_bytes / 1e9:.2f} GB and {_SPARE_BYTES / 1e9:.2f} GB to spare, {free / 1e9:.2f} free",
        )


def _summary(errors: dict[int, AudioError], total: int) -> str:
    named = [str(errors[position]) for position in sorted(errors)[:_ERRORS_NAMED]]
    more = f"\n... and {len(errors) - len(named)} more" if len(errors) > len(named) else ""
    return f"{len(errors)} of {total} utterances cannot be read:\n" + "\n".join(named) + more
