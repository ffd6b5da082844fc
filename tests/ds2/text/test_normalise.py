"""Transcripts as people write them become transcripts as a network shall write them, in training and scoring alike."""

from __future__ import annotations

import pytest
from support.tiny import compose_once

from ds2.text.alphabet import Alphabet, AlphabetError, drop_punctuation, fold, lower, upper


def alphabet(*overrides: str) -> Alphabet:
    return Alphabet.from_config(compose_once(*overrides, "run_dir=x").alphabet)


@pytest.mark.parametrize(
    ("text", "locale", "expected"),
    [
        ("DIYARBAKIR İZMİR", "tr", "dıyarbakır izmir"),
        ("I\u0307zmir", "tr", "izmir"),
        ("BAKI", "az", "bakı"),
        ("TITLE", "", "title"),
        ("TITLE", "en", "title"),
        ("İ", "", "i\u0307"),
    ],
)
def test_case_follows_the_locale(text: str, locale: str, expected: str) -> None:
    assert lower(text, locale) == expected


def test_upper_case_in_turkish_keeps_both_letters_apart() -> None:
    assert upper("ılık iri", "tr") == "ILIK İRİ" and upper("iri") == "IRI"
    assert lower(upper("ılık iri", "tr"), "tr") == "ılık iri"


def test_punctuation_becomes_spaces_and_apostrophes_in_words_are_deleted_or_kept() -> None:
    assert drop_punctuation("well-known, U.S.").split() == ["well", "known", "U", "S"]
    assert drop_punctuation("Donau\u00addampf").split() == ["Donaudampf"]  # a soft hyphen
    assert drop_punctuation("don’t ‘go’") == "dont  go "
    assert drop_punctuation("don’t ‘go’", keep="'") == "don't  go "
    assert drop_punctuation("a-b c.", keep="-") == "a-b c "


def test_alphabets_of_conf_write_their_languages() -> None:
    turkish, unfit = alphabet("alphabet=turkish").normalise("İSTANBUL'da IŞIK, ığdır!")
    assert (turkish, sum(unfit.values())) == ("istanbulda ışık ığdır", 0)
    german, unfit = alphabet("alphabet=german", "alphabet.numbers=de").normalise("„Schöne Grüße“ – 3 Stück!")
    assert (german, sum(unfit.values())) == ("schöne grüße drei stück", 0)
    english, unfit = alphabet("alphabet=english_text").normalise("It’s 'well-known'; isn't it?")
    assert (english, sum(unfit.values())) == ("it's 'well known' isn't it", 0)


def test_case_and_punctuation_can_be_kept() -> None:
    cased = alphabet("alphabet=english_cased")
    assert cased.normalise("“Well,” said Mr. Smith…") == ("Well, said Mr. Smith", {})
    assert fold("“Well,” said Mr. Smith") == "well said mr smith"


def test_full_width_letters_become_plain_ones_under_nfkc() -> None:
    assert alphabet("alphabet.unicode=NFKC").normalise("ＡＢＣ ﬁn")[0] == "abc fin"


def test_rules_are_restored_from_a_model_file_and_older_files_have_defaults() -> None:
    changed = alphabet("alphabet=turkish", "alphabet.numbers=tr")
    assert Alphabet.from_dict(changed.to_dict()) == changed
    plain = alphabet()
    assert set(plain.to_dict()) == {"symbols", "case", "replace", "unknown"}
    assert Alphabet.from_dict(plain.to_dict()) == plain


def test_invalid_rules_are_refused() -> None:
    with pytest.raises(AlphabetError, match="NFC or NFKC"):
        Alphabet(("", "a"), unicode="NFX")
    with pytest.raises(AlphabetError, match=r"alphabet\.locale='turkish': .*such as tr"):
        Alphabet(("", "a"), locale="turkish")
    with pytest.raises(AlphabetError, match="keep or drop"):
        Alphabet(("", "a"), punctuation="lose")


def test_as_printed_is_true_for_capitals_or_punctuation() -> None:
    assert alphabet("alphabet=english_cased").as_printed
    assert alphabet("alphabet.symbols=' ab,'").as_printed
    assert not alphabet().as_printed and not alphabet("alphabet=german").as_printed
    assert not alphabet("alphabet.case=upper", "alphabet.symbols=' AB'").as_printed
