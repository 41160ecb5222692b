"""The progress of a group, and the answers that a stopped single-turn group hands to its next
attempt.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from pipelinerl.v1 import admission_pb2 as pb
from pipelinerl.v1 import sample_pb2
from pipelinerl_actor.task import Turn
from pipelinerl_common.types import FinishReason, VersionRun, merge_runs


@dataclass(slots=True)
class Progress:
    """State of one group under way: its trajectories write it, the rollout loop reads it."""

    lease: pb.GroupLease
    unsampled: set[int]
    """Indices of the trajectories that still occupy a generator's slot, or wait for one."""
    num_tokens: int = 0
    """Tokens sampled by this attempt."""
    partial: "PartialGroup | None" = None
    """The answers so far; None for a task with a rollout of its own."""


@dataclass(frozen=True, slots=True)
class PartialAnswer:
    """`turn` as far as it was sampled; only a complete one has a finish reason and a text."""

    turn: Turn
    is_complete: bool


@dataclass(slots=True)
class PartialGroup:
    """What has been sampled of a single-turn group: answers to one prompt, by sample index."""

    stop: asyncio.Event | None = None
    """Set to end the group with what it has sampled; None if none can resume from it."""
    prompt_token_ids: tuple[int, ...] = ()
    answers: dict[int, PartialAnswer] = field(default_factory=dict)

    def add(
        self, index: int, prompt_token_ids: tuple[int, ...], turn: Turn, is_complete: bool
    ) -> None:
        """Adds `turn` behind what was sampled of the answer before; it has the text of both."""
        if (before := self.answers.get(index)) is None:
            self.prompt_token_ids = prompt_token_ids
        else:
            runs = merge_runs([*before.turn.version_runs, *turn.version_runs])
            turn = replace(
                turn,
                token_ids=before.turn.token_ids + turn.token_ids,
                logprobs=before.turn.logprobs + turn.logprobs,
                version_runs=runs,
            )
        self.answers[index] = PartialAnswer(turn, is_complete)

    @property
    def oldest_version(self) -> int | None:
        """Version that sampled the first tokens; None while nothing was sampled."""
        runs = [answer.turn.version_runs for answer in self.answers.values()]
        return min((run[0].policy_version for run in runs if run), default=None)

    def to_proto(self) -> pb.PartialGroup | None:
        """None when there is nothing to resume from."""
        sampled = {i: answer for i, answer in self.answers.items() if answer.turn.token_ids}
        if self.stop is None or not sampled:
            return None
        return pb.PartialGroup(
            prompt_token_ids=self.prompt_token_ids,
            answers=[_to_proto(index, answer) for index, answer in sampled.items()],
        )

    @classmethod
    def from_proto(cls, group: pb.PartialGroup) -> "PartialGroup":
        """The answers of an earlier attempt, for one that may be stopped again."""
        answers = {each.sample_index: _from_proto(each) for each in group.answers}
        return cls(asyncio.Event(), tuple(group.prompt_token_ids), answers)


def _to_proto(index: int, answer: PartialAnswer) -> pb.PartialAnswer:
    turn = answer.turn
    message = pb.PartialAnswer(
        sample_index=index,
        token_ids=turn.token_ids,
        logprobs=turn.logprobs,
        version_runs=[
            sample_pb2.VersionRun(policy_version=run.policy_version, num_tokens=run.num_tokens)
            for run in turn.version_runs
        ],
    )
    if answer.is_complete:
        message.finish_reason, message.text = _FINISH_REASONS[turn.finish_reason], turn.text
    return message


def _from_proto(message: pb.PartialAnswer) -> PartialAnswer:
    is_complete = message.finish_reason != sample_pb2.FINISH_REASON_UNSPECIFIED
    turn = Turn(
        message.text,
        tuple(message.token_ids),
        tuple(message.logprobs),
        tuple(VersionRun(run.policy_version, run.num_tokens) for run in message.version_runs),
        FinishReason(message.finish_reason) if is_complete else FinishReason.LENGTH,
    )
    return PartialAnswer(turn, is_complete)


_FINISH_REASONS: Mapping[FinishReason, sample_pb2.FinishReason.ValueType] = {
    FinishReason.STOP: sample_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: sample_pb2.FINISH_REASON_LENGTH,
}
