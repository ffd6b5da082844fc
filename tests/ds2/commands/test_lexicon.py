"""`ds2 data lexicon` as a user calls it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ds2.cli import main
from ds2.config.schema import AlphabetConfig
from ds2.model import shipped
from ds2.text.alphabet import Alphabet
from ds2.text.pronunciations import read_pronunciations


@pytest.fixture
def dictionary(tmp_path: Path) -> Path:
    path = tmp_path / "dictionary.txt"
    path.write_text("CAT K AE1 T\nAT AE1 T\nTACT T AE1 K T\nA AH0\nA(2) EY1\n", encoding="utf-8")
    return path


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("a cat at a tac\n", encoding="utf-8")
    return path


def test_words_of_a_text_come_from_the_dictionary_or_are_guessed(
    dictionary: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = text.parent / "lexicon.txt"
    assert main(["data", "lexicon", str(out), "--dictionary", str(dictionary), "--words", str(text)]) == 0
    written = read_pronunciations(out)
    assert set(written.words) == {"a", "cat", "at", "tac"}
    assert written.words["a"] == (("AH",), ("EY",)) and written.words["cat"] == (("K", "AE", "T"),)
    assert "guessed: tac T AE K" in capsys.readouterr().out


def test_a_word_with_a_letter_that_the_dictionary_lacks_stays_whole(
    dictionary: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text.write_text("A cat, at Caté's: 2 cats-at. «tac»\n", encoding="utf-8")
    out = text.parent / "lexicon.txt"
    assert main(["data", "lexicon", str(out), "--dictionary", str(dictionary), "--words", str(text)]) == 0
    assert set(read_pronunciations(out).words) == {"a", "cat", "at", "tac"}
    printed = capsys.readouterr().out
    assert "without a pronunciation: 3 words, such as catés, 2, cats; the dictionary has no word with 2 s é" in printed


def test_full_stops_and_hyphens_of_a_dictionary_do_not_stay_in_texts(dictionary: Path, text: Path) -> None:
    with dictionary.open("a", encoding="utf-8") as file:
        file.write("AT. AE1 T K AE1 T\nCAT-A K AE1 T AH0\n'CAT K AE1 T\nA'T AE1 T\n")
    text.write_text("A cat-a cat. At. 'Tis a\u2019t.\n", encoding="utf-8")
    out = text.parent / "lexicon.txt"
    command = ["data", "lexicon", str(out), "--dictionary", str(dictionary), "--words", str(text), "--no-guess"]
    assert main(command) == 0
    written = read_pronunciations(out)
    assert set(written.words) == {"a", "cat", "at", "a't"} and written.words["at"] == (("AE", "T"),)
    alphabet = Alphabet.from_config(AlphabetConfig(lexicon=str(out), punctuation="drop"))
    assert alphabet.written("a cat-a cat. At. a\u2019t.") == "a cat a cat at a't"
    assert main(command[:5]) == 0
    assert set(read_pronunciations(out).words) == {"a", "at", "cat", "tact", "'cat", "a't"}


def test_words_are_normalised_by_the_settings_of_the_training(dictionary: Path, text: Path) -> None:
    dictionary.write_text("I\u015eIK I SH I K\nIKI I K I\nC\u00b7A K AE\nTWO T UW\n", encoding="utf-8")
    text.write_text("I\u015e\u0131k, c\u00b7a 2.\n", encoding="utf-8")
    out = text.parent / "lexicon.txt"
    command = ["data", "lexicon", str(out), "--dictionary", str(dictionary), "--words", str(text), "--no-guess"]
    for settings, words in (
        (["alphabet=turkish"], {"\u0131\u015f\u0131k"}),
        (["alphabet.numbers=en", "alphabet.locale=tr"], {"\u0131\u015f\u0131k", "two"}),
        (["alphabet.symbols=' c\u00b7a'"], {"c\u00b7a"}),
    ):
        for before in (3, 7):  # behind --words TEXT too
            assert main([*command[:before], *settings, *command[before:]]) == 0
            assert set(read_pronunciations(out).words) == words


def test_stress_stays_and_nothing_is_guessed_if_asked(dictionary: Path, text: Path) -> None:
    out = text.parent / "lexicon.txt"
    command = ["data", "lexicon", str(out), "--dictionary", str(dictionary), "--words", str(text)]
    assert main([*command, "--no-guess", "--keep-stress"]) == 0
    assert dict(read_pronunciations(out).words) == {
        "a": (("AH0",), ("EY1",)),
        "at": (("AE1", "T"),),
        "cat": (("K", "AE1", "T"),),
    }


def test_a_text_that_keeps_its_capitals_has_the_pronunciations_of_other_cases(
    dictionary: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text.write_text("A Cat at CAT. Tac\n", encoding="utf-8")
    out = text.parent / "lexicon.txt"
    command = ["data", "lexicon", str(out), "alphabet=english_cased", "--dictionary", str(dictionary)]
    assert main([*command, "--words", str(text)]) == 0
    written = read_pronunciations(out)
    assert set(written.words) == {"A", "Cat", "at", "CAT", "Tac"}
    assert written.words["Cat"] == written.words["CAT"] == (("K", "AE", "T"),) and len(written.words["A"]) == 2
    assert "guessed: Tac T AE K" in capsys.readouterr().out


def test_a_line_without_spaces_is_no_word_and_is_not_printed_whole(
    dictionary: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text.write_text("a cat " + "tac" * 100_000 + "\n", encoding="utf-8")
    out = text.parent / "lexicon.txt"
    with dictionary.open("a", encoding="utf-8") as file:
        file.write("TA" * 50_000 + " T AE1" * 50_000 + "\n")
    assert main(["data", "lexicon", str(out), "--dictionary", str(dictionary), "--words", str(text)]) == 0
    assert set(read_pronunciations(out).words) == {"a", "cat"}
    printed = capsys.readouterr().out
    assert "1 word, such as tactac" in printed and "1 word of more than 200 letters" in printed
    assert len(printed) < 600


def test_without_words_the_whole_dictionary_is_written(dictionary: Path, tmp_path: Path) -> None:
    with dictionary.open("a", encoding="utf-8") as file:
        file.write("\u00b4 AE K\nX-RAY EH K S\n")  # after normalisation one is empty, the other is two words
    assert main(["data", "lexicon", str(tmp_path / "all.txt"), "--dictionary", str(dictionary)]) == 0
    assert set(read_pronunciations(tmp_path / "all.txt").words) == {"a", "at", "cat", "tact"}


def test_missing_and_useless_files_are_refused(
    dictionary: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "numbers.txt").write_text("dog\n", encoding="utf-8")
    out = tmp_path / "out.txt"
    for words, message in (("none.txt", "there is no file"), ("numbers.txt", "no word of")):
        command = ["data", "lexicon", str(out), "--dictionary", str(dictionary), "--words", str(tmp_path / words)]
        assert main(command) == 2
        assert message in capsys.readouterr().err and not out.exists()


def test_a_model_of_phones_is_a_dictionary(
    text: Path,
    make_model: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    lexicon, small = text.with_name("words.txt"), text.parent / "models" / "small"
    lexicon.write_text("cat K AE T\nat AE T\ntact T AE K T\na AH\na(2) EY\n", encoding="utf-8")
    small.mkdir(parents=True)
    (small / "card.json").touch()
    make_model(f"alphabet.lexicon={lexicon}").rename(small / "best.safetensors")
    monkeypatch.setattr(shipped, "FOLDER", small.parent)
    text.write_text("at tac\n", encoding="utf-8")
    out = text.parent / "lexicon.txt"
    assert main(["data", "lexicon", str(out), "--dictionary", "small", "--words", str(text)]) == 0
    assert "guessed: tac T AE K" in capsys.readouterr().out
    assert "at AE T" in out.read_text(encoding="utf-8")
    assert "has these phones of the model, which a network trained with it cannot write: AH EY" in caplog.text
    caplog.clear()
    assert main(["data", "lexicon", str(out), "--dictionary", "small"]) == 0
    assert "phones of the model" not in caplog.text


@pytest.mark.slow
def test_english_is_a_dictionary(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text.write_text("hello pegrenne\n", encoding="utf-8")
    out = text.parent / "lexicon.txt"
    assert main(["data", "lexicon", str(out), "--dictionary", "english", "--words", str(text)]) == 0
    assert "guessed: pegrenne" in capsys.readouterr().out
    assert "hello HH" in out.read_text(encoding="utf-8")
