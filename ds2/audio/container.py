"""Truncated, damaged and joined audio files, found from lengths in their headers, which decoders do not check."""

import os
import re
import struct
import zlib
from collections.abc import Callable, Iterator

Read = Callable[[int, int], bytes]  # (offset, size) -> bytes, fewer at the end of the file

_STREAMED_BYTES = 0x7EFFFF00  # larger sizes in 32 bits are written to a pipe, where the length is unknown
_STREAMED_BYTES_64 = 1 << 62
_MAX_CHUNKS = 10_000
_AVI_SLACK_BYTES = 1 << 12  # some writers count the head of a chunk too
_MP4_SLACK_BYTES = 16  # of a head here; where samples are missing, decoders notice
_SEGMENT = b"\x18\x53\x80\x67"  # of Matroska: all but the header
_OGG_BEGIN_OF_STREAM, _OGG_END_OF_STREAM = 2, 4
_XING = re.compile(rb"(?:Xing|Info)(.{12})", re.DOTALL)  # flags, frames, bytes
_MP3_FRAMES = 2000  # at the start, and
_MP3_PLACES = 16  # spread over the file, that show whether the bit rate varies
_MP3_HEAD = re.compile(rb"\xff[\xe2\xe3\xf2\xf3\xfa\xfb]")  # of a frame of layer III
_MP3_KBPS = (  # of MPEG 1; of MPEG 2 and 2.5
    (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 0),
    (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160, 0),
)
_FLAC_HEAD = re.compile(rb"fLaC[\x00\x80]\x00\x00\x22")  # and that of its first block, of 34 bytes
_FLAC_BUFFER_BYTES = 1 << 14  # libFLAC reads up to 8 KiB more than it decodes; a tag may lie between two recordings
_JOINED = "holds recordings one after the other, of which only the first is read, to byte {} of {}"
_MIRRORED = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))


def describe_damage(descriptor: int, container: str) -> str | None:
    """Describe how a file is truncated, in Ogg how it is damaged, and what of Ogg and MP3 decoders do not read.

    Headers written to a pipe, when the length was not known, and files of raw samples state no length.

    Args:
        descriptor: of the file, open for reading; its position does not change.
        container: libsndfile's name of the format, or one of `ds2.audio.ffmpeg.container_of`.
    Returns:
        a sentence on the damage, '' if there is none, None for a container that cannot be checked.
    """
    size = os.fstat(descriptor).st_size
    check = _CHECKS.get(container)
    return None if check is None else check(lambda at, n: os.pread(descriptor, n, at) if at < size else b"", size)


def describe_second_flac(descriptor: int) -> str:
    """Describe a recording behind another one in a FLAC file, '' if there is none.

    A header of FLAC states samples, not bytes: where the recording ends is known when it has been decoded.

    Args:
        descriptor: of the file, whose position is where the decoder of the first recording stopped reading.
    """
    stopped = os.lseek(descriptor, 0, os.SEEK_CUR)
    first = max(_id3_bytes(os.pread(descriptor, 10, 0)) + 1, stopped - _FLAC_BUFFER_BYTES)
    second = _FLAC_HEAD.search(os.pread(descriptor, stopped + _FLAC_BUFFER_BYTES - first, first))
    return _JOINED.format(first + second.start(), os.fstat(descriptor).st_size) if second else ""


def _id3_bytes(head: bytes) -> int:
    """The size of the tag that a file of these first 10 bytes begins with."""
    return 10 + sum(byte << 7 * place for place, byte in enumerate(head[:5:-1])) if head.startswith(b"ID3") else 0


def _truncation(stated: int, present: int, streamed: int = _STREAMED_BYTES) -> str:
    if present < stated < streamed:
        return f"truncated: its header says {stated} bytes of samples, the file holds {present}"
    return ""


def _overrun(what: str, at: int, end: int, size: int) -> str:
    return f"truncated: its {what} at byte {at} ends at byte {end}, the file at {size}" if end > size else ""


def _chunks(
    read: Read, at: int, layout: str, padding: int = 1, *, with_head: bool = False
) -> Iterator[tuple[bytes, int, int]]:
    """Yield the name of each chunk, the stated size of its content and where that begins.

    Args:
        at: where the first chunk begins.
        layout: of a chunk's head: its name and size.
        padding: the content is padded to a multiple of so many bytes.
        with_head: the size counts the head too.
    """
    head_bytes = struct.calcsize(layout)
    for _ in range(_MAX_CHUNKS):
        head = read(at, head_bytes)
        if len(head) < head_bytes:
            return
        name, stated = struct.unpack(layout, head)
        stated, at = max(0, stated - with_head * head_bytes), at + head_bytes
        yield name, stated, at
        at += -(-stated // padding) * padding


def _chunked(read: Read, size: int) -> str:
    """RIFF, RIFX, RF64, AIFF and 8SVX: sizes of 32 bits, that of the samples of RF64 in another chunk."""
    order = "<" if read(0, 4) in (b"RIFF", b"RF64") else ">"
    long_size = 0
    for name, stated, at in _chunks(read, 12, f"{order}4sI", padding=2):
        if name == b"ds64" and len(sizes := read(at, 16)) == 16:
            long_size = struct.unpack("<8xQ", sizes)[0]
        elif name == b"data" and stated == 0xFFFFFFFF and long_size:
            return _truncation(long_size, size - at, _STREAMED_BYTES_64)
        elif name in (b"data", b"SSND", b"BODY"):
            return _truncation(stated, size - at)
    return ""


def _long_chunks(chunks: Iterator[tuple[bytes, int, int]], size: int) -> str:
    """Sony Wave64, whose names are GUIDs, and Apple's CAF, where a size of -1 means to the end of the file."""
    for name, stated, at in chunks:
        if name.startswith(b"data"):
            return _truncation(stated, size - at, _STREAMED_BYTES_64)
    return ""


def _sun(read: Read, size: int) -> str:
    """Sun and NeXT: where the samples begin and how many bytes they take."""
    head = read(0, 12)
    if len(head) < 12:
        return ""
    first, stated = struct.unpack(">4xII" if head.startswith(b".snd") else "<4xII", head)
    return _truncation(stated, size - first)


def _sphere(read: Read, size: int) -> str:
    """NIST SPHERE: lines of a name, a type and a value, in a header whose size is the second line."""
    lines = read(0, 1 << 16).split(b"end_head", 1)[0].split(b"\n")
    values = {parts[0]: parts[2] for line in lines if len(parts := line.split(None, 2)) == 3}
    try:
        frame = int(values[b"channel_count"]) * int(values[b"sample_n_bytes"])
        return _truncation(int(values[b"sample_count"]) * frame, size - int(lines[1]), _STREAMED_BYTES_64)
    except (KeyError, ValueError, IndexError):
        return ""


def _ogg(read: Read, size: int) -> str:
    """Ogg (RFC 3533): pages, the last one marked as the end of the stream; later bytes do not belong to it.

    Decoders skip a page whose checksum is wrong, which may be seconds of sound.
    """
    at, ended = 0, False
    while len(head := read(at, 27 + 255)) >= 27 and head.startswith(b"OggS"):
        end = at + 27 + head[26] + sum(head[27 : 27 + head[26]])
        if overrun := _overrun("page", at, end, size):
            return overrun
        if _ogg_checksum(read(at, end - at)) != head[22:26]:
            return f"damaged: the checksum of its page at byte {at} is wrong"
        if ended and head[5] & _OGG_BEGIN_OF_STREAM:
            return _JOINED.format(at, size)
        at, ended = end, bool(head[5] & _OGG_END_OF_STREAM)
    return "" if ended else f"truncated: its pages end at byte {at} of {size} without one that ends the stream"


def _mp3(read: Read, size: int) -> str:
    """MPEG audio, perhaps behind a tag; where its first frame states the length, decoders end there."""
    at = _id3_bytes(read(0, 10))
    first = read(at, 64)
    flags, frames, stated = struct.unpack(">III", xing[1]) if (xing := _XING.search(first)) else (0, 0, 0)
    if flags & 3 == 3 and stated:  # 0 was never completed
        end = at + stated
        following = read(end, 3)  # of a tag at the end: TAG, APE
        if size - end > size / 100 and (following == b"ID3" or following[:2] >= b"\xff\xe0"):  # less is no recording
            return _JOINED.format(end, size)
    states_length = (flags & 1 and frames) or b"VBRI" in first  # LAME's way, or that of Fraunhofer's encoder
    if not states_length and len({*_mp3_kbps(read, at), *_mp3_later_kbps(read, at, size)}) > 1:
        return "varies in bit rate and states no length, so that decoders guess where it ends"
    return ""


def _mp3_later_kbps(read: Read, at: int, size: int) -> Iterator[int]:
    """Yield the bit rates of frames all over the file; four in a row are no accident of the bytes."""
    for place in range(at, size, (size - at) // _MP3_PLACES + 1):
        chains = (list(_mp3_kbps(read, place + head.start(), 4)) for head in _MP3_HEAD.finditer(read(place, 1 << 11)))
        yield from next((chain for chain in chains if len(chain) == 4), [])


def _mp3_kbps(read: Read, at: int, frames: int = _MP3_FRAMES) -> Iterator[int]:
    """Yield the bit rates of up to so many frames of MPEG layer III, of which the first begins at a byte."""
    for _ in range(frames):
        head = read(at, 4)
        if len(head) < 4 or head[0] != 0xFF or head[1] & 0xE6 != 0xE2:
            return
        halvings = (2, 0, 1, 0)[head[1] >> 3 & 3]  # of the rate: MPEG 2.5, none, MPEG 2, MPEG 1
        kbps, rate_hz = _MP3_KBPS[halvings > 0][head[2] >> 4], (44100, 48000, 32000, 0)[head[2] >> 2 & 3] >> halvings
        if not kbps or not rate_hz:
            return
        yield kbps
        at += (72 if halvings else 144) * 1000 * kbps // rate_hz + (head[2] >> 1 & 1)


def _mp4(read: Read, size: int) -> str:
    """ISO 14496-12, and QuickTime: boxes of a size and a name; size 1: in 64 bits, 0: to the end of the file."""
    at = 0
    while len(head := read(at, 16)) >= 8:
        stated, name = struct.unpack(">I4s", head[:8])
        stated = int.from_bytes(head[8:], "big") if stated == 1 else stated
        if stated < 8:
            break
        if name in (b"moov", b"moof", b"mdat") and at + stated > size + _MP4_SLACK_BYTES:
            return _overrun(name.decode(), at, at + stated, size)
        at += stated
    return ""


def _matroska(read: Read, size: int) -> str:
    """EBML (RFC 8794): an element is an ID, a size of 1 to 8 bytes, of which all bits set mean unknown, and content."""
    at = 0
    while len(head := read(at, 12)) == 12 and head[4]:
        width = 9 - head[4].bit_length()
        stated, most = int.from_bytes(head[4 : 4 + width], "big") - (1 << 7 * width), (1 << 7 * width) - 1
        end = at + 4 + width + stated
        if head.startswith(_SEGMENT):
            return _overrun("segment", at, end, size) if stated < most else ""
        at = end
    return ""


def _avi(read: Read, size: int) -> str:
    """RIFF chunks of 1 GB at most, one after the other."""
    for name, stated, at in _chunks(read, 0, "<4sI", padding=2):
        if name == b"RIFF" and at + stated > size + _AVI_SLACK_BYTES and stated < _STREAMED_BYTES:
            return _overrun("chunk", at - 8, at + stated, size)
    return ""


def _ogg_checksum(page: bytes) -> bytes:
    """Return a page's CRC-32 with its own field zeroed, most significant bit first: zlib's on mirrored bits."""
    mirrored = (page[:22] + bytes(4) + page[26:]).translate(_MIRRORED)
    remainder = zlib.crc32(mirrored, 0xFFFFFFFF) ^ 0xFFFFFFFF  # initial value and final xor 0
    return remainder.to_bytes(4, "big").translate(_MIRRORED)


_CHECKS: dict[str, Callable[[Read, int], str]] = {
    **dict.fromkeys(("WAV", "WAVEX", "RF64", "AIFF", "SVX"), _chunked),
    "W64": lambda read, size: _long_chunks(_chunks(read, 40, "<16sQ", padding=8, with_head=True), size),
    "CAF": lambda read, size: _long_chunks(_chunks(read, 8, ">4sQ"), size),
    "AU": _sun,
    "NIST": _sphere,
    "OGG": _ogg,
    "MP3": _mp3,
    "MP4": _mp4,
    "MATROSKA": _matroska,
    "AVI": _avi,
    # Their decoders notice truncation, or they state no length.
    **dict.fromkeys(("FLAC", "RAW", "ASF", "AMR", "ADTS", ""), lambda read, size: ""),
}
