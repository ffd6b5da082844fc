"""Hot words by every protocol: each session has its own, whoever shares its batches."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import openai
import pytest
from support.serving import RATE_HZ, Running, connect, speech, text_alone, text_at, updated, wav
from support.serving import vosk as answers

from ds2.config.schema import DecodeConfig
from ds2.decoding.phrases import HotWords

DATA = speech(2, 1.5)
OPEN = DecodeConfig(method="beam", beam=32, label_min_log_prob=-1e9, prune=1e9)  # nothing is cut but by the beam


def wanted(running: Running, hot: HotWords | None) -> str:
    return text_alone(running.recogniser, DATA, hot)


async def vosk(running: Running, config: dict[str, Any]) -> str:
    """The text, or the error."""
    answer = (await answers(running.websocket, DATA, config=config))[-1]
    return str(answer.get("error") or answer["text"])


def test_sessions_of_vosk_have_their_own(shared: Callable[..., Running]) -> None:
    running = shared(decode=OPEN)
    plain = wanted(running, None)
    other = wanted(running, {plain: -500.0})
    hot = [None, {plain: -500.0}, {plain: -500.0, other: -500.0}]
    texts = [wanted(running, words) for words in hot]
    assert len(set(texts)) == 3

    async def together() -> list[str]:
        configs: list[dict[str, Any]] = [{"hot_words": words} for words in hot]
        return await asyncio.gather(*(vosk(running, config) for config in configs * 3))

    assert asyncio.run(together()) == texts * 3
    assert asyncio.run(vosk(running, {"phrase_list": ["CAB", "b a"]})) == wanted(running, {"cab": 10.0, "b a": 10.0})


def test_openais_prompt_is_a_hint_and_our_field_an_order(shared: Callable[..., Running]) -> None:
    running = shared(decode=OPEN)
    upload, create = wav(DATA), running.client().audio.transcriptions.create
    prompt = "Cab, b a; a sentence of many words that is no phrase. 123, zebra"
    assert create(model="ds2", file=upload, prompt=prompt).text == wanted(running, {"cab": 10.0, "b a": 10.0})
    assert create(model="ds2", file=upload, keywords=["cab", "b a"]).text == wanted(running, {"cab": 10.0, "b a": 10.0})
    hot = json.dumps({"cab": 90})
    assert create(model="ds2", file=upload, extra_body={"hot_words": hot}).text == wanted(running, {"cab": 90.0})
    with pytest.raises(openai.BadRequestError, match="zebra"):
        create(model="ds2", file=upload, extra_body={"hot_words": '["zebra"]'})


def test_several_fields_count_together_and_an_empty_one_takes_hot_words_back(shared: Callable[..., Running]) -> None:
    running = shared(decode=OPEN)
    plain = wanted(running, None)
    other = wanted(running, {plain: -500.0})
    both = wanted(running, {plain: -500.0, other: -500.0, "cab": 10.0})
    orders = {plain: -500.0, other: -500.0}
    create = running.client().audio.transcriptions.create
    assert asyncio.run(vosk(running, {"phrase_list": ["cab"], "hot_words": orders})) == both != other
    assert create(model="ds2", file=wav(DATA), prompt="cab", extra_body={"hot_words": json.dumps(orders)}).text == both

    async def vosk_takes_back() -> str:
        async with connect(running.websocket) as ws:
            for orders in ({plain: -500.0}, {}):
                await ws.send(json.dumps({"config": {"sample_rate": RATE_HZ, "hot_words": orders}}))
            await ws.send(DATA)
            await ws.recv()
            await ws.send('{"eof" : 1}')
            return str(json.loads(await ws.recv())["text"])

    async def realtime(*transcriptions: dict[str, Any]) -> str:
        audio = base64.b64encode(DATA).decode()
        async with connect(f"ws://127.0.0.1:{running.port}/v1/realtime?intent=transcription") as ws:
            for one in transcriptions:
                settings = {"type": "transcription", "audio": {"input": {"turn_detection": None, "transcription": one}}}
                await ws.send(json.dumps({"type": "session.update", "session": settings}))
            await ws.send(json.dumps({"type": "input_audio_buffer.append", "audio": audio}))
            await ws.send(json.dumps({"type": "input_audio_buffer.commit"}))
            async for message in ws:
                if (event := json.loads(message))["type"].endswith("completed"):
                    return str(event["transcript"])
        raise AssertionError("no transcript")

    assert asyncio.run(vosk_takes_back()) == plain != other
    at_24_khz = text_at(running.recogniser, DATA, 24000)
    assert asyncio.run(realtime({"hot_words": {at_24_khz: -500.0}})) != at_24_khz
    assert asyncio.run(realtime({"hot_words": {at_24_khz: -500.0}}, {"hot_words": {}})) == at_24_khz
    assert asyncio.run(realtime({"prompt": "cab", "hot_words": {at_24_khz: -500.0}})) != at_24_khz


def test_what_has_no_weight_is_worth_the_setting(serve: Callable[..., Running]) -> None:
    running = serve(decode=replace(OPEN, hot_word_bonus=-500.0))
    plain = wanted(running, None)
    other = wanted(running, {plain: -500.0})
    assert other != plain == wanted(running, {plain: 0.0})
    assert wanted(running, {plain: None}) == other
    assert asyncio.run(vosk(running, {"phrase_list": [plain]})) == other
    assert running.client().audio.transcriptions.create(model="ds2", file=wav(DATA), prompt=plain).text == other


def test_realtime_takes_them_before_audio(shared: Callable[..., Running]) -> None:
    running = shared(decode=OPEN)
    assert updated(running, prompt="cab, 7").type == "session.updated"
    assert updated(running, keywords=["cab", "7"]).type == "session.updated"
    assert updated(running, hot_words={"cab": 3}).type == "session.updated"
    assert "zebra" in updated(running, hot_words=["zebra"]).error.message
    assert "keywords is a list" in updated(running, keywords="cab").error.message


def test_a_decoder_that_looks_for_none_says_so(shared: Callable[..., Running]) -> None:
    running = shared("greedy")
    assert "decode.method=beam" in asyncio.run(vosk(running, {"hot_words": {"cab": 3.0}}))
    assert asyncio.run(vosk(running, {})) == wanted(running, None)


def test_a_prompt_of_too_many_phrases_is_refused_before_any_work(shared: Callable[..., Running]) -> None:
    running = shared(decode=OPEN)
    create = running.client().audio.transcriptions.create
    with pytest.raises(openai.BadRequestError, match="20000 at most"):
        create(model="ds2", file=("talk.raw", DATA), prompt="ab, c " * 150_000)
    with pytest.raises(openai.BadRequestError, match="1000 at most"):
        create(model="ds2", file=("talk.raw", DATA), keywords=["cab"] * 900 + ["b, a, c"] * 90)
    assert "1001 phrases: 1000 at most" in asyncio.run(vosk(running, {"phrase_list": ["a"] * 1001}))
