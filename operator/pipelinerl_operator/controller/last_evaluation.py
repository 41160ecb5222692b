"""Between the end of training and that of the job: the last step's evaluation. The job waits for
it, and never fails by it.

trainer rank 0 ended well -> only the evaluator runs on -> it ended well, or its time is over ->
Succeeded
"""

from dataclasses import replace

from pipelinerl_control.plan import Role, longest_evaluation_s
from pipelinerl_operator.controller.conditions import ConditionReason, ConditionType, set_condition
from pipelinerl_operator.controller.counting import count_pods
from pipelinerl_operator.controller.decision import Draft, EventType, Wanted
from pipelinerl_operator.controller.endings import end_of_first
from pipelinerl_operator.controller.provisioning import provision
from pipelinerl_operator.controller.restarts import take_failures
from pipelinerl_operator.controller.status import JobPhase, read_time, write_time


def waits_for_evaluation(draft: Draft, wanted: Wanted) -> bool:
    """Takes the next step towards it. False when there is nothing to wait for any more."""
    evaluation = wanted.job.spec.evaluation
    if evaluation is None:
        return False
    if (end := end_of_first(draft, wanted, Role.EVALUATOR)) is not None:
        if draft.status.phase is JobPhase.EVALUATING or end.message:
            draft.note(EventType.NORMAL, "Evaluated", end.message or "the last step is evaluated")
        return False
    limit_s = longest_evaluation_s(evaluation)
    deadline = _began(draft, wanted) + limit_s
    if draft.seen.now >= deadline:
        draft.note(
            EventType.WARNING,
            "NotEvaluated",
            f"the evaluation of the last step has not ended within {limit_s:g} s",
        )
        return False
    if draft.status.phase is not JobPhase.EVALUATING:
        draft.set(phase=JobPhase.EVALUATING)
        draft.note(
            EventType.NORMAL, "Evaluating", "training is finished; the last step is evaluated"
        )
    set_condition(
        draft,
        ConditionType.EVALUATING,
        True,
        ConditionReason.TRAINING_FINISHED,
        f"the last step is evaluated until {write_time(deadline)}",
    )
    draft.look_again(deadline - draft.seen.now)
    if not take_failures(draft, _only(draft, wanted, Role.EVALUATOR)):
        provision(draft, _only(draft, wanted, Role.EVALUATOR, Role.TRAINER))
        count_pods(draft)
    return True


def _began(draft: Draft, wanted: Wanted) -> float:
    """When training ended, as the condition remembers it, or ended again since then."""
    condition = draft.status.condition(ConditionType.EVALUATING)
    holds = condition is not None and condition.status == "True"
    seen = (
        condition.last_transition_time
        if condition is not None and holds
        else write_time(draft.seen.now)
    )
    end = end_of_first(draft, wanted, Role.TRAINER)
    return max(read_time(seen), end.finished_at if end is not None else 0.0)


def _only(draft: Draft, wanted: Wanted, *roles: Role) -> Wanted:
    """Pods of other roles are not needed any more, nor are trainers that are gone."""
    there = {pod.key.name for pod in draft.seen.pods}
    pods = [
        spec
        for spec in wanted.desired.pods
        if spec.role in roles and (spec.role is Role.EVALUATOR or spec.name in there)
    ]
    return replace(wanted, desired=replace(wanted.desired, pods=tuple(pods)))
