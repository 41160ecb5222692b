"""U(h) of a generator, measured: tokens per second at 1, 2, 4, ... concurrent requests, and the
file that `pipelinerl plan --utilization` reads.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp

from pipelinerl_common.errors import PermanentError, PipelineRLError, SettingsError, Unavailable
from pipelinerl_common.generator_api import CompletionRequest
from pipelinerl_common.generator_client import GeneratorClient, GeneratorError, NoAnswer
from pipelinerl_common.text import counted

PROMPT_IDS = range(1, 9)
"""Prompts are made of these tokens: any vocabulary has them."""

Complete = Callable[[], Awaitable[int]]
"""Does one request; returns its number of tokens."""


@dataclass(frozen=True, slots=True)
class RequestShape:
    """What every request asks for. Example: 256 tokens after a prompt of 32."""

    prompt_tokens: int
    max_tokens: int
    temperature: float = 1.0


@dataclass(frozen=True, slots=True)
class RequestSpan:
    """One request. Its tokens are taken as evenly spread over its time."""

    start: float
    end: float
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Level:
    """What was measured at one concurrency. Example: 950 tokens/s with 8 requests at once."""

    concurrency: int
    tokens_per_second: float
    num_requests: int
    """Requests that were running in the measured time."""


@dataclass(frozen=True, slots=True)
class CurveScale:
    """What U is a share of."""

    num_gpus: int = 1
    """GPUs of the generator; h and tokens per second in the file are those of one."""
    peak_tokens_per_second: float | None = None
    """A GPU's peak FLOP/s over the FLOPs of one token. None takes the fastest level."""


class GeneratorEndpoint:
    """The measured generator. Completions do not end early, so that all have the same length."""

    def __init__(self, url: str, token: str | None, shape: RequestShape, timeout_s: float) -> None:
        self._url = url
        self._token = token
        self._shape = shape
        self._timeout_s = timeout_s
        self._numbers = count()

    async def complete(self, client: GeneratorClient) -> int:
        """Sends one request; returns the number of sampled tokens, at least 1.

        Raises SettingsError for what the user can change, Unavailable, or PermanentError.
        """
        first, shape = next(self._numbers), self._shape
        places = range(first, first + shape.prompt_tokens)
        request = CompletionRequest(
            prompt_token_ids=[PROMPT_IDS[place % len(PROMPT_IDS)] for place in places],
            max_tokens=shape.max_tokens,
            temperature=shape.temperature,
            ignore_eos=True,
        )
        try:
            answer = await client.complete(request, self._timeout_s)
        except GeneratorError as error:
            raise _explained(self._url, error) from error
        num_tokens = sum(len(choice.token_ids) for choice in answer.choices)
        if num_tokens < 1:
            raise PermanentError(f"{self._url}: the answer has no tokens")
        return num_tokens

    def client(self, session: aiohttp.ClientSession) -> GeneratorClient:
        return GeneratorClient(self._url, self._token, session)


def _explained(url: str, error: GeneratorError) -> PipelineRLError:
    if isinstance(error.__cause__, aiohttp.InvalidURL):
        return SettingsError(f"--generator {url}: not a URL, for example http://127.0.0.1:8000")
    if isinstance(error, NoAnswer):
        return Unavailable(f"{error}; see --timeout")
    if error.status in (0, 200):  # no answer, or one that is not a completion
        return error
    if error.status in (401, 403):
        return SettingsError(f"{error}; give the generator's token with --token-file")
    if error.status in (400, 422):
        return SettingsError(f"{error}; see --prompt-tokens and --max-tokens")
    if error.status == 503:
        return Unavailable(f"{error}; a generator outside a job serves only with --serve-initial")
    return PermanentError(str(error))


def levels(most: int) -> list[int]:
    """1, 2, 4, ... and `most` itself. Example: levels(12) is [1, 2, 4, 8, 12]."""
    doubled = [1 << power for power in range(most.bit_length()) if 1 << power < most]
    return [*doubled, most]


def tokens_within(spans: Iterable[RequestSpan], start: float, end: float) -> float:
    """Tokens between two times. Example: a request of 10 tokens from 0 to 5 has 4 between 3 and
    7.
    """
    total = 0.0
    for span in spans:
        common = min(span.end, end) - max(span.start, start)
        if common > 0:
            total += span.num_tokens * common / (span.end - span.start)
    return total


async def measure_all(
    endpoint: GeneratorEndpoint, concurrencies: Sequence[int], seconds: float
) -> list[Level]:
    """One level after the other, printed as it is measured."""
    measured = []
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        client = endpoint.client(session)
        for concurrency in concurrencies:
            level = await measure(lambda: endpoint.complete(client), concurrency, seconds)
            requests = counted(level.num_requests, "request")
            speed = f"{level.tokens_per_second:.1f} tokens/s"
            print(f"{concurrency} at once: {speed} ({requests})", flush=True)
            measured.append(level)
    return measured


async def measure(complete: Complete, concurrency: int, seconds: float) -> Level:
    """Keeps `concurrency` requests running; measures for `seconds` from when each place has
    finished its first one.

    Ends when the requests that are then running have ended. The first error of `complete` is raised
    here, and the other requests are cancelled.
    """
    places = _Places(complete, concurrency)
    try:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(concurrency):
                tasks.create_task(places.work())
            # The first requests start together and pay for warm-up: they are not measured.
            await places.is_warm.wait()
            start = time.monotonic()
            await asyncio.sleep(seconds)
            end = time.monotonic()
            places.is_over = True
    except ExceptionGroup as group:
        raise group.exceptions[0] from None
    within = [span for span in places.spans if span.end > start and span.start < end]
    return Level(concurrency, tokens_within(within, start, end) / (end - start), len(within))


@dataclass
class _Places:
    """The places of one level: each does one request after another."""

    complete: Complete
    concurrency: int
    spans: list[RequestSpan] = field(default_factory=list)
    num_warm: int = 0
    is_warm: asyncio.Event = field(default_factory=asyncio.Event)
    is_over: bool = False

    async def work(self) -> None:
        await self._request()
        self.num_warm += 1
        if self.num_warm == self.concurrency:
            self.is_warm.set()
        while not self.is_over:
            await self._request()

    async def _request(self) -> None:
        start = time.monotonic()
        num_tokens = await self.complete()
        self.spans.append(RequestSpan(start, time.monotonic(), num_tokens))


def curve_document(
    measured: Sequence[Level], scale: CurveScale, about: dict[str, Any]
) -> dict[str, Any]:
    """h and tokens per second per GPU, U at each. Raises SettingsError when the peak is below what
    was measured.
    """
    speeds = [level.tokens_per_second / scale.num_gpus for level in measured]
    peak = max(speeds) if scale.peak_tokens_per_second is None else scale.peak_tokens_per_second
    if max(speeds) > peak:
        raise SettingsError(
            f"--peak-flops and --parameters allow {peak:.1f} tokens/s per GPU, but "
            f"{max(speeds):.1f} were measured: check both numbers and --gpus"
        )
    points = [
        {
            "h": level.concurrency / scale.num_gpus,
            "tokens_per_second": speed,
            "utilization": speed / peak,
        }
        for level, speed in zip(measured, speeds, strict=True)
    ]
    return {
        "relative_to": "plateau" if scale.peak_tokens_per_second is None else "peak_flops",
        "peak_tokens_per_second": peak,
        **about,
        "points": points,
    }


def write_curve(path: Path, document: dict[str, Any]) -> None:
    """Raises SettingsError when the file cannot be written."""
    try:
        path.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"--output {path}: cannot be written: {error.strerror}") from error
