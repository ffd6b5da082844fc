"""Sessions that listen for keywords among all words, by every protocol with a place for them, beside others."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import openai
import pytest
from support.serving import RATE_HZ, Running, alone, connect, samples_of, speech, text_alone, updated, vosk, wav

from ds2.config.schema import DecodeConfig
from ds2.decoding.beam.decoder import BeamDecoder
from ds2.decoding.hypothesis import Word
from ds2.decoding.phrases import FALSE_ALARMS, OTHERS
from ds2.recognition.recogniser import Recogniser
from ds2.recognition.session import decode_sessions

DATA = speech(2, 3.0)
ENDLESS = {"silence_s": 1e6, "after_speech_s": 1e6, "longest_s": 1e6}
MANY = 9.0  # false alarms an hour
WORDS = {"cb": -1.0, "bc": -1.0, "cbc": -1.2, "bcb": -1.3, "a": -2.0}  # what the model writes, cut into words
KEYWORDS = [["cbc"], ["bcb"], ["bcb cbc", "a"]]


@pytest.fixture(scope="module")
def measured(shared: Callable[..., Running], tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Running]:
    """A server whose search knows a few words, and how often it finds them wrongly."""
    file = tmp_path_factory.mktemp("lm") / "words.arpa"
    grams = [f"{log10} {word}" for word, log10 in {"<s>": -1.0, "</s>": -1.0, "<unk>": -1.0, **WORDS}.items()]
    file.write_text("\n".join(["\\data\\", f"ngram 1={len(grams)}", "", "\\1-grams:", *grams, "", "\\end\\", ""]))
    options = DecodeConfig(
        method="beam",
        beam=8,
        alpha=1.0,
        lm=str(file),
        lexicon=True,
        label_min_log_prob=-1e9,
        prune=1e9,
        keyword_alarms=[0.1, 0.2, 0.5, 2.0, MANY],
    )
    return lambda: shared(decode=options)


def wanted(recogniser: Recogniser, keywords: Sequence[str], alarms: float = FALSE_ALARMS) -> tuple[Word, ...]:
    return alone(recogniser.only_keywords(keywords, alarms), DATA).words


def record(word: Word) -> dict[str, Any]:
    """A word as Vosk sends it."""
    times = {"start": round(word.start_s, 3), "end": round(word.end_s, 3)}
    return {"word": word.text, "conf": round(word.confidence, 4), **times}


def test_sessions_of_vosk_listen_for_their_own_in_one_batch(
    measured: Callable[[], Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    running, sizes, step = measured(), list[int](), BeamDecoder.step
    plain = text_alone(running.recogniser, DATA)
    words = [wanted(running.recogniser, keywords) for keywords in KEYWORDS]
    texts = [" ".join(word.text for word in own) for own in words]
    assert len(set(texts)) == 3 and "cbc" in texts[0].split() and "bcb cbc" in [word.text for word in words[2]]

    async def together() -> list[list[dict[str, Any]]]:
        configs: list[dict[str, Any]] = [{"only_keywords": keywords} for keywords in KEYWORDS]
        sent = [vosk(running.websocket, DATA, config=config | {"endpoints": ENDLESS}) for config in configs]
        sent += [vosk(running.websocket, DATA, chunk=1111 * 2, config=configs[0] | {"endpoints": ENDLESS})]
        sent += [vosk(running.websocket, DATA, config={"endpoints": ENDLESS})]
        return await asyncio.gather(*sent)

    replies = asyncio.run(together())
    assert [answers[-1]["text"] for answers in replies] == [*texts, texts[0], plain]
    for answers, own in zip(replies, [*words, words[0]], strict=False):
        assert answers[-1]["result"] == [record(word) for word in own]
        assert {word for answer in answers for word in answer.get("partial", "").split()} <= {OTHERS, *WORDS}

    monkeypatch.setattr(BeamDecoder, "step", lambda self, d, *rest: (sizes.append(len(d)), step(self, d, *rest))[1])
    lives = [running.recogniser.only_keywords(keywords).live() for keywords in KEYWORDS]
    for live in lives:
        live.accept_waveform(samples_of(DATA))
    while any(live.is_ready() for live in lives):
        decode_sessions(lives)
    assert set(sizes) == {len(KEYWORDS)}


def test_more_false_alarms_find_more(measured: Callable[[], Running]) -> None:
    running = measured()
    few, usual, more, many = (
        [record(word) for word in wanted(running.recogniser, [keyword], alarms)]
        for keyword, alarms in (("cbcb", 0.1), ("cbcb", FALSE_ALARMS), ("bcbc", FALSE_ALARMS), ("bcbc", MANY))
    )
    texts = [[word["word"] for word in words] for words in (few, usual, more, many)]
    assert texts[0] == texts[2] == [OTHERS] and "cbcb" in texts[1] and "bcbc" in texts[3]
    for keyword, alarms, words in (
        ("cbcb", {"false_alarms": 0.1}, few),
        ("cbcb", {}, usual),
        ("bcbc", {"false_alarms": None}, more),
        ("bcbc", {"false_alarms": MANY}, many),
        ("bcbc", {"false_alarms": "9"}, many),  # as a form has it
    ):
        config = {"only_keywords": [keyword], "endpoints": ENDLESS, **alarms}
        assert asyncio.run(vosk(running.websocket, DATA, config=config))[-1]["result"] == words


REFUSED = {
    "what the network does not write": ({"only_keywords": ["cbc", "zebra"]}, "zebra"),
    "no list": ({"only_keywords": {"cbc": 1}}, "config.only_keywords is {'cbc': 1}: give a list of phrases"),
    "too many": ({"only_keywords": ["a"] * 1001}, "1000 at most"),
    "too many texts": ({"only_keywords": ["(a|b|c) " * 8]}, "more than 200 texts"),
    "what cannot be read": ({"only_keywords": ["(a"]}, "not closed"),
    "both": ({"only_keywords": ["cbc"], "grammar": ["a"]}, "config.grammar and config.only_keywords: give one"),
    "hot words": ({"only_keywords": ["cbc"], "hot_words": {"a": 1}}, "one of the three"),
    "no keywords": ({"false_alarms": 1}, "give config.only_keywords with it"),
    "no number": ({"only_keywords": ["cbc"], "false_alarms": "x"}, "config.false_alarms='x' is not allowed"),
    "none": ({"only_keywords": ["cbc"], "false_alarms": 0}, "config.false_alarms=0 is not allowed"),
    "fewer than measured": ({"only_keywords": ["cbc"], "false_alarms": 0.01}, "allow 0.1 or more"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_had_is_an_error_in_the_protocol(measured: Callable[[], Running], case: str) -> None:
    (config, reason), running = REFUSED[case], measured()
    assert reason in asyncio.run(vosk(running.websocket, DATA[:8000], config=config))[-1]["error"]
    assert "text" in asyncio.run(vosk(running.websocket, DATA[:8000]))[-1]  # others go on


def test_other_searches_and_protocols_say_why(shared: Callable[..., Running], measured: Callable[[], Running]) -> None:
    config = {"only_keywords": ["a"]}
    assert "decode.method=beam" in asyncio.run(vosk(shared("greedy").websocket, DATA, config=config))[-1]["error"]
    assert "`ds2 lm tune`" in asyncio.run(vosk(shared("beam").websocket, DATA, config=config))[-1]["error"]

    async def deepgram(port: int) -> dict[str, Any]:
        query = f"encoding=linear16&sample_rate={RATE_HZ}&only_keywords=a"
        async with connect(f"ws://127.0.0.1:{port}/v1/listen?{query}") as ws:
            return dict(json.loads(await ws.recv()))

    assert "only_keywords='a' is not offered" in asyncio.run(deepgram(measured().port))["message"]


def test_openais_files_listen_for_keywords(measured: Callable[[], Running]) -> None:
    running = measured()
    create, words = running.client().audio.transcriptions.create, wanted(running.recogniser, KEYWORDS[2])
    fields = {"only_keywords": json.dumps(KEYWORDS[2])}
    timed = {"response_format": "verbose_json", "timestamp_granularities": ["word"]}
    answer = create(model="ds2", file=wav(DATA), extra_body=fields, **timed)
    assert [(word.word, word.start, word.end, word.confidence) for word in answer.words] == [
        (word["word"], word["start"], word["end"], word["conf"]) for word in map(record, words)
    ]
    with pytest.raises(openai.BadRequestError, match="zebra"):
        create(model="ds2", file=wav(DATA), extra_body={"only_keywords": '["zebra"]'})
    with pytest.raises(openai.BadRequestError, match="false_alarms='x' is not allowed"):
        create(model="ds2", file=wav(DATA), extra_body=fields | {"false_alarms": "x"})


def test_openais_sessions_send_an_event_for_each_keyword(measured: Callable[[], Running]) -> None:
    running = measured()
    samples = np.repeat(samples_of(DATA), 3)[::2]  # at 24 kHz
    data = (samples * 32767).astype("<i2").tobytes()
    words = alone(running.recogniser.only_keywords(KEYWORDS[0], MANY), data, 24000).words

    async def events() -> tuple[list[Any], str]:
        client = openai.AsyncOpenAI(base_url=f"{running.web}/v1", api_key="none")
        matches = list[Any]()
        async with client.realtime.connect(model="ds2", extra_query={"intent": "transcription"}) as connection:
            wish = {"only_keywords": KEYWORDS[0], "false_alarms": MANY}
            audio: Any = {"input": {"turn_detection": None, "transcription": wish}}
            await connection.send({"type": "session.update", "session": {"type": "transcription", "audio": audio}})
            await connection.input_audio_buffer.append(audio=base64.b64encode(data).decode())
            await connection.input_audio_buffer.commit()
            async for event in connection:
                assert event.type != "error", event
                if event.type.endswith("transcription.segment"):
                    matches.append(event)
                if event.type.endswith("transcription.completed"):
                    return matches, event.transcript
        raise AssertionError("no transcript")

    matches, transcript = asyncio.run(events())
    assert transcript == " ".join(word.text for word in words)
    assert matches and [(e.text, e.confidence, e.start, e.end) for e in matches] == [
        (word.text, round(word.confidence, 4), round(word.start_s, 3), round(word.end_s, 3))
        for word in words
        if word.text != OTHERS
    ]
    assert len({event.id for event in matches}) == len(matches) and len({event.item_id for event in matches}) == 1
    assert "zebra" in updated(running, only_keywords=["zebra"]).error.message
    assert "give one of the two" in updated(running, only_keywords=["a"], phrases=["b"]).error.message
