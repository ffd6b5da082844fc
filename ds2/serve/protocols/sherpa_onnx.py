"""sherpa-onnx's WebSocket protocol: float32 samples at 16 kHz, then the text Done.

A result comes whenever the text changed. `text`, `tokens` and `timestamps` are those of the segment with the number
`segment`; a token is a word, and its time counts from `start_time`.
After Done the last result has `is_eof`, the text Done! follows, and the connection ends. The protocol has no errors:
they come as {"error": message} before the connection closes.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from ds2.audio.stream import Pcm
from ds2.decoding.hypothesis import Word
from ds2.recognition.open_segments import Endpoints, Segment
from ds2.serve.client import SessionSettings
from ds2.serve.limits import BadRequestError
from ds2.serve.protocols.websocket import Connection

_RATE_HZ = 16000


class SherpaOnnx(Connection):
    """One connection."""

    summary = "sherpa-onnx's WebSocket"
    settings = SessionSettings(_RATE_HZ, Endpoints(), interim_words=True)
    sample_reader = staticmethod(partial(Pcm, "<f4"))
    segment = 0  # the number of the open one
    start_s = 0.0  # where it begins
    partial = ""  # its text as sent

    async def handle_messages(self) -> None:
        """`Done` ends the connection too."""
        while (message := await self.receive()) is not None:
            if message.get("bytes") is not None:
                result = await self.accept_audio(message["bytes"])
                for segment in result.final:
                    await self._send_segment(segment, is_eof=False)
                if result.partial != self.partial:
                    self.partial = result.partial
                    await self.send(self._result(result.partial, result.words))
            elif message.get("text") == "Done":
                await self.send_last_result()
                await self.send("Done!")
                await self.socket.close()
                return
            else:
                raise BadRequestError("messages are float32 samples at 16 kHz, or the text Done")

    async def send_last_result(self) -> None:
        final = await self.flush()
        for segment in final[:-1]:
            await self._send_segment(segment, is_eof=False)
        if final:
            await self._send_segment(final[-1], is_eof=True)
        else:
            await self.send(self._result("", [], is_final=True, is_eof=True))

    async def _send_segment(self, segment: Segment, *, is_eof: bool) -> None:
        """Send the final result of a segment; the next one begins at its end."""
        result = self._result(segment.hypothesis.text, segment.hypothesis.words, is_final=True, is_eof=is_eof)
        self.segment, self.start_s, self.partial = self.segment + 1, segment.end_s, ""
        await self.send(result)

    def _result(
        self, text: str, words: Sequence[Word], *, is_final: bool = False, is_eof: bool = False
    ) -> dict[str, Any]:
        """Return a result of the open segment."""
        tokens = [f" {word}" for word in text.split()]
        times_s = [round(word.start_s - self.start_s, 3) for word in words]
        state = {"segment": self.segment, "start_time": round(self.start_s, 3), "is_final": is_final, "is_eof": is_eof}
        return {"text": text, "tokens": tokens, "timestamps": times_s, **state}
