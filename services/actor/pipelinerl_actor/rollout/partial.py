"""What a single-turn group has sampled when it is stopped, and how another attempt at it goes on
from there.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from pipelinerl.v1 import admission_pb2 as pb
from pipelinerl.v1 import sample_pb2
from pipelinerl_actor.task import Turn
from pipelinerl_common.types import FinishReason, VersionRun


@dataclass(frozen=True, slots=True)
class PartialAnswer:
    """`turn` as far as it was sampled; its finish reason and text count only when it is complete."""

    turn: Turn
    is_complete: bool


class PartialAnswers:
    """Of one group, by sample index. All answer the same prompt."""

    def __init__(self) -> None:
        self.prompt_token_ids: tuple[int, ...] = ()
        self._answers: dict[int, PartialAnswer] = {}

    def keep(self, index: int, prompt_token_ids: tuple[int, ...], answer: PartialAnswer) -> None:
        self.prompt_token_ids = prompt_token_ids
        self._answers[index] = answer

    def get(self, index: int) -> PartialAnswer | None:
        return self._answers.get(index)

    @property
    def num_tokens(self) -> int:
        return sum(len(answer.turn.token_ids) for answer in self._answers.values())

    @property
    def oldest_version(self) -> int | None:
        """Of the first tokens; None while nothing was sampled."""
        runs = [answer.turn.version_runs for answer in self._answers.values()]
        return min((run[0].policy_version for run in runs if run), default=None)

    def to_proto(self) -> pb.PartialGroup | None:
        """None when there is nothing to go on from."""
        if not self.num_tokens:
            return None
        answers = [
            _to_proto(index, answer)
            for index, answer in self._answers.items()
            if answer.turn.token_ids
        ]
        return pb.PartialGroup(prompt_token_ids=self.prompt_token_ids, answers=answers)

    @classmethod
    def of(cls, group: pb.PartialGroup) -> "PartialAnswers":
        answers = cls()
        for each in group.answers:
            answers.keep(each.sample_index, tuple(group.prompt_token_ids), _from_proto(each))
        return answers


def joined(before: Turn, after: Turn) -> Turn:
    """One turn whose tokens were sampled in two goes. `after` has the text of both."""
    runs = [*before.version_runs, *after.version_runs]
    at = len(before.version_runs)
    if 0 < at < len(runs) and runs[at - 1].policy_version == runs[at].policy_version:
        runs[at - 1 : at + 1] = [
            VersionRun(runs[at].policy_version, runs[at - 1].num_tokens + runs[at].num_tokens)
        ]
    return replace(
        after,
        token_ids=before.token_ids + after.token_ids,
        logprobs=before.logprobs + after.logprobs,
        version_runs=tuple(runs),
    )


def _to_proto(index: int, answer: PartialAnswer) -> pb.PartialAnswer:
    turn = answer.turn
    return pb.PartialAnswer(
        sample_index=index,
        token_ids=turn.token_ids,
        logprobs=turn.logprobs,
        version_runs=[
            sample_pb2.VersionRun(policy_version=run.policy_version, num_tokens=run.num_tokens)
            for run in turn.version_runs
        ],
        finish_reason=_FINISH_REASONS[turn.finish_reason]
        if answer.is_complete
        else sample_pb2.FINISH_REASON_UNSPECIFIED,
        text=turn.text if answer.is_complete else "",
    )


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
