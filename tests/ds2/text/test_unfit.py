"""What an alphabet cannot write comes back as a table and as an alphabet in which it fits."""

from __future__ import annotations

import yaml

from ds2.config.schema import AlphabetConfig
from ds2.text.alphabet import Alphabet
from ds2.text.unfit import count_unfit, help_text


def proposal(text: str) -> Alphabet:
    _, _, rest = text.partition("\nalphabet:\n")
    settings = yaml.safe_load(rest.split("\n\n", maxsplit=1)[0])
    return Alphabet.from_config(AlphabetConfig(**settings))


def test_the_table_counts_and_the_block_makes_room() -> None:
    texts = ["Grüße, Ärger!", "schöne Grüße"]
    plain = Alphabet.from_config(AlphabetConfig())
    unfit = count_unfit(texts, plain)
    shown = help_text(unfit, plain)
    assert "       2  ü  U+00FC LATIN SMALL LETTER U WITH DIAERESIS" in shown
    assert shown.index("U+00DF") < shown.index("U+00E4")  # by count
    better = proposal(shown)
    assert not count_unfit(texts, better) and better.punctuation == "drop" and better.numbers == ""


def test_digits_ask_for_a_language_and_turkish_for_its_locale() -> None:
    plain = Alphabet.from_config(AlphabetConfig())
    shown = help_text(count_unfit(["3 İnek, ılık"], plain), plain)
    assert "numbers: en  # digits to words: your language" in shown and "alphabet.locale=tr" in shown
    assert proposal(shown).normalise("İNEK ILIK")[0] == "inek ılık"


def test_nothing_unfit_says_nothing() -> None:
    assert help_text({}, Alphabet.from_config(AlphabetConfig())) == ""
