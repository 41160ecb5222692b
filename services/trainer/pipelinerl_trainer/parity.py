"""The start-up check that generators and trainer compute the same log-probabilities from the same
weights.

Generators complete random token ids; the trainer scores what they sampled, at the same temperature.
A difference beyond numerics means a wrong element type, temperature, position or weight, and
training on it would be training on noise.
"""

import logging
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipelinerl.v1 import batches_pb2
from pipelinerl_common.codec import micro_batch_from_proto, micro_batch_to_proto
from pipelinerl_common.errors import FatalError, PipelineRLError, SettingsError
from pipelinerl_common.generator_api import CompletionRequest
from pipelinerl_common.generator_client import GeneratorClient
from pipelinerl_common.settings import JobSpec
from pipelinerl_common.types import MicroBatch, VersionRun
from pipelinerl_trainer.engine import DeepSpeedEngine
from pipelinerl_trainer.event_loop import EventLoopProxy
from pipelinerl_trainer.packed import pack_row
from pipelinerl_trainer.ranks import Ranks, Vote
from pipelinerl_trainer.source import TrainingStopped

log = logging.getLogger(__name__)

PROMPT_TOKENS, COMPLETION_TOKENS = 8, 32
REQUEST_S = 60.0
CALL_GRACE_S = 10.0
"""Time that the event loop may need beyond a request's own deadline."""
PATIENCE_S = 300.0
"""Longest time for the generators to answer all prompts once one of them serves the weights."""
PAUSE_S = 0.5


@dataclass(frozen=True, slots=True)
class SampledPrompt:
    """What a generator sampled for one prompt."""

    generator: str
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


class ParityCheck:
    """Compares log-probabilities of generators and trainer. Every rank calls `run`; rank 0 asks the
    generators, and all ranks score the same row.
    """

    def __init__(
        self, spec: JobSpec, generators: Sequence[str], token: str | None, vocabulary: int
    ) -> None:
        self._settings = spec.trainers.parity
        self._temperature = spec.task.sampling.temperature
        self._max_tokens = max(1, min(COMPLETION_TOKENS, spec.model.max_model_len - PROMPT_TOKENS))
        self._generators = generators
        self._token = token
        self._prompts = _prompts(spec.seed, self._settings.num_prompts, vocabulary)

    @property
    def is_wanted(self) -> bool:
        if self._prompts and not self._generators:
            log.warning(
                "no generator's address is known: log-probabilities of generators and trainer are "
                "not compared"
            )
        return bool(self._prompts and self._generators)

    def run(
        self, engine: DeepSpeedEngine, ranks: Ranks, events: EventLoopProxy, version: int
    ) -> float:
        """Returns the mean absolute difference per token. Raises SettingsError beyond the bound and
        FatalError without answers.
        """
        completed = _row(self._collect(ranks, events, version), self._temperature, version)
        message = ranks.from_leader(micro_batch_to_proto(completed).SerializeToString())
        row, columns = pack_row(
            micro_batch_from_proto(batches_pb2.MicroBatch.FromString(message)), ranks.device
        )
        logprobs_T = engine.score_only(row).logprobs_T
        differences_T = (logprobs_T - columns.old_logprobs_T).abs().double()
        sums = [
            float(differences_T.sum()),
            float(len(differences_T)),
            float(differences_T.max()) if len(differences_T) else 0.0,
        ]
        total, count, largest = (float(number) for number in ranks.gather(sums)[0])
        mean, bound = total / max(count, 1.0), self._settings.max_logprob_difference
        if not mean <= bound:
            raise SettingsError(
                f"generators and trainer disagree on the same weights: over {count:.0f} tokens "
                f"their log-probabilities differ by {mean:.4g} on average and {largest:.4g} at "
                f"most, more than trainers.parity.maxLogprobDifference={bound:g}. Check "
                "model.dtype, the engine's arguments and the sampling settings; raise the bound "
                "only for a difference that you can explain"
            )
        log.info("parity mean=%.3g max=%.3g tokens=%d bound=%g", mean, largest, count, bound)
        return mean

    def _collect(self, ranks: Ranks, events: EventLoopProxy, version: int) -> list[SampledPrompt]:
        """Returns all completions on rank 0 and none on the other ranks, which wait in rounds."""
        found: list[SampledPrompt] = []
        deadline = time.monotonic() + PATIENCE_S
        while True:
            vote = Vote.READY
            if ranks.is_leader and len(found) < len(self._prompts):
                vote = self._next(found, events, version)
                if vote is Vote.WAIT and time.monotonic() > deadline:
                    text = "the generators did not complete %d prompts within %g s"
                    log.error(text, len(self._prompts), PATIENCE_S)
                    vote = Vote.FAILED
            # One vote for each request: no rank waits in a collective longer than a request takes.
            outcome = ranks.vote(Vote.STOP if events.is_stopping else vote)
            if outcome is Vote.READY:
                return found
            if outcome is Vote.STOP:
                raise TrainingStopped
            if outcome is Vote.FAILED:
                raise FatalError(
                    "the parity check got no answers from the generators; see rank 0's log"
                )
            if vote is Vote.WAIT and len(found) < len(self._prompts):
                events.pause(PAUSE_S)

    def _next(self, found: list[SampledPrompt], events: EventLoopProxy, version: int) -> Vote:
        """Requests one more completion; returns READY when it was the last."""
        prompt = self._prompts[len(found)]
        url = self._generators[len(found) % len(self._generators)]
        try:
            found.append(events.wait(self._ask(url, prompt, version), REQUEST_S + CALL_GRACE_S))
        except (PipelineRLError, ValueError) as error:
            log.info("generator=%s has no completion for the parity check yet: %s", url, error)
            return Vote.WAIT
        return Vote.READY if len(found) == len(self._prompts) else Vote.WAIT

    async def _ask(self, url: str, prompt: tuple[int, ...], version: int) -> SampledPrompt:
        """Raises GeneratorError without an answer, ValueError for an unusable one."""
        request = CompletionRequest(
            model="policy",
            prompt_token_ids=list(prompt),
            max_tokens=self._max_tokens,
            temperature=self._temperature,
            logprobs=True,
            seed=len(prompt),
        )
        answer = await GeneratorClient(url, self._token).complete(request, REQUEST_S)
        [choice] = answer.choices
        served = {served_version for served_version, _ in choice.weight_versions}
        if served != {version}:
            raise ValueError(f"it served version {sorted(served)}, not {version}")
        token_ids, logprobs = tuple(choice.token_ids), tuple(choice.token_logprobs)
        if not token_ids or len(token_ids) != len(logprobs):
            raise ValueError(f"{len(token_ids)} tokens with {len(logprobs)} log-probabilities")
        return SampledPrompt(url, prompt, token_ids, logprobs)


def _prompts(seed: int, count: int, vocabulary: int) -> list[tuple[int, ...]]:
    generator = random.Random(seed)
    return [
        tuple(generator.randrange(vocabulary) for _ in range(PROMPT_TOKENS)) for _ in range(count)
    ]


def _row(completions: Sequence[SampledPrompt], temperature: float, version: int) -> MicroBatch:
    """Packs all completions into one row; without any it is a filler row."""
    ids, mask, logprobs = list[int](), list[int](), list[float]()
    for each in completions:
        num_prompt = len(each.prompt_ids)
        ids += [*each.prompt_ids, *each.token_ids]
        mask += [0] * num_prompt + [1] * len(each.token_ids)
        logprobs += [*[0.0] * num_prompt, *each.logprobs]
    return MicroBatch(
        index=0,
        sequence_lengths=tuple(len(each.prompt_ids) + len(each.token_ids) for each in completions),
        input_ids_L=np.array(ids, np.uint32),
        loss_mask_L=np.array(mask, np.uint8),
        old_logprobs_L=np.array(logprobs, np.float32),
        advantages_L=np.zeros(len(ids), np.float32),
        ref_logprobs_L=None,
        returns_L=None,
        rewards=(0.0,) * len(completions),
        sequence_weights=(1.0,) * len(completions),
        version_runs=(VersionRun(version, sum(mask)),) if completions else (),
        temperature=temperature,
        group_numbers=(0,) * len(completions),
    )


def vocabulary_of(language_model: Any) -> int:
    """Returns the size of the vocabulary; all token ids below it exist."""
    return int(language_model.config.get_text_config().vocab_size)
