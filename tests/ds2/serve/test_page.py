"""The page at /: one file that reaches its own server only; with a microphone where Chromium is installed."""

from __future__ import annotations

import json
import re
import shutil
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from support.serving import RATE_HZ, WAIT_S, Running, samples_of, speech, until

from ds2.config.schema import DecodeConfig
from ds2.decoding.hypothesis import Word
from ds2.recognition.captions import cues, srt, vtt
from ds2.recognition.open_segments import Endpoints
from ds2.serve.protocols.vosk import Vosk
from ds2.serve.tls import self_signed

SPOKEN_S = 2.0
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or ""


def test_the_page_asks_no_other_host(shared: Callable[..., Running]) -> None:
    running = shared()
    with urllib.request.urlopen(running.web + "/", timeout=WAIT_S) as answer:
        html, policy = answer.read().decode(), answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy
    assert len(re.findall("sha256-", policy)) == 2 and "unsafe" not in policy
    assert not re.search(r"https?://|//[a-z]|@import|url\(", html)
    assert not re.search(r"\son[a-z]+=", html) and " style=" not in html  # the policy forbids them
    labels = re.findall(r"<(?:button|label|input|meter)[^>]*>", html)
    assert len(labels) >= 9 and 'lang="en"' in html and 'aria-live="polite"' in html
    assert "<output" not in html  # a screen reader would read the level, five times a second


@contextmanager
def chromium_page(tmp_path: Path, *arguments: str, once: bool = False, **options: Any) -> Iterator[Any]:
    """A page of a browser whose microphone plays `spoken.wav`, which this writes; errors of its scripts fail."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    if not CHROMIUM:
        pytest.skip("needs chromium")
    samples = np.concatenate([samples_of(speech(2, SPOKEN_S)), np.zeros(2 * RATE_HZ, np.float32)])
    soundfile.write(tmp_path / "spoken.wav", samples, RATE_HZ, subtype="PCM_16")
    fake = ["--no-sandbox", "--use-fake-ui-for-media-stream", "--use-fake-device-for-media-stream", *arguments]
    fake.append(f"--use-file-for-fake-audio-capture={tmp_path / 'spoken.wav'}{'%noloop' * once}")
    with playwright.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=fake, timeout=1000 * WAIT_S)
        page = browser.new_context(permissions=["microphone"], **options).new_page()
        page.set_default_timeout(1000 * WAIT_S)
        errors = list[str]()
        page.on("pageerror", lambda error: errors.append(str(error)))
        yield page
        browser.close()
    assert errors == []


@pytest.fixture
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several words of the untrained model, which finds no pauses in a file."""
    monkeypatch.setattr("ds2.recognition.open_segments.OVERTIME_S", 0.0)
    monkeypatch.setattr("ds2.serve.protocols.openai_rest.Endpoints", lambda: Endpoints(longest_s=0.5))


@pytest.mark.slow
def test_a_phone_over_http_shows_what_the_microphone_needs(serve: Callable[..., Running], tmp_path: Path) -> None:
    running = serve(allow_hosts=("ds2.test",))
    phone = {"viewport": {"width": 360, "height": 640}, "has_touch": True, "is_mobile": True}
    with chromium_page(tmp_path, "--host-resolver-rules=MAP ds2.test 127.0.0.1", **phone) as page:
        page.goto(f"http://ds2.test:{running.port}/")
        assert "needs https" in page.inner_text("#state") and page.is_disabled("#microphone")
        page.set_input_files("#file", str(tmp_path / "spoken.wav"))
        until(lambda: page.inner_text("#state").startswith("Done: "))
        assert page.inner_text(".words").strip() and page.is_disabled("#microphone")
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        page.get_by_role("button", name="Copy the text").click()
        until(lambda: "copy" in page.inner_text("#state"))


@pytest.mark.slow
def test_a_microphone_over_https_with_a_key(serve: Callable[..., Running], tmp_path: Path) -> None:
    running = serve(tls=self_signed(["localhost", "127.0.0.1"]), api_key=(key := "a/b (c)=="))
    with chromium_page(tmp_path, ignore_https_errors=True) as page:
        start_microphone(page, f"https://127.0.0.1:{running.port}/", key=key)
        stop_microphone(page)
        assert page.inner_text(".words").strip()


@pytest.mark.slow
def test_a_lost_server_is_shown_and_connected_to_again(serve: Callable[..., Running], tmp_path: Path) -> None:
    running = serve()
    with chromium_page(tmp_path) as page:
        start_microphone(page, running.web)
        lose_server(page, running)
        before = page.inner_text(".words")
        serve(port=running.port)
        page.locator("#state", has_text="Listening again").wait_for()
        page.locator("#partial", has_text=re.compile(r".{4}")).wait_for()
        stop_microphone(page)
        assert page.locator(".recording").count() == 1
        words = json.loads(saved(page, "json"))["words"]
        assert page.inner_text(".words").startswith(before) and len(words) > len(before.split()) - 1
        assert [word["start"] for word in words] == sorted(word["start"] for word in words)


@pytest.mark.slow
def test_speech_while_the_server_is_lost_is_recognised(serve: Callable[..., Running], tmp_path: Path) -> None:
    """The microphone plays once: its words come though the server was away for all of them."""
    running = serve()
    with chromium_page(tmp_path, once=True) as page:
        start_microphone(page, running.web, letters=2)
        lose_server(page, running)
        time.sleep(SPOKEN_S)
        serve(port=running.port)
        page.locator("#state", has_text="Listening again").wait_for()
        stop_microphone(page)
        words = json.loads(saved(page, "json"))["words"]
    assert words[0]["start"] < SPOKEN_S / 2 < words[-1]["end"]


@pytest.mark.slow
@pytest.mark.usefixtures("short_segments")
def test_saved_files_hold_what_is_shown(serve: Callable[..., Running], tmp_path: Path) -> None:
    running = serve()
    with chromium_page(tmp_path) as page:
        recognise_file(page, running.web, tmp_path)
        files = {name: saved(page, name) for name in ("txt", "srt", "vtt", "json")}
    content = json.loads(files["json"])
    words = [Word(word["word"], word["start"], word["end"], word["confidence"]) for word in content["words"]]
    assert content["text"].split() == [word.text for word in words] and files["txt"].split() == content["text"].split()
    assert len(words) > 1 and files["srt"] == srt(cues(words)) and files["vtt"] == vtt(cues(words))
    assert [word.start_s for word in words] == sorted({word.start_s for word in words})


@pytest.mark.slow
def test_captions_are_those_of_ds2_transcribe(serve: Callable[..., Running], tmp_path: Path) -> None:
    """Long words, pauses and signs."""
    draw = np.random.default_rng(5)
    texts = [*("<b>", "&", "x" * 50), *("a" * int(length) for length in draw.integers(1, 14, 200))]
    gaps = draw.choice([0.0, 0.1, 0.999, 1.0, 3.0], len(texts), p=[0.5, 0.3, 0.05, 0.1, 0.05])
    starts = [round(float(start), 3) for start in np.cumsum(gaps + 0.25)]
    words = [Word(text, start, round(start + 0.25, 3), 1.0) for text, start in zip(texts, starts, strict=True)]
    sent = [{"word": word.text, "start": word.start_s, "end": word.end_s, "confidence": 1} for word in words]
    with chromium_page(tmp_path) as page:
        page.goto(serve().web)
        page.evaluate("words => new Recording('talk').add(words, 'text')", sent)
        assert saved(page, "srt") == srt(cues(words)) and saved(page, "vtt") == vtt(cues(words))


@pytest.mark.slow
def test_a_confidence_stands_on_the_line_of_its_word(serve: Callable[..., Running], tmp_path: Path) -> None:
    words = [{"word": "a" * (1 + n % 8), "start": n, "end": n + 0.5, "confidence": 0.9} for n in range(60)]
    with chromium_page(tmp_path, viewport={"width": 360, "height": 740}) as page:
        page.goto(serve().web)
        page.evaluate("words => new Recording('talk').add(words, 'text')", words)
        page.click("#details")
        shares = page.locator(".words small").all()
        tops = [share.evaluate("share => share.getBoundingClientRect().top") for share in shares]
        ends = [
            share.evaluate("share => share.previousElementSibling.getBoundingClientRect().bottom") for share in shares
        ]
    assert len(set(ends)) > 5 and all(top < end for top, end in zip(tops, ends, strict=True))


@pytest.mark.slow
@pytest.mark.usefixtures("short_segments")
def test_words_are_reached_by_keys_and_touch(serve: Callable[..., Running], tmp_path: Path) -> None:
    with chromium_page(tmp_path) as page:
        recognise_file(page, serve().web, tmp_path)
        count = page.locator(".words span").count()
        page.locator(".words").focus()
        shown = [press(page, key) for key in ("ArrowRight", "End", "ArrowLeft", "Home", "Escape")]
        assert shown[0] == shown[3] != "" == shown[4] and len(set(shown[:3])) == min(3, count)
        assert re.search(r": \d+ % sure, \d+\.\d\d s to \d+\.\d\d s", shown[1])
        page.locator(".words span").last.click()
        assert page.inner_text("#word") == shown[1]
        assert page.evaluate("document.querySelector('audio').currentTime") > 0
        assert not page.locator(".words small").first.is_visible()
        page.evaluate("new Recording('talk')")  # whose words the note would cover
        assert page.inner_text("#word") == "" and page.locator(".chosen").count() == 0
        page.click("#details")
        assert page.locator(".words small").first.is_visible()
        page.on("dialog", lambda dialog: dialog.accept())
        page.click("#clear")
        assert page.locator(".recording").count() == 0 and page.is_visible("#empty")


@pytest.mark.slow
@pytest.mark.parametrize("height", [640, 800])
def test_what_has_the_focus_is_not_covered(serve: Callable[..., Running], tmp_path: Path, height: int) -> None:
    words = [{"word": "a" * (1 + n % 8), "start": n, "end": n + 0.5, "confidence": 0.9} for n in range(60)]
    with chromium_page(tmp_path, viewport={"width": 2 * height - 900, "height": height}) as page:
        page.goto(serve().web)
        for name in ("one", "two", "three"):
            page.evaluate("([name, words]) => new Recording(name).add(words, 'text')", [name, words])
        tops = []
        for _ in range(25):
            page.keyboard.press("Shift+Tab")
            tops.append(page.evaluate("document.activeElement.closest('#transcript *')?.getBoundingClientRect().top"))
        covered = page.evaluate("find('source').getBoundingClientRect().bottom")
    tops = [top for top in tops if top is not None]
    assert len(tops) > 15 and min(tops) >= covered


@pytest.mark.slow
def test_settings_that_the_server_refuses_are_shown(serve: Callable[..., Running], tmp_path: Path) -> None:
    with chromium_page(tmp_path) as page:
        page.goto(serve().web)
        page.click("summary")
        page.fill("#only", "(ab")
        page.set_input_files("#file", str(tmp_path / "spoken.wav"))
        page.locator("#state.bad", has_text="(ab").wait_for()
        page.click("#microphone")
        page.locator("#state.bad", has_text="(ab").wait_for()
        until(lambda: page.inner_text("#microphone") == "Start microphone")
        assert page.locator(".recording").count() == 0


@pytest.mark.slow
def test_keywords_alone_are_shown(serve: Callable[..., Running], tmp_path: Path) -> None:
    running = serve(decode=DecodeConfig(method="beam", beam=8, keyword_alarms=[0.1, 0.2, 0.5, 2.0, 9.0]))
    with chromium_page(tmp_path) as page:
        word = running.recogniser.transcribe(tmp_path / "spoken.wav").text.split()[0]
        page.goto(running.web)
        page.click("summary")
        page.fill("#keywords", "a")
        page.set_input_files("#file", str(tmp_path / "spoken.wav"))
        page.locator("#state", has_text="No words were recognised").wait_for()
        page.click("#microphone")
        page.locator("#partial", has_text="…").wait_for()
        stop_microphone(page)
        assert page.locator(".recording").count() == 0
        page.fill("#keywords", f"a\n{word}")
        page.set_input_files("#file", str(tmp_path / "spoken.wav"))
        until(lambda: page.inner_text("#state").startswith("Done: "))
        assert set(json.loads(saved(page, "json"))["text"].split()) == {word}


def start_microphone(page: Any, address: str, *, letters: int = 4, key: str = "") -> None:
    """Open the page and speak until it shows a few letters."""
    page.goto(address)
    page.evaluate("key => { document.getElementById('key').value = key }", key)
    page.click("#microphone")
    page.locator("#partial", has_text=re.compile(rf".{{{letters}}}")).wait_for()


def stop_microphone(page: Any) -> None:
    """Stop, and wait for the last words."""
    page.click("#microphone")
    until(lambda: page.inner_text("#state") == "Done.")


def lose_server(page: Any, running: Running) -> None:
    """End the server; the page must say that it was lost."""
    running.end()
    page.locator("#state", has_text="The server was lost").wait_for()
    until(lambda: not is_listening(running.port))


def recognise_file(page: Any, address: str, tmp_path: Path) -> None:
    """Open the page and recognise `spoken.wav` to its end."""
    page.goto(address)
    page.set_input_files("#file", str(tmp_path / "spoken.wav"))
    until(lambda: page.inner_text("#state").startswith("Done: "))


def press(page: Any, key: str) -> str:
    page.keyboard.press(key)
    return str(page.inner_text("#word"))


def saved(page: Any, name: str) -> str:
    """The file that the page saves of its last recording."""
    with page.expect_download() as download:
        page.get_by_role("button", name=f"Save as {name}").last.click()
    assert download.value.suggested_filename.endswith(f".{name}")
    return Path(download.value.path()).read_text(encoding="utf-8")


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.slow
def test_a_microphone_in_chromium(
    serve: Callable[..., Running], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ds2.recognition.open_segments.OVERTIME_S", 0.0)
    monkeypatch.setattr(Vosk, "settings", replace(Vosk.settings, endpoints=Endpoints(longest_s=1.0)))
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    if not CHROMIUM:
        pytest.skip("needs chromium")
    running = serve()
    samples = np.concatenate([samples_of(speech(2, SPOKEN_S)), np.zeros(2 * RATE_HZ, np.float32)])
    soundfile.write(tmp_path / "spoken.wav", samples, RATE_HZ, subtype="PCM_16")
    fake = ["--no-sandbox", "--use-fake-ui-for-media-stream", "--use-fake-device-for-media-stream"]
    fake.append(f"--use-file-for-fake-audio-capture={tmp_path / 'spoken.wav'}%noloop")
    with playwright.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=fake, timeout=1000 * WAIT_S)
        page = browser.new_context(permissions=["microphone"]).new_page()
        page.set_default_timeout(1000 * WAIT_S)
        wrong, asked = list[str](), list[str]()
        page.on("console", lambda message: wrong.append(message.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(running.web)
        page.click("#microphone")
        page.locator("#partial", has_text=re.compile(r".{4}")).wait_for()  # looks at each picture: it comes and goes
        assert page.inner_text("#level").endswith("dB")
        until(lambda: re.fullmatch(r"\d\.\d s", page.inner_text("#delay")))
        stop_microphone(page)
        words = page.inner_text(".words")
        assert words.strip() and page.inner_text("#partial") == ""
        assert "% sure" in page.get_attribute(".words span", "title")
        page.set_input_files("#file", str(tmp_path / "spoken.wav"))
        until(lambda: page.inner_text("#state").startswith("Done: "))
        assert page.locator(".words").nth(1).inner_text().strip()
        browser.close()
    assert wrong == []
    assert asked and all(url.startswith((running.web, "blob:")) for url in asked)
