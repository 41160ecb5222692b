"""The generator that is measured, over HTTP."""

from dataclasses import dataclass, field
from itertools import count

import aiohttp

from pipelinerl_common.errors import PermanentError, PipelineRLError, SettingsError, Unavailable
from pipelinerl_common.generator_api import CompletionRequest
from pipelinerl_common.generator_client import GeneratorClient, GeneratorError, NoAnswer

_PROMPT_IDS = range(1, 9)
"""Prompts are made of these: any vocabulary has them."""


@dataclass(frozen=True, slots=True)
class RequestShape:
    """What every request asks for. Example: 256 tokens after a prompt of 32."""

    prompt_tokens: int
    max_tokens: int
    temperature: float = 1.0


@dataclass(frozen=True)
class Endpoint:
    """A generator's /v1/chat/completions. Completions do not end early, so that all have the same
    length.
    """

    client: GeneratorClient
    shape: RequestShape
    timeout_s: float
    _numbers: "count[int]" = field(default_factory=count)

    async def complete(self) -> int:
        """Sends one request; returns the number of sampled tokens, at least 1.

        Raises SettingsError for what the user can change, Unavailable, or PermanentError.
        """
        first = next(self._numbers)
        request = CompletionRequest(
            prompt_token_ids=[
                _PROMPT_IDS[(first + place) % len(_PROMPT_IDS)]
                for place in range(self.shape.prompt_tokens)
            ],
            max_tokens=self.shape.max_tokens,
            temperature=self.shape.temperature,
            ignore_eos=True,
        )
        try:
            answer = await self.client.complete(request, self.timeout_s)
        except GeneratorError as error:
            raise self._explained(error) from error
        num_tokens = sum(len(choice.token_ids) for choice in answer.choices)
        if num_tokens < 1:
            raise PermanentError(f"{self.client.url}: the answer has no tokens")
        return num_tokens

    def _explained(self, error: GeneratorError) -> PipelineRLError:
        if isinstance(error.__cause__, aiohttp.InvalidURL):
            return SettingsError(
                f"--generator {self.client.url}: not a URL, for example http://127.0.0.1:8000"
            )
        if isinstance(error, NoAnswer):
            return Unavailable(f"{error}; see --timeout")
        if error.status in (0, 200):  # no answer, or one that is not a completion
            return error
        if error.status in (401, 403):
            return SettingsError(f"{error}; give the generator's token with --token-file")
        if error.status in (400, 422):
            return SettingsError(f"{error}; see --prompt-tokens and --max-tokens")
        if error.status == 503:
            return Unavailable(
                f"{error}; a generator outside a job serves only with --serve-initial"
            )
        return PermanentError(str(error))
