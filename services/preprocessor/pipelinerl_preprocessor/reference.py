"""Log-probs of sampled tokens under the frozen reference model, from its generators' `POST
/v1/score`.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import aiohttp
import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ValidationError

from pipelinerl_common.errors import PermanentError, SettingsError, TemporaryError, Unavailable
from pipelinerl_preprocessor.rows import TrainSequence

log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 120.0
GIVE_UP_S = 600.0
"""The reference may be away this long before a group is dropped for it."""
_FIRST_BACKOFF_S, _MAX_BACKOFF_S = 0.2, 5.0
_CALLS_PER_GENERATOR = 8


class ScoreResponse(BaseModel):
    """What is used of the answer."""

    logprobs: list[list[float]]


class Reference:
    """Calls go to the generator with the fewest tokens in flight; one that failed is tried again
    after the others.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        urls: Sequence[str],
        temperature: float,
        give_up_s: float,
    ) -> None:
        self._session = session
        self._temperature = temperature
        self._give_up_s = give_up_s
        self._load = dict.fromkeys(urls, 0)
        self.max_concurrent = _CALLS_PER_GENERATOR * len(urls)

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        urls: Sequence[str],
        *,
        temperature: float,
        token: str | None,
        give_up_s: float = GIVE_UP_S,
    ) -> AsyncIterator["Reference"]:
        """Raises SettingsError without an address."""
        if not urls:
            raise SettingsError(
                "spec.reference is set but no reference generator was given: pass --reference URL "
                "at least once"
            )
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        timeout = aiohttp.ClientTimeout(total=CALL_TIMEOUT_S)
        async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
            yield cls(session, [url.rstrip("/") for url in urls], temperature, give_up_s)

    async def score(self, sequences: Sequence[TrainSequence]) -> list[NDArray[np.float32]]:
        """T log-probs for each sequence's sampled tokens, at the sampling temperature.

        Raises Unavailable when no generator answered in time, PermanentError when one refuses or
        answers nonsense.
        """
        starts = [sequence.segment_lengths[0] for sequence in sequences]
        body = {
            "sequences": [
                {"token_ids": sequence.token_ids_S.tolist(), "start": start}
                for sequence, start in zip(sequences, starts, strict=True)
            ],
            "temperature": self._temperature,
        }
        answer = await self._call(body, sum(sequence.num_tokens for sequence in sequences))
        if len(answer.logprobs) != len(sequences):
            raise PermanentError(
                f"/v1/score answered {len(answer.logprobs)} sequences instead of {len(sequences)}"
            )
        return [_sampled(*each) for each in zip(sequences, starts, answer.logprobs, strict=True)]

    async def _call(self, body: object, num_tokens: int) -> ScoreResponse:
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + self._give_up_s
        backoff_s = _FIRST_BACKOFF_S
        failed: set[str] = set()
        while True:
            url = min(self._load, key=lambda each: (each in failed, self._load[each]))
            self._load[url] += num_tokens
            try:
                return await self._post(url, body)
            except TemporaryError as error:
                failed = {url} if len(failed) >= len(self._load) else failed | {url}
                if loop.time() + backoff_s > give_up_at:
                    raise
                log.warning("reference=%s failed, trying again: %s", url, error)
            finally:
                self._load[url] -= num_tokens
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)

    async def _post(self, url: str, body: object) -> ScoreResponse:
        """Translates aiohttp's errors and statuses into ours."""
        try:
            async with self._session.post(f"{url}/v1/score", json=body) as response:
                text = await response.text()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise Unavailable(f"{url}/v1/score: {type(error).__name__}: {error}") from error
        if response.status >= 500 or response.status == 429:
            raise Unavailable(f"{url}/v1/score: status {response.status}: {text[:200]}")
        if response.status != 200:
            raise PermanentError(f"{url}/v1/score: status {response.status}: {text[:200]}")
        try:
            return ScoreResponse.model_validate_json(text)
        except ValidationError as error:
            raise PermanentError(f"{url}/v1/score: not the expected answer: {error}") from error


def _sampled(sequence: TrainSequence, start: int, logprobs: list[float]) -> NDArray[np.float32]:
    """Picks the sampled tokens out of the scores of tokens `start` and later."""
    if len(logprobs) != sequence.num_tokens - start:
        raise PermanentError(
            f"/v1/score answered {len(logprobs)} log-probs for {sequence.num_tokens - start} tokens"
        )
    segments = sequence.segment_lengths
    sampled_S = np.repeat(np.tile([False, True], len(segments) // 2), segments)
    scores_S = np.concatenate(
        [np.zeros(start, dtype=np.float32), np.asarray(logprobs, dtype=np.float32)]
    )
    scores_T: NDArray[np.float32] = scores_S[sampled_S]
    if not np.isfinite(scores_T).all():
        raise PermanentError("/v1/score answered a log-prob that is not finite")
    return scores_T
