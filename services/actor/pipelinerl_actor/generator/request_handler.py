"""Handles the generator's completion and scoring requests: prompts, limits, refusals, answers."""

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from pipelinerl_actor.generator.engine import EngineCompletion, GeneratorEngine, Sampling
from pipelinerl_actor.generator.metrics import GeneratorMetrics
from pipelinerl_actor.models.chat import chat_token_ids
from pipelinerl_common.errors import PermanentError, TemporaryError, Unavailable
from pipelinerl_common.generator_api import (
    Choice,
    ChoiceMessage,
    CompletionRequest,
    CompletionResponse,
    Logprobs,
    ScoreRequest,
    ScoreResponse,
    TokenLogprob,
    Usage,
)

Result = TypeVar("Result")

_MAX_WAITING_FACTOR = 16
"""Most sequences under way, as a multiple of those that the engine decodes at once; further
requests are refused.
"""
_SCORE_ATTEMPTS = 5


class BadRequest(PermanentError):
    """The request itself cannot be served."""


class Overloaded(TemporaryError):
    """Too many sequences wait already."""


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What a request is checked against."""

    max_model_len: int
    max_running_requests: int
    vocabulary: int
    """Bound of the token ids."""


class RequestHandler:
    """Turns requests into sequences of the engine. `version` returns the weights' version, which is
    below 0 while there are none to serve.
    """

    def __init__(
        self,
        engine: GeneratorEngine,
        tokenizer: Any,
        limits: RequestLimits,
        metrics: GeneratorMetrics,
        version: Callable[[], int],
        *,
        model: str,
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._limits = limits
        self._metrics = metrics
        metrics.running.set(0.0)
        metrics.limit.set(float(limits.max_running_requests))
        self._version = version
        self._model = model
        self._idle = asyncio.Event()
        self._idle.set()
        self._stops: dict[str, asyncio.Event] = {}
        self.num_running = 0
        self.draining = False

    @property
    def ready(self) -> bool:
        return self._version() >= 0 and not self.draining

    async def complete(self, request: CompletionRequest) -> CompletionResponse:
        """Samples all choices; cancelling it stops their decode. Raises BadRequest, Unavailable or
        Overloaded.
        """
        self._check_ready()
        prompt = self._prompt(request)
        answer = request.answer_token_ids or []
        self._check_tokens(answer)
        given = [*prompt, *answer]
        max_tokens = self._max_tokens(request, len(given))
        samplings = [_sampling(request, max_tokens, index) for index in range(request.n)]
        # One sequence of the engine per choice: each has its own seed and its own end.
        async with self._counted(request.n):
            with self._stoppable(request.request_id) as stop:
                completions = await _all(
                    [self._generate(given, sampling, stop) for sampling in samplings]
                )
        self._metrics.prompt_tokens.inc(len(prompt))
        choices = [
            self._choice(request, index, completion) for index, completion in enumerate(completions)
        ]
        sampled = sum(len(choice.token_ids) for choice in choices)
        usage = Usage(
            prompt_tokens=len(prompt),
            completion_tokens=sampled,
            total_tokens=len(prompt) + sampled,
            cached_tokens=sum(completion.num_cached_tokens for completion in completions),
        )
        return CompletionResponse(
            model=self._model, choices=choices, prompt_token_ids=prompt, usage=usage
        )

    def cancel(self, request_id: str) -> bool:
        """Ends a request of `complete` with what it has sampled. False without such a request."""
        stop = self._stops.get(request_id)
        if stop is not None:
            stop.set()
        return stop is not None

    async def score(self, request: ScoreRequest) -> ScoreResponse:
        """Scores all sequences under one version, again from the start if the weights change."""
        self._check_ready()
        for sequence in request.sequences:
            self._check_tokens(sequence.token_ids)
            if len(sequence.token_ids) > self._limits.max_model_len:
                raise BadRequest(
                    f"{len(sequence.token_ids)} token ids are more than the context of "
                    f"{self._limits.max_model_len}"
                )
        async with self._counted(len(request.sequences)):
            for _ in range(_SCORE_ATTEMPTS):
                version = self._version()
                # Weights may change at any await; then nothing is returned of this attempt.
                logprobs = await _all(
                    [
                        self._engine.score(s.token_ids, s.start, request.temperature)
                        for s in request.sequences
                    ]
                )
                if version == self._version():
                    self._metrics.scored_tokens.inc(sum(map(len, logprobs)))
                    return ScoreResponse(logprobs=logprobs, weight_version=version)
        raise Unavailable(f"the weights changed during each of {_SCORE_ATTEMPTS} attempts")

    async def drain(self, timeout_s: float) -> bool:
        """Refuses new requests and waits for the running ones; true when all have ended."""
        self.draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    # Requests

    def _check_ready(self) -> None:
        if self.draining:
            self._metrics.refused.inc(reason="draining")
            raise Unavailable("draining")
        if self._version() < 0:
            self._metrics.refused.inc(reason="no_weights")
            raise Unavailable("no weights of the job were received yet")

    @asynccontextmanager
    async def _counted(self, sequences: int) -> AsyncIterator[None]:
        limit = _MAX_WAITING_FACTOR * self._limits.max_running_requests
        if self.num_running and self.num_running + sequences > limit:
            self._metrics.refused.inc(reason="overloaded")
            raise Overloaded(f"{self.num_running} sequences run or wait, and at most {limit} may")
        self.num_running += sequences
        self._idle.clear()
        self._metrics.running.set(self.num_running)
        try:
            yield
        except asyncio.CancelledError:
            self._metrics.cancelled.inc(sequences)
            raise
        finally:
            self.num_running -= sequences
            self._metrics.running.set(self.num_running)
            if self.num_running == 0:
                self._idle.set()

    def _prompt(self, request: CompletionRequest) -> list[int]:
        if request.prompt_token_ids is not None:
            self._check_tokens(request.prompt_token_ids)
            return request.prompt_token_ids
        messages = [message.model_dump() for message in request.messages or ()]
        try:
            return chat_token_ids(self._tokenizer, messages)
        # The template is a program of the model's author, and may refuse messages in any way.
        except Exception as error:
            raise BadRequest(f"the model's chat template refuses the messages: {error}") from error

    @contextmanager
    def _stoppable(self, request_id: str | None) -> Iterator[asyncio.Event | None]:
        if request_id is None:
            yield None
            return
        if request_id in self._stops:
            raise BadRequest(f"request_id={request_id!r} is under way already")
        self._stops[request_id] = asyncio.Event()
        try:
            yield self._stops[request_id]
        finally:
            del self._stops[request_id]

    def _check_tokens(self, token_ids: Sequence[int]) -> None:
        if (highest := max(token_ids, default=0)) >= self._limits.vocabulary:
            raise BadRequest(
                f"token id {highest} is outside the vocabulary of {self._limits.vocabulary}"
            )

    def _max_tokens(self, request: CompletionRequest, prompt_tokens: int) -> int:
        context = self._limits.max_model_len
        room = context - prompt_tokens
        wanted = request.max_tokens if request.max_tokens is not None else max(1, room)
        if wanted > room:
            raise BadRequest(
                f"prompt of {prompt_tokens} tokens and max_tokens={wanted} exceed the context of "
                f"{context}"
            )
        return wanted

    # Answers

    async def _generate(
        self, prompt: list[int], sampling: Sampling, stop: asyncio.Event | None
    ) -> EngineCompletion:
        completion = await self._engine.generate(prompt, sampling, stop)
        self._metrics.tokens.inc(len(completion.token_ids))
        self._metrics.sequences.inc(finish_reason=completion.finish_reason)
        return completion

    def _choice(
        self, request: CompletionRequest, index: int, completion: EngineCompletion
    ) -> Choice:
        logprobs = None
        if request.logprobs:
            tokens = [self._tokenizer.decode([token]) for token in completion.token_ids]
            content = [
                TokenLogprob(token=t, logprob=p)
                for t, p in zip(tokens, completion.logprobs, strict=True)
            ]
            logprobs = Logprobs(content=content)
        text = completion.text
        if request.answer_token_ids is not None:
            text = self._tokenizer.decode(
                [*request.answer_token_ids, *completion.token_ids], skip_special_tokens=True
            )
        return Choice(
            index=index,
            message=ChoiceMessage(content=text),
            finish_reason=completion.finish_reason,
            token_ids=list(completion.token_ids),
            token_logprobs=[
                value if math.isfinite(value) else _LOWEST for value in completion.logprobs
            ],
            weight_versions=[
                (run.policy_version, run.num_tokens) for run in completion.version_runs
            ],
            logprobs=logprobs,
        )


_LOWEST = -1e9
"""Replaces minus infinity, which JSON does not have."""


async def _all(calls: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Results in order. A failure or a cancellation cancels the others, and awaits them."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from failed
    return [task.result() for task in tasks]


def _sampling(request: CompletionRequest, max_tokens: int, index: int) -> Sampling:
    return Sampling(
        max_tokens=max_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        stop=request.stop_strings,
        seed=None if request.seed is None else request.seed + index,
        ignore_eos=request.ignore_eos,
    )
