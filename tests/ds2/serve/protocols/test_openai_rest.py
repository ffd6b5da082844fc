"""Uploads: how much of them a server keeps at once, a disk that is full, and others that are answered meanwhile."""

from __future__ import annotations

import resource
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest
from support.serving import Running, speech, text_alone, until

HEAD = (
    b"POST /v1/audio/transcriptions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: multipart/form-data; boundary=x\r\n"
    b"Content-Length: 3000000\r\n\r\n"
    b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.raw"\r\n\r\n'
)


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def transcribe(running: Running, data: bytes) -> str:
    return str(running.client().audio.transcriptions.create(model="ds2", file=("a.raw", data)).text)


def test_the_bytes_of_all_uploads_are_bounded(serve: Callable[..., Running], temporary: Path) -> None:
    running, data = serve(uploads_bytes=2_500_000), speech(1, 1.0)
    with socket.create_connection(("127.0.0.1", running.port)) as held:
        held.sendall(HEAD + bytes(2_400_000))  # and then nothing
        until(lambda: refused(running, bytes(200_000)))
        assert transcribe(running, data) == text_alone(running.recogniser, data)  # a small one has its place
    until(lambda: not refused(running, bytes(200_000)))
    with pytest.raises(openai.APIStatusError, match="2500000 bytes at most") as too_large:  # no later time helps
        transcribe(running, bytes(2_600_000))
    assert (too_large.value.status_code, too_large.value.type) == (413, "invalid_request_error")
    assert not list(temporary.glob("ds2-upload-*"))


def refused(running: Running, data: bytes) -> bool:
    try:
        transcribe(running, data)
    except openai.RateLimitError as error:
        assert "no more uploads at once" in str(error)
        return True
    return False


@pytest.fixture
def small_disk() -> Iterator[None]:
    """No file of this process grows beyond 2 MiB."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_is_full_refuses_the_upload_and_nothing_else(
    serve: Callable[..., Running], temporary: Path, small_disk: None
) -> None:
    running, data = serve(), speech(2, 1.0)
    for _ in range(2):
        with pytest.raises(openai.InternalServerError, match="cannot store the upload") as caught:
            transcribe(running, bytes(4 << 20))
        assert (caught.value.status_code, caught.value.type) == (507, "server_error")
        assert transcribe(running, data) == text_alone(running.recogniser, data)
    until(lambda: running.metric("ds2_sessions") == 0)
    assert not list(temporary.glob("ds2-upload-*"))


def test_the_event_loop_copies_no_upload(shared: Callable[..., Running], monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written to the named file is written in another thread than that of the event loop."""
    threads = set[str]()
    make = tempfile.NamedTemporaryFile

    def watched(**options: str) -> object:
        threads.add(threading.current_thread().name)
        return make(**options)

    running, data = shared(), speech(3, 1.0)
    monkeypatch.setattr(tempfile, "NamedTemporaryFile", watched)
    assert transcribe(running, data) == text_alone(running.recogniser, data)
    assert threads and all("AnyIO worker" in name for name in threads)


def test_clients_that_list_models_find_one(serve: Callable[..., Running]) -> None:
    running = serve(api_key="secret")
    client = running.client("secret")
    assert [model.id for model in client.models.list()] == ["ds2"]
    assert client.models.retrieve("whisper-1").id == "whisper-1"
    with pytest.raises(openai.AuthenticationError):
        running.client("wrong").models.list()
