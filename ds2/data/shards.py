"""Writes corpora as shards: tar files in WebDataset's layout, each with an index, and a manifest of their members."""

import hashlib
import io
import json
import logging
import re
import tarfile
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.pool import ThreadPool
from pathlib import Path

import soundfile

from ds2.audio.read import AudioError
from ds2.audio.shard import Shard, ShardError, ShardMember, write_index
from ds2.data.audio_cache import content_keys, decode, summarise_errors
from ds2.data.manifest import Utterance, runs, write_manifest
from ds2.system.files import atomic_file
from ds2.system.machine import thread_pool, usable_cores
from ds2.system.plain import counted
from ds2.system.terminal import ProgressBar

log = logging.getLogger(__name__)

MANIFEST = "manifest.jsonl"
_CHUNK_PER_CORE = 16  # utterances that are encoded before they are written
_KEY_CHARACTERS = 60
_USTAR_BLOCK = 512


@dataclass(frozen=True)
class WrittenShards:
    """Result of `write_shards`."""

    utterances: list[Utterance]
    shards: int
    reused: int  # of these, shards that existed already, made from the same utterances
    left_out: list[AudioError]


def write_shards(
    utterances: Sequence[Utterance],
    folder: Path,
    sample_rate_hz: int,
    shard_bytes: int,
    *,
    channel: int = 0,
    skip_bad: bool = False,
) -> WrittenShards:
    """Write utterances as shards `000000.tar`, ... with their indices, and `manifest.jsonl` after the last.

    Members are KEY.flac, 16 bits at the rate, with exactly the samples that training reads from the utterance's own
    file, and KEY.json with text, duration, speaker and language. Shards are written atomically. An existing shard of
    the same utterances is reused, so an interrupted command can be run again.

    Args:
        shard_bytes: size of the 16-bit samples of a shard; FLAC takes about half.
        channel: of the utterances' files, from 1; 0 averages all.
        skip_bad: leave out utterances that cannot be read.

    Raises:
        AudioError: utterances cannot be read. The shards of the others remain and are reused.
        OSError: the folder cannot be written or the disk is full.
    """
    made, errors, reused = list[Utterance](), list[AudioError](), 0
    parts = list(runs(utterances, shard_bytes // 2 / sample_rate_hz))
    with (
        thread_pool(usable_cores()) as threads,
        ProgressBar("writing shards", len(utterances), "utterances") as progress,
    ):
        for number, (first, part) in enumerate(parts):
            path = folder / f"{number:06d}.tar"
            made_from = hashlib.sha256(b"".join(content_keys(part, sample_rate_hz, channel))).hexdigest()
            members = None
            with suppress(ShardError):
                if (shard := Shard(path)).made_from == made_from:
                    members = dict(enumerate(shard.members(), first))  # their names begin with their numbers
            if members is None:
                members, failed = _write(path, first, part, sample_rate_hz, channel, threads, progress)
                errors += failed
                write_index(path, members.values(), made_from if not failed else "")
            else:
                reused += 1
                progress.update(progress.done + len(part))
            for position, utterance in enumerate(part, first):
                if position in members:
                    member = members[position]
                    audio, seconds = path.absolute() / member.name, member.samples / sample_rate_hz
                    made.append(replace(utterance, audio_filepath=audio, duration_s=seconds, offset_s=0.0))
    if errors and (not skip_bad or not made):
        raise AudioError(
            summarise_errors(errors, len(utterances)) + "\nCorrect the corpus, or leave them out (--skip-bad)"
        )
    write_manifest(folder / MANIFEST, made)
    numbered = sorted(path.name for path in folder.glob(f"{'[0-9]' * 6}.tar"))
    if stale := [name for name in numbered if int(name[:6]) >= len(parts)]:
        log.warning(
            "%s has %s of an earlier command, such as %s, that its manifest does not list: remove them before another "
            "program reads the folder", folder, counted(len(stale), "shard"), stale[0],
        )  # fmt: skip
    return WrittenShards(made, len(parts), reused, errors)


def _write(
    path: Path,
    first: int,
    part: Sequence[Utterance],
    sample_rate_hz: int,
    channel: int,
    threads: ThreadPool,
    progress: ProgressBar,
) -> tuple[dict[int, ShardMember], list[AudioError]]:
    def encode(utterance: Utterance) -> tuple[bytes, int] | AudioError:
        try:
            pcm = decode(utterance, sample_rate_hz, channel)
        except AudioError as error:
            return error.bare()
        flac = io.BytesIO()
        soundfile.write(flac, pcm, sample_rate_hz, format="FLAC", subtype="PCM_16")
        return flac.getvalue(), len(pcm)

    members, failed, step = dict[int, ShardMember](), list[AudioError](), _CHUNK_PER_CORE * usable_cores()
    with (
        atomic_file(path) as partial,
        partial.open("wb") as file,
        tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar,
    ):
        for start in range(0, len(part), step):
            chunk = part[start : start + step]
            for position, encoded in enumerate(progress.over(threads.map(encode, chunk, 1)), start):
                if isinstance(encoded, AudioError):
                    failed.append(encoded)
                    continue
                content, samples = encoded
                name = f"{_key(first + position, part[position])}.flac"
                offset = file.tell() + _USTAR_BLOCK
                members[first + position] = ShardMember(name, offset, len(content), zlib.crc32(content), samples)
                _add(tar, name, content)
                _add(tar, name.replace(".flac", ".json"), _facts(part[position], samples / sample_rate_hz))
    return members, failed


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    tar.addfile(info, io.BytesIO(content))


def _facts(u: Utterance, duration_s: float) -> bytes:
    facts = {"text": u.text, "duration": round(duration_s, 6), "speaker": u.speaker, "lang": u.lang}
    return json.dumps({key: value for key, value in facts.items() if value}, ensure_ascii=False).encode()


def _key(position: int, utterance: Utterance) -> str:
    """Return a key without dots: WebDataset ends keys at the first dot."""
    return f"{position:09d}-{re.sub(r'[^A-Za-z0-9_-]', '_', utterance.name)[:_KEY_CHARACTERS]}"
