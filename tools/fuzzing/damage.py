"""Random damage to files: bytes of any file, words of a text, values in the JSON of a safetensors header."""

import itertools
import json
import random
import re
import struct
from collections.abc import Callable
from typing import Any

NUMBERS = (
    "nan", "-nan", "inf", "-inf", "-1", "0", "1", "1e999", "1e-999", "5e-324", "1e308", "-0.0", "1" * 40,
    "1" + "0" * 400, "9" * 5000, "0x10", "½",
)  # fmt: skip
WORDS = (
    "", " ", "\0", "\x1b[2J", "\ufeff", "\u202e", "null", "true", "[]", "{}", "[" * 3000, '"', "'", "\\", "\n", "\r",
    "\t", "${oc.env:HOME}", "${decode}", "../../../../etc/passwd", "/dev/zero", "é", "日本", "\U0001f600", "<s>",
    "</s>", "a" * 70_000,
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2**31, 2**63, 2**70, 10**400, 0.5, -0.5, 5e-324, 1e300, float("nan"), float("inf"), "",
    "x", "nan", "\0", "\ud800", "日" * 200, "${oc.env:HOME}", "/etc/passwd", [], [1], [[]], [1, 2, 3, 4, 5], {},
    {"x": 1}, "a" * 70_000,
)  # fmt: skip
_NUMBER = re.compile(rb"-?\d+(?:\.\d+)?(?:e-?\d+)?")
Damage = Callable[[random.Random, bytes], bytes]


def _place(draw: random.Random, content: bytes) -> int:
    """A position, half of the time within the first bytes, where headers are."""
    return draw.randrange(min(len(content), draw.choice((64, 1 << 30)))) if content else 0


def _flip(draw: random.Random, content: bytes) -> bytes:
    damaged = bytearray(content)
    for _ in range(draw.choice((1, 1, 1, 8, 100)) if damaged else 0):
        damaged[_place(draw, content)] ^= 1 << draw.randrange(8)
    return bytes(damaged)


def _cut(draw: random.Random, content: bytes) -> bytes:
    return content[: _place(draw, content)] if draw.random() < 0.7 else content[: -draw.randint(1, 16)]


def _grow(draw: random.Random, content: bytes) -> bytes:
    at = draw.choice((_place(draw, content), len(content)))
    random_bytes, zeros = draw.randbytes(draw.randint(1, 300)), bytes(draw.randint(1, 5000))
    return content[:at] + draw.choice((random_bytes, zeros, content[: len(content) // 2])) + content[at:]


def _block(draw: random.Random, content: bytes) -> bytes:
    at, size = _place(draw, content), draw.choice((1, 2, 4, 8, 64, 4096))
    filling = draw.choice((b"", bytes(size), b"\xff" * size, draw.randbytes(size), content[:size]))
    return content[:at] + filling + content[at + size :]


def _integer(draw: random.Random, content: bytes) -> bytes:
    layout = draw.choice(("<I", ">I", "<Q", ">Q", "<H", ">H"))
    size = struct.calcsize(layout)
    value = draw.choice((0, 1, 2 ** (8 * size) - 1, 2 ** (8 * size - 1), draw.randrange(2 ** (8 * size))))
    at = _place(draw, content)
    return content[:at] + struct.pack(layout, value) + content[at + size :]


def _number(draw: random.Random, content: bytes) -> bytes:
    numbers = list(_NUMBER.finditer(content))
    if not numbers:
        return _word(draw, content)
    chosen = draw.choice(numbers)
    return content[: chosen.start()] + draw.choice(NUMBERS).encode() + content[chosen.end() :]


def _word(draw: random.Random, content: bytes) -> bytes:
    parts = re.split(rb"(\s|[,:=\"])", content)
    parts[draw.randrange(len(parts))] = draw.choice(WORDS).encode()
    return b"".join(parts)


def _lines(draw: random.Random, content: bytes) -> bytes:
    lines = content.split(b"\n")
    chosen, where = draw.randrange(len(lines)), draw.randrange(len(lines) + 1)
    removed, doubled = lines[:chosen] + lines[chosen + 1 :], [*lines[:where], lines[chosen], *lines[where:]]
    return b"\n".join(draw.choice((removed, doubled, lines[::-1])))


def _encoding(draw: random.Random, content: bytes) -> bytes:
    text = content.decode("utf-8", "replace")
    return draw.choice((text.encode("utf-16"), b"\xef\xbb\xbf" + content, text.encode("latin-1", "replace") + b"\xe9",
                        content.replace(b"\n", b"\r\n"), content.replace(b"\n", b"\r")))  # fmt: skip


def _resized(draw: random.Random, value: list[Any] | dict[str, Any] | str) -> Any:
    """A list, an object or a text of another size."""
    size = draw.choice((0, 1, 257, 1001, 20_001, 200_000))
    if isinstance(value, dict):
        pairs = itertools.cycle(value.items() or [("a", 1)])
        return {f"{key}{number}": one for number, (key, one) in zip(range(size), pairs, strict=False)}
    return (value * (1 + size // max(1, len(value))))[:size]


def changed_tree(draw: random.Random, tree: Any) -> Any:
    """The JSON tree with one value replaced, removed, added or of another size, anywhere."""
    if not isinstance(tree, dict | list) or not tree or draw.random() < 0.1:
        return draw.choice(VALUES)
    keys = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
    key = draw.choice(keys)
    tree = tree.copy()
    action = draw.random()
    if action < 0.1:
        del tree[key]
    elif action < 0.2 and isinstance(tree, dict):
        tree[draw.choice(("x", "", "\0", f"{key} "))] = tree.pop(key)
    elif action < 0.3 and isinstance(tree[key], list | dict | str):
        tree[key] = _resized(draw, tree[key])
    else:
        tree[key] = changed_tree(draw, tree[key])
    return tree


def _header(draw: random.Random, content: bytes) -> bytes:
    """A safetensors file that is whole but for a value in its header, or in the JSON that ds2 keeps there."""
    (size,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + size])
    if draw.random() < 0.7:
        header["__metadata__"]["ds2"] = json.dumps(changed_tree(draw, json.loads(header["__metadata__"]["ds2"])))
    else:
        header = changed_tree(draw, header)
    written = json.dumps(header).encode()
    return struct.pack("<Q", len(written)) + written + content[8 + size :]


def _list_of_files(draw: random.Random, content: bytes) -> bytes:
    """A list, playlist or description for FFmpeg that names other files, `secret.wav` of the target among them."""
    name = draw.choice(("secret.wav", "./secret.wav", "file:secret.wav", "../case/secret.wav", "/etc/passwd", "-"))
    name = draw.choice((name, f"concat:{name}", f"subfile,,start,0,end,0,,:{name}", f"crypto:{name}", f"async:{name}"))
    lists = (
        f"ffconcat version 1.0\n{'safe 0' * draw.randrange(2)}\nfile '{name}'\n" * draw.choice((1, 2, 20_000)),
        f"#EXTM3U\n#EXT-X-VERSION:3\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\n{name}\n#EXT-X-ENDLIST\n",
        f'#EXTM3U\n#EXT-X-MAP:URI="{name}"\n#EXT-X-KEY:METHOD=AES-128,URI="{name}"\n#EXTINF:9,\n{name}\n',
        f"v=0\no=- 0 0 IN IP4 127.0.0.1\ns={name}\nc=IN IP4 127.0.0.1\nm=audio 5004 RTP/AVP 0\n",
        f"<?xml version='1.0'?><MPD xmlns='urn:mpeg:dash:schema:mpd:2011'><BaseURL>{name}</BaseURL></MPD>",
        f";FFMETADATA1\ntitle={name}\n",
    )
    made = draw.choice(lists).encode()
    return draw.choice((made, made, b"\xef\xbb\xbf" + made, made + content, content + made))


def _with_checksum(header: bytearray) -> bytearray:
    return header[:148] + b"%06o\0 " % (sum(header[:148]) + 8 * ord(" ") + sum(header[156:])) + header[156:]


def _tar_header(draw: random.Random, content: bytes) -> bytes:
    """A tar file with one field of a header changed and the checksum right, or with a header twice, or a pax record."""
    at = 512 * draw.randrange(max(1, len(content) // 512))
    header = bytearray(content[at : at + 512].ljust(512, b"\0"))
    kind = draw.randrange(4)
    if kind == 0:  # size, in octal or base 256
        header[124:136] = draw.choice((b"77777777777\0", b"\x80" + b"\xff" * 11, b"\xff" * 12, b"-1".ljust(12, b"\0")))
    elif kind == 1:  # type: sparse, long names, pax, links, devices
        header[156] = draw.choice(b"SLKxg123456\0")
    elif kind == 2:
        header[0:100] = draw.choice((bytes(100), b"\xff" * 100, b"../" * 33 + b"a", header[0:100]))
    header = _with_checksum(header)
    if kind == 3:  # a pax header before it
        record = draw.choice((b"size", b"path", b"GNU.sparse.size", b"GNU.sparse.map", b"hdrcharset", b"mtime"))
        body = record + b"=" + draw.choice(NUMBERS).encode() + b"\n"
        pax = b"%d " % (len(body) + len(str(len(body) + 4)) + 1) + body
        before = bytearray(512)
        before[0:1], before[124:136], before[156:157] = b"p", b"%011o\0" % len(pax), b"x"
        header = _with_checksum(before) + pax.ljust(-(-len(pax) // 512) * 512, b"\0") + header
    return content[:at] + bytes(header) + content[at + 512 * draw.randrange(2) :]


def _json_lines(draw: random.Random, content: bytes) -> bytes:
    lines = content.splitlines()
    chosen = draw.randrange(len(lines))
    lines[chosen] = json.dumps(changed_tree(draw, json.loads(lines[chosen]))).encode()
    return b"\n".join(lines) + b"\n"


BYTES: tuple[Damage, ...] = (_flip, _cut, _grow, _block, _integer)
TEXT: tuple[Damage, ...] = (*BYTES, _number, _word, _number, _word, _lines, _encoding)
LISTS: tuple[Damage, ...] = (*BYTES, _list_of_files, _list_of_files, _list_of_files)
TAR: tuple[Damage, ...] = (*TEXT, _tar_header, _tar_header, _tar_header, _tar_header)
TENSORS: tuple[Damage, ...] = (*BYTES, _header, _header, _header, _header, _header)
JSON_LINES: tuple[Damage, ...] = (*TEXT, _json_lines, _json_lines, _json_lines)
