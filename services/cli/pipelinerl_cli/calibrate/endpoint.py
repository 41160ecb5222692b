"""The generator that is measured, over HTTP."""

import json
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import aiohttp

from pipelinerl_common.errors import PermanentError, SettingsError, Unavailable

_PROMPT_IDS = range(1, 9)
"""Prompts are made of these: any vocabulary has them."""
_MAX_ERROR_CHARACTERS = 300


@dataclass(frozen=True, slots=True)
class Completion:
    """What every request asks for. Example: 256 tokens after a prompt of 32."""

    prompt_tokens: int
    max_tokens: int
    temperature: float = 1.0


@dataclass(frozen=True)
class Endpoint:
    """A generator's /v1/chat/completions. Completions do not end early, so that all have the same
    length.
    """

    session: aiohttp.ClientSession
    url: str
    completion: Completion
    token: str | None = None
    _numbers: "count[int]" = field(default_factory=count)

    async def complete(self) -> int:
        """One request; returns the number of sampled tokens, at least 1. The session's timeout is
        its deadline.

        Raises SettingsError for what the user can set right, Unavailable, or PermanentError for an
        answer that is none.
        """
        url = f"{self.url.rstrip('/')}/v1/chat/completions"
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        try:
            async with self.session.post(url, json=self._body(), headers=headers) as response:
                body = await response.read()
                if response.status != 200:
                    raise _refusal(url, response.status, body)
        except aiohttp.InvalidURL as error:
            raise SettingsError(
                f"--generator {self.url}: not a URL, for example http://127.0.0.1:8000"
            ) from error
        except TimeoutError as error:
            raise Unavailable(
                f"{url}: no answer in {self.session.timeout.total:g} s; see --timeout"
            ) from error
        except aiohttp.ClientError as error:
            raise Unavailable(f"{url}: {error}") from error
        return _num_tokens(url, body)

    def _body(self) -> dict[str, Any]:
        first = next(self._numbers)
        prompt = [
            _PROMPT_IDS[(first + place) % len(_PROMPT_IDS)]
            for place in range(self.completion.prompt_tokens)
        ]
        return {
            "prompt_token_ids": prompt,
            "max_tokens": self.completion.max_tokens,
            "temperature": self.completion.temperature,
            "ignore_eos": True,
        }


def _num_tokens(url: str, body: bytes) -> int:
    try:
        num_tokens = sum(len(choice["token_ids"]) for choice in json.loads(body)["choices"])
    except (ValueError, KeyError, TypeError) as error:
        raise PermanentError(f"{url}: not a generator's answer: {error!r}") from error
    if num_tokens < 1:
        raise PermanentError(f"{url}: the answer has no tokens")
    return num_tokens


def _refusal(url: str, status: int, body: bytes) -> Exception:
    text = body.decode(errors="replace")
    with suppress(
        ValueError, KeyError, TypeError
    ):  # what is not our error document is shown as it is
        text = str(json.loads(text)["error"]["message"])
    message = f"{url}: HTTP {status}: {text[:_MAX_ERROR_CHARACTERS]}"
    if status in (401, 403):
        return SettingsError(f"{message}; give the generator's token with --token-file")
    if status in (400, 422):
        return SettingsError(f"{message}; see --prompt-tokens and --max-tokens")
    if status == 503:
        return Unavailable(f"{message}; a generator outside a job serves only with --serve-initial")
    return PermanentError(message)
