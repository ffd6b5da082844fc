"""https: with a certificate of the user, or with one that the server makes."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from support.serving import WAIT_S, Running, speech, text_alone, vosk, wav

from ds2.cli import main
from ds2.serve.tls import Certificate, names_of_host, self_signed


def test_clients_that_trust_the_certificate_are_served(serve: Callable[..., Running]) -> None:
    made = self_signed(names_of_host("0.0.0.0", ["talk.example"]))
    assert made.key.parent.stat().st_mode & 0o077 == 0
    running = serve(tls=made)
    trusting = ssl.create_default_context(cafile=str(made.certificate))
    for name in ("127.0.0.1", "localhost"):
        with urllib.request.urlopen(
            f"https://{name}:{running.port}/healthz", timeout=WAIT_S, context=trusting
        ) as answer:
            assert answer.status == 200
    with pytest.raises(urllib.error.URLError, match="CERTIFICATE"):
        urllib.request.urlopen(f"https://127.0.0.1:{running.port}/healthz", timeout=WAIT_S)


def test_uploads_and_sessions_over_tls_have_the_words_of_the_recogniser(serve: Callable[..., Running]) -> None:
    made, data = self_signed(["127.0.0.1"]), speech(1, 3.0)
    running, trusting = serve(tls=made), ssl.create_default_context(cafile=str(made.certificate))
    expected = text_alone(running.recogniser, data)
    with httpx.Client(verify=trusting, timeout=WAIT_S) as web:
        address = f"https://127.0.0.1:{running.port}/v1/audio/transcriptions"
        answer = web.post(address, files={"file": wav(data)}, data={"model": "ds2"})
    assert answer.json()["text"] == expected != ""
    answers = asyncio.run(vosk(f"wss://127.0.0.1:{running.port}/", data, tls=trusting))
    assert " ".join(answer["text"] for answer in answers if answer.get("text")) == expected


def test_who_speaks_without_tls_is_cut_off_without_a_word_and_others_are_served(
    serve: Callable[..., Running], caplog: pytest.LogCaptureFixture
) -> None:
    made = self_signed(["127.0.0.1"])
    running, trusting = serve(tls=made), ssl.create_default_context(cafile=str(made.certificate))
    address = "127.0.0.1", running.port
    caplog.clear()
    with socket.create_connection(address, WAIT_S) as silent:
        for sent in (b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n", b'{"type": "describe"}\n', b"\0" * 100):
            with socket.create_connection(address, WAIT_S) as plain:
                plain.sendall(sent)
                assert plain.recv(100) == b""
        with urllib.request.urlopen(f"https://127.0.0.1:{running.port}/", timeout=WAIT_S, context=trusting) as answer:
            assert answer.status == 200
        silent.setblocking(False)
        with pytest.raises(BlockingIOError):  # it may still begin
            silent.recv(100)
    assert not caplog.records


def test_a_certificate_is_used_again_while_it_has_all_names() -> None:
    first = self_signed(["localhost"]).certificate.read_bytes()
    assert self_signed(["localhost"]).certificate.read_bytes() == first
    more = self_signed(["localhost", "10.0.0.7"]).certificate.read_bytes()
    assert more != first and self_signed(["localhost"]).certificate.read_bytes() == more
    self_signed(["localhost"]).key.write_bytes(b"damaged")
    assert self_signed(["localhost"]).certificate.read_bytes() != more


def test_a_certificate_that_another_server_replaces_keeps_its_key() -> None:
    made, copy = self_signed(["localhost"]), self_signed(["localhost"]).key.with_name("copy.pem")
    os.link(made.key, copy)  # what a server that opened the key reads, though another one replaces it
    self_signed(["localhost", "10.0.0.7"])
    Certificate(copy, copy).check()


@pytest.mark.parametrize("workers", [pytest.param("0", marks=pytest.mark.slow), "1"])
def test_the_command_serves_https(make_model: Callable[..., Path], workers: str) -> None:
    command = [sys.executable, "-m", "ds2.cli", "serve", str(make_model()), "--device", "cpu", "--port", "0",
               "--host", "0.0.0.0", "--tls-self-signed", "--workers", workers]  # fmt: skip
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        address = re.match(r"ds2 serve: (https://127\.0\.0\.1:\d+)", server.stdout.readline())
        assert address
        trusting = ssl.create_default_context(cafile=str(self_signed(["localhost"]).certificate))
        with urllib.request.urlopen(f"{address[1]}/healthz", timeout=WAIT_S, context=trusting) as answer:
            assert answer.status == 200
        server.terminate()
        assert server.wait(WAIT_S) == 0
    finally:
        server.kill()


def test_wrong_files_are_named(
    make_model: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made, model = self_signed(["localhost"]), str(make_model())
    broken = tmp_path / "broken.pem"
    broken.write_text("no PEM")
    cases = [
        (["--tls-cert", str(made.certificate)], "go together"),
        (["--tls-self-signed", "--tls-cert", str(made.certificate)], "leave it out, or --tls-cert"),
        (["--tls-cert", str(broken), "--tls-key", str(made.key)], f"--tls-cert {broken}"),
        (["--tls-cert", str(made.certificate), "--tls-key", str(tmp_path / "none")], "No such file"),
    ]
    for options, message in cases:
        assert main(["serve", model, "--device", "cpu", "--port", "0", *options]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("key", ["secret\n", " ", "schlüssel"])
def test_a_key_that_no_client_can_send_is_refused(
    make_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], key: str
) -> None:
    monkeypatch.setenv("DS2_API_KEY", key)
    assert main(["serve", str(make_model()), "--device", "cpu", "--port", "0"]) == 2
    assert "DS2_API_KEY has characters that no client can send" in capsys.readouterr().err
