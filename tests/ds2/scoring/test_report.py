"""The error page in a real browser: filters typed and clicked, rows counted, transcripts that look like markup."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ds2.audio.augment import encode
from ds2.scoring.report import html_page, most_errors
from ds2.scoring.wer import Report, corpus_report

ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the key of an element reference in the WebDriver standard
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # whatever proxy the environment names
WAIT_S = 600  # a last resort: a browser starts late on a busy machine


class Browser:
    """A headless Chromium, driven by the WebDriver protocol."""

    def __init__(self, port: int) -> None:
        self._base = f"http://127.0.0.1:{port}"
        options = {"args": ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]}
        wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        session = self._call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self._session = f"/session/{session['sessionId']}"

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._base + path, data, {"Content-Type": "application/json"}, method=method)
        with _DIRECT.open(request, timeout=WAIT_S) as answer:
            return json.load(answer)["value"]

    def open(self, url: str) -> None:
        self._call("POST", f"{self._session}/url", {"url": url})

    def find(self, css: str) -> list[str]:
        found = self._call("POST", f"{self._session}/elements", {"using": "css selector", "value": css})
        return [element[ELEMENT] for element in found]

    def type(self, css: str, text: str) -> None:
        [element] = self.find(css)
        self._call("POST", f"{self._session}/element/{element}/clear", {})
        self._call("POST", f"{self._session}/element/{element}/value", {"text": text})

    def click(self, css: str) -> None:
        self._call("POST", f"{self._session}/element/{self.find(css)[0]}/click", {})

    def texts(self, css: str) -> list[str]:
        return [self._call("GET", f"{self._session}/element/{element}/text") for element in self.find(css)]

    def run(self, script: str) -> Any:
        return self._call("POST", f"{self._session}/execute/sync", {"script": script, "args": []})

    def complaints(self) -> list[str]:
        log = self._call("POST", f"{self._session}/se/log", {"type": "browser"})
        return [entry["message"] for entry in log if entry["level"] == "SEVERE"]

    def close(self) -> None:
        self._call("DELETE", self._session)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    driver = shutil.which("chromedriver")
    if driver is None:
        pytest.skip("no chromedriver on this machine (Debian: apt-get install chromium chromium-driver)")
    with subprocess.Popen([driver, "--port=0"], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            lines = iter(process.stdout.readline, "")
            port = next(int(found[1]) for line in lines if (found := re.search(r"successfully on port (\d+)", line)))
            try:
                opened = Browser(port)
            except urllib.error.HTTPError as error:
                pytest.skip(f"chromedriver starts no browser: {error.read().decode()[:300]}")
            yield opened
            opened.close()
        finally:
            process.terminate()


def wait_until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.02)


def page(report: Report, folder: Path) -> str:
    """Write the page; returns its URL."""
    (folder / "errors.html").write_text(html_page(report, "dev & <test>"), encoding="utf-8")
    return (folder / "errors.html").as_uri()


@pytest.fixture
def report() -> Report:
    return corpus_report(
        ["the cat sat", "a dog", "the cat ran off", "<b>bold</b> </script> &amp; words"],
        ["the bat sat", "a dog", "the bat ran", "<b>bold</b> <img/src=x> &amp; words here"],
        names=["u1", "u2", "u3", "u4"],
        speakers=["ann", "bob", "bob", "ann"],
    )


def test_filters_typed_and_clicked(browser: Browser, report: Report, tmp_path: Path) -> None:
    url = page(report, tmp_path)
    browser.open(url)
    assert len(browser.find("#list article")) == 4
    assert browser.texts("#count") == ["4 of 4 utterances, 5 errors in 13 words, WER 38.46 %"]
    browser.type("#query", "BAT sat")
    assert browser.texts("#list h2") == ["u1, speaker ann: 1 of 3"]
    browser.type("#query", "no such words")
    assert browser.texts("#count") == ["0 of 4 utterances, 0 errors in 0 words"]
    browser.open("about:blank")
    browser.open(f"{url}#speaker=bob&kind=E")
    assert browser.texts("#list h2") == ["u3, speaker bob: 2 of 4"]
    browser.click("#kind option[value='']")
    assert len(browser.find("#list article")) == 2
    browser.click("#speaker option[value='']")
    browser.click("#kind option[value=D]")
    assert browser.texts("#list .D") == ["off"]
    browser.click("#kind option[value='']")
    browser.click("#order option[value=rate]")
    assert [text.split(",")[0] for text in browser.texts("#list h2")] == ["u3", "u4", "u1", "u2"]
    assert browser.complaints() == []


def test_an_error_in_the_list_filters_utterances(browser: Browser, report: Report, tmp_path: Path) -> None:
    browser.open(page(report, tmp_path))
    browser.click("details summary")
    assert browser.texts("#errors button")[0] == "cat \u2192 bat \u00d72"
    browser.click("#errors button")
    assert [text.split(",")[0] for text in browser.texts("#list h2")] == ["u1", "u3"]
    assert browser.texts("#list .S b") == ["bat", "bat"]
    browser.click("#errors button")
    assert len(browser.find("#list article")) == 4


def test_transcripts_never_act_as_markup(browser: Browser, report: Report, tmp_path: Path) -> None:
    browser.open(page(report, tmp_path))
    assert browser.texts("h1") == ["dev & <test>"]
    assert browser.find("#list img") == []
    assert browser.texts("#list article:nth-child(4) .words span")[:2] == ["<b>bold</b>", "</script>\n<img/src=x>"]


def test_utterances_with_most_errors_come_first(report: Report) -> None:
    assert most_errors(report, 9) == [2, 3, 0]  # the second has none
    assert most_errors(report, 2) == [2, 3]
    assert most_errors(report, 0) == []


def test_a_recording_has_a_player(browser: Browser, report: Report, tmp_path: Path) -> None:
    tone = 0.3 * np.sin(np.arange(8000, dtype=np.float32))
    recordings = {2: encode(tone, "mp3", 16000)}
    (tmp_path / "errors.html").write_text(html_page(report, "dev", recordings), encoding="utf-8")
    browser.open((tmp_path / "errors.html").as_uri())
    assert len(browser.find("audio")) == 1
    browser.click("#order option[value=errors]")
    assert browser.texts("#list article:has(audio) h2") == ["u3, speaker bob: 2 of 4"]
    browser.run("document.querySelector('audio').load()")
    wait_until(lambda: browser.run("return document.querySelector('audio').readyState") >= 1)
    assert browser.run("return document.querySelector('audio').duration") == pytest.approx(0.5, abs=0.2)
    assert browser.complaints() == []


def test_a_long_corpus_is_shown_in_parts(browser: Browser, tmp_path: Path) -> None:
    references = [f"word{i}" for i in range(500)]
    browser.open(page(corpus_report(references, ["word7"] * 500), tmp_path))
    assert browser.texts("#count") == ["500 of 500 utterances, 499 errors in 500 words, WER 99.80 %"]
    assert len(browser.find("#list article")) == 200
    browser.click("#more")
    browser.click("#more")
    assert len(browser.find("#list article")) == 500
    assert browser.texts("#more") == [""]
    assert browser.texts("label[hidden]") == [""]


def test_the_page_loads_no_other_resources(report: Report) -> None:
    content = html_page(report, "title")
    data = re.search(r'id="data">(.*?)</script>', content, re.DOTALL)
    assert data is not None
    assert [row[0] for row in json.loads(data[1])["utterances"]] == ["u1", "u2", "u3", "u4"]
    outside = content.replace(data[1], "")
    assert re.findall(r"https?:|src=|href=|@import|url\(", outside) == []
