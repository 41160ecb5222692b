"""One group: G trajectories of one prompt, sampled, verified, and put together.

A single-turn task with short completions asks for all G in one request, since then the request costs more than its decoding.
Otherwise each trajectory goes its own way, so that a slow or broken one does not hold up the others' slots.
"""

import asyncio
import logging
import math
import time
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from pipelinerl.v1.admission_pb2 import GroupLease
from pipelinerl_actor.rollout.clock import TrajectoryClock
from pipelinerl_actor.rollout.failures import FATAL, GivenUp, backoff_s
from pipelinerl_actor.rollout.meter import Meter
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


@dataclass(slots=True)
class Progress:
    """Of a group that is being rolled out."""

    num_unsampled: int
    """Trajectories that still occupy a slot of a generator, or wait for one."""
    num_tokens: int = 0
    """Sampled so far."""


class GroupRoller:
    """Rolls out groups of one task; holds no state of any of them."""

    def __init__(self, job: str, task: Task, settings: TaskSettings, sampler: Sampler, meter: Meter) -> None:
        self._job = job
        self._task = task
        self._settings = settings
        self._sampler = sampler
        self._meter = meter
        is_single_turn = type(task).rollout is Task.rollout
        self._together = is_single_turn and settings.sampling.max_tokens <= _SHORT_COMPLETION_TOKENS

    async def roll_out(self, lease: GroupLease, progress: Progress) -> SampleGroup:
        """The finished group. Raises GroupFailed, or what must end the actor. Cancelling it stops the decoding."""
        prompt = self._prompt(lease.prompt_index)
        if self._together:
            samples = await self._roll_out_together(lease, prompt, progress)
        else:
            indices = range(lease.group_size)
            samples = await self._enough([self._roll_out_alone(lease, prompt, index, progress) for index in indices])
        if not any(sample.num_sampled for sample in samples):
            raise GroupFailed("no_tokens", f"group {lease.group_id}: no trajectory has a sampled token")
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

    async def _roll_out_together(self, lease: GroupLease, prompt: Prompt, progress: Progress) -> list[Sample]:
        clock = TrajectoryClock(self._settings.timeout_seconds)
        try:
            async with _deadline(clock):
                records = await self._sample_all(lease.group_size, prompt, clock)
                progress.num_unsampled = 0
                progress.num_tokens = sum(record.num_sampled for record in records)
                finishing = [self._finish(lease, prompt, index, record) for index, record in enumerate(records)]
                return await self._enough(finishing)
        except GivenUp as error:
            self._count(error, error.__cause__, lease.group_size)
            raise GroupFailed(error.reason, str(error)) from error

    async def _sample_all(self, group_size: int, prompt: Prompt, clock: TrajectoryClock) -> list[TokenRecord]:
        """As few requests as slots allow, one after the other."""
        records: list[TokenRecord] = []
        while len(records) < group_size:
            n = min(group_size - len(records), self._sampler.generators.max_running)
            completions = await self._sampler.chat(prompt.messages, n, clock)
            for turn in completions.turns:
                record = TokenRecord()
                record.add(completions.prompt_token_ids, turn)
                records.append(record)
        return records

    async def _finish(self, lease: GroupLease, prompt: Prompt, index: int, record: TokenRecord) -> Sample:
        verdict = await self._sampler.verify(lease.prompt_index, prompt, record.turns[-1])
        return record.to_sample(index, check_verdict(verdict))

    async def _roll_out_alone(self, lease: GroupLease, prompt: Prompt, index: int, progress: Progress) -> Sample:
        clock = TrajectoryClock(self._settings.timeout_seconds)
        num_failures = 0
        try:
            async with _deadline(clock):
                while True:
                    trajectory = Trajectory(self._sampler, lease.prompt_index, index, prompt, clock)
                    try:
                        return await self._drive(trajectory)
                    except TemporaryError as error:
                        num_failures += 1
                        if num_failures > self._settings.max_retries:
                            raise GivenUp("task_unavailable", f"{num_failures} tries, the last: {error}") from error
                        self._meter.failed("task_retry")
                    finally:
                        progress.num_tokens += trajectory.record.num_sampled
                    await asyncio.sleep(backoff_s(num_failures))
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
        """The samples of those that succeed. When too many have failed the rest is cancelled and GroupFailed raised."""
        needed = max(min(2, len(trajectories)), math.ceil(self._settings.min_group_fraction * len(trajectories)))
        tasks = [asyncio.ensure_future(_settled(trajectory)) for trajectory in trajectories]
        samples: list[Sample] = []
        failures: Counter[str] = Counter()
        try:
            for finished in asyncio.as_completed(tasks):
                outcome = await finished
                if isinstance(outcome, Sample):
                    samples.append(outcome)
                    continue
                failures[outcome.reason] += 1
                self._count(outcome, outcome.__cause__)
                if len(tasks) - failures.total() < needed:
                    reason = failures.most_common(1)[0][0]
                    raise GroupFailed(reason, f"{failures.total()} of {len(tasks)} trajectories failed, the last: {outcome}")
        finally:
            await cancel_all(tasks)
        return samples

    def _count(self, error: GivenUp, cause: BaseException | None, num_trajectories: int = 1) -> None:
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
