"""One group: G trajectories of one prompt, sampled, verified, and put together.

Each trajectory runs by itself, so that a slow or broken one does not hold up the others' slots. For
a single-turn task with short completions all G answers are sampled ahead in one request, since a
request then costs more than its decoding; the trajectories find their answers in
`Progress.partial`, as they do in a group that resumes from an earlier attempt.
"""

import asyncio
import logging
import math
import time
import traceback
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pipelinerl.v1.admission_pb2 import GroupLease
from pipelinerl_actor.rollout.failures import FATAL, GivenUp, GroupFailed, Retries, RolloutStopped
from pipelinerl_actor.rollout.generator_client import TurnRequest
from pipelinerl_actor.rollout.generators import TrajectoryClock
from pipelinerl_actor.rollout.metrics import RolloutMeter
from pipelinerl_actor.rollout.progress import PartialGroup, Progress
from pipelinerl_actor.rollout.trajectory import Sampler, Trajectory, check_verdict
from pipelinerl_actor.task import Prompt, Task
from pipelinerl_common.errors import TemporaryError
from pipelinerl_common.service import cancel_all
from pipelinerl_common.settings import TaskSettings
from pipelinerl_common.types import GroupId, Sample, SampleGroup

log = logging.getLogger(__name__)

_SHORT_COMPLETION_TOKENS = 256


class GroupRoller:
    """Rolls out the groups of one task; holds no state of any of them."""

    def __init__(
        self, job: str, task: Task, settings: TaskSettings, sampler: Sampler, meter: RolloutMeter
    ) -> None:
        self._job = job
        self._task = task
        self._settings = settings
        self._sampler = sampler
        self._meter = meter
        self._is_single_turn = type(task).rollout is Task.rollout
        # A task's own rollout may have acted on the tokens already, and no engine finds a stop
        # string that was sampled half before and half after a resumption.
        self._can_resume = self._is_single_turn and not settings.sampling.stop

    def begin(self, lease: GroupLease) -> Progress:
        """The progress of a new attempt, with what an earlier one has sampled."""
        progress = Progress(lease, set(range(lease.group_size)))
        if self._can_resume:
            progress.partial = PartialGroup.from_proto(lease.partial)
        elif self._is_single_turn:
            progress.partial = PartialGroup()
        return progress

    async def roll_out(self, progress: Progress) -> SampleGroup:
        """The finished group. Cancelling it stops the decoding.

        Raises GroupFailed; RolloutStopped after `progress.partial.stop`; or what must end the
        actor.
        """
        lease = progress.lease
        prompt = self._prompt(lease.prompt_index)
        partial = progress.partial
        is_short = self._settings.sampling.max_tokens <= _SHORT_COMPLETION_TOKENS
        if partial is not None and not partial.answers and is_short:
            samples = await self._sample_together(progress, prompt, partial)
        else:
            samples = await self._sample_each(progress, prompt)
        # Without a sampled token there is nothing to train on.
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

    async def _sample_together(
        self, progress: Progress, prompt: Prompt, partial: PartialGroup
    ) -> list[Sample]:
        """Samples all answers ahead, then verifies them, under one deadline for the whole group."""
        clock = TrajectoryClock(self._settings.timeout_seconds)
        try:
            async with _deadline(clock):
                await self._sample_ahead(progress, prompt, partial, clock)
                # The slots are free now: the loop may lease further groups during verification.
                progress.unsampled.clear()
                return await self._sample_each(progress, prompt)
        except RolloutStopped:
            raise
        except GivenUp as error:
            self._count(error, error.__cause__, progress.lease.group_size)
            raise GroupFailed(error.reason, str(error)) from error

    async def _sample_ahead(
        self, progress: Progress, prompt: Prompt, partial: PartialGroup, clock: TrajectoryClock
    ) -> None:
        """Fills `partial` with all answers, in as few requests as the slots allow, one after the
        other.
        """
        group_size = progress.lease.group_size
        while (num_sampled := len(partial.answers)) < group_size:
            n = min(group_size - num_sampled, self._sampler.generators.most_at_once)
            request = TurnRequest(
                self._sampler.sampling, messages=prompt.messages, n=n, stop=partial.stop
            )
            completions = await self._sampler.sample(request, clock, progress)
            answers = zip(completions.turns, completions.complete, strict=True)
            for index, (turn, is_complete) in enumerate(answers, start=num_sampled):
                partial.add(index, completions.prompt_token_ids, turn, is_complete)
            if not all(completions.complete):
                raise RolloutStopped

    async def _sample_each(self, progress: Progress, prompt: Prompt) -> list[Sample]:
        """The samples of the trajectories that succeed.

        Raises GroupFailed once too many have failed, and cancels the rest; RolloutStopped when some
        were stopped, once all have ended.
        """
        num_trajectories = progress.lease.group_size
        needed = max(
            min(2, num_trajectories),
            math.ceil(self._settings.min_group_fraction * num_trajectories),
        )
        tasks = [
            asyncio.ensure_future(self._sample_or_failure(progress, prompt, index))
            for index in range(num_trajectories)
        ]
        samples: list[Sample] = []
        failures: Counter[str] = Counter()
        stopped: RolloutStopped | None = None
        try:
            for finished in asyncio.as_completed(tasks):
                outcome = await finished
                if isinstance(outcome, Sample):
                    samples.append(outcome)
                elif isinstance(outcome, RolloutStopped):
                    # Not raised yet: the others have been stopped too and still bring tokens.
                    stopped = outcome
                else:
                    failures[outcome.reason] += 1
                    self._count(outcome, outcome.__cause__)
                if num_trajectories - failures.total() < needed:
                    raise GroupFailed(
                        failures.most_common(1)[0][0],
                        f"{failures.total()} of {num_trajectories} trajectories failed, the last: "
                        f"{outcome}",
                    )
        finally:
            await cancel_all(tasks)
        if stopped is not None:
            raise stopped
        return samples

    async def _sample_or_failure(
        self, progress: Progress, prompt: Prompt, index: int
    ) -> Sample | GivenUp:
        """One trajectory under its deadline."""
        clock = TrajectoryClock(self._settings.timeout_seconds)
        try:
            async with _deadline(clock):
                return await self._sample_one(progress, prompt, index, clock)
        except GivenUp as error:
            return error
        finally:
            progress.unsampled.discard(index)

    async def _sample_one(
        self, progress: Progress, prompt: Prompt, index: int, clock: TrajectoryClock
    ) -> Sample:
        """Starts the trajectory again after a TemporaryError of the task's code."""
        retries = Retries("task_unavailable", self._settings.max_retries)
        while True:
            trajectory = Trajectory(self._sampler, progress, prompt, index, clock)
            try:
                return await self._run_task(trajectory)
            except TemporaryError as error:
                await retries.wait(error)
                self._meter.failed("task_retry")

    async def _run_task(self, trajectory: Trajectory) -> Sample:
        """Runs the task's own code. Raises GivenUp, TemporaryError, or what must end the actor."""
        try:
            verdict = check_verdict(await self._task.rollout(trajectory))
        except (GivenUp, TemporaryError, *FATAL):
            raise
        except Exception as error:
            raise GivenUp("task_error", f"{type(error).__name__}: {error}") from error
        return trajectory.record.to_sample(trajectory.sample_index, verdict)

    def _count(
        self, error: GivenUp, cause: BaseException | None, num_trajectories: int = 1
    ) -> None:
        is_first = self._meter.failed(error.reason, num_trajectories)
        level = logging.WARNING if is_first else logging.DEBUG
        log.log(level, "trajectory given up: reason=%s %s", error.reason, error)
        if is_first and cause is not None:
            log.warning("%s", "".join(traceback.format_exception(cause)))


@asynccontextmanager
async def _deadline(clock: TrajectoryClock) -> AsyncIterator[None]:
    try:
        async with clock.running():
            yield
    except TimeoutError as error:
        if clock.expired:
            raise GivenUp("timeout", f"not done within {clock.limit_s:g} s") from error
        raise
