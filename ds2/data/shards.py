"""Corpora as shards: tar files in WebDataset's layout, each with an index, and a manifest that names their members."""

from __future__ import annotations

import hashlib
import io
import json
import logging
import re
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.pool import ThreadPool
from pathlib import Path

import numpy as np
import soundfile
from numpy.typing import NDArray
from tqdm import tqdm

from ds2.audio.read import AudioError
from ds2.audio.shard import Member, Shard, ShardError, write_index
from ds2.data.audio_cache import content_keys
from ds2.data.cache_build import decode, summary
from ds2.data.manifest import Utterance, write_manifest
from ds2.system.files import atomic_file
from ds2.system.machine import usable_cores

log = logging.getLogger(__name__)

MANIFEST = "manifest.jsonl"
_AT_ONCE = 16  # utterances a core that are encoded before they are written
_KEY_CHARACTERS = 60
_USTAR_BLOCK = 512


@dataclass(frozen=True)
class Written:
    """What `write_shards` made."""

    utterances: list[Utterance]
    shards: int
    kept: int  # of these, how many were there already, made of the same
    left_out: list[AudioError]


def write_shards(
    utterances: Sequence[Utterance], folder: Path, sample_rate_hz: int, shard_bytes: int, *, skip_bad: bool = False
) -> Written:
    """Write utterances as shards `000000.tar`, ... with their indices, and `manifest.jsonl` once all are there.

    A member is KEY.flac, 16 bits at the rate, the samples that training would read from the utterance's own file, to
    the bit; KEY.json beside it has text, duration, speaker and language. Each shard appears whole or not at all; one
    that is there, of the same utterances, is kept, so that a writing that was stopped goes on.

    Args:
        utterances: in the order that they shall lie in.
        folder: receives the shards.
        sample_rate_hz: of the members.
        shard_bytes: of samples as 16 bits in one shard, of which FLAC takes about half.
        skip_bad: leave out what cannot be read rather than stop.
    Raises:
        AudioError: utterances cannot be read; names them. The shards of the others stay, and are found again.
        OSError: the folder cannot be written or the disk is full.
    """
    made, errors, kept = list[Utterance](), list[AudioError](), 0
    parts = list(_parts(utterances, shard_bytes // 2 / sample_rate_hz))
    with (
        ThreadPool(usable_cores()) as threads,
        tqdm(total=len(utterances), desc="writing shards", unit="utt", disable=None) as progress,
    ):
        for number, (first, part) in enumerate(parts):
            path = folder / f"{number:06d}.tar"
            made_from = hashlib.sha256(b"".join(content_keys(part, sample_rate_hz))).hexdigest()
            members = _found(path, made_from, first)
            if members is None:
                members, failed = _write(path, first, part, sample_rate_hz, threads, progress)
                errors += failed
                write_index(path, members.values(), made_from if not failed else "")
            else:
                kept += 1
                progress.update(len(part))
            for position, utterance in enumerate(part, first):
                if position in members:
                    member = members[position]
                    audio, seconds = path.absolute() / member.name, member.samples / sample_rate_hz
                    made.append(replace(utterance, audio_filepath=audio, duration_s=seconds, offset_s=0.0))
    if errors and (not skip_bad or not made):
        raise AudioError(summary(errors, len(utterances)) + "\nMend the corpus, or leave them out (--skip-bad)")
    write_manifest(folder / MANIFEST, made)
    return Written(made, len(parts), kept, errors)


def _parts(utterances: Sequence[Utterance], shard_s: float) -> Iterator[tuple[int, Sequence[Utterance]]]:
    """Cut the list into shards: (position of the first, utterances), by what the manifest says of their lengths."""
    first, held_s = 0, 0.0
    for position, utterance in enumerate(utterances):
        if held_s and held_s + utterance.duration_s > shard_s:
            yield first, utterances[first:position]
            first, held_s = position, 0.0
        held_s += utterance.duration_s
    yield first, utterances[first:]


def _found(path: Path, made_from: str, first: int) -> dict[int, Member] | None:
    """The audio of a shard that was made of the same, by position in the list; None where there is none."""
    with suppress(ShardError):
        shard = Shard(path)
        if shard.made_from == made_from:
            return dict(enumerate(shard.members(), first))  # their names begin with their numbers
    return None


def _write(
    path: Path, first: int, part: Sequence[Utterance], sample_rate_hz: int, threads: ThreadPool, progress: tqdm
) -> tuple[dict[int, Member], list[AudioError]]:
    def encode(utterance: Utterance) -> tuple[bytes, int] | AudioError:
        try:
            return _flac(pcm := decode(utterance, sample_rate_hz), sample_rate_hz), len(pcm)
        except AudioError as error:
            return error

    members, failed, step = dict[int, Member](), list[AudioError](), _AT_ONCE * usable_cores()
    with (
        atomic_file(path) as partial,
        partial.open("wb") as file,
        tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar,
    ):
        for start in range(0, len(part), step):
            chunk = part[start : start + step]
            for position, encoded in enumerate(threads.map(encode, chunk), start):
                progress.update()
                if isinstance(encoded, AudioError):
                    failed.append(encoded)
                    continue
                content, samples = encoded
                name = f"{_key(first + position, part[position])}.flac"
                offset = file.tell() + _USTAR_BLOCK
                members[first + position] = Member(name, offset, len(content), zlib.crc32(content), samples)
                _add(tar, name, content)
                _add(tar, name.replace(".flac", ".json"), _facts(part[position], samples / sample_rate_hz))
    return members, failed


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    tar.addfile(info, io.BytesIO(content))


def _flac(pcm: NDArray[np.int16], sample_rate_hz: int) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, pcm, sample_rate_hz, format="FLAC", subtype="PCM_16")
    return buffer.getvalue()


def _facts(utterance: Utterance, duration_s: float) -> bytes:
    facts = {
        "text": utterance.text,
        "duration": round(duration_s, 6),
        "speaker": utterance.speaker,
        "lang": utterance.lang,
    }
    return json.dumps({key: value for key, value in facts.items() if value}, ensure_ascii=False).encode()


def _key(position: int, utterance: Utterance) -> str:
    """WebDataset takes what stands before the first dot for the key."""
    return f"{position:09d}-{re.sub(r'[^A-Za-z0-9_-]', '_', utterance.name)[:_KEY_CHARACTERS]}"
