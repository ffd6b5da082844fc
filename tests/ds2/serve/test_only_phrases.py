"""Sessions that recognise given phrases only, by every protocol with a place for them, beside others that do not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import openai
import pytest
from support.serving import Running, speech, text_alone, updated, vosk, wav

DATA = speech(2, 3.0)
ONLY = ["(a|b) [c]", "cab"]


def wanted(running: Running, phrases: list[str]) -> str:
    return text_alone(running.recogniser.only_phrases(phrases) if phrases else running.recogniser, DATA)


def test_a_session_recognises_nothing_but_its_grammar(shared: Callable[..., Running]) -> None:
    running = shared("greedy")
    free = wanted(running, [])
    grammars: list[list[str]] = [[], free.split(), ["a", "[unk]"]]
    texts = [wanted(running, grammar) for grammar in grammars]
    assert texts == [free, free, "[unk]"]

    async def together() -> list[list[dict[str, Any]]]:
        endless = {"silence_s": 1e6, "after_speech_s": 1e6, "longest_s": 1e6}
        configs = [{"grammar": grammar, "endpoints": endless} for grammar in grammars]
        return await asyncio.gather(*(vosk(running.websocket, DATA, config=config) for config in configs * 2))

    replies = asyncio.run(together())
    assert [answers[-1]["text"] for answers in replies] == texts * 2
    for answers, text in zip(replies, texts, strict=False):
        assert " ".join(word["word"] for word in answers[-1]["result"]) == text


@pytest.mark.parametrize(
    ("grammar", "named"),
    [
        (["zebra"], "does not write"),
        (["(a"], "not closed"),
        ({"a": 1}, "give a list of phrases"),
        ("a", "list of phrases"),
        ([["a"]], "phrases are texts"),
        (["a"] * 1001, "1000 at most"),
        (["[unk]"], "give at least one"),
    ],
)
def test_a_grammar_that_cannot_be_read_is_an_error_in_the_protocol(
    shared: Callable[..., Running], grammar: Any, named: str
) -> None:
    running = shared("greedy")
    assert named in asyncio.run(vosk(running.websocket, DATA, config={"grammar": grammar}))[-1]["error"]
    assert asyncio.run(vosk(running.websocket, DATA))[-1]["text"] is not None  # others go on


def test_openais_files_take_phrases(shared: Callable[..., Running]) -> None:
    running = shared("greedy")
    upload, create = wav(DATA), running.client().audio.transcriptions.create
    assert create(model="ds2", file=upload, extra_body={"phrases": json.dumps(ONLY)}).text == wanted(running, ONLY)
    with pytest.raises(openai.BadRequestError, match="zebra"):
        create(model="ds2", file=upload, extra_body={"phrases": '["zebra"]'})


def test_openais_sessions_take_phrases(shared: Callable[..., Running]) -> None:
    running = shared("greedy")
    assert updated(running, phrases=ONLY).type == "session.updated"
    assert "zebra" in updated(running, phrases=["zebra"]).error.message
