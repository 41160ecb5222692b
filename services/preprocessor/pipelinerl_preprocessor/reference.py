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
from pydantic import ValidationError

from pipelinerl_common.backoff import Backoff
from pipelinerl_common.errors import PermanentError, SettingsError
from pipelinerl_common.generator_api import ScoredSequence, ScoreRequest, ScoreResponse
from pipelinerl_common.generator_client import GeneratorClient, GeneratorUnavailable
from pipelinerl_preprocessor.rows import TrainSequence, sampled_slots

log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 120.0
GIVE_UP_S = 600.0
"""The reference may be unreachable this long before a group is dropped for it."""
_CALLS_PER_GENERATOR = 8


class Reference:
    """The reference model's generators. A call goes to the generator with the fewest tokens in
    flight; one that failed is tried again after the others.
    """

    def __init__(
        self, clients: Sequence[GeneratorClient], temperature: float, give_up_s: float
    ) -> None:
        self._temperature = temperature
        self._give_up_s = give_up_s
        self._load = dict.fromkeys(clients, 0)
        self.max_concurrent = _CALLS_PER_GENERATOR * len(clients)

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
        async with aiohttp.ClientSession() as session:
            clients = [GeneratorClient(url, token, session) for url in urls]
            yield cls(clients, temperature, give_up_s)

    async def score(self, sequences: Sequence[TrainSequence]) -> list[NDArray[np.float32]]:
        """T log-probs for each sequence's sampled tokens, at the sampling temperature.

        Raises Unavailable when no generator answered in time, PermanentError when one refuses or
        answers nonsense.
        """
        starts = [sequence.segment_lengths[0] for sequence in sequences]
        try:
            request = ScoreRequest(
                sequences=[
                    ScoredSequence(token_ids=sequence.token_ids_S.tolist(), start=start)
                    for sequence, start in zip(sequences, starts, strict=True)
                ],
                temperature=self._temperature,
            )
        except ValidationError as error:
            raise PermanentError(f"not a score request: {error}") from error
        answer = await self._call(request, sum(sequence.num_tokens for sequence in sequences))
        if len(answer.logprobs) != len(sequences):
            raise PermanentError(
                f"/v1/score answered {len(answer.logprobs)} sequences instead of {len(sequences)}"
            )
        return [_sampled(*each) for each in zip(sequences, starts, answer.logprobs, strict=True)]

    async def _call(self, request: ScoreRequest, num_tokens: int) -> ScoreResponse:
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + self._give_up_s
        backoff = Backoff()
        failed: set[GeneratorClient] = set()
        while True:
            client = min(self._load, key=lambda each: (each in failed, self._load[each]))
            self._load[client] += num_tokens
            try:
                return await client.score(request, CALL_TIMEOUT_S)
            except GeneratorUnavailable as error:
                failed = {client} if len(failed) >= len(self._load) else failed | {client}
                delay_s = backoff.next_delay()
                if loop.time() + delay_s > give_up_at:
                    raise
                log.warning("reference=%s failed, trying again: %s", client.url, error)
            finally:
                self._load[client] -= num_tokens
            # The next attempt prefers another generator; the delay keeps a short outage of all of
            # them from dropping the group.
            await asyncio.sleep(delay_s)


def _sampled(sequence: TrainSequence, start: int, logprobs: list[float]) -> NDArray[np.float32]:
    """Picks the sampled tokens out of the scores of tokens `start` and later."""
    if len(logprobs) != sequence.num_tokens - start:
        raise PermanentError(
            f"/v1/score answered {len(logprobs)} log-probs for {sequence.num_tokens - start} tokens"
        )
    sampled_S = sampled_slots([sequence], sequence.num_tokens)
    scores_T = np.asarray(logprobs, dtype=np.float32)[sampled_S[start:]]
    if not np.isfinite(scores_T).all():
        raise PermanentError("/v1/score answered a log-prob that is not finite")
    return scores_T
