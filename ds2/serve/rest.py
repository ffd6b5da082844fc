"""OpenAI's REST interface for transcription: POST /v1/audio/transcriptions."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import shutil
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from starlette.concurrency import iterate_in_threadpool, run_in_threadpool
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.types import Message

from ds2.audio.read import audio_blocks
from ds2.decoding.hypothesis import Word
from ds2.recognition.captions import cues, srt, vtt
from ds2.recognition.session import NEVER, Endpoints, Segment
from ds2.serve.batcher import Batcher, Source
from ds2.serve.limits import BrokenError, FullError, LimitError, Limits
from ds2.system.errors import UserError

log = logging.getLogger(__name__)

_Found = TypeVar("_Found")
FORMATS = ("json", "text", "srt", "verbose_json", "vtt")
_TIMED = ("srt", "verbose_json", "vtt")
_STATUS: dict[type[Exception], int] = {FullError: 429, BrokenError: 500}  # of other errors 400
_PIECE = 1 << 20  # bytes copied at a time
_SUFFIX = re.compile(r"\.[A-Za-z0-9]{1,8}")  # by which formats are known that nothing else tells


class Transcriptions:
    """The endpoint: an upload of any format that `ds2 transcribe` reads, heard in the batches of all sources."""

    def __init__(self, batcher: Batcher, limits: Limits) -> None:
        self.batcher, self.limits = batcher, limits
        self.stored_bytes = 0  # of all uploads that arrive or are decoded

    async def __call__(self, request: Request) -> Response:
        """Answer a request."""
        upload, answer = _Upload(self), None
        try:
            self.limits.check_key(request)
            answer = await self._answer(request, upload)
            return answer
        except LimitError as error:
            return self._refused(error.status, str(error))
        except UserError as error:
            return self._refused(_STATUS.get(type(error), 400), str(error))
        except OSError as error:  # a full disk
            log.error("an upload cannot be kept: %s", error)
            return self._refused(507, f"this server cannot keep the upload: {error.strerror}")
        except ClientDisconnect:  # nobody is there to be answered
            return Response(status_code=400)
        except HTTPException as error:
            return self._refused(error.status_code, str(error.detail))
        finally:
            if not isinstance(answer, StreamingResponse):  # it reads the upload yet, and closes it
                upload.close()

    def _refused(self, status: int, message: str) -> JSONResponse:
        self.batcher.refused(str(status))
        kind = "invalid_request_error" if status < 500 and status != 429 else "server_error"
        error = {"message": message, "type": kind, "param": None, "code": None}
        return JSONResponse({"error": error}, status)

    async def _answer(self, request: Request, upload: _Upload) -> Response:
        async with Request(request.scope, self._limited(request, upload)).form(max_files=1) as form:
            file, form_at = form.get("file"), str(form.get("response_format") or "json")
            if not isinstance(file, UploadFile):
                raise LimitError("the form has no file: send multipart/form-data with a field `file`", 400, 1008)
            if form_at not in FORMATS:
                raise LimitError(f"response_format={form_at!r} is not one of {', '.join(FORMATS)}", 400, 1008)
            stream = str(form.get("stream") or "false").lower() in ("true", "1")
            grains = [str(grain) for grain in form.getlist("timestamp_granularities[]")]
            language = str(form.get("language") or "unknown")
            phrases = self.batcher.phrases
            hot_words = await phrases.prompt(form.get("prompt"), form.getlist("keywords[]"))
            if form.get("hot_words"):  # ours: phrases and what each is worth
                hot_words = await phrases.table(form.get("hot_words"), "hot_words")
            await run_in_threadpool(upload.copy, file)
            rules = Endpoints() if stream else NEVER
            source = await self.batcher.open(self.batcher.sample_rate_hz, rules, hot_words)
        parts = self._segments(source, upload)
        if stream:
            return await _events(parts, request)
        segments = await _unless_gone(request, _all(parts))
        return _response(form_at, segments, source.accepted_s, language, grains)

    def _limited(self, request: Request, upload: _Upload) -> Any:
        """The request's bytes as they come, up to the most that is taken."""

        async def receive() -> Message:
            try:
                async with asyncio.timeout(self.limits.idle_s):
                    message = await request.receive()
            except TimeoutError as error:
                raise LimitError(f"nothing of the upload came for {self.limits.idle_s:g} s", 408, 1013) from error
            upload.grow(len(message.get("body", b"")))
            return message

        return receive

    async def _segments(self, source: Source, upload: _Upload) -> AsyncGenerator[Segment]:
        blocks = audio_blocks(upload.path, self.batcher.sample_rate_hz)
        try:
            async for samples in iterate_in_threadpool(blocks):
                for segment in (await source.accept(samples)).final:
                    yield segment
                self.limits.check_duration(source.accepted_s)
            for segment in (await source.flush()).final:
                yield segment
        except (LimitError, FullError, BrokenError):
            raise
        except UserError as error:
            raise LimitError(str(error).replace(str(upload.path), upload.name), 400, 1007) from error
        finally:
            source.close()
            blocks.close()  # the client may have gone: nothing more is decoded
            upload.close()


class _Upload:
    """A file that a client sends, while it arrives and is decoded."""

    def __init__(self, endpoint: Transcriptions) -> None:
        self.endpoint, self.size_bytes = endpoint, 0
        self.name, self.path = "the upload", Path()
        self._file: Any = None

    def grow(self, size_bytes: int) -> None:
        """Count bytes that came.

        Raises:
            LimitError: too many for an upload.
            FullError: too many of all uploads.
        """
        limits = self.endpoint.limits
        self.size_bytes += size_bytes
        self.endpoint.stored_bytes += size_bytes
        if self.size_bytes > limits.upload_bytes:
            raise LimitError(f"uploads may have {limits.upload_bytes} bytes at most", 413, 1009)
        if self.endpoint.stored_bytes > limits.uploads_bytes:
            raise FullError("this server takes no more uploads at once: try again later")

    def copy(self, file: UploadFile) -> None:
        """Copy what came to a file with a name that tells its format; blocks."""
        self.name = file.filename or self.name
        suffix = Path(self.name).suffix
        suffix = suffix if _SUFFIX.fullmatch(suffix) else ""
        self._file = tempfile.NamedTemporaryFile(prefix="ds2-upload-", suffix=suffix)  # noqa: SIM115 (`close` does)
        shutil.copyfileobj(file.file, self._file, _PIECE)
        self._file.flush()
        self.path = Path(self._file.name)

    def close(self) -> None:
        """Delete the file; twice does no harm."""
        self.endpoint.stored_bytes -= self.size_bytes
        self.size_bytes = 0
        if self._file is not None:
            self._file.close()


async def _all(parts: AsyncIterator[Segment]) -> list[Segment]:
    return [segment async for segment in parts]


async def _unless_gone(request: Request, work: Coroutine[Any, Any, _Found]) -> _Found:
    """What work gives.

    Raises:
        ClientDisconnect: the client went before; the work is not done to its end.
    """

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            continue

    tasks = asyncio.create_task(work), asyncio.create_task(gone())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise ClientDisconnect
        return tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()


async def _events(parts: AsyncGenerator[Segment], request: Request) -> Response:
    """Server-sent events: the text of each segment as it becomes final, then the whole."""
    first = await _unless_gone(request, anext(parts, None))  # refused, if unreadable, before an answer began

    async def events() -> AsyncIterator[str]:
        texts: list[str] = []
        segment = first
        try:
            while segment is not None:
                delta = (" " if texts else "") + segment.hypothesis.text
                texts.append(segment.hypothesis.text)
                yield _event({"type": "transcript.text.delta", "delta": delta})
                segment = await anext(parts, None)
        except UserError as error:
            yield _event({"type": "error", "error": {"message": str(error), "type": "invalid_request_error"}})
            return
        finally:  # the client may have gone
            await parts.aclose()
        yield _event({"type": "transcript.text.done", "text": " ".join(texts)})

    return StreamingResponse(events(), media_type="text/event-stream", headers={"cache-control": "no-store"})


def _event(data: dict[str, Any]) -> str:
    return f"event: {data['type']}\ndata: {json.dumps(data, ensure_ascii=False)}\n\n"


def _response(form_at: str, segments: list[Segment], duration_s: float, language: str, grains: list[str]) -> Response:
    text = " ".join(segment.hypothesis.text for segment in segments)
    words = [word for segment in segments for word in segment.hypothesis.words]
    if form_at in _TIMED and text and not words:
        raise LimitError(
            f"response_format={form_at} needs word times, and this server has decode.times=false", 400, 1008
        )
    if form_at == "text":
        return PlainTextResponse(text + "\n")
    if form_at == "srt":
        return PlainTextResponse(srt(cues(words)))
    if form_at == "vtt":
        return PlainTextResponse(vtt(cues(words)), media_type="text/vtt")
    if form_at == "json":
        return JSONResponse({"text": text})
    found: dict[str, Any] = {"task": "transcribe", "language": language, "duration": duration_s, "text": text}
    if "word" in grains:
        found["words"] = [_word(word) for word in words]
    if "segment" in grains or not grains:
        found["segments"] = [
            {"id": number, "start": cue.start_s, "end": cue.end_s, "text": cue.text}
            for number, cue in enumerate(cues(words))
        ]
    return JSONResponse(found)


def _word(word: Word) -> dict[str, Any]:
    times = {"start": round(word.start_s, 3), "end": round(word.end_s, 3)}
    return {"word": word.text, **times, "confidence": round(word.confidence, 4)}  # the last is ours
