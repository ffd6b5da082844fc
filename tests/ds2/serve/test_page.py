"""The page at /: one file that reaches its own server only; with a microphone where Chromium is installed."""

from __future__ import annotations

import re
import shutil
import socket
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from support.serving import RATE_HZ, WAIT_S, Running, samples_of, speech, until

from ds2.recognition.session import Endpoints
from ds2.serve.protocols.vosk import Vosk
from ds2.serve.tls import self_signed

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or ""


def test_the_page_asks_no_other_host(serve: Callable[..., Running]) -> None:
    running = serve()
    with urllib.request.urlopen(running.web + "/", timeout=WAIT_S) as answer:
        html, policy = answer.read().decode(), answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy
    assert len(re.findall("sha256-", policy)) == 2 and "unsafe" not in policy
    assert not re.search(r"https?://|//[a-z]|@import|url\(", html)
    assert not re.search(r"\son[a-z]+=", html) and " style=" not in html  # the policy forbids them
    labels = re.findall(r"<(?:button|label|input|meter)[^>]*>", html)
    assert len(labels) >= 9 and 'lang="en"' in html and 'aria-live="polite"' in html


@contextmanager
def chromium_page(tmp_path: Path, *arguments: str, **options: Any) -> Iterator[Any]:
    """A page of a browser whose microphone plays `spoken.wav`, which this writes; errors of its scripts fail."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    if not CHROMIUM:
        pytest.skip("needs chromium")
    samples = np.concatenate([samples_of(speech(2, 2.0)), np.zeros(2 * RATE_HZ, np.float32)])
    soundfile.write(tmp_path / "spoken.wav", samples, RATE_HZ, subtype="PCM_16")
    fake = ["--no-sandbox", "--use-fake-ui-for-media-stream", "--use-fake-device-for-media-stream", *arguments]
    fake.append(f"--use-file-for-fake-audio-capture={tmp_path / 'spoken.wav'}")
    with playwright.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=fake, timeout=1000 * WAIT_S)
        page = browser.new_context(permissions=["microphone"], **options).new_page()
        page.set_default_timeout(1000 * WAIT_S)
        errors = list[str]()
        page.on("pageerror", lambda error: errors.append(str(error)))
        yield page
        browser.close()
    assert errors == []


@pytest.mark.slow
def test_a_phone_over_http_shows_what_the_microphone_needs(serve: Callable[..., Running], tmp_path: Path) -> None:
    running = serve(allow_hosts=("ds2.test",))
    phone = {"viewport": {"width": 360, "height": 640}, "has_touch": True, "is_mobile": True}
    with chromium_page(tmp_path, "--host-resolver-rules=MAP ds2.test 127.0.0.1", **phone) as page:
        page.goto(f"http://ds2.test:{running.port}/")
        assert "needs https" in page.inner_text("#state") and page.is_disabled("#microphone")
        page.set_input_files("#file", str(tmp_path / "spoken.wav"))
        until(lambda: page.inner_text("#state").startswith("Done: "))
        assert page.inner_text("#final").strip() and page.is_disabled("#microphone")
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        page.click("#copy")
        until(lambda: "copy" in page.inner_text("#state"))


@pytest.mark.slow
def test_a_microphone_over_https(serve: Callable[..., Running], tmp_path: Path) -> None:
    running = serve(tls=self_signed(["localhost", "127.0.0.1"]))
    with chromium_page(tmp_path, ignore_https_errors=True) as page:
        page.goto(f"https://127.0.0.1:{running.port}/")
        page.click("#microphone")
        page.locator("#partial", has_text=re.compile(r".{4}")).wait_for()
        page.click("#microphone")
        until(lambda: page.inner_text("#state") == "Done.")
        assert page.inner_text("#final").strip()


@pytest.mark.slow
def test_a_lost_server_is_shown_and_connected_to_again(serve: Callable[..., Running], tmp_path: Path) -> None:
    running = serve()
    with chromium_page(tmp_path) as page:
        page.goto(running.web)
        page.click("#microphone")
        page.locator("#partial", has_text=re.compile(r".{4}")).wait_for()
        running.end()
        page.locator("#state", has_text="The server was lost").wait_for()
        until(lambda: not is_listening(running.port))
        serve(port=running.port)
        page.locator("#state", has_text="Listening again").wait_for()
        page.locator("#partial", has_text=re.compile(r".{4}")).wait_for()
        page.click("#microphone")
        until(lambda: page.inner_text("#state") == "Done.")


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.slow
def test_a_microphone_in_chromium(
    serve: Callable[..., Running], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ds2.recognition.session.OVERTIME_S", 0.0)
    monkeypatch.setattr(Vosk, "endpoints", Endpoints(longest_s=1.0))
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    if not CHROMIUM:
        pytest.skip("needs chromium")
    running = serve()
    samples = np.concatenate([samples_of(speech(2, 2.0)), np.zeros(2 * RATE_HZ, np.float32)])
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
        page.click("#microphone")
        until(lambda: page.inner_text("#state") == "Done.")
        words = page.inner_text("#final")
        assert words.strip() and page.inner_text("#partial") == ""
        assert "% sure" in page.get_attribute("#final span", "title")
        page.set_input_files("#file", str(tmp_path / "spoken.wav"))
        until(lambda: page.inner_text("#state").startswith("Done: "))
        assert len(page.inner_text("#final")) > len(words)
        browser.close()
    assert wrong == []
    assert asked and all(url.startswith((running.web, "blob:")) for url in asked)
