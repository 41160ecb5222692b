"""The control side of one generator's HTTP interface. Every call is a fresh connection with a
deadline.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from pipelinerl_common import tracing

PROBE_TIMEOUT_S = 5.0
ANSWER_GRACE_S = 5.0
"""A generator ends a call by itself at the deadline it was given; its answer may take this much
longer.
"""


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of a control call.

    `status` is the HTTP status, or 0 when no answer came: refused, cut off, or silent past the deadline.
    """

    status: int
    body: Mapping[str, Any]
    error: str = ""

    @property
    def ok(self) -> bool:
        return self.status == 200

    @property
    def is_silence(self) -> bool:
        return self.status == 0


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """`weights` is the body of GET /weights of a generator that is alive, else None with the
    reason.
    """

    weights: Mapping[str, Any] | None
    error: str = ""
    is_slow: bool = False
    """No answer in time, which on a busy machine does not yet mean that it is dead."""


class GeneratorClient:
    """Control calls to the generator at base URL `url`."""

    def __init__(self, name: str, url: str, token: str | None) -> None:
        self.name = name
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    async def probe(self, timeout_s: float = PROBE_TIMEOUT_S) -> ProbeResult:
        """Whether it is alive, and which weights it has."""
        health = await self._call("GET", "/health", None, timeout_s)
        answer = await self._call("GET", "/weights", None, timeout_s) if health.ok else health
        if answer.ok:
            return ProbeResult(answer.body)
        return ProbeResult(
            None, answer.error, is_slow=answer.is_silence and answer.error.startswith("no answer")
        )

    async def init_process_group(self, body: Mapping[str, Any], timeout_s: float) -> Answer:
        return await self._call(
            "POST",
            "/init_process_group",
            {**body, "timeout_s": timeout_s},
            timeout_s + ANSWER_GRACE_S,
        )

    async def update_weights(self, body: Mapping[str, Any], timeout_s: float) -> Answer:
        return await self._call(
            "POST",
            "/request_weight_update",
            {**body, "timeout_s": timeout_s},
            timeout_s + ANSWER_GRACE_S,
        )

    async def _call(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float
    ) -> Answer:
        connector = aiohttp.TCPConnector(force_close=True)
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with (
                aiohttp.ClientSession(
                    connector=connector,
                    timeout=timeout,
                    headers={**self._headers, **tracing.headers()},
                ) as session,
                session.request(method, self.url + path, json=body) as response,
            ):
                return await _read(response)
        except TimeoutError:
            return Answer(0, {}, f"no answer to {path} within {timeout_s:g} s")
        except (aiohttp.ClientError, OSError, asyncio.IncompleteReadError) as error:
            return Answer(0, {}, f"{path}: {type(error).__name__}: {error}")


async def _read(response: aiohttp.ClientResponse) -> Answer:
    try:
        body = await response.json(content_type=None)
    except ValueError:
        body = None
    parsed = body if isinstance(body, dict) else {}
    if response.status == 200:
        return Answer(200, parsed)
    error = parsed.get("error")
    message = error.get("message") if isinstance(error, dict) else None
    return Answer(
        response.status,
        parsed,
        f"{response.url.path}: HTTP {response.status}: {message or response.reason}",
    )
