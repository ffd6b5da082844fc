"""Hot words as clients send them: how many, how long, and in how much work."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from ds2.decoding.lexicon import SessionTrie, Spelling
from ds2.decoding.phrases import MAX_CHARACTERS, LexiconError
from ds2.serve.limits import StatusError
from ds2.serve.phrases import MAX_WAITING, FullError, PhraseReader
from ds2.text.alphabet import Alphabet

ALPHABET = Alphabet(("", " ", "a", "b", "c"))


def reader(characters: str = "abc") -> PhraseReader:
    return PhraseReader(ALPHABET, frozenset(characters))


TOO_MUCH = {
    "phrases": (["a"] * 1001, "1001 phrases: 1000 at most"),
    "weights": ({f"a{'b' * n}": 1 for n in range(1001)}, "1001 phrases: 1000 at most"),
    "characters": (["a" * 150] * 200, "30000 characters: 20000 at most"),
    "json": ("[" + '"a",' * 100_000, "400001 characters: 160000 at most"),
    "phrases in json": (str(["a"] * 1001).replace("'", '"'), "1001 phrases: 1000 at most"),
    "one phrase": (["a" * 201], "200 characters at most"),
    "no text": ([["a"]], "phrases are texts"),
    "no table": ({1, 2}, "list of phrases"),
    "no json": ("[", "list of phrases"),
    "a text in json": ('"ab"', "list of phrases"),
    "a weight of 400 digits": ({"a": 10**400}, "is not allowed: give numbers from -1000000 to 1000000"),
    "a weight that is true": ({"a": True}, "True is not allowed"),
    "a weight that is no number": ({"a": float("nan")}, "nan is not allowed"),
}


@pytest.mark.parametrize("case", TOO_MUCH)
def test_too_much_is_refused_with_the_limit(case: str) -> None:
    value, reason = TOO_MUCH[case]
    with pytest.raises((StatusError, LexiconError), match=reason):
        asyncio.run(reader().table(value, "hot_words"))


@pytest.mark.parametrize(("prompt", "keywords"), [("a, " * 180_000, None), ("", ["a" * 10] * 2500), ("a," * 9000, [])])
def test_a_prompt_that_is_too_long_is_refused(prompt: str, keywords: Any) -> None:
    with pytest.raises(StatusError, match=r"(1000|20000) at most"):
        asyncio.run(reader().prompt(prompt, keywords))


def test_a_prompt_holds_the_phrases_that_the_network_can_write() -> None:
    prompt = "ab, c a. ab; a b c a b c, zebra,, b"
    assert asyncio.run(reader().prompt(prompt, ["cab"])) == dict.fromkeys(["ab", "c a", "b", "cab"])
    assert asyncio.run(reader("").prompt(prompt, None)) == {}


def test_keywords_that_are_no_list_are_refused() -> None:
    with pytest.raises(StatusError, match="keywords is a list of texts"):
        asyncio.run(reader().prompt(None, 3))


def test_a_decoder_without_hot_words_refuses_a_table_and_drops_a_prompt() -> None:
    with pytest.raises(LexiconError, match=r"decode\.method=beam"):
        asyncio.run(reader("").table(["a"], "hot_words"))


def test_only_so_many_wait() -> None:
    phrases = reader()

    async def many() -> list[Any]:
        tables = [phrases.table(["a"], "hot_words") for _ in range(MAX_WAITING + 1)]
        return await asyncio.gather(*tables, return_exceptions=True)

    answers = asyncio.run(many())
    assert [answer for answer in answers if not isinstance(answer, FullError)] == [{"a": None}] * MAX_WAITING
    assert asyncio.run(phrases.table(["b"], "hot_words")) == {"b": None}


class Counting(dict[Any, Any]):
    """Counts how often it is read, as work does."""

    reads = 0

    def __getitem__(self, key: Any) -> Any:
        Counting.reads += 1
        return super().__getitem__(key)


def test_adding_phrases_reads_each_character_of_the_phrases_once() -> None:
    """Of phrases that share their words, whose work grew with the square of their number."""
    import torch

    spelling = Spelling.of(ALPHABET)
    trie = SessionTrie({}, np.zeros(0, np.float32), spelling, 1.0, 0.0, 0.0, torch.device("cpu"))
    trie.codes = Counting(trie.codes)
    letters = [a + b + c + d for a in "abc" for b in "abc" for c in "abc" for d in "abc"]
    phrases = {f"a b {first} {second}": 1.0 for first in letters[:40] for second in letters[:20]}
    characters = sum(len(phrase.replace(" ", "")) for phrase in phrases)
    assert len(phrases) == 800 and characters <= MAX_CHARACTERS
    root = trie.add_phrases(phrases)
    assert Counting.reads == characters
    trie.remove_phrases(root)


def test_nodes_of_phrases_are_free_again_when_their_last_user_has_left() -> None:
    import torch

    trie = SessionTrie({}, np.zeros(0, np.float32), Spelling.of(ALPHABET), 1.0, 0.0, 0.0, torch.device("cpu"))
    root = trie.add_phrases({"a b": 1.0})
    assert trie.add_phrases({"a b": 1.0}) == root
    trie.remove_phrases(root)
    other = trie.add_phrases({"a": 1.0})
    assert other != root
    trie.remove_phrases(root)
    assert trie.add_phrases({"b": 1.0}) == root
