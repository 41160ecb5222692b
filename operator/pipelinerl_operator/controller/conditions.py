"""Conditions of a job, with their reasons from closed lists."""

from enum import StrEnum

from pipelinerl_operator.controller.decision import Draft
from pipelinerl_operator.controller.status import MAX_MESSAGE_CHARACTERS, Condition, write_time


class ConditionType(StrEnum):
    SUSPENDED = "Suspended"
    UNDERSTOOD = "Understood"
    """Only of a job whose spec has had fields that the operator does not know."""
    PROVISIONED = "Provisioned"
    WEIGHT_GROUP_READY = "WeightGroupReady"
    RUNNING = "Running"
    DEGRADED = "Degraded"
    EVALUATING = "Evaluating"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


class ConditionReason(StrEnum):
    """Reasons of conditions."""

    SUSPENDING = "Suspending"
    SUSPENDED = "Suspended"
    RESUMED = "Resumed"
    INVALID_SPEC = "InvalidSpec"
    UNKNOWN_FIELDS = "UnknownFields"
    ALL_KNOWN = "AllFieldsKnown"
    POD_REFUSED = "PodRefused"
    NAME_TAKEN = "NameTaken"
    STREAM_UNAVAILABLE = "StreamUnavailable"
    CREATING = "CreatingPods"
    ALL_CREATED = "AllPodsCreated"
    NOT_SCHEDULED = "NotScheduled"
    IMAGE_PULL = "ImagePull"
    CONTAINER_WAITING = "ContainerWaiting"
    STARTING = "Starting"
    ALL_READY = "AllReady"
    FORMING = "Forming"
    FORMED = "Formed"
    NO_MEMBERS = "NoMembers"
    BACKING_OFF = "BackingOff"
    RESTARTING = "Restarting"
    AS_IT_SHOULD_BE = "AsItShouldBe"
    TRAINING_FINISHED = "TrainingFinished"
    RESTART_LIMIT = "RestartLimitExceeded"
    FAILURE_RULE = "FailureRule"
    WRONG_SETTINGS = "WrongSettings"
    DEADLINE = "DeadlineExceeded"
    PRE_RUNNING_DEADLINE = "PreRunningDeadlineExceeded"
    FINISHED = "Finished"


def set_condition(
    draft: Draft, type_: ConditionType, holds: bool, because: ConditionReason, message: str = ""
) -> None:
    """Sets a condition. Its transition time moves only with its status."""
    status = draft.status
    old = status.condition(type_)
    word = "True" if holds else "False"
    since = (
        old.last_transition_time
        if old is not None and old.status == word
        else write_time(draft.seen.now)
    )
    new = Condition(
        type=type_.value,
        status="True" if holds else "False",
        reason=because.value,
        message=message[:MAX_MESSAGE_CHARACTERS],
        last_transition_time=since,
        observed_generation=draft.seen.job.generation,
    )
    others = [condition for condition in status.conditions if condition.type != type_]
    order = {each.value: place for place, each in enumerate(ConditionType)}
    draft.set(
        conditions=sorted(
            [*others, new], key=lambda condition: order.get(condition.type, len(order))
        )
    )
