"""One group: G trajectories of one prompt, sampled, verified, and put together.

A single-turn task with short completions asks for all G in one request, since then the request
costs more than its decoding. Otherwise each trajectory goes its own way, so that a slow or broken
one does not hold up the others' slots.
"""

import asyncio
import logging
import math
import time
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from pipelinerl.v1.admission_pb2 import GroupLease
from pipelinerl_actor.rollout.failures import (
    FATAL,
    GivenUp,
    TrajectoryStopped,
    backoff_s,
    exhausted,
)
from pipelinerl_actor.rollout.generators import TrajectoryClock
from pipelinerl_actor.rollout.metrics import RolloutMeter
from pipelinerl_actor.rollout.partial import PartialAnswer, PartialAnswers, joined
from pipelinerl_actor.rollout.trajectory import Sampler, TokenRecord, Trajectory, check_verdict
from pipelinerl_actor.task import Prompt, Task
from pipelinerl_common.errors import PermanentError, TemporaryError
from pipelinerl_common.service import cancel_all
from pipelinerl_common.settings import TaskSettings
from pipelinerl_common.types import GroupId, Sample, SampleGroup

log = logging.getLogger(__name__)

_SHORT_COMPLETION_TOKENS = 256


class GroupFailed(PermanentError):
    """Too few of a group's trajectories succeeded; `reason` is why most of the others did not."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class GroupStopped(PermanentError):
    """The group's `Progress.stop` was set before all of it was sampled; its `answers` have what
    was.
    """


@dataclass(slots=True)
class Progress:
    """Of a group that is being rolled out."""

    num_unsampled: int
    """Trajectories that still occupy a slot of a generator, or wait for one."""
    num_tokens: int = 0
    """Sampled so far."""
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    """Once it is set, the group ends with what it has sampled until then."""
    answers: PartialAnswers = field(default_factory=PartialAnswers)
    """What it has sampled, of a group that can go on in another attempt."""


class GroupRoller:
    """Rolls out groups of one task; holds no state of any of them."""

    def __init__(
        self, job: str, task: Task, settings: TaskSettings, sampler: Sampler, meter: RolloutMeter
    ) -> None:
        self._job = job
        self._task = task
        self._settings = settings
        self._sampler = sampler
        self._meter = meter
        is_single_turn = type(task).rollout is Task.rollout
        self._together = is_single_turn and settings.sampling.max_tokens <= _SHORT_COMPLETION_TOKENS
        self.can_go_on = is_single_turn and not settings.sampling.stop
        """Whether a stopped group can go on from its tokens. Not where the task's own code may have
        gone on from them, nor with stop strings, which nobody would find across the seam.
        """

    def limit(self, num_trajectories: int | None) -> None:
        """Most trajectories to decode at once, all groups together."""
        self._sampler.generators.limit = num_trajectories

    def begin(self, lease: GroupLease) -> Progress:
        """Of a new attempt, which has what an earlier one has left."""
        has_answers = self.can_go_on and lease.HasField("partial")
        return Progress(
            lease.group_size,
            answers=PartialAnswers.of(lease.partial) if has_answers else PartialAnswers(),
        )

    async def roll_out(self, lease: GroupLease, progress: Progress) -> SampleGroup:
        """The finished group. Cancelling it stops the decoding. Raises GroupFailed, GroupStopped,
        or what must end us.
        """
        prompt = self._prompt(lease.prompt_index)
        if progress.answers.num_tokens:
            indices = range(lease.group_size)
            samples = await self._enough(
                [self._go_on(lease, prompt, index, progress) for index in indices]
            )
        elif self._together:
            samples = await self._roll_out_together(lease, prompt, progress)
        else:
            indices = range(lease.group_size)
            samples = await self._enough(
                [self._roll_out_alone(lease, prompt, index, progress) for index in indices]
            )
        if not any(sample.num_sampled for sample in samples):
            raise GroupFailed(
                "no_tokens", f"group {lease.group_id}: no trajectory has a sampled token"
            )
        return SampleGroup(
            job=self._job,
            group_id=GroupId(lease.group_id),
            attempt=lease.attempt,
            prompt_index=lease.prompt_index,
            temperature=self._settings.sampling.temperature,
            samples=tuple(sorted(samples, key=lambda sample: sample.index)),
            finished_at=time.time(),
        )

    def _prompt(self, index: int) -> Prompt:
        try:
            return self._task.prompt(index)
        except Exception as error:
            given_up = GivenUp("task_error", f"prompt({index}): {type(error).__name__}: {error}")
            self._count(given_up, error)
            raise GroupFailed(given_up.reason, str(given_up)) from error

    async def _roll_out_together(
        self, lease: GroupLease, prompt: Prompt, progress: Progress
    ) -> list[Sample]:
        clock = TrajectoryClock(self._settings.timeout_seconds)
        try:
            async with _deadline(clock):
                records = await self._sample_all(lease.group_size, prompt, clock, progress)
                progress.num_unsampled = 0
                progress.num_tokens = sum(record.num_sampled for record in records)
                finishing = [
                    self._finish(lease, prompt, index, record)
                    for index, record in enumerate(records)
                ]
                return await self._enough(finishing)
        except TrajectoryStopped as error:
            raise GroupStopped from error
        except GivenUp as error:
            self._count(error, error.__cause__, lease.group_size)
            raise GroupFailed(error.reason, str(error)) from error

    async def _sample_all(
        self, group_size: int, prompt: Prompt, clock: TrajectoryClock, progress: Progress
    ) -> list[TokenRecord]:
        """As few requests as slots allow, one after the other."""
        records: list[TokenRecord] = []
        while len(records) < group_size:
            n = min(group_size - len(records), self._sampler.generators.most_at_once)
            completions = await self._sampler.chat(
                prompt.messages, n, clock, progress.stop if self.can_go_on else None
            )
            for turn, is_complete in zip(completions.turns, completions.complete, strict=True):
                progress.answers.keep(
                    len(records), completions.prompt_token_ids, PartialAnswer(turn, is_complete)
                )
                record = TokenRecord()
                record.add(completions.prompt_token_ids, turn)
                records.append(record)
            if not all(completions.complete):
                raise GroupStopped
        return records

    async def _finish(
        self, lease: GroupLease, prompt: Prompt, index: int, record: TokenRecord
    ) -> Sample:
        verdict = await self._sampler.verify(lease.prompt_index, prompt, record.turns[-1])
        return record.to_sample(index, check_verdict(verdict))

    async def _roll_out_alone(
        self, lease: GroupLease, prompt: Prompt, index: int, progress: Progress
    ) -> Sample:
        clock = TrajectoryClock(self._settings.timeout_seconds)
        num_failures = 0
        try:
            async with _deadline(clock):
                while True:
                    keeping = progress if self.can_go_on else None
                    trajectory = Trajectory(
                        self._sampler, lease.prompt_index, index, prompt, clock, keeping
                    )
                    try:
                        return await self._drive(trajectory)
                    except TemporaryError as error:
                        num_failures += 1
                        if given_up := exhausted(
                            "task_unavailable", num_failures, self._settings.max_retries, error
                        ):
                            raise given_up from error
                        self._meter.failed("task_retry")
                    finally:
                        progress.num_tokens += trajectory.record.num_sampled
                    await asyncio.sleep(backoff_s(num_failures))
        finally:
            progress.num_unsampled -= 1

    async def _go_on(
        self, lease: GroupLease, prompt: Prompt, index: int, progress: Progress
    ) -> Sample:
        """A trajectory of which an earlier attempt may have left an answer, or the first part of
        one.
        """
        answer = progress.answers.get(index)
        if answer is None:
            return await self._roll_out_alone(lease, prompt, index, progress)
        clock = TrajectoryClock(self._settings.timeout_seconds)
        try:
            async with _deadline(clock):
                record = TokenRecord()
                prompt_token_ids = progress.answers.prompt_token_ids
                if not answer.is_complete:
                    completions = await self._sampler.go_on(
                        prompt_token_ids, answer.turn, clock, progress.stop
                    )
                    answer = PartialAnswer(
                        joined(answer.turn, completions.turns[0]), completions.complete[0]
                    )
                    progress.answers.keep(index, prompt_token_ids, answer)
                    progress.num_tokens += len(completions.turns[0].token_ids)
                if not answer.is_complete:
                    raise TrajectoryStopped
                record.add(prompt_token_ids, answer.turn)
                return await self._finish(lease, prompt, index, record)
        finally:
            progress.num_unsampled -= 1

    async def _drive(self, trajectory: Trajectory) -> Sample:
        """Runs the task's own code. Raises GivenUp, TemporaryError, or what must end the actor."""
        try:
            verdict = check_verdict(await self._task.rollout(trajectory))
        except (GivenUp, TemporaryError, *FATAL):
            raise
        except Exception as error:
            raise GivenUp("task_error", f"{type(error).__name__}: {error}") from error
        return trajectory.record.to_sample(trajectory.sample_index, verdict)

    async def _enough(self, trajectories: Sequence[Coroutine[Any, Any, Sample]]) -> list[Sample]:
        """The samples of those that succeed. When too many have failed the rest is cancelled and
        GroupFailed raised; when some were stopped, GroupStopped, once all have ended.
        """
        needed = max(
            min(2, len(trajectories)),
            math.ceil(self._settings.min_group_fraction * len(trajectories)),
        )
        tasks = [asyncio.ensure_future(_settled(trajectory)) for trajectory in trajectories]
        samples: list[Sample] = []
        failures: Counter[str] = Counter()
        is_stopped = False
        try:
            for finished in asyncio.as_completed(tasks):
                outcome = await finished
                if isinstance(outcome, Sample):
                    samples.append(outcome)
                    continue
                if isinstance(outcome, TrajectoryStopped):
                    is_stopped = True
                    continue
                failures[outcome.reason] += 1
                self._count(outcome, outcome.__cause__)
                if len(tasks) - failures.total() < needed:
                    reason = failures.most_common(1)[0][0]
                    raise GroupFailed(
                        reason,
                        f"{failures.total()} of {len(tasks)} trajectories failed, the last: "
                        f"{outcome}",
                    )
        finally:
            await cancel_all(tasks)
        if is_stopped:
            raise GroupStopped
        return samples

    def _count(
        self, error: GivenUp, cause: BaseException | None, num_trajectories: int = 1
    ) -> None:
        is_first = self._meter.failed(error.reason, num_trajectories)
        level = logging.WARNING if is_first else logging.DEBUG
        log.log(level, "trajectory given up: reason=%s %s", error.reason, error)
        if is_first and cause is not None:
            log.warning("%s", "".join(traceback.format_exception(cause)))


async def _settled(trajectory: Coroutine[Any, Any, Sample]) -> Sample | GivenUp:
    try:
        return await trajectory
    except GivenUp as error:
        return error


@asynccontextmanager
async def _deadline(clock: TrajectoryClock) -> AsyncIterator[None]:
    try:
        async with clock.running():
            yield
    except TimeoutError as error:
        if clock.expired:
            raise GivenUp("timeout", f"not done within {clock.limit_s:g} s") from error
        raise
