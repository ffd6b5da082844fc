"""Pronunciations of words: files in the format of CMUdict, and their packed form within a model."""

import base64
import functools
import re
import sys
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ds2.system import UserError

Phones = tuple[str, ...]
_STRESS = "012"
_WAY_OUT = "give a model of phones, or lines as `ds2 data lexicon FILE --dictionary english` writes them"
_WEIGHT = re.compile(r"[+-]?[.,]?[0-9][0-9.,/%]*([eE][+-]?[0-9]+)?")  # 0.5, 0,5, 1/2, 50%
_MAX_TIMES = 100  # that packed pronunciations may grow; those of CMUdict grow 4 times


@dataclass(frozen=True)
class Pronunciations:
    """The pronunciations of words, each a sequence of phones."""

    words: Mapping[str, tuple[Phones, ...]] = field(hash=False)  # of each word, the usual one first
    phones: tuple[str, ...]  # all, sorted

    @classmethod
    def of(cls, words: Mapping[str, Sequence[Phones]]) -> "Pronunciations":
        """Drop repeated pronunciations of a word, and list the phones."""
        distinct = {word: tuple(dict.fromkeys(variants)) for word, variants in words.items()}
        phones = {phone for variants in distinct.values() for variant in variants for phone in variant}
        return cls(distinct, tuple(sorted(phones)))

    def lines(self) -> Iterable[str]:
        """The lines of a file: a word and its phones; further pronunciations of a word follow it as word(2), ..."""
        for word, variants in self.words.items():
            for number, phones in enumerate(variants, start=1):
                yield f"{word if number == 1 else f'{word}({number})'} {' '.join(phones)}"

    def packed(self) -> str:
        """The lines, compressed, as ASCII text for the metadata of a model."""
        return base64.b64encode(zlib.compress("\n".join(self.lines()).encode(), 9)).decode()

    @classmethod
    @functools.lru_cache(maxsize=1)  # a model that is loaded again shares them: English's take half a second
    def unpacked(cls, packed: str) -> "Pronunciations":
        """Undo `packed`; raises UserError where the text is no such thing."""
        try:
            compressed = base64.b64decode(packed, validate=True)
            unpacking = zlib.decompressobj()
            text = unpacking.decompress(compressed, _MAX_TIMES * len(compressed)).decode()
        except (ValueError, zlib.error) as error:
            raise UserError(f"the pronunciations of the model are damaged: {error}") from error
        if not unpacking.eof:
            raise UserError(
                "the pronunciations of the model are damaged: they break off, or unpack to more than "
                f"{_MAX_TIMES} times their size"
            )
        return parse_pronunciations(text.splitlines(), "the model's pronunciations")


def read_pronunciations(path: Path, *, keep_stress: bool = True) -> Pronunciations:
    """Read a file in the format of CMUdict, or the pronunciations of a model.

    Args:
        path: each line is a word and its phones, apart by white space. `word(2)`, or the same word again, is a further
            pronunciation. `#` begins a comment, `;;;` a line of comment. Or a model of phones, *.safetensors.
        keep_stress: whether a last 0, 1 or 2 of a phone stays, as in AH0.

    Raises:
        UserError: the file cannot be read, or a line is not in that format, or the model writes no phones.
    """
    if path.suffix == ".safetensors":
        from ds2.system.tensor_file import read_metadata  # imported late: it needs torch

        alphabet = read_metadata(path).get("alphabet")
        if not isinstance(alphabet, dict) or not isinstance(packed := alphabet.get("pronunciations"), str):
            raise UserError(f"{path} is no model of phones: it has no pronunciations; {_WAY_OUT}")
        return Pronunciations.unpacked(packed)
    try:
        text = path.read_text(encoding="utf-8-sig")  # a byte-order mark would be a part of the first word
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"pronunciations {path} cannot be read: {error}; {_WAY_OUT}") from error
    return parse_pronunciations(text.splitlines(), str(path), keep_stress=keep_stress)


def parse_pronunciations(lines: Iterable[str], name: str, *, keep_stress: bool = True) -> Pronunciations:
    """Parse the lines of a file called `name`; see `read_pronunciations`."""
    words: dict[str, list[Phones]] = {}
    for number, line in enumerate(lines, start=1):
        content = "" if line.startswith(";;;") else line.partition("#")[0]
        word, *phones = content.split() or [""]
        if not word:
            continue
        if not phones or _WEIGHT.fullmatch(phones[0]):
            what = "has no phones" if not phones else f"has the weight {phones[0]}, which is not supported"
            raise UserError(f"{name}, line {number}: {word} {what}; write: word PHONE PHONE ...")
        if word.endswith(")") and "(" in word[1:]:
            word = word[: word.rindex("(")]
        if not keep_stress:
            phones = [phone.rstrip(_STRESS) or phone for phone in phones]
        words.setdefault(word, []).append(tuple(map(sys.intern, phones)))  # a few texts, a million times in a lexicon
    if not words:
        raise UserError(f"{name} has no pronunciations: write lines such as: word W ER D")
    return Pronunciations.of(words)
