"""Pronunciations: files in CMUdict's format, what is refused in them, their packed form, transcripts as phones."""

from __future__ import annotations

import base64
import zlib
from pathlib import Path

import pytest

from ds2.config.schema import AlphabetConfig
from ds2.system import UserError
from ds2.text.alphabet import Alphabet, AlphabetError
from ds2.text.pronunciations import Pronunciations, parse_pronunciations, read_pronunciations

LINES = [
    ";;; a comment, with # and words",
    "",
    "read R EH1 D  # past tense",
    "read(2)\tR IY1 D",
    "read(3) R EH1 D",
    "lead L EH1 D",
    "lead L IY1 D",
    ":) S M AY1 L",
]


@pytest.fixture
def lexicon(tmp_path: Path) -> Path:
    path = tmp_path / "lexicon.txt"
    path.write_text("a AH\na(2) EY\ncat K AE T\ndon't D OW N T\n", encoding="utf-8")
    return path


def test_variants_follow_their_number_or_the_word_again() -> None:
    found = parse_pronunciations(LINES, "test")
    assert found.words["read"] == (("R", "EH1", "D"), ("R", "IY1", "D"))  # the third is the first again
    assert found.words["lead"] == (("L", "EH1", "D"), ("L", "IY1", "D"))
    assert found.words[":)"] == (("S", "M", "AY1", "L"),)
    assert found.phones == ("AY1", "D", "EH1", "IY1", "L", "M", "R", "S")


def test_stress_is_dropped_on_request_and_makes_variants_equal() -> None:
    found = parse_pronunciations(["the DH AH0", "the(2) DH AH1", "the(3) DH IY0"], "test", keep_stress=False)
    assert found.words["the"] == (("DH", "AH"), ("DH", "IY")) and found.phones == ("AH", "DH", "IY")


def test_lines_and_packed_form_give_the_same_pronunciations() -> None:
    found = parse_pronunciations(LINES, "test")
    assert parse_pronunciations(found.lines(), "again") == found
    unpacked = Pronunciations.unpacked(found.packed())
    assert unpacked == found and dict(unpacked.words) == dict(found.words)


@pytest.mark.parametrize("lines, message", [
    (["cat K AE T", "dog"], r"test, line 2: dog has no phones; write: word PHONE"),
    *((["cat " + weight + " K AE T"], f"line 1: cat has the weight {weight}, which is not supported")
      for weight in ("0.5", "0,5", "1/2", "50%", "-1e-3")),
    (["dog # D AO G"], r"line 1: dog has no phones"),
    ([";;; nothing"], r"test has no pronunciations: write lines such as"),
])  # fmt: skip
def test_broken_lines_are_named(lines: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_pronunciations(lines, "test")


def test_a_byte_order_mark_is_no_part_of_the_first_word(tmp_path: Path) -> None:
    (tmp_path / "lexicon.txt").write_text("\ufeffa AH\r\na(2) EY\r\n", encoding="utf-8")
    assert read_pronunciations(tmp_path / "lexicon.txt").words == {"a": (("AH",), ("EY",))}


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none.txt cannot be read: .*`ds2 data lexicon FILE --dictionary english`"):
        read_pronunciations(tmp_path / "none.txt")
    (tmp_path / "latin.txt").write_bytes(b"d\xe9j\xe0 D EY ZH AA\n")
    with pytest.raises(UserError, match=r"latin.txt cannot be read"):
        read_pronunciations(tmp_path / "latin.txt")


@pytest.mark.parametrize("packed", [
    "no base64!",
    "ü",
    base64.b64encode(b"not compressed").decode(),
    base64.b64encode(zlib.compress(b"\xff\xfe K AE")).decode(),
    base64.b64encode(zlib.compress(b"cat K AE T\n" * 40)[:-6]).decode(),
    base64.b64encode(zlib.compress(b"cat K AE T\n" * 1_000_000)).decode(),
], ids=["characters", "not_ascii", "no_stream", "no_text", "cut", "bomb"])  # fmt: skip
def test_damaged_pronunciations_of_a_model_are_refused(packed: str) -> None:
    with pytest.raises(UserError, match="damaged"):
        Pronunciations.unpacked(packed)


def test_transcripts_become_the_first_pronunciations(lexicon: Path) -> None:
    alphabet = Alphabet.from_config(AlphabetConfig(lexicon=str(lexicon)))
    assert alphabet.symbols == ("", "AE", "AH", "D", "EY", "K", "N", "OW", "T")
    labels = alphabet.encode("A  cat DON'T")
    assert alphabet.decode(labels) == "AH K AE T D OW N T"
    assert alphabet.decode((0, *labels[:1], 0)) == "AH" and not alphabet.as_printed
    again = Alphabet.from_dict(alphabet.to_dict())
    assert again == alphabet and again.encode("a cat") == labels[:4]


def test_words_without_a_pronunciation_stop_or_are_left_out(lexicon: Path) -> None:
    with pytest.raises(
        AlphabetError, match=r"words without a pronunciation: act; add them with `ds2 data lexicon`, or"
    ):
        Alphabet.from_config(AlphabetConfig(lexicon=str(lexicon))).encode("act a cat")
    lenient = Alphabet.from_config(AlphabetConfig(lexicon=str(lexicon), unknown="drop"))
    assert lenient.decode(lenient.encode("act a cat")) == "AH K AE T"


def test_a_lexicon_in_another_case_is_refused(lexicon: Path) -> None:
    with pytest.raises(AlphabetError, match=r"alphabet.lexicon has \['a', 'cat', \"don't\"\]"):
        Alphabet.from_config(AlphabetConfig(lexicon=str(lexicon), case="upper"))
