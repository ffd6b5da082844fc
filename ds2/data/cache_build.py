"""Utterances decoded into files of the audio cache, on all cores; and which of them are cheap to read instead."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from ds2.audio.read import AudioError, read_audio, reads_cheaply
from ds2.data.cache_file import CacheWriter
from ds2.data.manifest import Utterance
from ds2.system.files import atomic_file
from ds2.system.machine import usable_cores

log = logging.getLogger(__name__)

SUFFIX = ".audio"
_FILE_SAMPLES = 1 << 29  # in one file, 1 GiB: a build that is killed loses no more
_ERRORS_NAMED = 10


def decode(utterance: Utterance, sample_rate_hz: int) -> NDArray[np.int16]:
    """Return the samples (N,) of an utterance; raises AudioError where it cannot be read."""
    waveform = read_audio(utterance.audio_filepath, sample_rate_hz, utterance.offset_s, utterance.duration_s)
    pcm: NDArray[np.int16] = np.clip(np.rint(waveform * 32768), -32768, 32767).astype(np.int16)
    return pcm


def find_cheap(utterances: Mapping[bytes, Utterance], sample_rate_hz: int) -> tuple[set[bytes], list[AudioError]]:
    """Return the keys of utterances that need no cache, by the headers of their files, and what is wrong with others.

    Args:
        utterances: by key.
        sample_rate_hz: wanted.
    """

    def check(key: bytes) -> bool:
        u = utterances[key]
        return reads_cheaply(u.audio_filepath, sample_rate_hz, u.offset_s, u.duration_s)

    cheap, errors = set(), list[AudioError]()
    with closing(_on_all_cores(check, list(utterances))) as results:
        for key, found in tqdm(results, "looking at audio", len(utterances), unit="utt", disable=None):
            if isinstance(found, AudioError):
                errors.append(found)
            elif found:
                cheap.add(key)
    return cheap, errors


def write_files(folder: Path, utterances: Mapping[bytes, Utterance], sample_rate_hz: int) -> list[AudioError]:
    """Decode utterances into files of about 1 GiB, each of which appears whole or not at all; return what failed.

    Threads, not processes: decoding and resampling leave the interpreter lock, and nothing need be forked or pickled.
    What ends this from outside ends it at once: it waits for no thread.

    Raises:
        OSError: the folder cannot be written or the disk is full.
    """
    started, errors = time.monotonic(), list[AudioError]()
    hours = sum(u.duration_s for u in utterances.values()) / 3600
    log.info("decoding %d utterances, %.2f h, into the audio cache %s", len(utterances), hours, folder)
    with tqdm(total=len(utterances), desc="decoding audio", unit="utt", disable=None) as progress:
        for keys in _parts(utterances, sample_rate_hz):
            with suppress(AudioError), atomic_file(_path(folder, keys)) as partial, CacheWriter(partial) as writer:
                errors += _fill(writer, keys, utterances, sample_rate_hz, progress)
                if not len(writer):
                    raise errors[-1]  # a file that holds nothing is not published
    log.info("audio cache: %d utterances, %.1f s", len(utterances) - len(errors), time.monotonic() - started)
    return errors


def _fill(
    writer: CacheWriter, keys: list[bytes], utterances: Mapping[bytes, Utterance], sample_rate_hz: int, progress: tqdm
) -> list[AudioError]:
    def add(key: bytes) -> None:
        writer.add(key, decode(utterances[key], sample_rate_hz))

    errors = []
    with closing(_on_all_cores(add, keys)) as results:
        for _, found in results:
            errors += [found] if isinstance(found, AudioError) else []
            progress.update()
    return errors


def _parts(utterances: Mapping[bytes, Utterance], sample_rate_hz: int) -> Iterator[list[bytes]]:
    """Part keys, in order, into those of one file each."""
    keys, samples = list[bytes](), 0.0
    for key, utterance in utterances.items():
        keys.append(key)
        samples += utterance.duration_s * sample_rate_hz
        if samples >= _FILE_SAMPLES:
            yield keys
            keys, samples = [], 0.0
    if keys:
        yield keys


def _path(folder: Path, keys: Iterable[bytes]) -> Path:
    """Builders of the same utterances write files of the same name: the last takes the place of the others."""
    return folder / (hashlib.sha256(b"".join(keys)).hexdigest()[:24] + SUFFIX)


def _on_all_cores(work: Callable[[bytes], Any], keys: list[bytes]) -> Generator[tuple[bytes, Any], None, None]:
    """Yield each key and what `work` returns or the AudioError that it raises, as they come; closing waits for none."""

    def attempt(key: bytes) -> tuple[bytes, Any]:
        try:
            return key, work(key)
        except BaseException as error:  # one that ended a thread of the pool would never arrive
            return key, error

    with ThreadPool(usable_cores()) as threads:
        for key, found in threads.imap_unordered(attempt, keys):
            if isinstance(found, BaseException) and not isinstance(found, AudioError):
                raise found
            yield key, found


def write_cheap(folder: Path, keys: Sequence[bytes]) -> None:
    """Note that these keys are of utterances that need no cache: their headers are not looked at again."""
    with atomic_file(_path(folder, keys)) as partial, CacheWriter(partial) as writer:
        for key in keys:
            writer.add(key, np.zeros(0, np.int16))


def summary(errors: Sequence[AudioError], total: int) -> str:
    """Name the first of what is wrong with utterances and count the rest."""
    texts = sorted(map(str, errors))
    more = f"\n... and {len(texts) - _ERRORS_NAMED} more" if len(texts) > _ERRORS_NAMED else ""
    return f"{len(texts)} of {total} utterances cannot be read:\n" + "\n".join(texts[:_ERRORS_NAMED]) + more
