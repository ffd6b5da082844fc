"""OpenAI's REST interface for transcription: POST /v1/audio/transcriptions."""

import asyncio
import json
import logging
import re
import shutil
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar

from starlette.concurrency import iterate_in_threadpool, run_in_threadpool
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.types import Message

from ds2.audio.read import audio_blocks
from ds2.decoding.hypothesis import Word, times_record
from ds2.recognition.captions import cues, srt, vtt
from ds2.recognition.open_segments import NEVER, Endpoints, Segment
from ds2.serve.client import EngineClient, EngineSession, SessionSettings
from ds2.serve.limits import BAD_DATA, BadRequestError, FullError, Limits, StatusError, refuse_misspelt
from ds2.serve.phrases import KEYWORDS
from ds2.system import UserError
from ds2.system.plain import short_repr

log = logging.getLogger(__name__)

_T = TypeVar("_T")
FORMATS = ("json", "text", "srt", "verbose_json", "vtt")
_TIMED = ("srt", "verbose_json", "vtt")
_GRANULARITIES = ("word", "segment")
_FIELDS = (  # those that change nothing here among them
    "file", "model", "language", "prompt", "response_format", "temperature", "stream", "timestamp_granularities[]",
    "timestamp_granularities", "include[]", "include", "chunking_strategy", "known_speaker_names[]",
    "known_speaker_references[]", "keywords[]", "hot_words", "phrases", *KEYWORDS,
)  # fmt: skip
_PIECE_BYTES = 1 << 20  # copied at a time
_SUFFIX = re.compile(r"\.[A-Za-z0-9]{1,8}")  # the content of some formats does not identify them


class Transcriptions:
    """The route: an upload of any format that `ds2 transcribe` reads, decoded in the batches of all sessions."""

    def __init__(self, engine: EngineClient, limits: Limits) -> None:
        self.engine, self.limits = engine, limits
        self.stored_bytes = 0  # of all uploads that arrive or are decoded

    async def __call__(self, request: Request) -> Response:
        """Answer a request."""
        upload, response = _Upload(self), None
        try:
            self.limits.check_key(request)
            response = await self._transcribe(request, upload)
            return response
        except StatusError as error:
            return self._refuse(error.status, str(error))
        except UserError as error:
            return self._refuse(400, str(error))
        except OSError as error:  # a full disk
            log.error("an upload cannot be stored: %s", error)
            return self._refuse(507, f"this server cannot store the upload: {error.strerror}")
        except ClientDisconnect:  # the client does not read the response
            return Response(status_code=400)
        except HTTPException as error:
            return self._refuse(error.status_code, str(error.detail))
        finally:
            if not isinstance(response, StreamingResponse):  # `_events` closes the upload at its end
                upload.close()

    async def models(self, request: Request) -> Response:
        """Answer /v1/models and /v1/models/NAME: one model, which goes by any name."""
        try:
            self.limits.check_key(request)
        except StatusError as error:
            return self._refuse(error.status, str(error))
        model = {"id": request.path_params.get("name", "ds2"), "object": "model", "created": 0, "owned_by": "ds2"}
        return JSONResponse(model if request.path_params else {"object": "list", "data": [model]})

    def _refuse(self, status: int, message: str) -> JSONResponse:
        self.engine.count_refusal(str(status))
        return error_response(status, message)

    async def _transcribe(self, request: Request, upload: "_Upload") -> Response:
        encoding = request.headers.get("content-encoding", "identity")
        if encoding.lower() != "identity":
            raise StatusError(f"Content-Encoding {encoding[:40]!r} is not read: send the form as it is", 415, BAD_DATA)
        async with Request(request.scope, self._limited(request, upload)).form(max_files=1) as form:
            file, response_format = form.get("file"), str(form.get("response_format") or "json")
            if not isinstance(file, UploadFile):
                raise BadRequestError(
                    "the form has no file: send multipart/form-data with a field `file`, which has a filename"
                )
            refuse_misspelt(form, _FIELDS)
            if response_format not in FORMATS:
                formats = ", ".join(FORMATS)
                raise BadRequestError(f"response_format={short_repr(response_format)} is not one of {formats}")
            asked = str(form.get("stream") or "false").lower()
            if asked not in ("true", "1", "false", "0"):
                raise BadRequestError(f"stream={short_repr(asked)} is not allowed: give true or false")
            stream = asked in ("true", "1")
            if stream and response_format in ("srt", "vtt"):
                raise BadRequestError(f"stream=true sends events, not {response_format}: leave out one of the two")
            names = ("timestamp_granularities[]", "timestamp_granularities")  # as OpenAI's clients write it; by hand
            granularities = [str(one) for name in names for one in form.getlist(name)]
            if unknown := [one for one in granularities if one not in _GRANULARITIES]:
                raise BadRequestError(
                    f"timestamp_granularities={short_repr(unknown[0])} is not one of {', '.join(_GRANULARITIES)}"
                )
            if granularities and not stream and response_format != "verbose_json":
                raise BadRequestError(
                    f"timestamp_granularities needs response_format=verbose_json or stream=true; {response_format} "
                    "has no field for them"
                )
            language = str(form.get("language") or "unknown")
            phrases = self.engine.phrases
            hot_words = await phrases.prompt(form.get("prompt"), form.getlist("keywords[]"))
            hot_words |= await phrases.table(form.get("hot_words"), "hot_words")  # our extension: with weights
            only, alarms = await phrases.only(form, "phrases")  # our extensions: JSON, only these phrases or keywords
            await run_in_threadpool(upload.copy, file)
        endpoints = Endpoints() if stream else NEVER
        settings = SessionSettings(self.engine.sample_rate_hz, endpoints, hot_words, only, false_alarms=alarms)
        session = await self.engine.open(settings)
        segments = self._segments(session, upload)
        if stream:
            return await _events(segments, session, request, with_words="word" in granularities)
        all_segments = await _unless_disconnected(request, _all(segments))
        return _response(response_format, all_segments, session.accepted_s, language, granularities)

    def _limited(self, request: Request, upload: "_Upload") -> Any:
        """Receive the request's body, as far as the limits allow."""

        async def receive() -> Message:
            try:
                async with asyncio.timeout(self.limits.idle_s):
                    message = await request.receive()
            except TimeoutError as error:
                raise StatusError(f"nothing of the upload came for {self.limits.idle_s:g} s", 408, 1013) from error
            upload.grow(len(message.get("body", b"")))
            return message

        return receive

    async def _segments(self, session: EngineSession, upload: "_Upload") -> AsyncGenerator[Segment]:
        """Yield segments as they become final."""
        blocks = audio_blocks(upload.path, self.engine.sample_rate_hz)
        try:
            async for samples in iterate_in_threadpool(blocks):
                for segment in (await session.accept_waveform(samples)).final:
                    yield segment
                self.limits.check_duration(session.accepted_s)
            for segment in (await session.flush()).final:
                yield segment
        except StatusError:
            raise
        except UserError as error:
            raise BadRequestError(str(error).replace(str(upload.path), upload.name)) from error
        finally:
            session.close()
            blocks.close()  # the client may have left: nothing more is decoded
            upload.close()


class _Upload:
    """A file that a client sends, until it is decoded."""

    def __init__(self, route: Transcriptions) -> None:
        self.route, self.size_bytes = route, 0
        self.name, self.path = "the upload", Path()
        self._file: Any = None

    def grow(self, size_bytes: int) -> None:
        """Count bytes that arrived.

        Raises:
            StatusError: this upload is too large.
            FullError: all uploads together are too large.
        """
        limits = self.route.limits
        self.size_bytes += size_bytes
        self.route.stored_bytes += size_bytes
        most = min(limits.upload_bytes, limits.uploads_bytes)  # waiting does not help one that is larger than all
        if self.size_bytes > most:
            raise StatusError(f"uploads may have {most} bytes at most", 413, 1009)
        if self.route.stored_bytes > limits.uploads_bytes:
            raise FullError("this server takes no more uploads at once: try again later")

    def copy(self, file: UploadFile) -> None:
        """Copy the upload to a file whose suffix names its format. Blocks."""
        self.name = file.filename or self.name
        suffix = Path(self.name).suffix
        suffix = suffix if _SUFFIX.fullmatch(suffix) else ""
        self._file = tempfile.NamedTemporaryFile(prefix="ds2-upload-", suffix=suffix)  # noqa: SIM115 (`close` does)
        shutil.copyfileobj(file.file, self._file, _PIECE_BYTES)
        self._file.flush()
        self.path = Path(self._file.name)

    def close(self) -> None:
        """Delete the file; twice does no harm."""
        self.route.stored_bytes -= self.size_bytes
        self.size_bytes = 0
        if self._file is not None:
            self._file.close()


def error_response(status: int, message: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """Return an error as OpenAI's clients read it."""
    kind = "invalid_request_error" if status < 500 and status != 429 else "server_error"
    error = {"message": message, "type": kind, "param": None, "code": None}
    return JSONResponse({"error": error}, status, headers)


async def _all(segments: AsyncIterator[Segment]) -> list[Segment]:
    return [segment async for segment in segments]


async def _unless_disconnected(request: Request, work: Coroutine[Any, Any, _T]) -> _T:
    """Return the result of `work`; raises ClientDisconnect, and cancels the work, where the client left."""

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            continue

    tasks = asyncio.create_task(work), asyncio.create_task(disconnected())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise ClientDisconnect
        return tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()


async def _events(
    segments: AsyncGenerator[Segment], session: EngineSession, request: Request, *, with_words: bool
) -> Response:
    """Server-sent events: the text of each segment as it becomes final, then the whole text.

    Our extensions: with `timestamp_granularities[]=word` a text's words, and the duration at the end.
    """
    # Before the response starts: an unreadable file gets an error status.
    first = await _unless_disconnected(request, anext(segments, None))

    async def events() -> AsyncIterator[str]:
        texts: list[str] = []
        segment = first
        try:
            while segment is not None:
                delta = (" " if texts else "") + segment.hypothesis.text
                texts.append(segment.hypothesis.text)
                words = {"words": [_word(word) for word in segment.hypothesis.words]} if with_words else {}
                yield _event({"type": "transcript.text.delta", "delta": delta, **words})
                segment = await anext(segments, None)
        except UserError as error:
            yield _event({"type": "error", "error": {"message": str(error), "type": "invalid_request_error"}})
            return
        finally:  # the client may have left
            await segments.aclose()
        duration_s = round(session.accepted_s, 3)
        yield _event({"type": "transcript.text.done", "text": " ".join(texts), "duration": duration_s})

    return StreamingResponse(events(), media_type="text/event-stream", headers={"cache-control": "no-store"})


def _event(data: dict[str, Any]) -> str:
    return f"event: {data['type']}\ndata: {json.dumps(data, ensure_ascii=False)}\n\n"


def _response(
    response_format: str, segments: list[Segment], duration_s: float, language: str, granularities: list[str]
) -> Response:
    text = " ".join(segment.hypothesis.text for segment in segments)
    words = [word for segment in segments for word in segment.hypothesis.words]
    if response_format in _TIMED and text and not words:
        raise BadRequestError(
            f"response_format={response_format} needs word times, and this server has decode.times=false"
        )
    if response_format == "text":
        return PlainTextResponse(text + "\n")
    if response_format == "srt":
        return PlainTextResponse(srt(cues(words)))
    if response_format == "vtt":
        return PlainTextResponse(vtt(cues(words)), media_type="text/vtt")
    if response_format == "json":
        return JSONResponse({"text": text})
    duration_s = round(duration_s, 3)
    content: dict[str, Any] = {"task": "transcribe", "language": language, "duration": duration_s, "text": text}
    if "word" in granularities:
        content["words"] = [_word(word) for word in words]
    if "segment" in granularities or not granularities:
        content["segments"] = [
            {"id": number, "start": round(cue.start_s, 3), "end": round(cue.end_s, 3), "text": cue.text}
            for number, cue in enumerate(cues(words))
        ]
    return JSONResponse(content)


def _word(word: Word) -> dict[str, Any]:
    return {"word": word.text, **times_record(word)}  # confidence is our extension
