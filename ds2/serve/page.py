"""The page at /: a microphone or a file, and what is heard, in one file that asks no other host for anything."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import HTMLResponse


class Page:
    """Gives the page, with a policy that lets it run its own script and speak to its own server only."""

    def __init__(self) -> None:
        self.html = files("ds2.serve").joinpath("page.html").read_text(encoding="utf-8")
        script, style = (_hashes(self.html, tag) for tag in ("script", "style"))
        policy = (
            "default-src 'none'",
            f"script-src {script} blob:",  # blob: what cuts the microphone's sound, in the thread that hears it
            f"style-src {style}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
        self.headers = {
            "content-security-policy": "; ".join(policy),
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
            "permissions-policy": "microphone=(self)",
            "cache-control": "no-cache",
        }

    async def __call__(self, request: Request) -> HTMLResponse:
        """The page."""
        return HTMLResponse(self.html, headers=self.headers)


def _hashes(html: str, tag: str) -> str:
    found = re.findall(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in found)
    return " ".join(f"'sha256-{digest}'" for digest in digests)
